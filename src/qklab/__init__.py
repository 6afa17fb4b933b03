"""qklab: what happens between queries and keys in attention.

from qklab import Attention, AttentionSpec
layer = Attention(AttentionSpec(width=512, heads=8, share="k=v"))
"""

from typing import TYPE_CHECKING, Any

from qklab import register
from qklab.schema import SpecError

if TYPE_CHECKING:
    from qklab.attention import Attention, AttentionSpec, Cache, CouplingSpec, LatentSpec
    from qklab.model import Decoder, DecoderCache, DecoderSpec, recipe, stack, unstack

__version__ = "0.2.0"

__all__ = [
    "Attention",
    "AttentionSpec",
    "Cache",
    "CouplingSpec",
    "Decoder",
    "DecoderCache",
    "DecoderSpec",
    "LatentSpec",
    "SpecError",
    "recipe",
    "register",
    "stack",
    "unstack",
]


def __dir__() -> list[str]:
    return [*globals(), *__all__]


def __getattr__(name: str) -> Any:
    """What needs torch is imported when first asked for: `qklab --help` and reading a run do without it."""
    from importlib import import_module

    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    model = name.startswith("Decoder") or name in ("recipe", "stack", "unstack")
    home = "qklab.model" if model else "qklab.attention"
    return getattr(import_module(home), name)
