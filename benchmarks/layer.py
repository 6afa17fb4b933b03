"""What each mechanism costs in training and in decoding, against the standard layer, in one run.

    python benchmarks/layer.py                 # nano on the CPU, 51m on a GPU
    python benchmarks/layer.py --rounds 30 --model 124m

Correctness comes first: an arm whose cached decoding strays from its full forward, or whose compiled loss strays from the
eager one, is not measured and the command fails. Times are medians over interleaved rounds. The floors are the fewest FLOPs
(training: three times the forward's matrix products) over this machine's own matrix rate, and the fewest bytes (decoding:
weights and cache read once) over its own copy rate.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

from measure import copy_rate, interleaved, keep, matrix_rate, median_and_spread, provenance, synchronize
from qklab import CouplingSpec, Decoder, LatentSpec, recipe

ARMS: dict[str, dict[str, Any]] = {
    "(Q,K,V)": {},
    "(Q,K,V) again": {},  # the same model twice: a ratio closer to 1 than this pair's is noise
    "(Q,K,V) gqa": {"kv_heads": 2},
    "(Q,K=V)": {"share": "k=v"},
    "(Q,K=V) on-read": {"share": "k=v", "kv_rotation": "on-read"},
    "(Q=K=V)": {"share": "q=k=v"},
    "MLA": {"latent": LatentSpec(query_rank=256, kv_rank=128, rope_width=32)},
    "euler×1": {"coupling": CouplingSpec(kind="euler")},
    "leapfrog×1": {"coupling": CouplingSpec(kind="leapfrog")},
    "leapfrog×7": {"coupling": CouplingSpec(kind="leapfrog", steps=7)},
    "affine×1": {"coupling": CouplingSpec(kind="affine")},
    "qk-norm": {"norm": "qk"},
    "differential": {"mix": "differential"},
    "differential-v2": {"mix": "differential-v2"},
}


def check(model: Decoder, device: str) -> None:
    """Decoding through the cache equals the full forward, in float32, to rounding."""
    ids = torch.randint(model.spec.vocab, (2, 48), device=device)
    with torch.no_grad():
        full = model(ids)
        cache = model.new_cache(2, 48)
        decoded = torch.cat([model(chunk, cache=cache) for chunk in ids.split([32] + [1] * 16, 1)], 1)
    error = float((decoded - full).norm() / full.norm())
    if not error < 1e-4:
        sys.exit(
            f"{model.spec.name}: cached decoding differs from the full forward by {error:.1e}; nothing was measured."
        )


class Training:
    """One forward and backward of the language-model loss in bf16 on the GPU, in float32 on the CPU."""

    def __init__(self, model: Decoder, batch: int, tokens: int, compiled: bool, device: str):
        self.model, self.device = model, device
        self.ids = torch.randint(model.spec.vocab, (batch, tokens + 1), device=device)
        self.loss = torch.compile(self.eager_loss) if compiled else self.eager_loss

    def eager_loss(self) -> torch.Tensor:
        with torch.autocast(self.device, dtype=torch.bfloat16, enabled=self.device == "cuda"):
            logits = self.model(self.ids[:, :-1])
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), self.ids[:, 1:].flatten())

    def __call__(self) -> None:
        self.loss().backward()
        self.model.zero_grad(set_to_none=True)

    def check(self) -> None:
        with torch.no_grad():
            eager, compiled = float(self.eager_loss()), float(self.loss())
        if not abs(eager - compiled) < 2e-3 * eager:
            sys.exit(
                f"{self.model.spec.name}: compiled loss {compiled} is not the eager {eager}; nothing was measured."
            )


class Decoding:
    """One new token for every row over a filled cache."""

    def __init__(self, model: Decoder, batch: int, context: int, device: str):
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self.model = Decoder(model.spec, seed=0).to(device, dtype)
        self.cache = self.model.new_cache(batch, context + 1)
        for layer in self.cache:
            for tensor in layer.tensors:
                tensor.normal_()
        self.context, self.dtype = context, dtype
        self.ids = torch.randint(model.spec.vocab, (batch, 1), device=device)
        self.rewind()

    def rewind(self) -> None:
        for layer in self.cache:
            layer.length = self.context

    @torch.no_grad()
    def __call__(self) -> None:
        self.model(self.ids, cache=self.cache)
        self.rewind()

    def fewest_bytes(self) -> int:
        weights = self.model.spec.parameters() * self.dtype.itemsize
        return weights + self.ids.shape[0] * self.model.spec.cache_bytes(self.context, self.dtype)


def table(title: str, times: dict[str, list[float]], floors: dict[str, float], extra: dict[str, str]) -> dict[str, Any]:
    """Print and return: milliseconds, spread, ratio to (Q,K,V), distance to the floor."""
    standard, _ = median_and_spread(times["(Q,K,V)"])
    print(f"\n{title}\n  {'arm':<18} {'ms':>9} {'±':>5} {'ratio':>6} {'× floor':>8}")
    rows = {}
    for name, values in times.items():
        middle, spread = median_and_spread(values)
        rows[name] = {"ms": 1e3 * middle, "spread": spread, "ratio": middle / standard, "floor_ms": 1e3 * floors[name]}
        line = f"  {name:<18} {1e3 * middle:>9.2f} {100 * spread:>4.1f}% {middle / standard:>6.3f} {middle / floors[name]:>8.2f}"
        print(line, extra.get(name, ""))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--model", help="recipe; nano on the CPU, 51m on a GPU")
    parser.add_argument("--batch", type=int, help="sequences per training step; 4 on the CPU, 64 on a GPU")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--decode-batch", type=int, help="rows decoded together; 4 on the CPU, 32 on a GPU")
    parser.add_argument("--decode-context", type=int, help="tokens already cached; 1024 on the CPU, 16384 on a GPU")
    parser.add_argument("--no-compile", action="store_true", help="measure eager mode only")
    parser.add_argument("--arms", nargs="*", default=list(ARMS), choices=list(ARMS), metavar="ARM")
    parser.add_argument("--commit", help="the commit measured, where git cannot be asked")
    parser.add_argument("--out", type=Path, help="folder for the result file; benchmarks/results by default")
    options = parser.parse_args()
    device, gpu = options.device, options.device == "cuda"
    name = options.model or ("51m" if gpu else "nano")
    batch, tokens = options.batch or (64 if gpu else 4), 1024 if gpu else 256
    decode_batch = options.decode_batch or (32 if gpu else 4)
    context = options.decode_context or (16_384 if gpu else 1024)
    compiled = not options.no_compile and gpu
    arms = ["(Q,K,V)", *(arm for arm in options.arms if arm != "(Q,K,V)")]

    torch.manual_seed(0)
    print(f"ceilings of {provenance(device, options.commit)['device']}:", end=" ", flush=True)
    dtype = torch.bfloat16 if gpu else torch.float32
    flops, bandwidth = matrix_rate(device, dtype), copy_rate(device)
    print(f"{flops / 1e12:.2f} TFLOP/s, {bandwidth / 1e9:.0f} GB/s")
    result: dict[str, Any] = {
        "provenance": provenance(device, options.commit),
        "model": name, "batch": batch, "tokens": tokens, "compiled": compiled,
        "decode_batch": decode_batch, "decode_context": context,
        "matrix_tflops": flops / 1e12, "copy_gbytes_per_s": bandwidth / 1e9,
    }  # fmt: skip

    training: dict[str, Training] = {}
    memory: dict[str, str] = {}
    for arm in arms:
        print(f"preparing {arm} …", flush=True)
        model = Decoder(recipe(name, **ARMS[arm]), seed=0).to(device)
        check(model, device)
        torch._dynamo.reset()
        training[arm] = Training(model, batch, tokens, compiled, device)
        training[arm].check()
        training[arm]()
        synchronize(device)
        if gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            training[arm]()
            peak = torch.cuda.max_memory_allocated() - before
            memory[arm] = f"{peak / 2**30:5.1f} GiB"
            result.setdefault("training_activation_bytes", {})[arm] = peak
    floors = {
        arm: 3 * batch * tokens * step.model.spec.flops_per_token(tokens) / flops for arm, step in training.items()
    }
    title = f"training step, {name}, {batch} × {tokens} tokens, {'compiled' if compiled else 'eager'}"
    result["training"] = table(title, interleaved(training, options.rounds, device), floors, memory)

    decoding = {arm: Decoding(step.model, decode_batch, context, device) for arm, step in training.items()}
    bytes_ = {arm: step.cache.bytes for arm, step in decoding.items()}
    floors = {arm: step.fewest_bytes() / bandwidth for arm, step in decoding.items()}
    title = f"decoding one token, {name}, {decode_batch} rows over {context} cached tokens, eager"
    notes = {arm: f"{size / 2**20:8.1f} MiB cache" for arm, size in bytes_.items()}
    result["decoding"] = table(title, interleaved(decoding, options.rounds, device), floors, notes)
    result["decoding_cache_bytes"] = bytes_
    keep(f"layer-{name}-{device}", result, options.out or Path(__file__).parent / "results")


if __name__ == "__main__":
    main()
