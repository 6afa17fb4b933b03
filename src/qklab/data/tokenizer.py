"""Tokenizers: bytes, a BPE trained on the corpus, or GPT-2's. All are byte-level: no text is unknown to them."""

import functools
import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

from qklab.data.encoder import encoder, token_dtype
from qklab.data.spec import DataError
from qklab.runs.files import write_bytes

FORMAT = 1
GPT2_FILES = ("encoder.json", "vocab.bpe")


def canonical(content: object) -> bytes:
    """The one way a JSON value is written where its hash counts."""
    return json.dumps(content, ensure_ascii=False, sort_keys=True, separators=(",", ":")).encode()


@functools.cache
def byte_of_character() -> dict[str, int]:
    """GPT-2's spelling of bytes, inverted: printable bytes are their own characters, others follow from 256 on."""
    kept = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    rest = [byte for byte in range(256) if byte not in kept]
    return {chr(byte): byte for byte in kept} | {chr(256 + i): byte for i, byte in enumerate(rest)}


class Tokenizer:
    """Text to token numbers and back. The last number, `eot`, marks the beginning of a document and stands for no text.

    `definition` is {"kind": "bytes"} or {"kind": "bpe", "tokens": […], "merges": [[left, right], …]}.
    """

    def __init__(self, definition: dict[str, Any]):
        self.definition = definition
        self.pieces = token_bytes(definition)
        self.vocab = len(self.pieces)
        self.eot = self.vocab - 1
        self.hash = hashlib.sha256(canonical({"format": FORMAT, **definition})).hexdigest()
        self.byte_lengths = np.array([len(piece) for piece in self.pieces], np.int64)
        self.dtype = token_dtype(self.vocab)

    @functools.cached_property
    def encode_batch(self) -> Any:
        return encoder(self.definition)

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The tokens of each text, without end-of-text; `"<|endoftext|>"` in a text is text."""
        if isinstance(texts, str):
            raise DataError("encode takes a list of texts, but one text came; write encode([text]).")
        return self.encode_batch(texts)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of tokens; bytes that are no UTF-8 and numbers beyond the vocabulary become U+FFFD."""
        numbers = [int(i) for i in ids]
        shown = {self.eot: b"<|endoftext|>"}
        raw = (shown.get(i) or (self.pieces[i] if 0 <= i < self.vocab else b"\xff") for i in numbers)
        return b"".join(raw).decode(errors="replace")

    def save(self, path: str | os.PathLike[str]) -> None:
        write_bytes(Path(path), canonical({"format": FORMAT, **self.definition}) + b"\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        try:
            content = json.loads(Path(path).read_bytes())
            if content.pop("format") != FORMAT:
                raise DataError(f"{path} is a tokenizer of another format than {FORMAT}; prepare the corpus again.")
            return cls(content)
        except OSError as error:
            raise DataError(f"the tokenizer {path} cannot be read: {error.strerror}.") from error
        except (KeyError, TypeError, AttributeError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise DataError(f"{path} is no tokenizer that qklab wrote; prepare the corpus again.") from error

    @classmethod
    def bytes(cls) -> Self:
        """One token per byte of UTF-8, and end-of-text: 257."""
        return cls({"kind": "bytes"})

    @classmethod
    def gpt2(cls, folder: str | os.PathLike[str]) -> Self:
        """GPT-2's 50,257 tokens from `encoder.json` and `vocab.bpe`."""
        try:
            numbers = json.loads((Path(folder) / GPT2_FILES[0]).read_text(encoding="utf-8"))
            lines = (Path(folder) / GPT2_FILES[1]).read_text(encoding="utf-8").split("\n")
        except OSError as error:
            raise DataError(f"GPT-2's tokenizer needs {' and '.join(GPT2_FILES)} in {folder}: {error}.") from error
        except ValueError as error:
            raise DataError(f"{Path(folder) / GPT2_FILES[0]} is no JSON; fetch GPT-2's own file again.") from error
        merges = [line.split(" ") for line in lines if line.strip() and not line.startswith("#version")]
        wrong = DataError(f"{folder} does not hold GPT-2's own {' and '.join(GPT2_FILES)}; fetch them again.")
        if not isinstance(numbers, dict) or sorted(numbers.values(), key=str) != sorted(range(50257), key=str):
            raise wrong
        try:
            tokenizer = cls({"kind": "bpe", "tokens": sorted(numbers, key=numbers.__getitem__), "merges": merges})
            if tokenizer.encode(["Hello world"])[0].tolist() != [15496, 995]:
                raise wrong
        except DataError:
            raise
        except Exception as error:  # `tokenizers` raises a bare Exception for merges that do not fit
            raise wrong from error
        return tokenizer


def token_bytes(definition: dict[str, Any]) -> list[bytes]:
    """What each token stands for; end-of-text, the last, stands for nothing."""
    if definition["kind"] == "bytes":
        return [bytes([byte]) for byte in range(256)] + [b""]
    byte = byte_of_character()
    tokens = definition["tokens"]
    return [bytes(byte[character] for character in token) for token in tokens[:-1]] + [b""]
