"""A family of Transformers models that qklab does not know: converted, and under logit control, like its own."""

from qklab import register
from qklab.hf.layout import SeparateProjections


@register.family("arcee")  # the `model_type` of its configuration
class Arcee(SeparateProjections):
    title = "Arcee"
    attention = "transformers.models.arcee.modeling_arcee.ArceeAttention"
