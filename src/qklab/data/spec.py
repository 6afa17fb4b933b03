"""What a corpus is made of: its source, its tokenizer, how it is split."""

from dataclasses import dataclass
from typing import Any

from qklab.schema import Spec, checked_field, integer_field, number_field, suggest_name, text_field

TOKENIZERS = ("bytes", "bpe", "gpt2")


class DataError(ValueError):
    """A corpus that cannot be prepared, opened or read, told in one sentence."""


def check_tokenizer_name(value: Any) -> str:
    if isinstance(value, str) and (value in TOKENIZERS or (value.startswith("gpt2:") and len(value) > 5)):
        return value
    raise ValueError(f"must be 'bytes', 'bpe', 'gpt2' or 'gpt2:FOLDER'{suggest_name(value, TOKENIZERS)}")


@dataclass(frozen=True, kw_only=True)
class DataSpec(Spec):
    """A corpus: text from `source` as tokens of `tokenizer`, in the splits train, valid and test.

    Splits that the source has no files for are cut off its training documents: the fraction `valid` of them, and
    the fraction `test`, chosen by a hash of each document's text. `limit_bytes` ends the training split there.
    """

    source: str = text_field("stdlib")
    tokenizer: str = checked_field(check_tokenizer_name, "bpe")
    vocab: int = integer_field(4096, at_least=257, at_most=2**24)
    valid: float = number_field(0.04, at_least=0, at_most=0.5)
    test: float = number_field(0.02, at_least=0, at_most=0.5)
    limit_bytes: int | None = integer_field(None, at_most=2**50)
