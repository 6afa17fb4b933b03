"""Tokenizers: bytes, a BPE trained on the corpus, or GPT-2's. All are byte-level: no text is unknown to them.

Tasks have symbols between spaces instead.
"""

import functools
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

from qklab.data.spec import DataError
from qklab.runs.files import write_bytes

FORMAT = 1
END_OF_TEXT = "<|endoftext|>"
GPT2_FILES = ("encoder.json", "vocab.bpe")

# GPT-2's pattern never matches from a non-space into a space, so text may be cut there without changing a token.
# The class is Unicode's White_Space, which is what the pattern's \s means; Python's \s has four more characters.
SPACE = "\t\n\x0b\x0c\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
CHUNK = re.compile(f"[{SPACE}]*[^{SPACE}]+|[{SPACE}]+")
# The pattern itself, for text that is ASCII.
ASCII_PIECE = re.compile(
    r"'(?:[sdmt]|ll|ve|re)| ?[A-Za-z]+| ?[0-9]+| ?[^\t-\r A-Za-z0-9]+|[\t-\r ]+(?![^\t-\r ])|[\t-\r ]+"
)
CACHED_CHUNKS = 2**18
CACHED_LENGTH = 48


def format_canonical_json(content: object) -> bytes:
    """The one way a JSON value is written where its hash counts."""
    return json.dumps(content, ensure_ascii=False, sort_keys=True, separators=(",", ":")).encode()


def choose_token_dtype(vocab: int) -> np.dtype:
    """Little-endian uint16 where it is enough, else uint32."""
    return np.dtype("<u2" if vocab <= 2**16 else "<u4")


@functools.cache
def byte_of_character() -> dict[str, int]:
    """GPT-2's spelling of bytes, inverted: printable bytes are their own characters, others follow from 256 on."""
    kept = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    rest = [byte for byte in range(256) if byte not in kept]
    return {chr(byte): byte for byte in kept} | {chr(256 + i): byte for i, byte in enumerate(rest)}


class Tokenizer:
    """Text to token numbers and back. The last number, `eot`, marks the beginning of a document and stands for no text.

    `definition` is {"kind": "bytes"}, {"kind": "bpe", "tokens": […], "merges": [[left, right], …]} or
    {"kind": "symbols", "tokens": […]}, whose last token is end-of-text as in a BPE.
    """

    def __init__(self, definition: dict[str, Any]):
        self.definition = definition
        self.pieces = list_token_bytes(definition)
        self.vocab = len(self.pieces)
        self.eot = self.vocab - 1
        self.hash = hashlib.sha256(format_canonical_json({"format": FORMAT, **definition})).hexdigest()
        text = definition["kind"] != "symbols"  # symbols stand for no text, and so for no bytes of it
        self.byte_lengths = np.array([len(piece) * text for piece in self.pieces], np.int64)
        self.dtype = choose_token_dtype(self.vocab)

    @functools.cached_property
    def encode_batch(self) -> Callable[[Sequence[str]], list[np.ndarray]]:
        if self.definition["kind"] == "bytes":
            return lambda texts: [np.frombuffer(text.encode(), np.uint8).astype(self.dtype) for text in texts]
        if self.definition["kind"] == "symbols":
            return self.encode_symbols
        tokens_of = ChunkCache(self.definition, self.dtype).__getitem__
        return lambda texts: [np.frombuffer(b"".join(map(tokens_of, CHUNK.findall(x))), self.dtype) for x in texts]

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The tokens of each text, without end-of-text; `"<|endoftext|>"` in a text is text."""
        if isinstance(texts, str):
            raise DataError("encode takes a list of texts, but one text came; write encode([text]).")
        return self.encode_batch(texts)

    def encode_symbols(self, texts: Sequence[str]) -> list[np.ndarray]:
        numbers = {token: number for number, token in enumerate(self.definition["tokens"])}
        try:
            return [np.array([numbers[symbol] for symbol in text.split()], self.dtype) for text in texts]
        except KeyError as error:
            known = " ".join(self.definition["tokens"][:12])
            raise DataError(f"there is no symbol {error} among those of this task: {known} …") from None

    def decode(self, ids: Iterable[int]) -> str:
        """The text of tokens; bytes that are no UTF-8 and numbers beyond the vocabulary become U+FFFD."""
        pieces = {self.eot: END_OF_TEXT.encode()}
        numbers = map(int, ids)
        raw = (pieces.get(i) or (self.pieces[i] if 0 <= i < self.vocab else b"\xff") for i in numbers)
        return b"".join(raw).decode(errors="replace")

    def save(self, path: str | os.PathLike[str]) -> None:
        write_bytes(Path(path), format_canonical_json({"format": FORMAT, **self.definition}) + b"\n")

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


def list_token_bytes(definition: dict[str, Any]) -> list[bytes]:
    """What each token stands for; end-of-text, the last, stands for nothing."""
    if definition["kind"] == "bytes":
        return [bytes([byte]) for byte in range(256)] + [b""]
    tokens = definition["tokens"]
    if definition["kind"] == "symbols":
        return [f"{token} ".encode() for token in tokens[:-1]] + [b""]
    byte = byte_of_character()
    return [bytes(byte[character] for character in token) for token in tokens[:-1]] + [b""]


def build_bpe(definition: dict[str, Any]) -> Any:
    """The `tokenizers` object of a BPE definition: byte-level, GPT-2's pattern, no special tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {token: i for i, token in enumerate(definition["tokens"])}
    merges = [(left, right) for left, right in definition["merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    return tokenizer


def train_bpe(texts: Iterator[str], vocab: int) -> dict[str, Any]:
    """The definition of a byte-level BPE with at most `vocab` tokens, end-of-text last, trained on `texts`."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab - 1, min_frequency=2, show_progress=False, initial_alphabet=alphabet, special_tokens=[]
    )
    tokenizer.train_from_iterator(texts, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    merges = [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]]
    return {"kind": "bpe", "tokens": [*tokens, END_OF_TEXT], "merges": merges}


class ChunkCache(dict[str, bytes]):
    """The tokens of chunks of text, as raw bytes. Most chunks of natural text are in it, which is what makes it fast.

    When it is full it becomes the past, from which chunks that are met again come back; the rest is forgotten then.
    """

    def __init__(self, definition: dict[str, Any], dtype: np.dtype):
        self.tokenizer, self.dtype = build_bpe(definition), dtype
        self.past: dict[str, bytes] = {}

    def __missing__(self, chunk: str) -> bytes:
        if len(chunk) > CACHED_LENGTH:
            return self.encode_chunk(chunk)
        tokens = self.past.get(chunk)
        if tokens is None:
            pieces = ASCII_PIECE.findall(chunk) if chunk.isascii() else ()
            tokens = b"".join(map(self.__getitem__, pieces)) if len(pieces) > 1 else self.encode_chunk(chunk)
        if len(self) >= CACHED_CHUNKS:
            self.past = dict(self)
            self.clear()
        self[chunk] = tokens
        return tokens

    def encode_chunk(self, chunk: str) -> bytes:
        if chunk.isascii() and chunk.isprintable() and len(ASCII_PIECE.findall(chunk)) == 1:
            # the model without what is around it takes half the time; it spells a space "Ġ"
            ids = [token.id for token in self.tokenizer.model.tokenize(chunk.replace(" ", "Ġ"))]
        else:
            ids = self.tokenizer.encode(chunk, add_special_tokens=False).ids
        return np.array(ids, self.dtype).tobytes()
