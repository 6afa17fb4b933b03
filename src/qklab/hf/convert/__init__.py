"""Convert a loaded Transformers model in place: coupling, shared keys and values, merged heads, QK-norm.

from qklab.hf import convert
print(convert(model, coupling="leapfrog", trainable="coupling"))
"""

from qklab.hf.convert.apply import convert, revert
from qklab.hf.convert.cache import cache_bytes
from qklab.hf.convert.record import Conversion, LayerReport, Report, conversion_of
from qklab.hf.convert.store import load, load_adapter, register, save_adapter

register()

__all__ = [
    "Conversion",
    "LayerReport",
    "Report",
    "cache_bytes",
    "conversion_of",
    "convert",
    "load",
    "load_adapter",
    "revert",
    "save_adapter",
]
