"""Corpora: text to tokens, shards with hashed manifests, and what is in them."""

from qklab.data.prepare import prepare_corpus
from qklab.data.shards import Corpus, Split
from qklab.data.sources import Document, Source
from qklab.data.spec import DataError, DataSpec
from qklab.data.tokenizer import Tokenizer

__all__ = ["Corpus", "DataError", "DataSpec", "Document", "Source", "Split", "Tokenizer", "prepare_corpus"]
