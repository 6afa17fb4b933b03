"""An attention spec, or a model of several, in words and numbers, next to (Q,K,V) of the same size."""

from typing import Any

import torch

from qklab.attention.spec import AttentionSpec
from qklab.model.spec import DecoderSpec

CONTEXT = 1024
LONG = 32_768


def make_baseline(spec: AttentionSpec) -> AttentionSpec:
    """(Q,K,V) with a key/value head for every query head, everything else at its default."""
    return AttentionSpec(
        width=spec.width, heads=spec.heads, head_width=spec.head_width, bias=spec.bias, position="none"
    )


def count_costs(spec: AttentionSpec | DecoderSpec) -> dict[str, int]:
    """What it costs, in the order people ask."""
    return {
        "parameters": spec.parameters(),
        f"FLOPs per token at {CONTEXT:,} tokens": spec.flops_per_token(CONTEXT),
        "cache bytes per token (bf16)": spec.cache_bytes_per_token(torch.bfloat16),
        f"cache bytes at {LONG:,} tokens (bf16)": spec.cache_bytes(LONG, torch.bfloat16),
    }


def name_costs(spec: AttentionSpec | DecoderSpec) -> dict[str, int]:
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
    lines = [spec.name, "", *format_formula(spec), ""]
    lines += format_costs("one layer", spec, make_baseline(spec), f"with {spec.heads} key/value heads")
    if spec.position == "learned":
        lines.append(
            "  (learned positions live in the decoder, context × width parameters once per model, not per layer)"
        )
    if not spec.causal:
        lines.append("  (a bidirectional layer is never cached; the cache figures are those of its causal twin)")
    return "\n".join(lines)


def format_decoder(spec: DecoderSpec) -> str:
    """Name, formula per stage of each kind of layer, and the figures of the model against the same one with (Q,K,V)."""
    lines = [spec.name]
    for kind in dict.fromkeys(spec.pattern):
        layers = [str(layer) for layer, attention in enumerate(spec.attentions) if attention == kind]
        lines += ["", f"{kind.name}: layers {', '.join(layers)}", *format_formula(kind)]
    plain = spec.replace(attention=[make_baseline(attention) for attention in spec.pattern])
    return "\n".join([*lines, "", *format_costs("the model", spec, plain, "in every layer")])


def format_formula(spec: AttentionSpec) -> list[str]:
    return [f"  {stage:<10} {text}" for stage, text in spec.formula.items() if text]


def format_costs(what: str, spec: Any, plain: Any, remark: str) -> list[str]:
    lines = [f"  {what:<38} {'this':>14} {'(Q,K,V)':>14}  {remark}"]
    for (name, now), before in zip(count_costs(spec).items(), count_costs(plain).values(), strict=True):
        lines.append(f"  {name:<38} {now:>14,} {before:>14,}  {format_change(now, before)}")
    return lines
