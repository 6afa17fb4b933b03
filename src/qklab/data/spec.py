"""What a corpus is made of: its source, its tokenizer, how it is split."""

import codecs
from dataclasses import dataclass
from typing import Any

from qklab.schema import Spec, boolean_field, checked_field, integer_field, number_field, suggest_name, text_field

TOKENIZERS = ("bytes", "bpe", "gpt2")


class DataError(ValueError):
    """A corpus that cannot be prepared, opened or read, told in one sentence."""


def check_tokenizer_name(value: Any) -> str:
    if isinstance(value, str) and (value in TOKENIZERS or (value.startswith("gpt2:") and len(value) > 5)):
        return value
    raise ValueError(f"must be 'bytes', 'bpe', 'gpt2' or 'gpt2:FOLDER'{suggest_name(value, TOKENIZERS)}")


def check_source_name(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError("must be a text that is not empty")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError(
            "must be UTF-8, since it is written down; rename the file, or name the folder it is in"
        ) from None
    return value


def check_encoding(value: Any) -> str:
    try:
        return codecs.lookup(value).name
    except (LookupError, TypeError, ValueError):
        raise ValueError("must be a name that Python knows, such as utf-8, latin-1 or cp1252") from None


@dataclass(frozen=True, kw_only=True)
class DataSpec(Spec):
    """A corpus: text from `source` as tokens of `tokenizer`, in the splits train, valid and test.

    Splits that the source has no files for are cut off its training documents: the fraction `valid` of them, and
    the fraction `test`, chosen by a hash of each document's text. `limit_bytes` ends the training split there.

    `column` is the field or column that holds the text in files that have several, `encoding` that of files of text;
    `skip_bad` leaves out files that cannot be read, and names them.
    """

    source: str = checked_field(check_source_name, "stdlib")
    tokenizer: str = checked_field(check_tokenizer_name, "bpe")
    vocab: int = integer_field(4096, at_least=257, at_most=2**24)
    valid: float = number_field(0.04, at_least=0, at_most=0.5)
    test: float = number_field(0.02, at_least=0, at_most=0.5)
    limit_bytes: int | None = integer_field(None, at_most=2**50)
    column: str = text_field("text")
    encoding: str = checked_field(check_encoding, "utf-8")
    skip_bad: bool = boolean_field(False)
