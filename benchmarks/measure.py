"""What benchmarks share: timing both sides in one run, the machine's own ceilings, and result files with provenance."""

import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping
from datetime import date
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def seconds(call: Callable[[], object], device: str) -> float:
    synchronize(device)
    start = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - start


def gpu_seconds(call: Callable[[], object], rounds: int = 9, calls: int = 10) -> float:
    """Median time on the GPU of one call, replayed from a graph so that the host's share does not count."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        call()
    times = []
    for _ in range(rounds):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(calls):
            graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / 1e3 / calls)
    return statistics.median(times)


def peak_bytes(call: Callable[[], object]) -> int:
    """Bytes on the GPU that a call, its second, needs beyond what lies there before it."""
    call()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    return torch.cuda.max_memory_allocated() - before


def interleaved(calls: Mapping[str, Callable[[], object]], rounds: int, device: str) -> dict[str, list[float]]:
    """Seconds of every call in every round, the calls taking turns so that drift of the machine hits all alike."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(rounds):
        for name, call in calls.items():
            times[name].append(seconds(call, device))
    return times


def median_and_spread(times: list[float]) -> tuple[float, float]:
    """Median, and half the distance between the quartiles relative to it."""
    low, middle, high = statistics.quantiles(times, n=4) if len(times) > 1 else (times[0],) * 3
    return middle, (high - low) / 2 / middle


def list_kernels(call: Callable[[], object], calls: int = 5) -> str:
    """A table of the kernels of so many calls on a GPU, slowest first."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as recorded:
        for _ in range(calls):
            call()
        torch.cuda.synchronize()
    return recorded.key_averages().table(sort_by="self_cuda_time_total", row_limit=40, max_name_column_width=70)


def matrix_rate(device: str, dtype: torch.dtype) -> float:
    """FLOP/s of a large matrix product on random data: the ceiling for arithmetic."""
    n = 8192 if device == "cuda" else 1024
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    for _ in range(3):
        torch.mm(a, b)
    return 2 * n**3 / min(seconds(lambda: torch.mm(a, b), device) for _ in range(10))


def copy_rate(device: str) -> float:
    """Bytes per second of a large copy, read plus written: the ceiling for memory."""
    source = torch.empty(2**31 if device == "cuda" else 2**27, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    return 2 * source.numel() / min(seconds(lambda: target.copy_(source), device) for _ in range(10))


def provenance(device: str, commit: str | None) -> dict[str, Any]:
    """Which machine, which software, which commit."""
    if commit is None:
        answer = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
        commit = answer.stdout.strip() or "unknown"
    name = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine()
    return {
        "date": date.today().isoformat(),
        "commit": commit,
        "device": name,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def keep(name: str, result: dict[str, Any], folder: Path = RESULTS) -> Path:
    """Write one result file and say where."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    print(f"kept in {path}")
    return path
