"""qklab and Transformers: our models under their tools, and our mechanisms in their models.

import qklab.hf
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained("exported")
"""

try:
    import transformers

    if tuple(int(part) for part in transformers.__version__.split(".")[:2]) < (5, 17):
        raise ImportError(f"{transformers.__version__} is installed")
except ImportError as error:
    raise ImportError(
        f"qklab.hf needs Transformers 5.17 or newer ({error}); install it with: pip install -U 'qklab[hf]'"
    ) from error

from qklab.hf.cache import QKLabCache, count_cache_bytes
from qklab.hf.config import QKLabConfig
from qklab.hf.convert import convert, load_adapter, load_converted, revert, save_adapter
from qklab.hf.export import to_transformers
from qklab.hf.heads import QKLabForCausalLM, QKLabForMaskedLM, QKLabForSequenceClassification
from qklab.hf.model import QKLabModel

transformers.AutoConfig.register(QKLabConfig.model_type, QKLabConfig, exist_ok=True)
transformers.AutoModel.register(QKLabConfig, QKLabModel, exist_ok=True)
transformers.AutoModelForCausalLM.register(QKLabConfig, QKLabForCausalLM, exist_ok=True)
transformers.AutoModelForMaskedLM.register(QKLabConfig, QKLabForMaskedLM, exist_ok=True)
transformers.AutoModelForSequenceClassification.register(QKLabConfig, QKLabForSequenceClassification, exist_ok=True)

__all__ = [
    "QKLabCache",
    "QKLabConfig",
    "QKLabForCausalLM",
    "QKLabForMaskedLM",
    "QKLabForSequenceClassification",
    "QKLabModel",
    "convert",
    "count_cache_bytes",
    "load_adapter",
    "load_converted",
    "revert",
    "save_adapter",
    "to_transformers",
]
