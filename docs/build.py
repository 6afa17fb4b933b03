"""Redraws the drawings and rewrites the cost tables of docs/, so that neither can go stale.

python docs/build.py            writes what has changed
python docs/build.py --check    changes nothing, names what is stale and exits 1
"""

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from drawings import CHARTS, DRAWINGS

from qklab import AttentionSpec, CouplingSpec, LatentSpec, recipe, register
from qklab.describe import CONTEXT, LONG, format_change

DOCS = Path(__file__).parent
BLOCK = re.compile(r"(?<=<!-- costs: begin -->\n).*?(?=<!-- costs: end -->)", re.DOTALL)

RESULT = DOCS.parent / "benchmarks/results/layer-51m-h200.json"

Choices = dict[str, Any]

# page → arms of the result file
MEASURED = {
    "separate": ["(Q,K,V) gqa"],
    "shared-key-value": ["(Q,K=V)", "(Q,K=V) on-read"],
    "shared-all": ["(Q=K=V)"],
    "latent": ["MLA"],
    "coupling": ["euler×1", "leapfrog×1", "leapfrog×7", "affine×1"],
    "euler": ["euler×1"],
    "leapfrog": ["leapfrog×1", "leapfrog×7"],
    "affine": ["affine×1"],
    "qk-norm": ["qk-norm"],
    "rope": ["(Q,K=V)", "(Q,K=V) on-read"],
    "differential": ["differential"],
    "differential-v2": ["differential-v2"],
}


def couple(kind: str, **options: Any) -> Choices:
    return {"coupling": CouplingSpec.from_dict({"kind": kind} | options)}


MLA: Choices = {"latent": LatentSpec(query_rank=256, kv_rank=128, rope_width=32)}

# page → what its table compares with (Q,K,V) at width 512 and 8 heads
COSTS: dict[str, list[Choices]] = {
    "separate": [{"kv_heads": 4}, {"kv_heads": 2}, {"kv_heads": 1}],
    "shared-key-value": [{"share": "k=v"}, {"share": "k=v", "kv_heads": 2}, {"share": "k=v", "kv_heads": 1}],
    "shared-query-key": [{"share": "q=k"}],
    "shared-all": [{"share": "q=k=v"}],
    "latent": [
        MLA,
        {"latent": LatentSpec(query_rank=256, kv_rank=64, rope_width=32)},
        MLA | couple("affine"),
        MLA | couple("uncoupled"),
    ],
    "short-convolution": [{"short_conv": 4}, {"short_conv": 4, "share": "k=v"}],
    "key-shift": [{"key_shift": True, "rope_fraction": 0.5}],
    "cca": [couple("cca"), couple("cca") | {"kv_heads": 2}],
    "coupling": [
        *(couple(kind) for kind in register.coupling),
        couple("leapfrog", steps=7),
        couple("leapfrog", force="gradient"),
        couple("leapfrog", force_sharing="per-head"),
        couple("leapfrog") | {"kv_heads": 2},
    ],
    "euler": [couple("euler"), couple("euler", steps=7)],
    "symplectic-euler": [couple("symplectic-euler"), couple("symplectic-euler", force="gradient")],
    "leapfrog": [couple("leapfrog"), couple("leapfrog", steps=7), couple("leapfrog", force="gradient")],
    "affine": [couple("affine"), couple("affine", force_sharing="per-head"), couple("affine", force_width=21)],
    "uncoupled": [couple("uncoupled"), couple("euler")],
    "linear": [couple("linear"), couple("linear", force_sharing="per-head")],
    "qk-norm": [{"norm": "qk"}, {"share": "k=v"}, {"norm": "qk", "share": "k=v"}],
    "rope": [{"rope_fraction": 0.25}, {"share": "k=v"}, {"share": "k=v", "kv_rotation": "on-read"}],
    "learned-positions": [{"position": "learned"}],
    "asymmetry-2d": [
        {"share": "q=k", "causal": False},
        {"share": "q=k", "causal": False, "asymmetry_2d": True},
        {"share": "q=k=v", "causal": False, "asymmetry_2d": True, "asymmetry_free_scale": True},
    ],
    "softmax": [],
    "differential": [{"mix": "differential"}, {"mix": "differential", "share": "k=v"}],
    "differential-v2": [{"mix": "differential-v2"}, {"mix": "differential-v2", "kv_heads": 2}],
    "window": [{"window": 512}, {"window": 128}],
    "sinks": [{"sinks": True}],
    "exclusive": [{"exclusive": True}],
    "gate": [{"gate": "element"}, {"gate": "head"}],
    "value-norm": [{"value_norm": True}, {"norm": "qk", "share": "k=v", "value_norm": True}],
}

# the rows of the cache page, at width 1024 and 16 heads
CACHED: list[Choices] = [
    {},
    couple("leapfrog"),
    {"mix": "differential"},
    {"share": "q=k"},
    {"share": "k=v"},
    {"share": "q=k=v"},
    {"kv_heads": 4},
    {"share": "k=v", "kv_heads": 4},
    {"kv_heads": 1},
    {"share": "k=v", "kv_heads": 1},
    {"latent": LatentSpec(query_rank=512, kv_rank=256, rope_width=64)},
    couple("cca"),
    {"short_conv": 4},
    {"key_shift": True, "rope_fraction": 0.5},
    {"window": 512},
]


def format_table(rows: list[list[str]]) -> str:
    """Markdown, the first column to the left and the others to the right."""
    rule = ["---", *["---:"] * (len(rows[0]) - 1)]
    return "".join(f"| {' | '.join(row)} |\n" for row in [rows[0], rule, *rows[1:]])


def compare_count(now: int, before: int) -> str:
    return f"{now:,}" if now == before else f"{now:,} ({format_change(now, before)})"


def describe_measured(page: str) -> str:
    """Step times kept under benchmarks/results, for the arms that belong to the page."""
    kept: dict[str, Any] = json.loads(RESULT.read_text(encoding="utf-8"))
    training, decoding = kept["training"]["times"], kept["decoding"]["times"]
    arms = [
        f"{arm}: training step × {training[arm]['ratio']:.2f}, decoding × {decoding[arm]['ratio']:.2f}"
        for arm in MEASURED.get(page, [])
    ]
    if not arms:
        return ""
    return "\nMeasured against (Q,K,V), 51M on one H200 ([findings](../findings.md)): " + "; ".join(arms) + ".\n"


def cost_table(page: str, choices: list[Choices]) -> str:
    """What one layer costs next to (Q,K,V), and what that makes of the whole 60M model."""
    plain, model = AttentionSpec(width=512, heads=8), recipe("60m").parameters()
    rows = [["width 512, 8 heads", "parameters", f"FLOPs per token at {CONTEXT:,} tokens", "cache bytes per token",
             "parameters of the 60M model"]]  # fmt: skip
    cached = plain.cache_bytes_per_token()
    for choice in [{}, *choices]:
        spec, whole = plain.replace(**choice), recipe("60m", **choice).parameters()
        rows.append([
            spec.name,
            compare_count(spec.parameters(), plain.parameters()),
            compare_count(spec.flops_per_token(CONTEXT), plain.flops_per_token(CONTEXT)),
            compare_count(spec.cache_bytes_per_token(), cached) if spec.causal else "never cached",
            f"{whole:,}" if whole == model else f"{100 * (whole - model) / model:+.3g} %".replace("-", "−"),
        ])  # fmt: skip
    note = "\nOne layer; FLOPs are the forward matrix products; cache in bf16.\n"
    return format_table(rows) + note + describe_measured(page)


def cache_table() -> str:
    """Bytes of one layer's cache, exactly."""
    plain = AttentionSpec(width=1024, heads=16)
    rows = [["width 1024, 16 heads, bf16", "bytes per token", f"{LONG:,} tokens", "against (Q,K,V)"]]
    for choice in CACHED:
        spec = AttentionSpec(width=1024, heads=16, **choice)
        saved = 1 - spec.cache_bytes_per_token() / plain.cache_bytes_per_token()
        size = f"{spec.cache_bytes(LONG) / 2**20:.5g} MiB"
        rows.append([spec.name, f"{spec.cache_bytes_per_token():,}", size, f"−{100 * saved:g} %" if saved else "±0 %"])
    return format_table(rows) + "\nOne layer, one sequence.\n"


def fill_page(name: str, costs: str) -> str:
    """The page as it should be: what is there, with the costs between its markers."""
    text = (DOCS / f"mechanisms/{name}.md").read_text(encoding="utf-8")
    if len(BLOCK.findall(text)) != 1:
        sys.exit(f"docs/mechanisms/{name}.md needs one pair of lines <!-- costs: begin --> and <!-- costs: end -->.")
    return BLOCK.sub(lambda _: costs, text)


def expected_files() -> Iterator[tuple[Path, str]]:
    """Everything but charts, which are told stale by what they were made from."""
    for name, draw in DRAWINGS.items():
        yield DOCS / name, draw().svg()
    for name, choices in COSTS.items():
        yield DOCS / f"mechanisms/{name}.md", fill_page(name, cost_table(name, choices))
    yield DOCS / "mechanisms/cache.md", fill_page("cache", cache_table())


def read_or_empty(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""


def main() -> None:
    parser = argparse.ArgumentParser(description="Redraw the drawings and cost tables of docs/.")
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 and name what is stale")
    check = parser.parse_args().check
    stale: dict[Path, Callable[[], str]] = {
        path: lambda text=text: text for path, text in expected_files() if read_or_empty(path) != text
    }
    stale |= {DOCS / name: chart.svg for name, chart in CHARTS.items() if chart.stamp not in read_or_empty(DOCS / name)}
    known = {DOCS / name for name in (*DRAWINGS, *CHARTS)}
    orphans = sorted({*DOCS.glob("*.svg"), *DOCS.glob("mechanisms/*.svg")} - known)
    for path, make in stale.items():
        print(f"{'stale' if check else 'written'}: {path.relative_to(DOCS.parent)}")
        if not check:
            path.write_text(make(), encoding="utf-8")
    for path in orphans:
        print(f"drawn by nothing, delete it: {path.relative_to(DOCS.parent)}")
    sys.exit(1 if orphans or (check and stale) else 0)


if __name__ == "__main__":
    main()
