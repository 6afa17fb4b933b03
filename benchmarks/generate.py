"""What `generate` costs: tokens per second, cache bytes and peak memory of Transformers models, all in one run.

    python benchmarks/generate.py                     # 24 × 1024, 32 rows, 4,096 tokens of prompt, 256 new, on a GPU
    python benchmarks/generate.py --cache static      # fixed caches, the step compiled by Transformers itself
    python benchmarks/generate.py --cache both        # one after the other, and what growing costs against static
    python benchmarks/generate.py --tiny              # a small problem on the CPU, which says nothing about the table

(Q,K,V), (Q,K=V), (Q,K=V) with grouped heads and MLA as QKLabForCausalLM, and a Llama of that size beside itself after
`qklab.hf.convert(share="k=v")`. Weights are random. Correctness comes first: for every model greedy text through the
cache must be greedy text without it (a small piece, float32), and the cache must hold exactly the bytes that its spec
says, or nothing is measured. Times are medians of rounds in which the models take turns; decoding is `generate` less
the same call for one token. The floor of a decoding step is weights and cache, read once, over this machine's own copy
rate.
"""

import argparse
import gc
import statistics
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from measure import RESULTS, copy_rate, keep, provenance, seconds
from qklab import AttentionSpec, DecoderSpec
from qklab.hf import QKLabConfig, QKLabForCausalLM
from qklab.hf.cache import count_filled_bytes
from qklab.hf.convert import convert
from qklab.hf.convert import count_converted_bytes as converted_bytes

PLAIN, LLAMA = "(Q,K,V)", "Llama"
CONVERTED = "Llama, share='k=v'"
WAYS: dict[str, dict[str, Any]] = {name: {"cache_implementation": name} for name in ("dynamic", "static")}
UNASKED = "unasked"  # what `generate` takes by itself: the static cache, once its step is compiled
GROWING_BOUND, LLAMA_BOUND = 0.8, 1.0  # growing against static, and (Q,K,V) against Llama, in tokens a second


@dataclass(frozen=True)
class Size:
    """A model and a problem."""

    layers: int
    width: int
    heads: int
    batch: int
    prompt: int
    new: int
    vocab: int

    @property
    def head_width(self) -> int:
        return self.width // self.heads

    @property
    def cached(self) -> int:
        """Tokens of a row in the cache at the end: the last one is never read."""
        return self.prompt + self.new - 1


FULL = Size(layers=24, width=1024, heads=16, batch=32, prompt=4096, new=256, vocab=50_304)
TINY = Size(layers=2, width=64, heads=4, batch=2, prompt=24, new=8, vocab=128)


def specs(size: Size) -> dict[str, DecoderSpec]:
    """The attentions that are compared; MLA's latent is four heads wide and its rotary part half of one."""
    D = size.head_width
    latent = {"query_rank": size.width // 2, "kv_rank": 4 * D, "rope_width": D // 2}
    choices: dict[str, dict[str, Any]] = {
        PLAIN: {},
        "(Q,K=V)": {"share": "k=v"},
        f"(Q,K=V), {size.heads // 4} key/value heads": {"share": "k=v", "kv_heads": size.heads // 4},
        "MLA": {"latent": latent},
    }
    return {
        arm: DecoderSpec(
            vocab=size.vocab,
            width=size.width,
            layers=size.layers,
            attention=AttentionSpec.from_dict({"width": size.width, "heads": size.heads, **choice}),
            context=size.prompt + size.new,
            tied=False,  # else greedy text of random weights repeats itself, whatever is in the cache
        )
        for arm, choice in choices.items()
    }


def llama(size: Size) -> LlamaForCausalLM:
    """The Llama that (Q,K,V) is like."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=size.vocab,
            hidden_size=size.width,
            intermediate_size=4 * size.width,
            num_hidden_layers=size.layers,
            num_attention_heads=size.heads,
            num_key_value_heads=size.heads,
            max_position_embeddings=size.prompt + size.new,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=None,
        )
    )


def build(size: Size, device: str, converted: bool) -> dict[str, PreTrainedModel]:
    """Every arm in float32, in evaluation; Llama and its conversion if asked for."""
    models: dict[str, PreTrainedModel] = {}
    for arm, spec in specs(size).items():
        torch.manual_seed(0)
        models[arm] = QKLabForCausalLM(QKLabConfig(spec=spec))
    if converted:
        models[LLAMA], models[CONVERTED] = llama(size), llama(size)
    for model in models.values():
        model.to(device).eval()  # pyright: ignore[reportArgumentType]
    if converted:
        convert(models[CONVERTED], share="k=v")
    return models


def generated(model: Any, ids: Tensor, new: int, **options: Any) -> Any:
    mask = torch.ones_like(ids)
    return model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=new,
        min_new_tokens=new,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=None,
        return_dict_in_generate=True,
        **options,
    )


def held_bytes(arm: str, cache: Cache) -> int:
    """Bytes of the keys and values in a cache: of tokens it holds, where it has room for more."""
    return converted_bytes(cache)[0] if arm in (LLAMA, CONVERTED) else count_filled_bytes(cache)


def promised_bytes(arm: str, model: Any, size: Size, tokens: int, batch: int, dtype: torch.dtype) -> int:
    """What the spec says a cache of `tokens` tokens of `batch` rows takes."""
    if arm in (LLAMA, CONVERTED):
        tensors = 1 if arm == CONVERTED else 2
        return batch * tokens * size.layers * tensors * size.width * dtype.itemsize
    return batch * model.config.decoder_spec.cache_bytes(tokens, dtype)


def gate(models: dict[str, PreTrainedModel], size: Size, options: dict[str, Any], device: str) -> None:
    """Stop unless greedy text is the same with and without the cache and caches hold what they should."""
    torch.manual_seed(1)
    prompt, new = min(48, size.prompt), min(12, size.new)
    ids = torch.randint(size.vocab, (2, prompt), device=device)
    for arm, model in models.items():
        through = generated(model, ids, new)
        without = generated(model, ids, new, use_cache=False)
        measured = generated(model, ids, new, disable_compile=True, **options)
        if not all(torch.equal(other.sequences, without.sequences) for other in (through, measured)):
            sys.exit(f"{arm}: text through the cache differs from text without it; nothing was measured.")
        tokens = prompt + new - 1
        held = held_bytes(arm, through.past_key_values)
        promised = promised_bytes(arm, model, size, tokens, 2, torch.float32)
        if held != promised:
            sys.exit(f"{arm}: the cache holds {held:,} bytes where {promised:,} were promised; nothing was measured.")
    print(
        f"checked: {len(models)} models, greedy text with cache = without, caches hold what the specs say", flush=True
    )


def weight_bytes(model: torch.nn.Module) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


def peak_above(model: Any, ids: Tensor, size: Size, options: dict[str, Any], device: str) -> tuple[int | None, int]:
    """Most bytes `generate` had beside all weights (None on a CPU, which does not count them), and of its cache."""
    gpu = device == "cuda"
    if gpu:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if gpu else 0
    answer = generated(model, ids, size.new, **options)
    tensors = [tensor for layer in answer.past_key_values.layers for tensor in layer_tensors(layer)]
    owned = sum(tensor.untyped_storage().nbytes() for tensor in tensors)
    return (torch.cuda.max_memory_allocated() - before if gpu else None), owned


def layer_tensors(layer: Any) -> list[Tensor]:
    """The large tensors of a cache layer, ours or Transformers'."""
    inner = getattr(layer, "cache", None)
    found = inner.tensors if inner is not None else [layer.keys, layer.values]
    return [tensor for tensor in found if isinstance(tensor, Tensor)]


def measure(
    models: dict[str, PreTrainedModel], size: Size, rounds: int, options: dict[str, Any], device: str, rate: float
) -> dict[str, dict[str, Any]]:
    """Medians of every arm, the arms taking turns."""
    torch.manual_seed(2)
    ids = torch.randint(size.vocab, (size.batch, size.prompt), device=device)
    times: dict[str, dict[int, list[float]]] = {arm: {1: [], size.new: []} for arm in models}
    memory: dict[str, tuple[int | None, int]] = {}
    for arm, model in models.items():
        if options != WAYS["dynamic"]:
            generated(model, ids, size.new, **options)  # compiles
        taken = seconds(lambda a=arm, m=model: memory.update({a: peak_above(m, ids, size, options, device)}), device)
        print(f"  {arm}: {taken:.1f} s", flush=True)
    for turn in range(rounds):
        for arm, model in models.items():
            for new in (1, size.new):
                times[arm][new].append(seconds(lambda m=model, n=new: generated(m, ids, n, **options), device))
        told = ", ".join(f"{times[arm][size.new][-1]:.2f}" for arm in models)
        print(f"  round {turn + 1} of {rounds}: {told} s", flush=True)
    rows = {}
    for arm, model in models.items():
        whole, first = (statistics.median(times[arm][new]) for new in (size.new, 1))
        step = (whole - first) / (size.new - 1)
        weights, dtype = weight_bytes(model), next(model.parameters()).dtype
        cache = promised_bytes(arm, model, size, size.cached, size.batch, dtype)
        mean_cache = promised_bytes(arm, model, size, size.prompt + size.new // 2, size.batch, dtype)
        floor = (weights + mean_cache) / rate
        peak, owned = memory[arm]
        rows[arm] = {
            "seconds": times[arm][size.new],
            "tokens_per_s": size.batch * size.new / whole,
            "first_token_s": first,
            "decode_ms_per_step": 1e3 * step,
            "decode_tokens_per_s": size.batch / step,
            "floor_ms_per_step": 1e3 * floor,
            "share_of_floor": floor / step,
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "weight_bytes": weights,
            "cache_bytes": cache,
            "cache_bytes_owned": owned,
            "peak_bytes": None if peak is None else weights + peak,
        }
    return rows


def shown(rows: dict[str, dict[str, Any]]) -> None:
    def gigabytes(value: int | None) -> str:
        return "–" if value is None else f"{value / 1e9:.3f}"

    print(
        f"\n{'':<32}{'tokens/s':>10}{'first s':>9}{'ms/step':>9}{'floor':>8}{'cache GB':>10}{'owned':>9}{'peak GB':>9}"
    )
    for arm, row in rows.items():
        print(
            f"{arm:<32}{row['tokens_per_s']:>10,.0f}{row['first_token_s']:>9.3f}{row['decode_ms_per_step']:>9.2f}"
            f"{row['floor_ms_per_step']:>8.2f}{gigabytes(row['cache_bytes']):>10}{gigabytes(row['cache_bytes_owned']):>9}"
            f"{gigabytes(row['peak_bytes']):>9}"
        )


def ratios(rows: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Every arm against the one it changes: throughput, decoding, cache and peak."""
    told = {}
    print(f"\n{'against its baseline':<32}{'tokens/s':>10}{'decode':>9}{'cache':>9}{'peak':>9}")
    for arm, row in rows.items():
        base = LLAMA if arm == CONVERTED else PLAIN
        if arm in (base, LLAMA):
            continue
        pairs = {"tokens_per_s": "tokens_per_s", "decode": "decode_tokens_per_s", "cache": "cache_bytes"}
        told[arm] = {name: row[key] / rows[base][key] for name, key in pairs.items()}
        if row["peak_bytes"] is not None:
            told[arm]["peak"] = row["peak_bytes"] / rows[base]["peak_bytes"]
        print(f"{arm:<32}" + "".join(f"{told[arm].get(name, float('nan')):>9.3f}" for name in (*pairs, "peak")))
    return told


def show_bounds(results: dict[str, dict[str, dict[str, Any]]]) -> None:
    """Tokens a second against what they are to be at least, as far as this run has both: the growing cache, or what
    `generate` takes by itself, against the static one, and ours against Llama."""
    pairs = []
    for way in ("dynamic", UNASKED):
        if way in results and "static" in results:
            static = {arm: row for arm, row in results["static"].items() if arm not in (LLAMA, CONVERTED)}
            pairs += [(f"{arm}: {way} / static", results[way][arm], row, GROWING_BOUND) for arm, row in static.items()]
    for cache, rows in results.items():
        if LLAMA in rows:
            pairs.append((f"{PLAIN} / {LLAMA}, {cache}", rows[PLAIN], rows[LLAMA], LLAMA_BOUND))
    for name, row, base, least in pairs:
        ratio = row["tokens_per_s"] / base["tokens_per_s"]
        print(f"{name:<48}{ratio:>8.3f}  {'≥' if ratio >= least else 'below'} {least}")


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--tiny", action="store_true", help="a small problem in float32")
    parser.add_argument("--cache", default="dynamic", choices=[*WAYS, "both"], help="static is compiled on a GPU")
    parser.add_argument("--without-llama", action="store_true", help="leave Llama and its conversion out")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--prompt", type=int)
    parser.add_argument("--new", type=int)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--commit", help="the commit measured, where git cannot be asked")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the result file")
    options = parser.parse_args()
    device = options.device
    base = TINY if options.tiny else FULL
    changed = {name: getattr(options, name) for name in ("batch", "prompt", "new") if getattr(options, name)}
    size = Size(**(vars(base) | changed))
    dtype = torch.float32 if options.tiny else torch.bfloat16
    torch._dynamo.config.recompile_limit = 64
    models = build(size, device, not options.without_llama)
    ways = WAYS | {UNASKED: {}} if options.cache == "both" else {options.cache: WAYS[options.cache]}
    for way in ways.values():
        gate(models, size, way, device)
    for model in models.values():
        for parameter in model.parameters():  # buffers, such as RoPE's frequencies, stay in float32
            parameter.data = parameter.data.to(dtype)
    rate = copy_rate(device)
    told = provenance(device, options.commit)
    print(
        f"{told['device']}: {rate / 1e9:.0f} GB/s copied; {size.layers} × {size.width}, {size.batch} rows, "
        f"{size.prompt} tokens of prompt, {size.new} new, {dtype}, {options.cache} cache, {options.rounds} rounds",
        flush=True,
    )
    results = {cache: measure(models, size, options.rounds, way, device, rate) for cache, way in ways.items()}
    for cache, rows in results.items():
        print(f"\n{cache} cache", end="")
        shown(rows)
        result = {
            "provenance": told | {"transformers": metadata.version("transformers")},
            "set_up": vars(size) | {"dtype": str(dtype), "cache": cache, "rounds": options.rounds},
            "ceilings": {"copy_bytes_per_s": rate},
            "arms": rows,
            "ratios": ratios(rows),
        }
        if not options.tiny:
            keep(f"generate-{cache}-{device}", result, options.out)
    show_bounds(results)
    if options.tiny:
        print("\nA tiny problem says nothing about real ones, so it is not kept.")


if __name__ == "__main__":
    main()
