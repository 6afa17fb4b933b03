"""How every weight starts, in one table.

| parameter                                   | starts as                                            |
|---------------------------------------------|------------------------------------------------------|
| embeddings, learned positions               | N(0, 0.02)                                           |
| linear weights                              | N(0, 0.02)                                           |
| outputs into the residual stream            | N(0, 0.02/√(2·layers)): `attention.output`, `mlp.down` |
| biases; gains                               | 0; 1                                                 |
| coupling: forces, matrix                    | U(−1/√fan_in, 1/√fan_in), torch's default            |
| coupling: step size δ                       | `step_size`, or 0 with init="identity"               |
| coupling: affine's last layers              | 0                                                    |
| differential λ vectors                      | N(0, 0.1)                                            |
| sinks                                       | N(0, 0.02)                                           |
| 2-D asymmetry                               | w = 1/m, s = 1                                       |

Each module draws from a generator seeded by (seed, its name), on the CPU: the same seed gives a parameter the same
value on every device and next to any other mechanism.
"""

import hashlib
import math

import torch
from torch import nn

from qklab.attention.draw import normal_
from qklab.attention.rotate import LearnedPositions

STD = 0.02


def initialise(model: nn.Module, seed: int) -> None:
    """Set every parameter of a decoder as the table says. Modules with a rule of their own have `reset(generator)`."""
    layers = sum(name.endswith(".attention") for name, _ in model.named_modules())
    modules = list(model.named_modules())
    for name, module in reversed(modules):  # children first: a parent's rule has the last word
        generator = torch.Generator().manual_seed(seed_of(seed, name))
        if isinstance(module, nn.Linear):
            residual = name.endswith((".attention.output", ".mlp.down"))
            normal_(module.weight, STD / math.sqrt(2 * layers) if residual else STD, generator)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding | LearnedPositions):
            normal_(module.weight, STD, generator)
        elif isinstance(module, nn.RMSNorm | nn.LayerNorm):
            module.reset_parameters()
        elif callable(reset := getattr(module, "reset", None)):
            reset(generator)


def seed_of(seed: int, name: str) -> int:
    """A seed for one module: the first eight bytes of SHA-256("seed/name")."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "little", signed=True)
