"""What differential attention costs, forward and backward, by every way of composing it, in one run.

    python benchmarks/differential.py                       # the 51M model's shape on a GPU, a small one on the CPU
    python benchmarks/differential.py --heads 12 --batch 32

Correctness comes first: a way whose output or gradients err by more than twice what the written-out reference does in
the same precision is named and left out, and if it is the one the library takes the command fails. Times are medians
over interleaved rounds of several calls. The floor is the FLOPs of the composition over this machine's matrix rate.
"""

import argparse
import functools
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from decode import BACKENDS, timed
from measure import RESULTS, keep, matrix_rate, peak_bytes, provenance
from qklab.ops.differential import differential, differential_v2, reference

Way = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # q, k, v, weight → output
TAKEN = {"v1": "wide, default", "v2": "one call, default"}


def plain(q: Tensor, k: Tensor, v: Tensor, backend: SDPBackend | None = None) -> Tensor:
    """Causal attention by scaled_dot_product_attention: [B, T, heads, ·] each."""
    backends = [*BACKENDS.values(), SDPBackend.MATH] if backend is None else [backend]
    with sdpa_kernel(backends):
        o = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            is_causal=True,
            scale=64**-0.5,
            enable_gqa=q.shape[2] != k.shape[2],
        )
    return o.transpose(1, 2)


def padded(q: Tensor, k: Tensor, v: Tensor, backend: SDPBackend | None = None) -> Tensor:
    """Queries and keys filled up with zeros to the values' width."""
    more = v.shape[3] - q.shape[3]
    return plain(F.pad(q, (0, more)), F.pad(k, (0, more)), v, backend)


def halved(attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """One call for each half of the values, which are then as wide as keys."""
    return lambda q, k, v: torch.cat([attend(q, k, part) for part in v.chunk(2, -1)], -1)


def flex(tokens: int, device: str) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    blocks = create_block_mask(lambda b, h, i, j: i >= j, None, None, tokens, tokens, device=device)
    compiled = torch.compile(flex_attention, dynamic=False)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        o = compiled(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            block_mask=blocks,
            scale=64**-0.5,
            enable_gqa=q.shape[2] != k.shape[2],
        )
        assert isinstance(o, Tensor)
        return o.transpose(1, 2)

    return attend


def repeated(q: Tensor, k: Tensor, v: Tensor, weight: Tensor) -> Tensor:
    """One call with every value pair copied for both of its key heads."""
    pairs, groups = k.shape[2] // 2, q.shape[2] // k.shape[2]
    value = v.unflatten(2, (pairs, 2)).flatten(3).repeat_interleave(2, 2)
    o = plain(q, k, value).unflatten(2, (pairs, 2, groups))
    return (o[:, :, :, 0] - (weight * o[:, :, :, 1]).to(o.dtype)).flatten(2, 3)


def ways(tokens: int, device: str) -> dict[str, dict[str, Way]]:
    """Every way of each version, and of plain attention with as many heads."""

    def v1(attend: Any) -> Way:
        return lambda q, k, v, weight: differential(q, k, v, weight, attend)

    def v2(attend: Any) -> Way:
        return lambda q, k, v, weight: differential_v2(q, k, v, weight, attend)

    def standard(attend: Any) -> Way:
        return lambda q, k, v, weight: attend(q, k, v)

    chosen = BACKENDS if device == "cuda" else {}
    with_backend = {name: functools.partial(plain, backend=backend) for name, backend in chosen.items()}
    by_padding = {name: functools.partial(padded, backend=backend) for name, backend in chosen.items()}
    every: dict[str, dict[str, Way]] = {
        "standard": {"default": standard(plain)} | {name: standard(way) for name, way in with_backend.items()},
        "v1": {"repeated values, default": repeated, "wide, default": v1(plain), "halves, default": v1(halved(plain))}
        | {f"wide, {name}": v1(way) for name, way in with_backend.items()}
        | {f"halves, {name}": v1(halved(way)) for name, way in with_backend.items()}
        | {f"padded, {name}": v1(way) for name, way in by_padding.items()},
        "v2": {"one call, default": v2(plain)} | {f"one call, {name}": v2(way) for name, way in with_backend.items()},
    }
    if device == "cuda":
        every["v1"]["wide, flex"] = v1(flex(tokens, device))
        every["v2"]["one call, flex"] = v2(flex(tokens, device))
    return every


def inputs(
    version: str, batch: int, tokens: int, heads: int, device: str, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and λ, with gradients."""
    factor = 2 if version == "v2" else 1
    q = torch.randn(batch, tokens, factor * heads, 64, device=device, dtype=dtype)
    k, v = (torch.randn(batch, tokens, heads, 64, device=device, dtype=dtype) for _ in range(2))
    weight = torch.rand(batch, tokens, heads, device=device, dtype=dtype)
    weight = weight if version == "v2" else torch.tensor(0.5, device=device)
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), weight.requires_grad_()


def with_gradients(way: Way, tensors: tuple[Tensor, ...], upstream: Tensor | None = None) -> list[Tensor]:
    o = way(*tensors)
    upstream = torch.ones_like(o) if upstream is None else upstream
    return [o.detach(), *torch.autograd.grad(o, tensors[:3], upstream.to(o.dtype))]


def checked(version: str, every: dict[str, Way], tokens: int, device: str, dtype: torch.dtype) -> dict[str, Way]:
    """The ways whose output and gradients are within twice the reference's own error in this precision."""
    if version == "standard":
        return every
    definition = reference.differential if version == "v1" else reference.differential_v2
    mask = torch.ones(tokens, tokens, dtype=torch.bool, device=device).tril()

    def written_out(q: Tensor, k: Tensor, v: Tensor, weight: Tensor) -> Tensor:
        return definition(q, k, v, weight.to(q.dtype), 64**-0.5, mask)

    low_inputs = inputs(version, 1, tokens, 4, device, dtype)
    exact_inputs = tuple(tensor.detach().double().requires_grad_() for tensor in low_inputs)
    upstream = torch.randn_like(written_out(*low_inputs))
    exact = with_gradients(written_out, exact_inputs, upstream)
    low = with_gradients(written_out, low_inputs, upstream)
    good = {}
    for name, way in every.items():
        try:
            actual = with_gradients(way, low_inputs, upstream)
        except Exception as refusal:
            print(f"  {version}: {name} is left out: {str(refusal).strip().splitlines()[0][:100]}", flush=True)
            continue
        errors, budgets = [], []
        for mine, other, true in zip(actual, low, exact, strict=True):
            errors.append(float((mine.double() - true).norm() / true.norm()))
            budgets.append(2 * float((other.double() - true).norm() / true.norm()) + torch.finfo(dtype).eps)
        if all(error <= budget for error, budget in zip(errors, budgets, strict=True)):
            good[name] = way
        else:
            told = ", ".join(f"{error:.1e} of {budget:.1e}" for error, budget in zip(errors, budgets, strict=True))
            print(f"  {version}: {name} is left out: it errs by {told}", flush=True)
    if TAKEN[version] not in good:
        sys.exit(f"{version}: what the library takes, {TAKEN[version]!r}, is not among the right ones.")
    return good


def products(version: str) -> tuple[int, int]:
    """Widths multiplied per pair of tokens and head, forward and backward, with heads of width 1 (README.md)."""
    return {"standard": (2, 5), "v1": (3, 7), "v2": (4, 10)}[version]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--batch", type=int, help="1 on the CPU, 64 on a GPU")
    parser.add_argument("--tokens", type=int, help="128 on the CPU, 1024 on a GPU")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--commit", help="the commit measured, where git cannot be asked")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the result file")
    options = parser.parse_args()
    device, gpu = options.device, options.device == "cuda"
    batch, tokens = options.batch or (64 if gpu else 1), options.tokens or (1024 if gpu else 128)
    dtype = torch.bfloat16 if gpu else torch.float32
    warnings.simplefilter("ignore")  # SDPA explains at length why a backend refuses
    torch._dynamo.config.recompile_limit = 64
    torch.manual_seed(0)
    rate = matrix_rate(device, dtype)
    result: dict[str, Any] = {
        "provenance": provenance(device, options.commit),
        "set_up": {"batch": batch, "tokens": tokens, "heads": options.heads, "head_width": 64, "dtype": str(dtype)},
        "ceilings": {"flops_per_s": rate},
    }
    print(f"{batch} × {tokens} tokens, {options.heads} heads of 64, causal, {dtype}; {rate / 1e12:.1f} TFLOP/s")
    for version, every in ways(tokens, device).items():
        good = checked(version, every, tokens, device, dtype)
        tensors = inputs(version, batch, tokens, options.heads, device, dtype)
        forward, backward = products(version)
        one = batch * options.heads * 64 * tokens**2  # 2 FLOPs per multiply-add, half of the pairs
        floor = (forward + backward) * one / rate
        with torch.no_grad():
            only = {name: functools.partial(way, *tensors) for name, way in good.items()}
            ahead = timed(only, options.rounds, 5, device)
        calls = {name: functools.partial(with_gradients, way, tensors) for name, way in good.items()}
        both: dict[str, Any] = timed(calls, options.rounds, 5, device)  # pyright: ignore[reportArgumentType]
        print(f"\n{version}: floor {1e3 * floor:.3f} ms forward and backward")
        rows = {}
        for name, (middle, spread) in both.items():
            memory = peak_bytes(calls[name]) if gpu else None
            rows[name] = {
                "ms": 1e3 * middle,
                "spread": spread,
                "forward_ms": 1e3 * ahead[name][0],
                "peak_bytes": memory,
            }
            more = "" if memory is None else f" {memory / 2**30:.2f} GiB"
            timing = f"{1e3 * middle:>8.3f} ms ±{spread:.1%}, forward {1e3 * ahead[name][0]:.3f}"
            print(f"  {name:<26} {timing}, {middle / floor:.2f} × floor{more}", flush=True)
        result[version] = {"floor_ms": 1e3 * floor, "ways": rows}
    keep(f"differential-{device}", result, options.out)


if __name__ == "__main__":
    main()
