"""Convert a loaded Transformers model in place: coupling, shared keys and values, merged heads, QK-norm.

from qklab.hf import convert
print(convert(model, coupling="leapfrog", trainable="coupling"))
"""

from qklab.hf.convert.adapter import load_adapter, save_adapter
from qklab.hf.convert.apply import convert, revert
from qklab.hf.convert.cache import count_converted_bytes
from qklab.hf.convert.record import Conversion, ConversionReport, LayerReport, find_conversion
from qklab.hf.convert.store import load_converted, register_converted_classes

register_converted_classes()

__all__ = [
    "Conversion",
    "ConversionReport",
    "LayerReport",
    "convert",
    "count_converted_bytes",
    "find_conversion",
    "load_adapter",
    "load_converted",
    "revert",
    "save_adapter",
]
