"""An attention spec in words and numbers, next to the (Q,K,V) layer of the same size."""

from typing import Any

import torch

from qklab.attention.spec import AttentionSpec

CONTEXT = 1024
LONG = 32_768


def baseline(spec: AttentionSpec) -> AttentionSpec:
    """(Q,K,V) with a key/value head for every query head, everything else at its default."""
    return AttentionSpec(
        width=spec.width, heads=spec.heads, head_width=spec.head_width, bias=spec.bias, position="none"
    )


def figures(spec: AttentionSpec) -> dict[str, int]:
    """What one layer costs, in the order people ask."""
    return {
        "parameters": spec.parameters(),
        f"FLOPs per token at {CONTEXT:,} tokens": spec.flops_per_token(CONTEXT),
        "cache bytes per token (bf16)": spec.cache_bytes(1, torch.bfloat16),
        f"cache bytes at {LONG:,} tokens (bf16)": spec.cache_bytes(LONG, torch.bfloat16),
    }


def costs(spec: AttentionSpec) -> dict[str, int]:
    """The same figures under names a program can rely on."""
    names = ("parameters", "flops_per_token", "cache_bytes_per_token", "cache_bytes")
    told = dict(zip(names, figures(spec).values(), strict=True))
    return told | {"flops_context": CONTEXT, "cache_tokens": LONG}


def change(now: int, before: int) -> str:
    """ "−50 %": how a figure compares with the baseline's, to a tenth of a percent where that is not zero."""
    percent = round(100 * (now - before) / before, 1)
    if percent == 0 and now != before:
        return f"{100 * (now - before) / before:+.2g} %".replace("-", "−")
    return f"{percent:+.10g} %".replace("-", "−") if percent else "±0 %"


def as_dict(spec: AttentionSpec) -> dict[str, Any]:
    return {
        "name": spec.name,
        "formula": {stage: text for stage, text in spec.formula.items() if text},
        "layer": costs(spec),
        "baseline": costs(baseline(spec)),
        "spec": spec.to_dict(),
    }


def as_text(spec: AttentionSpec) -> str:
    """Name, formula per stage, and the figures against (Q,K,V)."""
    lines = [spec.name, ""]
    lines += [f"  {stage:<10} {text}" for stage, text in spec.formula.items() if text]
    lines += ["", f"  {'one layer':<38} {'this':>14} {'(Q,K,V)':>14}  with {spec.heads} key/value heads"]
    for (what, now), before in zip(figures(spec).items(), figures(baseline(spec)).values(), strict=True):
        lines.append(f"  {what:<38} {now:>14,} {before:>14,}  {change(now, before)}")
    if spec.position == "learned":
        lines.append(
            "  (learned positions live in the decoder, context × width parameters once per model, not per layer)"
        )
    if not spec.causal:
        lines.append("  (a bidirectional layer is never cached; the cache figures are those of its causal twin)")
    return "\n".join(lines)
