"""An attention spec in words and numbers, next to (Q,K,V) of the same size."""

from typing import Any

import torch

from qklab.attention.spec import AttentionSpec

CONTEXT = 1024
LONG = 32_768


def make_baseline(spec: AttentionSpec) -> AttentionSpec:
    """(Q,K,V) with a key/value head for every query head, everything else at its default."""
    return AttentionSpec(
        width=spec.width, heads=spec.heads, head_width=spec.head_width, bias=spec.bias, position="none"
    )


def count_costs(spec: AttentionSpec) -> dict[str, int]:
    """What it costs, in the order people ask."""
    return {
        "parameters": spec.parameters(),
        f"FLOPs per token at {CONTEXT:,} tokens": spec.flops_per_token(CONTEXT),
        "cache bytes per token (bf16)": spec.cache_bytes_per_token(torch.bfloat16),
        f"cache bytes at {LONG:,} tokens (bf16)": spec.cache_bytes(LONG, torch.bfloat16),
    }


def name_costs(spec: AttentionSpec) -> dict[str, int]:
    """The same figures under names a program can rely on."""
    names = ("parameters", "flops_per_token", "cache_bytes_per_token", "cache_bytes")
    named = dict(zip(names, count_costs(spec).values(), strict=True))
    return named | {"flops_context": CONTEXT, "cache_tokens": LONG}


def format_change(now: int, before: int) -> str:
    """ "−50 %": how a figure compares with the baseline's, to a tenth of a percent where that is not zero."""
    percent = round(100 * (now - before) / before, 1)
    if percent == 0 and now != before:
        return f"{100 * (now - before) / before:+.2g} %".replace("-", "−")
    return f"{percent:+.10g} %".replace("-", "−") if percent else "±0 %"


def describe_spec(spec: AttentionSpec) -> dict[str, Any]:
    """As JSON."""
    return {
        "name": spec.name,
        "formula": {stage: text for stage, text in spec.formula.items() if text},
        "layer": name_costs(spec),
        "baseline": name_costs(make_baseline(spec)),
        "spec": spec.to_dict(),
    }


def format_spec(spec: AttentionSpec) -> str:
    """Name, formula per stage, and the figures against (Q,K,V)."""
    lines = [spec.name, "", *(f"  {stage:<10} {text}" for stage, text in spec.formula.items() if text), ""]
    lines.append(f"  {'one layer':<38} {'this':>14} {'(Q,K,V)':>14}  with {spec.heads} key/value heads")
    for (name, now), before in zip(count_costs(spec).items(), count_costs(make_baseline(spec)).values(), strict=True):
        lines.append(f"  {name:<38} {now:>14,} {before:>14,}  {format_change(now, before)}")
    if spec.position == "learned":
        lines.append(
            "  (learned positions live in the decoder, context × width parameters once per model, not per layer)"
        )
    if not spec.causal:
        lines.append("  (a bidirectional layer is never cached; the cache figures are those of its causal twin)")
    return "\n".join(lines)
