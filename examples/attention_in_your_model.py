"""The attention layer in a model of your own: any of its mechanisms, then text token by token from its cache."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qklab import Attention, AttentionSpec, CouplingSpec


class Block(nn.Module):
    def __init__(self, spec: AttentionSpec):
        super().__init__()
        self.attention_norm, self.feed_forward_norm = nn.RMSNorm(spec.width), nn.RMSNorm(spec.width)
        self.attention = Attention(spec)
        self.feed_forward = nn.Sequential(
            nn.Linear(spec.width, 4 * spec.width), nn.GELU(), nn.Linear(4 * spec.width, spec.width)
        )

    def forward(self, x: Tensor, cache=None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cache=cache)
        return x + self.feed_forward(self.feed_forward_norm(x))


torch.manual_seed(0)
spec = AttentionSpec(width=64, heads=4, kv_heads=2, share="k=v", coupling=CouplingSpec(kind="leapfrog"), norm="qk")
print(spec.name, f"with {spec.cache_bytes(1024, torch.bfloat16):,} bytes of cache for 1,024 tokens")

embedding, block, head = nn.Embedding(32, 64), Block(spec), nn.Linear(64, 32)
model = nn.ModuleList([embedding, block, head])
optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
for step in range(101):
    ids = (torch.randint(32, (16, 1)) + 3 * torch.arange(17)) % 32  # every number is three more than the one before
    loss = F.cross_entropy(head(block(embedding(ids[:, :-1]))).flatten(0, 1), ids[:, 1:].flatten())
    optimiser.zero_grad()
    loss.backward()
    optimiser.step()
    if step % 50 == 0:
        print(f"step {step}: loss {loss.item():.2f}")

with torch.no_grad():
    cache = block.attention.new_cache(batch=1, tokens=12)
    ids = torch.tensor([[1, 4, 7]])
    written = ids[0].tolist()
    for _ in range(8):  # the three tokens first, then one at a time
        ids = head(block(embedding(ids), cache=cache))[:, -1:].argmax(-1)
        written.append(int(ids))
print(*written)
