"""A decoder language model, its sizes, its initialisation, and generation."""

from qklab.model.decoder import Decoder, DecoderCache
from qklab.model.recipes import RECIPES, recipe
from qklab.model.spec import DecoderSpec

__all__ = ["RECIPES", "Decoder", "DecoderCache", "DecoderSpec", "recipe"]
