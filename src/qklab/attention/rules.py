"""Which choices of an AttentionSpec go together, why others do not, and the nearest that do."""

from typing import Any

from qklab import register
from qklab.attention.coupling_spec import CouplingSpec
from qklab.attention.project import PROJECTIONS
from qklab.schema import Rule, require_value


def nearest_divisor(of: int, to: int, even: bool = False) -> int:
    """The divisor of `of` closest to `to` (the smaller of two), among the even ones if asked."""
    divisors = {d for small in range(1, int(of**0.5) + 1) if of % small == 0 for d in (small, of // small)}
    return min((d for d in divisors if not even or d % 2 == 0), key=lambda d: (abs(d - to), d))


def repair_rope(s: Any) -> dict[str, Any]:
    if s.rope_fraction == 1.0 or s.head_width < 2:
        return {"head_width": s.head_width + 1, "rope_fraction": 1.0}
    rotated = min(max(2, 2 * round(s.head_width * s.rope_fraction / 2)), s.head_width - s.head_width % 2)
    return {"rope_fraction": rotated / s.head_width}


def is_rope_uneven(s: Any) -> bool:
    if s.position != "rope" or s.latent is not None:
        return False
    rotated = s.head_width * s.rope_fraction
    return abs(rotated - round(rotated)) > 1e-6 or round(rotated) % 2 != 0 or round(rotated) == 0


def repair_key_shift(s: Any) -> dict[str, Any]:
    if s.position != "rope" or s.head_width < 4:
        return {"key_shift": False}
    return {"rope_fraction": s.head_width // 4 * 2 / s.head_width}


def has_latent(s: Any) -> bool:
    return s.latent is not None


def has_no_rope(s: Any) -> bool:
    return s.position != "rope"


def couples_heads(coupling: CouplingSpec) -> bool:
    """Whether a coupling's options are about heads, or about a force that only heads have."""
    return "per-head" in (coupling.force_sharing, coupling.step_sharing) or coupling.force != "mlp"


RULES = (
    Rule(
        "head_width",
        lambda s: s.head_width is None,
        lambda s: f"width={s.width} is not a multiple of heads={s.heads}, so the head width must be given",
        lambda s: {"head_width": max(2, s.width // s.heads // 2 * 2)},
    ),
    require_value("share", "none", has_latent, "a latent already stands for both key and value"),
    Rule(
        "kv_heads",
        lambda s: s.latent is not None and s.kv_heads != s.heads,
        lambda s: "a latent is already shared by all heads, so there are no key/value groups",
        lambda s: {"kv_heads": s.heads},
    ),
    Rule(
        "coupling",
        lambda s: s.latent is not None and s.coupling is not None and s.coupler is None,
        lambda s: f"{s.coupling.kind} moves the queries and keys of heads, and latents have none",
        lambda s: {"coupling": CouplingSpec(kind="affine", steps=s.coupling.steps)},
    ),
    Rule(
        "coupling",
        lambda s: s.latent is not None and s.coupling is not None and couples_heads(s.coupling),
        lambda s: "over latents, which have no heads, there is one network of each, and no gradient force",
        lambda s: {"coupling": s.coupling.replace(force="mlp", force_sharing="per-layer", step_sharing="per-layer")},
    ),
    require_value(
        "norm", "none", has_latent, "keys are never formed while decoding from a latent, so they cannot be normalised"
    ),
    require_value("short_conv", None, has_latent, "keys and values are never formed while decoding from a latent"),
    require_value("key_shift", False, has_latent, "keys are never formed while decoding from a latent"),
    require_value("mix", "softmax", has_latent, "differential attention over a latent is not defined"),
    require_value("value_norm", False, has_latent, "values are never formed while decoding from a latent"),
    require_value("rope_fraction", 1.0, has_latent, "the rotated part of a latent head is its rope_width"),
    require_value(
        "position",
        "none",
        lambda s: s.latent is not None and s.position == "rope" and not s.latent.rope_width,
        "the latent has rope_width=0, so there is nothing to rotate",
    ),
    Rule(
        "latent",
        lambda s: s.latent is not None and s.position != "rope" and s.latent.rope_width,
        lambda s: f"rope_width={s.latent.rope_width} would stay unrotated with position={s.position!r}",
        lambda s: {"latent": s.latent.replace(rope_width=0)},
    ),
    Rule(
        "kv_heads",
        lambda s: s.heads % s.kv_heads,
        lambda s: f"the key/value heads must divide heads={s.heads}",
        lambda s: {"kv_heads": nearest_divisor(s.heads, s.kv_heads)},
    ),
    Rule(
        "kv_heads",
        lambda s: not PROJECTIONS[s.share].own_query and s.kv_heads != s.heads,
        lambda s: f"share={s.share!r} makes every query head a key head, so there are heads={s.heads} of them",
        lambda s: {"kv_heads": s.heads},
    ),
    require_value(
        "mix",
        "softmax",
        lambda s: register.mix[s.mix].query_factor > 1 and not PROJECTIONS[s.share].own_query,
        lambda s: f"share={s.share!r} makes the queries the keys, and {s.mix} needs more queries than keys",
    ),
    Rule(
        "heads",
        lambda s: register.mix[s.mix].pairs_heads and s.heads % 2,
        lambda s: f"{s.mix} attention takes heads in pairs, so their number must be even",
        lambda s: {"heads": s.heads + 1, "kv_heads": s.heads + 1 if s.kv_heads == s.heads else s.kv_heads},
    ),
    Rule(
        "kv_heads",
        lambda s: register.mix[s.mix].pairs_heads and s.kv_heads % 2,
        lambda s: f"{s.mix} attention pairs key heads, so their number must be even",
        lambda s: {"kv_heads": nearest_divisor(s.heads, s.kv_heads, even=True)},
    ),
    Rule(
        "head_width",
        lambda s: s.rope_fraction == 1.0 and is_rope_uneven(s),
        lambda s: "RoPE turns pairs of entries, so the head width must be even",
        repair_rope,
    ),
    Rule(
        "rope_fraction",
        is_rope_uneven,
        lambda s: f"RoPE turns pairs of entries, so it must cover an even number of the {s.head_width}",
        repair_rope,
    ),
    require_value("rope_fraction", 1.0, has_no_rope, lambda s: f"position={s.position!r} rotates nothing"),
    require_value("rope_base", 10_000.0, has_no_rope, lambda s: f"position={s.position!r} rotates nothing"),
    require_value(
        "norm",
        "none",
        lambda s: s.coupling is not None and s.coupling.mechanism.normalises,
        lambda s: f"{s.coupling.kind} already brings queries and keys to one length",
    ),
    Rule(
        "key_shift",
        lambda s: s.key_shift and s.rotated_width in (0, s.head_width),
        lambda s: "it moves the entries that RoPE leaves, which must be some and not all",
        repair_key_shift,
    ),
    require_value(
        "value_norm",
        False,
        lambda s: s.makes_both_on_reading and s.key_shift,
        "keys are then made on reading, and key_shift moves those that are stored",
    ),
    require_value(
        "kv_rotation",
        "once",
        lambda s: not s.shares_rotated_key,
        "it is a choice only where key and value are one tensor under RoPE, with no norm between them",
    ),
    require_value(
        "asymmetry_2d",
        False,
        lambda s: PROJECTIONS[s.share].own_query or s.causal or s.latent is not None,
        "it breaks the symmetry that only share='q=k' or 'q=k=v' with causal=False has",
    ),
    require_value(
        "asymmetry_free_scale", False, lambda s: not s.asymmetry_2d, "it is a choice within asymmetry_2d=True"
    ),
    require_value(
        "differential_gain",
        True,
        lambda s: not register.mix[s.mix].has_gain,
        "it is the gain of the norm in mix='differential'",
    ),
    require_value("sinks", False, lambda s: not s.mixing.takes_sinks, lambda s: f"mix={s.mix!r} does not take sinks"),
    require_value(
        "sinks",
        False,
        lambda s: s.asymmetry_2d,
        "asymmetry_2d leaves out what is the same along a row, which a sink would be compared with",
    ),
)
