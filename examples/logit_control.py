"""Logit control in your own training loop: a small Llama learns to continue a sequence; the factors are printed."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from qklab.optim import LogitControl, attention_roles

torch.manual_seed(0)
config = LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
model = LlamaForCausalLM(config)  # or a qklab Decoder; roles may also be given by hand
optimiser = LogitControl(torch.optim.AdamW(model.parameters(), lr=3e-3), roles=attention_roles(model), tau=1.0)
for step in range(101):
    ids = (torch.randint(64, (16, 1)) + torch.arange(32)) % 64
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimiser.step()
    optimiser.zero_grad()
    if step % 50 == 0:
        print(f"step {step}: loss {loss.item():.2f}")
for layer, parts in optimiser.factors().items():
    for symbol, factors in parts.items():
        print(f"{layer} W_{symbol}: learning rate ×", " ".join(f"{factor:.2f}" for factor in factors.tolist()))
