"""What a corpus is made of: its source, its tokenizer, how it is split."""

import math
from dataclasses import dataclass
from typing import Any

from qklab.schema import Spec, checked_field, integer_field, suggest_name

TOKENIZERS = ("bytes", "bpe", "gpt2")


class DataError(ValueError):
    """A corpus that cannot be prepared, opened or read, told in one sentence."""


def source_name(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError("must be a file, a folder, 'stdlib', 'hf:NAME/CONFIG' or the name of a corpus")
    return value


def tokenizer_name(value: Any) -> str:
    if isinstance(value, str) and (value in TOKENIZERS or (value.startswith("gpt2:") and len(value) > 5)):
        return value
    raise ValueError(f"must be 'bytes', 'bpe', 'gpt2' or 'gpt2:FOLDER'{suggest_name(value, TOKENIZERS)}")


def fraction(default: float, *, at_most: float = 0.5) -> Any:
    """A share of the documents, from 0 to `at_most`."""

    def check(value: Any) -> float:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not math.isfinite(value) or not 0 <= value <= at_most:
            raise ValueError(f"must be a number from 0 to {at_most:g}")
        return float(value)

    return checked_field(check, default)


@dataclass(frozen=True, kw_only=True)
class DataSpec(Spec):
    """A corpus: text from `source` as tokens of `tokenizer`, in the splits train, valid and test.

    Splits that the source has no files for are cut off its training documents: the fraction `valid` of them, and
    the fraction `test`, chosen by a hash of each document's text. `limit_bytes` ends the training split there.
    """

    source: str = checked_field(source_name, "stdlib")
    tokenizer: str = checked_field(tokenizer_name, "bpe")
    vocab: int = integer_field(4096, at_least=257, at_most=2**24)
    valid: float = fraction(0.04)
    test: float = fraction(0.02)
    limit_bytes: int | None = integer_field(None, at_most=2**50)
