"""A decoder language model, its sizes, its initialisation, and generation."""

from qklab.model.decoder import Decoder, DecoderCache
from qklab.model.diagnose import Diagnosis, diagnose
from qklab.model.recipes import RECIPES, recipe
from qklab.model.spec import DecoderSpec
from qklab.model.stack import stack, unstack

__all__ = ["RECIPES", "Decoder", "DecoderCache", "DecoderSpec", "Diagnosis", "diagnose", "recipe", "stack", "unstack"]
