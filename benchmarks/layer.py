"""What each mechanism costs in training and in decoding, against the standard layer, in one run.

    python benchmarks/layer.py                 # nano on the CPU, 51m on a GPU
    python benchmarks/layer.py --rounds 30 --model 124m
    python benchmarks/layer.py --arms cca sinks "window 512@8192" --no-decoding    # training, one on longer rows

Correctness comes first: an arm whose cached decoding strays from its full forward, or whose compiled loss strays from
the eager one, is not measured and the command fails. Times are medians over interleaved rounds. The floors are the
fewest FLOPs (training: three times the forward's matrix products) over this machine's own matrix rate, and the fewest
bytes (decoding: weights and cache read once) over its own copy rate.
"""

import argparse
import sys
from pathlib import Path
from statistics import median
from typing import Any

import torch

from measure import RESULTS, copy_rate, interleaved, keep, matrix_rate, median_and_spread, provenance
from qklab import CouplingSpec, Decoder, DecoderSpec, LatentSpec, recipe
from qklab.model import RECIPES
from steps import Arms, Step

PLAIN, AGAIN = "(Q,K,V)", "(Q,K,V) again"


def arms(width: int) -> dict[str, dict[str, Any]]:
    """The attention choices that are measured."""
    return {
        PLAIN: {},
        AGAIN: {},  # the same model twice: a ratio closer to 1 than this pair's is noise
        "(Q,K,V) gqa": {"kv_heads": 2},
        "(Q,K=V)": {"share": "k=v"},
        "(Q,K=V) on-read": {"share": "k=v", "kv_rotation": "on-read"},
        "(Q=K=V)": {"share": "q=k=v"},
        "MLA": {"latent": LatentSpec(query_rank=width // 2, kv_rank=width // 4, rope_width=16)},
        "euler×1": {"coupling": CouplingSpec(kind="euler")},
        "leapfrog×1": {"coupling": CouplingSpec(kind="leapfrog")},
        "leapfrog×7": {"coupling": CouplingSpec(kind="leapfrog", steps=7)},
        "affine×1": {"coupling": CouplingSpec(kind="affine")},
        "cca": {"coupling": CouplingSpec(kind="cca")},
        "short-conv": {"short_conv": 4},
        "key-shift": {"key_shift": True, "rope_fraction": 0.5},
        "MLA affine×1": {
            "latent": LatentSpec(query_rank=width // 2, kv_rank=width // 4, rope_width=16),
            "coupling": CouplingSpec(kind="affine"),
        },
        "qk-norm": {"norm": "qk"},
        "differential": {"mix": "differential"},
        "differential-v2": {"mix": "differential-v2"},
        "gate element": {"gate": "element"},
        "gate head": {"gate": "head"},
        "sinks": {"sinks": True},
        "xsa": {"exclusive": True},
        "window 512": {"window": 512},
        "hybrid 3:1": {"attention": [{"window": 512}] * 3 + [{}]},
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


def prepare_step(spec: DecoderSpec, batch: int, tokens: int, compiled: bool, device: str) -> Step:
    """A training step, once its model's cache and its compiled loss are right."""
    model = Decoder(spec, seed=0).to(device)
    check(model, device)
    torch.manual_seed(0)
    step = Step(model, torch.randint(spec.vocab, (batch, tokens + 1), device=device), compiled)
    eager, loss = (float(run().detach()) for run in (step.eager, step.loss))
    if not abs(eager - loss) < 2e-3 * eager:
        sys.exit(f"{spec.name}: compiled loss {loss} is not the eager {eager}; nothing was measured.")
    return step


class Decoding:
    """One new token for every row over a filled cache."""

    def __init__(self, spec: DecoderSpec, batch: int, context: int, device: str):
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self.model = Decoder(spec, seed=0).to(device, dtype)
        self.cache = self.model.new_cache(batch, context + 1)
        for layer in self.cache:
            for tensor in layer.tensors:
                tensor.normal_()
        self.context, self.dtype = context, dtype
        self.ids = torch.randint(spec.vocab, (batch, 1), device=device)
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
    """Print and return: milliseconds, spread, ratio to (Q,K,V) on as many tokens, distance to the floor."""
    print(f"\n{title}\n  {'arm':<22} {'ms':>9} {'±':>5} {'ratio':>6} {'× floor':>8}")
    rows = {}
    for name, values in times.items():
        _, mark, tokens = name.partition("@")
        standard = median([value for arm in (PLAIN, AGAIN) for value in times.get(f"{arm}{mark}{tokens}", [])])
        middle, spread = median_and_spread(values)
        rows[name] = {"ms": 1e3 * middle, "spread": spread, "ratio": middle / standard, "floor_ms": 1e3 * floors[name]}
        timing = f"{1e3 * middle:>9.2f} {100 * spread:>4.1f}% {middle / standard:>6.3f} {middle / floors[name]:>8.2f}"
        print(f"  {name:<22} {timing} ", extra.get(name, ""))
    return rows


def measure_training(
    specs: dict[str, DecoderSpec], batch: int, tokens: int, compiled: bool, rounds: int, device: str, rate: float
) -> dict[str, Any]:
    """Milliseconds of a training step, and on a GPU, where every arm has a process of its own, the bytes it needs on
    top of what lies there before it; without rounds the kernels are printed instead. As many tokens in all for arms
    with rows of another length."""
    shapes = {arm: int(arm.partition("@")[2] or tokens) for arm in specs}
    cases = {arm: (spec, batch * tokens // shapes[arm], shapes[arm]) for arm, spec in specs.items()}
    print(f"preparing {', '.join(specs)} …", flush=True)
    peaks: dict[str, int] = {}
    if device == "cuda":
        processes = Arms({arm: (prepare_step, *case, compiled, device) for arm, case in cases.items()})
        _, peaks = processes.list_answers()
        if not rounds:
            processes.print_kernels()
            return {}
        times = processes.seconds(rounds)
    else:
        times = interleaved({arm: prepare_step(*case, compiled, device) for arm, case in cases.items()}, rounds, device)
    floors = {arm: 3 * batch * tokens * spec.flops_per_token(shapes[arm]) / rate for arm, spec in specs.items()}
    notes = {arm: f"{peak / 2**30:5.1f} GiB" for arm, peak in peaks.items()}
    title = f"training step, {batch} × {tokens} tokens, {'compiled' if compiled else 'eager'}"
    return {"times": table(title, times, floors, notes), "peak_bytes": peaks}


def measure_decoding(
    specs: dict[str, DecoderSpec], batch: int, context: int, rounds: int, device: str, rate: float
) -> dict[str, Any]:
    """Milliseconds for one new token per row."""
    steps = {arm: Decoding(spec, batch, context, device) for arm, spec in specs.items()}
    owned = {arm: step.cache.bytes for arm, step in steps.items()}
    floors = {arm: step.fewest_bytes() / rate for arm, step in steps.items()}
    notes = {arm: f"{size / 2**20:8.1f} MiB cache" for arm, size in owned.items()}
    title = f"decoding one token, {batch} rows over {context} cached tokens, eager"
    return {"times": table(title, interleaved(steps, rounds, device), floors, notes), "cache_bytes": owned}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--model", choices=list(RECIPES), help="nano on the CPU, 51m on a GPU")
    parser.add_argument("--batch", type=int, help="sequences per training step; 4 on the CPU, 64 on a GPU")
    parser.add_argument("--tokens", type=int, help="tokens of each; 256 on the CPU, 1024 on a GPU")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--decode-batch", type=int, help="rows decoded together; 4 on the CPU, 32 on a GPU")
    parser.add_argument("--decode-context", type=int, help="tokens already cached; 1024 on the CPU, 8192 on a GPU")
    parser.add_argument("--no-compile", action="store_true", help="train in eager mode, as on the CPU")
    named = f"any of: {', '.join(arms(512))}; or ARM@TOKENS, trained on rows of so many tokens and not decoded"
    parser.add_argument("--arms", nargs="*", metavar="ARM", help=named)
    parser.add_argument("--no-decoding", action="store_true", help="measure training alone")
    parser.add_argument("--kernels", action="store_true", help="say where training steps spend their time on a GPU")
    parser.add_argument("--name", help="what the result file's name ends with")
    parser.add_argument("--commit", help="the commit measured, where git cannot be asked")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the result file")
    options = parser.parse_args()
    device, gpu = options.device, options.device == "cuda"
    name = options.model or ("51m" if gpu else "nano")
    known = arms(recipe(name).width)
    wanted = options.arms or list(known)
    if unknown := [arm for arm in wanted if arm.partition("@")[0] not in known]:
        parser.error(f"there is no arm {unknown[0]!r}; the arms are {', '.join(known)}")
    specs: dict[str, DecoderSpec] = {}
    for mark in dict.fromkeys(arm.removeprefix(arm.partition("@")[0]) for arm in [PLAIN, *wanted]):
        for arm, choices in known.items():
            if arm in (PLAIN, AGAIN) or f"{arm}{mark}" in wanted:
                context = {"context": int(mark[1:])} if mark else {}
                specs[f"{arm}{mark}"] = recipe(name, **choices, **context)
    batch, tokens = options.batch or (64 if gpu else 4), options.tokens or (1024 if gpu else 256)
    decode_batch = options.decode_batch or (32 if gpu else 4)
    context = options.decode_context or (8192 if gpu else 1024)
    compiled = gpu and not options.no_compile

    torch.manual_seed(0)
    torch._dynamo.config.recompile_limit = 4 * len(known)  # one compilation per arm, none of them evicted
    rate, bandwidth = matrix_rate(device, torch.bfloat16 if gpu else torch.float32), copy_rate(device)
    told = provenance(device, options.commit)
    print(f"{name} on {told['device']}: {rate / 1e12:.2f} TFLOP/s in products, {bandwidth / 1e9:.0f} GB/s in copies")
    result: dict[str, Any] = {
        "provenance": told,
        "model": name,
        "ceilings": {"flops_per_s": rate, "copy_bytes_per_s": bandwidth},
        "training_set_up": {"batch": batch, "tokens": tokens, "compiled": compiled},
        "decoding_set_up": {"batch": decode_batch, "context": context},
    }
    if options.kernels and not gpu:
        parser.error("--kernels is about a GPU, and there is none here.")
    rounds = 0 if options.kernels else options.rounds
    result["training"] = measure_training(specs, batch, tokens, compiled, rounds, device, rate)
    if options.kernels:
        return
    if not options.no_decoding:
        decoded = {arm: spec for arm, spec in specs.items() if "@" not in arm}
        result["decoding"] = measure_decoding(decoded, decode_batch, context, options.rounds, device, bandwidth)
    keep(f"layer-{options.name or f'{name}-{device}'}", result, options.out)


if __name__ == "__main__":
    main()
