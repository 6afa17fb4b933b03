"""The arms that a comparison knows by name."""

from collections.abc import Sequence
from typing import Any

from qklab import register
from qklab.attention.project import PROJECTIONS
from qklab.schema import suggest_name
from qklab.study.spec import StudyError

BASELINE = "standard"
DEFAULT = (BASELINE, "leapfrog", "affine", "k=v", "qk-norm")
LOCAL = 64  # tokens that every other layer of a hybrid sees: half of the smallest size's context


def list_arms() -> dict[str, dict[str, Any]]:
    """Every arm that has a name, with the settings it changes: each registered mechanism, and a few others."""
    attention = {
        **{kind: {"coupling": {"kind": kind}} for kind in register.coupling},
        **{share: {"share": share} for share in PROJECTIONS if share != "none"},
        "gqa": {"kv_heads": 2},
        "mqa": {"kv_heads": 1},
        **{f"{norm}-norm": {"norm": norm} for norm in register.norm if norm != "none"},
        **{mix: {"mix": mix} for mix in register.mix if mix != "softmax"},
        **{name: {"layers": name} for name in register.pattern},
        "gate": {"gate": "element"},
        "sinks": {"sinks": True},
        "xsa": {"exclusive": True},
        "hybrid": {"layers": [{"window": LOCAL}, {}]},
        "learned-positions": {"position": "learned"},
        "short-conv": {"short_conv": 4},
        "key-shift": {"key_shift": True, "rope_fraction": 0.5},
    }
    arms = {name: {"attention": choices} for name, choices in attention.items()}
    return {BASELINE: {}, **arms, "quack": {"logit_control": {"tau": 1.0}}}


def select_arms(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The named arms, the baseline first."""
    arms = list_arms()
    for name in names:
        if name not in arms:
            raise StudyError(f"there is no arm {name!r}{suggest_name(name, arms)}; there are {', '.join(arms)}.")
    repeated = next((name for name in names if list(names).count(name) > 1), None)
    if repeated is not None:
        raise StudyError(f"the arm {repeated} came twice; two arms that are the same cannot be compared.")
    if not set(names) - {BASELINE}:
        raise StudyError(f"a comparison needs an arm besides {BASELINE}; there are {', '.join(arms)}.")
    return {name: arms[name] for name in dict.fromkeys([BASELINE, *names])}
