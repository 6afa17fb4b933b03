"""What attention over a cache costs: every route of ours and of torch, through our own cache, in one run.

    python benchmarks/decode.py                      # every problem of the table, on a GPU
    python benchmarks/decode.py --configs            # also the kernel's configurations, best first
    python benchmarks/decode.py --problems shared    # these problems only

Correctness comes first: where a route of ours errs by more than twice what the reference does in the same precision,
nothing is measured and the command fails; a route of torch's that refuses a problem or errs is named and left out.
Times are medians over interleaved rounds of several calls in a row, queued before the first of them starts, so that the
host's share is hidden as it is between the layers of a model; the table of small contexts includes it. The floor is
what must be read of the cache over this machine's own read rate. Without a GPU a small problem is checked and timed,
which says nothing about the table.
"""

import argparse
import functools
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from measure import RESULTS, keep, median_and_spread, provenance
from qklab import AttentionSpec, LatentSpec
from qklab.attention.cache import cache_class
from qklab.ops.decode import DecodeImpl, decode
from qklab.ops.decode import sdpa as sdpa_route
from qklab.ops.decode.reference import find_visible_slots, rotate_cached
from qklab.ops.rope import rope_angles

Arm = Callable[[], Tensor]
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
# block, warps, stages
SHAPES = [(32, 4, 4), (32, 2, 5), (64, 2, 4), (64, 4, 2), (64, 4, 3), (64, 4, 4), (64, 4, 5), (64, 8, 4), (128, 4, 2)]
SHAPES += [(128, 4, 3), (128, 8, 3), (128, 8, 4)]
WIDE_SHAPES = [
    (16, 4, 3),
    (32, 4, 2),
    (32, 4, 3),
    (32, 4, 4),
    (32, 8, 2),
    (32, 8, 3),
    (64, 4, 2),
    (64, 8, 2),
    (64, 8, 3),
]
QUEUEING_CYCLES = 4_000_000  # about 2 ms, in which the host queues the calls that are timed
OURS = ("ours", "ours again", "ours sdpa", "ours auto")


@dataclass
class Problem:
    """Queries over what a filled cache holds."""

    q: Tensor
    k: Tensor
    v: Tensor | None
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def fewest_bytes(self) -> int:
        """What must be read of keys and values."""
        B, S = self.k.shape[:2]
        starts = self.options.get("starts")
        slots = B * S if starts is None else B * S - int(starts.sum())
        width = self.k.shape[3] + (0 if self.v is None else self.v.shape[3])
        return slots * self.k.shape[2] * width * self.k.dtype.itemsize

    def value(self) -> Tensor:
        if self.v is not None:
            return self.v
        return self.k[..., : self.options.get("value_width", self.k.shape[3])]

    def row(self, b: int) -> "Problem":
        """Row b in float64."""
        part = slice(b, b + 1)
        by_row = ("starts", "lengths")
        options = {name: value[part] if name in by_row else value for name, value in self.options.items()}
        if "angles" in options:
            options["angles"] = tuple(table.double() for table in options["angles"])
        v = None if self.v is None else self.v[part].double()
        return Problem(self.q[part].double(), self.k[part].double(), v, options)

    def run(self, impl: DecodeImpl) -> Tensor:
        return decode(self.q, self.k, self.v, impl=impl, **self.options)


def cached(batch: int, context: int, device: str, dtype: torch.dtype, **choices: Any) -> list[Tensor]:
    """What a full cache of this spec holds, as a layer would read it: views, one token of room left."""
    spec = AttentionSpec(**choices)
    cache = cache_class(spec)(spec, batch, context + 1, dtype, device)
    for tensor in cache.tensors:
        tensor.normal_()
    cache.length = context
    return cache.read()


def build(name: str, batch: int, context: int, device: str, dtype: torch.dtype) -> Problem:
    """One problem of the table."""
    heads, groups, width = (32, 8, 128) if device == "cuda" else (4, 2, 32)
    gqa = {"width": heads * width, "heads": heads, "kv_heads": groups}
    make = functools.partial(cached, batch, context, device, dtype)
    q = torch.randn(batch, 1, heads, width, device=device, dtype=dtype)
    if name.startswith("latent"):
        heads = int(name.split()[1])
        rank, rope = (512, 64) if device == "cuda" else (64, 16)
        latent = LatentSpec(query_rank=rank, kv_rank=rank, rope_width=rope)
        (k,) = make(width=heads * width, heads=heads, latent=latent)
        q = torch.randn(batch, 1, heads, rank + rope, device=device, dtype=dtype)
        return Problem(q, k, None, {"value_width": rank})
    if name == "separate":
        k, v = make(**gqa)
        return Problem(q, k, v)
    if name == "window":  # a ring as wide as the window, gone round a few times
        k, v = make(**gqa)
        lengths = torch.full((batch,), 3 * context + 5, device=device)
        return Problem(q, k, v, {"window": context, "lengths": lengths})
    if name == "separate, mha":
        k, v = make(width=groups * width, heads=groups)
        return Problem(q[:, :, :groups], k, v)
    (k,) = make(**gqa, share="k=v")
    if name == "shared":
        return Problem(q, k, None)
    if name == "ragged":
        shortest = min(512, context // 4)
        lengths = torch.linspace(shortest, context, batch, device=device).round().long()
        return Problem(q, k, None, {"starts": context - lengths})
    assert name == "on-read", name
    cos, sin = rope_angles(torch.arange(context, device=device)[None], width, 10_000.0, torch.float32)
    return Problem(q, k, None, {"angles": (cos[0, :, 0], sin[0, :, 0])})


PROBLEMS = ("separate", "separate, mha", "window", "shared", "ragged", "on-read", "latent 16", "latent 128")


def torch_arm(problem: Problem, backend: SDPBackend | None, packed: bool = False) -> Arm:
    """scaled_dot_product_attention as torch chooses or with one backend; `packed`: a group's heads as its queries."""
    value, options = problem.value(), problem.options

    def call() -> Tensor:
        k = problem.k
        if "angles" in options:
            k = rotate_cached(k, options["angles"], None)
        q = problem.q.unflatten(2, (k.shape[2], -1))[:, 0] if packed else problem.q.transpose(1, 2)
        mask = None
        if "starts" in options:
            mask = find_visible_slots(1, k.shape[1], options["starts"], None, k.device)
        backends = [*BACKENDS.values(), SDPBackend.MATH] if backend is None else [backend]
        with sdpa_kernel(backends):
            o = F.scaled_dot_product_attention(
                q,
                k.transpose(1, 2),
                value.transpose(1, 2),
                attn_mask=mask,
                enable_gqa=q.shape[1] != k.shape[2],
            )
        return o.flatten(1, 2)[:, None] if packed else o.transpose(1, 2)

    return call


def flex_arm(problem: Problem) -> Arm:
    """FlexAttention, compiled, with a block mask where rows differ."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    q, k, value = problem.q, problem.k, problem.value()
    starts, blocks = problem.options.get("starts"), None
    if starts is not None:

        def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return j >= starts[b]

        blocks = create_block_mask(seen, q.shape[0], None, 1, k.shape[1], device=str(q.device))
    compiled = torch.compile(flex_attention, dynamic=False)

    def call() -> Tensor:
        o = compiled(
            q.transpose(1, 2),
            k.transpose(1, 2),
            value.transpose(1, 2),
            block_mask=blocks,
            enable_gqa=q.shape[2] != k.shape[2],
        )
        assert isinstance(o, Tensor)
        return o.transpose(1, 2)

    return call


def arms(problem: Problem, gpu: bool) -> dict[str, Arm]:
    """Every way to solve it."""
    ways: dict[str, Arm] = {"torch default": torch_arm(problem, None)}
    if gpu:
        for name, backend in BACKENDS.items():
            ways[f"torch {name}"] = torch_arm(problem, backend)
            ways[f"torch {name}, packed"] = torch_arm(problem, backend, packed=True)
        if not {"angles", "value_width"} & set(problem.options):
            ways["flex"] = flex_arm(problem)
        ways |= {"ours": lambda: problem.run("triton"), "ours again": lambda: problem.run("triton")}
    return ways | {"ours sdpa": lambda: problem.run("sdpa"), "ours auto": lambda: problem.run("auto")}


def checked(name: str, problem: Problem, ways: dict[str, Arm]) -> dict[str, Arm]:
    """The arms that solve it: first and last row against float64, within twice the reference's own error."""
    rows = (0, len(problem.q) - 1)
    exact = [problem.row(b).run("reference") for b in rows]
    low = []
    for b in rows:
        row = problem.row(b)
        v = None if row.v is None else row.v.to(problem.k.dtype)
        options = dict(row.options)
        if "angles" in options:
            options["angles"] = tuple(table.float() for table in options["angles"])
        low.append(decode(row.q.to(problem.q.dtype), row.k.to(problem.k.dtype), v, impl="reference", **options))
    good = {}
    for arm, call in ways.items():
        try:
            o = call()
        except Exception as refusal:
            if arm in OURS:
                raise
            torch.cuda.empty_cache()
            print(f"  {name}: {arm} is left out: {str(refusal).strip().splitlines()[0][:100]}", flush=True)
            continue
        error = sum(float((o[b : b + 1].double() - true).norm()) for b, true in zip(rows, exact, strict=True))
        allowed = sum(
            2 * float((other.double() - true).norm()) + torch.finfo(o.dtype).eps * float(true.norm())
            for other, true in zip(low, exact, strict=True)
        )
        if error <= allowed:
            good[arm] = call
        elif arm in OURS:
            sys.exit(f"{name}: {arm} errs by {error:.1e} where {allowed:.1e} is allowed; nothing was measured.")
        else:
            print(f"  {name}: {arm} is left out: it errs by {error:.1e} where {allowed:.1e} is allowed", flush=True)
    return good


def seconds(call: Callable[[], object], calls: int, device: str, ahead: bool = True) -> float:
    """Seconds of one of `calls` calls in a row; `ahead`: of the device's alone, the host having queued them before."""
    if device == "cpu":
        start = time.perf_counter()
        for _ in range(calls):
            call()
        return (time.perf_counter() - start) / calls
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    if ahead:
        torch.cuda._sleep(QUEUEING_CYCLES)
    begin.record()
    for _ in range(calls):
        call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3 / calls


def timed(
    ways: dict[str, Arm], rounds: int, calls: int, device: str, ahead: bool = True
) -> dict[str, tuple[float, float]]:
    """Median and spread of every arm, the arms taking turns."""
    times: dict[str, list[float]] = {arm: [] for arm in ways}
    for call in ways.values():
        seconds(call, 2, device)
    for _ in range(rounds):
        for arm, call in ways.items():
            times[arm].append(seconds(call, calls, device, ahead))
    return {arm: median_and_spread(values) for arm, values in times.items()}


def read_rate(device: str) -> float:
    """Bytes per second of the fastest of a few reductions over a large tensor."""
    size = 2**32 if device == "cuda" else 2**26
    source = torch.zeros(size // 4, device=device)
    shaped = source.view(-1, 2**14)
    calls = (source.sum, source.amax, lambda: shaped.sum(1), lambda: shaped.amax(1), lambda: shaped.sum(0))
    return size / min(seconds(call, 5, device) for call in calls for _ in range(4))


def measure(name: str, problem: Problem, rounds: int, device: str, rate: float) -> dict[str, Any]:
    """Milliseconds of every arm and its share of the read floor."""
    gpu = device == "cuda"
    ways = checked(name, problem, arms(problem, gpu))
    floor = problem.fewest_bytes / rate
    print(f"\n{name}: {problem.fewest_bytes / 1e9:.3f} GB to read, floor {1e3 * floor:.3f} ms", flush=True)
    rows = {}
    for arm, (middle, spread) in timed(ways, rounds, 5, device).items():
        rows[arm] = {"ms": 1e3 * middle, "spread": spread, "share_of_floor": floor / middle}
        print(
            f"  {arm:<24} {1e3 * middle:>9.4f} ms ±{100 * spread:.1f}% {100 * floor / middle:>6.1f} % of the read floor"
        )
    return {"floor_ms": 1e3 * floor, "arms": rows}


def configurations(problem: Problem, rounds: int, floor_ms: float) -> list[dict[str, Any]]:
    """The kernel under every configuration of a list, best first."""
    from triton.runtime.errors import OutOfResources

    from qklab.ops.decode.triton import Config
    from qklab.ops.decode.triton import decode as kernel

    shapes = WIDE_SHAPES if problem.k.shape[3] > 256 else SHAPES
    if problem.k.shape[3] > 256 and problem.q.shape[2] > 16:
        shapes = [shape for shape in shapes if shape[1] == 8]  # with fewer warps the sums do not fit into registers
    cos, sin = problem.options.get("angles", (None, None))
    starts, width = problem.options.get("starts"), problem.value().shape[3]
    scale = problem.q.shape[3] ** -0.5
    rows = []
    for shape in shapes:
        for chunk in (None, 1024, 2048, 4096):
            config = Config(*shape, chunk)
            call = functools.partial(
                kernel, problem.q, problem.k, problem.v, cos, sin, starts, None, None, None, width, scale, config
            )
            try:
                call()
                times = [seconds(call, 4, "cuda") for _ in range(max(3, rounds // 3))]
            except (OutOfResources, RuntimeError) as refusal:
                print(f"  {config}: {str(refusal).strip().splitlines()[0][:90]}", flush=True)
                break
            rows.append({"config": list(config), "ms": 1e3 * median_and_spread(times)[0]})
    rows.sort(key=lambda row: row["ms"])
    for row in rows[:8]:
        print(f"  block, warps, stages, chunk {row['config']}: {row['ms']:.4f} ms, {floor_ms / row['ms']:.1%} of floor")
    return rows


def growing(batch: int, context: int, steps: int, device: str, dtype: torch.dtype) -> dict[str, float]:
    """Milliseconds per step, by the clock on the wall, where the cache grows by a token with every call."""
    spec = AttentionSpec(width=4096, heads=32, kv_heads=8, share="k=v")
    q = torch.randn(batch, 1, 32, 128, device=device, dtype=dtype)
    new = torch.randn(batch, 1, 8, 128, device=device, dtype=dtype)
    cache = cache_class(spec)(spec, batch, context + steps, dtype, device)
    routes: dict[str, Callable[[Tensor], Tensor]] = {
        "torch default": lambda k: sdpa_route.decode(q, k, k, 128**-0.5),
        "cudnn": lambda k: sdpa_route.decode(q, k, k, 128**-0.5, order=[SDPBackend.CUDNN_ATTENTION]),
        "ours": lambda k: decode(q, k, impl="triton"),
    }
    print(f"\ngrowing from {context} tokens, {batch} rows, shared")
    rows = {}
    for name, route in routes.items():
        cache.length = context
        route(cache.append(new)[0])
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(steps - 1):
            route(cache.append(new)[0])
        torch.cuda.synchronize()
        rows[name] = 1e3 * (time.perf_counter() - start) / (steps - 1)
        print(f"  {name:<24} {rows[name]:>9.3f} ms a step", flush=True)
    return rows


def crossing(device: str, dtype: torch.dtype, rounds: int) -> list[dict[str, Any]]:
    """Where the kernel starts to win: small batches and contexts, each call waited for as a decoder's layers do."""
    print("\nshared, small: torch default, cudnn and ours in µs a call, eight calls in a row")
    rows = []
    for batch in (1, 8, 32):
        for context in (128, 512, 2048, 8192):
            problem = build("shared", batch, context, device, dtype)
            q, k = problem.q, problem.k
            ways: dict[str, Arm] = {
                "torch default": functools.partial(sdpa_route.decode, q, k, k, 128**-0.5),
                "cudnn": functools.partial(sdpa_route.decode, q, k, k, 128**-0.5, order=[SDPBackend.CUDNN_ATTENTION]),
                "ours": functools.partial(decode, q, k, impl="triton"),
            }
            times = {arm: 1e6 * middle for arm, (middle, _) in timed(ways, rounds, 8, device, ahead=False).items()}
            rows.append({"batch": batch, "context": context, "us": times})
            print(f"  {batch:>3} × {context:<6}", "  ".join(f"{arm} {value:.1f}" for arm, value in times.items()))
    return rows


def ratio(results: dict[str, Any], slow: tuple[str, Callable[[str], bool]], fast: tuple[str, str]) -> float | None:
    """The best of one problem's arms that `slow` takes over one arm of another."""
    times = [row["ms"] for arm, row in results.get(slow[0], {"arms": {}})["arms"].items() if slow[1](arm)]
    mine = results.get(fast[0], {"arms": {}})["arms"].get(fast[1])
    return min(times) / mine["ms"] if times and mine else None


def verdict(results: dict[str, Any]) -> list[dict[str, Any]]:
    """The table of the README: what was to be reached, and what was."""

    def theirs(arm: str) -> bool:
        return not arm.startswith("ours")

    def default(arm: str) -> bool:
        return arm == "torch default"

    def share(problem: str) -> float | None:
        row = results.get(problem, {"arms": {}})["arms"].get("ours auto")
        return row and row["share_of_floor"]

    rows = [
        (
            "shared over the best of torch's separate",
            ratio(results, ("separate", theirs), ("shared", "ours auto")),
            1.76,
        ),
        ("shared: share of the read floor", share("shared"), 0.88),
        ("separate over torch's default", ratio(results, ("separate", default), ("separate", "ours auto")), 1.6),
        ("separate over the best of torch's", ratio(results, ("separate", theirs), ("separate", "ours auto")), 1.0),
        ("ragged shared over the best of torch's", ratio(results, ("ragged", theirs), ("ragged", "ours auto")), 1.5),
    ]
    print("\nwhat was to be reached")
    for what, reached, bound in rows:
        said = "not measured" if reached is None else f"{reached:.2f}{'' if reached >= bound else '  MISSED'}"
        print(f"  {what:<42} ≥ {bound:<5} {said}")
    return [{"what": what, "reached": reached, "bound": bound} for what, reached, bound in rows]


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--problems", nargs="*", choices=PROBLEMS, default=list(PROBLEMS), metavar="PROBLEM")
    parser.add_argument("--batch", type=int, help="2 on the CPU, 32 on a GPU")
    parser.add_argument("--context", type=int, help="256 on the CPU, 32768 on a GPU")
    parser.add_argument("--configs", action="store_true", help="also try the kernel's configurations")
    parser.add_argument("--no-crossing", action="store_true", help="leave out small shapes and the growing cache")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--commit", help="the commit measured, where git cannot be asked")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the result file")
    options = parser.parse_args()
    device, gpu = options.device, options.device == "cuda"
    batch, context = options.batch or (32 if gpu else 2), options.context or (32_768 if gpu else 256)
    dtype = torch.bfloat16 if gpu else torch.float32
    warnings.simplefilter("ignore")  # SDPA explains at length why a backend refuses
    torch._dynamo.config.recompile_limit = 64
    torch.manual_seed(0)
    rate = read_rate(device)
    told = provenance(device, options.commit)
    print(f"{told['device']}: {rate / 1e9:.0f} GB/s read; {batch} rows over {context} cached tokens, {dtype}")
    result: dict[str, Any] = {
        "provenance": told,
        "set_up": {"batch": batch, "context": context, "dtype": str(dtype)},
        "ceilings": {"read_bytes_per_s": rate},
        "problems": {},
    }
    for name in options.problems:
        problem = build(name, batch, context, device, dtype)
        rows = measure(name, problem, options.rounds, device, rate)
        if gpu and options.configs and name not in ("separate, mha", "ragged"):  # which take another problem's
            rows["configurations"] = configurations(problem, options.rounds, rows["floor_ms"])
        result["problems"][name] = rows
        del problem
        if gpu:
            torch.cuda.empty_cache()
    if not gpu:
        print("\nThe table of bounds is about a GPU, and there is none here.")
        return
    if not options.no_crossing:
        result["small"] = crossing(device, dtype, options.rounds)
        result["growing_ms"] = growing(batch, context, 16, device, dtype)
    result["reached"] = verdict(result["problems"])
    keep(f"decode-{device}", result, options.out)


if __name__ == "__main__":
    main()
