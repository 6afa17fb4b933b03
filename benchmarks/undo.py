"""How accurate leapfrog's gradients are if its states are undone from bf16 outputs instead of computed from the inputs.

    python benchmarks/undo.py    # on the CPU, in seconds

All in float64 with a rounding to bf16 wherever the kernel has one: operands of products, and the outputs. Tokens are
8,192, D = h = 64, matrices have the standard deviation s/√D. Errors are relative, the largest of ∂q, ∂k, ∂W1 and ∂W2.
"""

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from measure import RESULTS, keep, provenance

TOKENS, D = 8192, 64
CASES = [(n, s, step) for n in (1, 7) for s in (0.3, 1.0, 2.0, 4.0) for step in (0.1, 0.5, 1.0)]
Round = Callable[[Tensor], Tensor]


def bf16(x: Tensor) -> Tensor:
    return x.bfloat16().double()


class Force(NamedTuple):
    """f(u) = W2 silu(W1 u + b1) + b2."""

    w1: Tensor
    b1: Tensor
    w2: Tensor
    b2: Tensor

    def __call__(self, u: Tensor, rounded: Round) -> Tensor:
        return rounded(torch.nn.functional.silu(rounded(u) @ self.w1.T + self.b1)) @ self.w2.T + self.b2

    def pulled_back(self, u: Tensor, d: Tensor, rounded: Round) -> tuple[Tensor, Tensor, Tensor]:
        """∂u, ∂W1 and ∂W2 of ⟨d, f(u)⟩."""
        u, d = rounded(u), rounded(d)
        z = u @ self.w1.T + self.b1
        sigma = z.sigmoid()
        dz = rounded(d @ self.w2 * sigma * (1 + z * (1 - sigma)))
        return dz @ self.w1, dz.T @ u, d.T @ rounded(z * sigma)


class States(NamedTuple):
    """The arguments of all n + 1 evaluations of f, the n keys that q drifted by, and the last key."""

    arguments: list[Tensor]
    keys: list[Tensor]
    end: Tensor


def moved(f: Force, q: Tensor, k: Tensor, step: float, n: int, rounded: Round) -> States:
    arguments, keys = [q], []
    k = k + step / 2 * f(q, rounded)
    for i in range(n):
        keys.append(k)
        q = q + step * k
        arguments.append(q)
        k = k + (step if i < n - 1 else step / 2) * f(q, rounded)
    return States(arguments, keys, k)


def undone(f: Force, q: Tensor, k: Tensor, step: float, n: int, rounded: Round) -> States:
    """The same from the outputs q, k."""
    end, arguments, keys = k, [q], []
    for i in range(n):
        k = k - (step if i else step / 2) * f(q, rounded)
        q = q - step * k
        keys.insert(0, k)
        arguments.insert(0, q)
    return States(arguments, keys, end)


def gradients(f: Force, states: States, dq: Tensor, dk: Tensor, step: float, rounded: Round) -> list[Tensor]:
    dw1, dw2 = torch.zeros_like(f.w1), torch.zeros_like(f.w2)
    n = len(states.keys)
    for i in range(n, -1, -1):
        share = step / 2 if i in (0, n) else step
        du, one, two = f.pulled_back(states.arguments[i], dk, rounded)
        dq, dw1, dw2 = dq + share * du, dw1 + share * one, dw2 + share * two
        if i:
            dk = dk + step * dq
    return [dq, dk, dw1, dw2]


def errors(n: int, scale: float, step: float) -> tuple[float, float]:
    """With states from the inputs, and undone from the outputs."""
    source = torch.Generator().manual_seed(0)
    q, k, dq, dk = (bf16(torch.randn(TOKENS, D, generator=source, dtype=torch.float64)) for _ in range(4))
    w1, w2 = (scale / math.sqrt(D) * torch.randn(D, D, generator=source, dtype=torch.float64) for _ in range(2))
    b1, b2 = (0.1 * torch.randn(D, generator=source, dtype=torch.float64) for _ in range(2))
    f = Force(*map(bf16, (w1, b1, w2, b2)))
    exact = gradients(f, moved(f, q, k, step, n, torch.clone), dq, dk, step, torch.clone)
    states = moved(f, q, k, step, n, bf16)
    again = undone(f, bf16(states.arguments[-1]), bf16(states.end), step, n, bf16)

    def worst(found: States) -> float:
        pairs = zip(gradients(f, found, dq, dk, step, bf16), exact, strict=True)
        return max(float((x - true).norm() / true.norm()) for x, true in pairs)

    return worst(states), worst(again)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the result file")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    print(f"{'steps':>6}{'s':>6}{'δ':>6}{'from inputs':>14}{'undone':>14}")
    for n, scale, step in CASES:
        kept, back = errors(n, scale, step)
        print(f"{n:>6}{scale:>6}{step:>6}{kept:>14.2%}{back:>14.2%}", flush=True)
        rows.append({"steps": n, "s": scale, "step": step, "from_inputs": kept, "undone": back})
    keep("coupling-undo-cpu", {"provenance": provenance("cpu", None), "rows": rows}, options.out)


if __name__ == "__main__":
    main()
