"""A Transformers model with a coupling between its queries and keys: the same logits at first, then trained alone."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from qklab.hf import convert, load_adapter, save_adapter


def build_model() -> LlamaForCausalLM:
    """Stands for yours: AutoModelForCausalLM.from_pretrained(…)."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
    )
    return LlamaForCausalLM(config).eval()


model = build_model()
ids = (torch.randint(64, (16, 1)) + torch.arange(32)) % 64
with torch.no_grad():
    before = model(input_ids=ids).logits
    print(convert(model, coupling="leapfrog", trainable="coupling"))
    assert torch.equal(model(input_ids=ids).logits, before)

optimiser = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad], lr=3e-2)
for step in range(21):
    loss = model(input_ids=ids, labels=ids).loss
    optimiser.zero_grad()
    loss.backward()
    optimiser.step()
    if step % 10 == 0:
        print(f"step {step}: loss {loss.item():.3f}")

save_adapter(model, "my-coupling")  # what was inserted, alone; the model's own weights have not changed
twin = build_model()
load_adapter(twin, "my-coupling")
with torch.no_grad():
    assert torch.equal(twin(input_ids=ids).logits, model(input_ids=ids).logits)
