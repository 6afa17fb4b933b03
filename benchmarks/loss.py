"""What the vocabulary loss costs, forward and backward, against torch's own and liger-kernel's, in one run.

    python benchmarks/loss.py                        # nano's shape on the CPU, the 51M model's on a GPU
    python benchmarks/loss.py --chunks 256 512 1024  # also with these MiB of logits at a time

Correctness comes first: where an arm's error against float64 exceeds twice that of torch's own low-precision run,
nothing is measured and the command fails. Times are medians over interleaved rounds. The floor is the three matrix
products at this machine's own rate plus, at its copy rate, the logits read and written once between them.
"""

import argparse
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from measure import RESULTS, copy_rate, interleaved, keep, matrix_rate, median_and_spread, peak_bytes, provenance
from qklab.ops.dispatch import Impl
from qklab.ops.loss import api, linear_cross_entropy

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def ours(impl: Impl, chunk_bytes: int | None = None) -> Loss:
    """Our loss, with this many bytes of logits at a time instead of its own choice."""

    def loss(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        own = api.CHUNK_BYTES[x.device.type]
        api.CHUNK_BYTES[x.device.type] = chunk_bytes or own
        try:
            return linear_cross_entropy(x, weight, targets, impl=impl)[0]
        finally:
            api.CHUNK_BYTES[x.device.type] = own

    return loss


def torch_loss(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, weight), targets)


def liger(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    from liger_kernel.transformers.functional import (  # pyright: ignore[reportMissingImports]
        liger_fused_linear_cross_entropy,
    )

    return liger_fused_linear_cross_entropy(x, weight, targets)


def arms(device: str, chunks: list[int]) -> dict[str, Loss]:
    """What is measured."""
    losses: dict[str, Loss] = {"torch": torch_loss}
    if device == "cuda":
        losses |= {"torch compiled": torch.compile(torch_loss), "ours": ours("triton"), "ours again": ours("triton")}
        if importlib.util.find_spec("liger_kernel") is not None:
            losses["liger"] = liger
    else:
        losses["ours"] = ours("reference")
    impl = "triton" if device == "cuda" else "reference"
    return losses | {f"ours, {size} MiB": ours(impl, size * 2**20) for size in chunks}


class Arm:
    """One forward and backward under autocast (bf16 on a GPU, none on the CPU) with a float32 matrix."""

    def __init__(self, loss: Loss, x: Tensor, weight: Tensor, targets: Tensor):
        self.loss, self.tensors = loss, (x.requires_grad_(), weight.requires_grad_(), targets)

    def __call__(self, autocast: bool = True) -> list[Tensor]:
        x, weight, targets = self.tensors
        x.grad = weight.grad = None
        with torch.autocast(x.device.type, dtype=torch.bfloat16, enabled=autocast and x.is_cuda):
            loss = self.loss(x, weight, targets)
        loss.backward()
        assert x.grad is not None
        assert weight.grad is not None
        return [loss.detach(), x.grad, weight.grad]


def check(losses: dict[str, Loss], x: Tensor, weight: Tensor, targets: Tensor) -> None:
    """Loss and gradients of every arm are as close to float64 as torch's own low-precision ones."""
    exact = Arm(torch_loss, x.double(), weight.double(), targets)(autocast=False)
    low = Arm(torch_loss, x.clone(), weight.clone(), targets)()
    for name, loss in losses.items():
        results = Arm(loss, x.clone(), weight.clone(), targets)()
        for what, actual, other, true in zip(("loss", "dx", "dW"), results, low, exact, strict=True):
            error, allowed = (float((tensor.double() - true).norm() / true.norm()) for tensor in (actual, other))
            if not error <= 2 * allowed + torch.finfo(x.dtype).eps:
                sys.exit(f"{name}: {what} errs by {error:.1e}, torch by {allowed:.1e}; nothing was measured.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--tokens", type=int, help="2048 on the CPU, 65536 on a GPU")
    parser.add_argument("--width", type=int, help="128 on the CPU, 512 on a GPU")
    parser.add_argument("--vocabulary", type=int, help="4096 on the CPU, 50304 on a GPU")
    parser.add_argument("--chunks", type=int, nargs="*", default=[], metavar="MIB", help="further chunk sizes")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--commit", help="the commit measured, where git cannot be asked")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the result file")
    options = parser.parse_args()
    device, gpu = options.device, options.device == "cuda"
    tokens, width = options.tokens or (65_536 if gpu else 2048), options.width or (512 if gpu else 128)
    vocabulary = options.vocabulary or (50_304 if gpu else 4096)

    torch.manual_seed(0)
    dtype = torch.bfloat16 if gpu else torch.float32
    x = torch.randn(tokens, width, device=device, dtype=dtype)
    weight = torch.randn(vocabulary, width, device=device) / width**0.5
    targets = torch.randint(vocabulary, (tokens,), device=device)
    losses = arms(device, options.chunks)
    check(losses, x[:1024], weight, targets[:1024])
    steps = {name: Arm(loss, x, weight, targets) for name, loss in losses.items()}
    peaks = {name: peak_bytes(step) for name, step in steps.items()} if gpu else {}
    rate, bandwidth = matrix_rate(device, dtype), copy_rate(device)
    floor = 6 * tokens * vocabulary * width / rate + 2 * tokens * vocabulary * dtype.itemsize / bandwidth
    print(f"{tokens} × {width} features over {vocabulary} entries, forward and backward; floor {1e3 * floor:.2f} ms")
    rows = {}
    for name, values in interleaved(steps, options.rounds, device).items():
        middle, spread = median_and_spread(values)
        rows[name] = {"ms": 1e3 * middle, "spread": spread, "peak_bytes": peaks.get(name)}
        memory = f"{peaks[name] / 2**30:6.2f} GiB" if name in peaks else ""
        print(f"  {name:<16} {1e3 * middle:>8.2f} ms ±{100 * spread:.1f}% {middle / floor:>6.2f} × floor {memory}")
    result: dict[str, Any] = {
        "provenance": provenance(device, options.commit),
        "set_up": {"tokens": tokens, "width": width, "vocabulary": vocabulary, "chunk_bytes": api.CHUNK_BYTES[device]},
        "ceilings": {"flops_per_s": rate, "copy_bytes_per_s": bandwidth},
        "floor_ms": 1e3 * floor,
        "arms": rows,
    }
    keep(f"loss-{device}", result, options.out)


if __name__ == "__main__":
    main()
