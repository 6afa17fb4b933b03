"""A family of Transformers models that qklab does not know: converted, and under logit control, like its own."""

from qklab import register
from qklab.hf.layout import SeparateProjections


@register.family("cwm")  # the `model_type` of its configuration
class Cwm(SeparateProjections):
    title = "CWM"
    attention = "transformers.models.cwm.modeling_cwm.CwmAttention"
