"""Text to token numbers: the part of a tokenizer that worker processes run.

This file imports nothing of qklab, so that it also runs as a program: `python -P encoder.py encode DEFINITION.json`
answers frames of texts with frames of tokens until its input ends, and `python -P encoder.py train VOCAB` turns
frames of texts into a definition. A worker therefore starts fast, is small, and ends with the process that feeds it.
"""

import json
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Any

import numpy as np

Encode = Callable[[Sequence[str]], list[np.ndarray]]

# GPT-2's pattern never matches from a non-space into a space, so text may be cut there without changing a token.
# The class is Unicode's White_Space, which is what the pattern's \s means; Python's \s has four more characters.
SPACE = "\t\n\x0b\x0c\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
CHUNKS = re.compile(f"[{SPACE}]*[^{SPACE}]+|[{SPACE}]+")
# The pattern itself, for text that is ASCII.
PIECES = re.compile(r"'(?:[sdmt]|ll|ve|re)| ?[A-Za-z]+| ?[0-9]+| ?[^\t-\r A-Za-z0-9]+|[\t-\r ]+(?![^\t-\r ])|[\t-\r ]+")
CACHED_CHUNKS = 2**18
CACHED_LENGTH = 48


def token_dtype(vocab: int) -> np.dtype:
    """Little-endian uint16 where it is enough, else uint32."""
    return np.dtype("<u2" if vocab <= 2**16 else "<u4")


def byte_level(definition: dict[str, Any]) -> Any:
    """The `tokenizers` object of a BPE definition: byte-level, GPT-2's pattern, no special tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {token: i for i, token in enumerate(definition["tokens"])}
    merges = [(left, right) for left, right in definition["merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    return tokenizer


class Chunks(dict[str, bytes]):
    """The tokens of chunks of text, as raw bytes. Most chunks of natural text are in it, which is what makes it fast.

    When it is full it becomes the past, from which chunks that are met again come back; the rest is forgotten then.
    """

    def __init__(self, definition: dict[str, Any]):
        self.tokenizer = byte_level(definition)
        self.dtype = token_dtype(len(definition["tokens"]))
        self.past: dict[str, bytes] = {}

    def __missing__(self, chunk: str) -> bytes:
        if len(chunk) > CACHED_LENGTH:
            return self.encoded(chunk)
        tokens = self.past.get(chunk)
        if tokens is None:
            pieces = PIECES.findall(chunk) if chunk.isascii() else ()
            tokens = b"".join(map(self.__getitem__, pieces)) if len(pieces) > 1 else self.encoded(chunk)
        if len(self) >= CACHED_CHUNKS:
            self.past = dict(self)
            self.clear()
        self[chunk] = tokens
        return tokens

    def encoded(self, chunk: str) -> bytes:
        if chunk.isascii() and chunk.isprintable() and len(PIECES.findall(chunk)) == 1:
            # the model without what is around it takes half the time; it spells a space "Ġ"
            ids = [token.id for token in self.tokenizer.model.tokenize(chunk.replace(" ", "Ġ"))]
        else:
            ids = self.tokenizer.encode(chunk, add_special_tokens=False).ids
        return np.array(ids, self.dtype).tobytes()


def encoder(definition: dict[str, Any]) -> Encode:
    """The function that turns texts into arrays of tokens, by a tokenizer's definition."""
    if definition["kind"] == "bytes":
        dtype = token_dtype(257)
        return lambda texts: [np.frombuffer(text.encode(), np.uint8).astype(dtype) for text in texts]
    chunks = Chunks(definition)
    tokens_of = chunks.__getitem__

    def encode(texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(b"".join(map(tokens_of, CHUNKS.findall(text))), chunks.dtype) for text in texts]

    return encode


def trained(texts: Iterator[str], vocab: int) -> dict[str, Any]:
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
    return {"kind": "bpe", "tokens": [*tokens, "<|endoftext|>"], "merges": merges}


def write_frame(stream: IO[bytes], pieces: Sequence[bytes | np.ndarray]) -> None:
    """A count, the length in bytes of each piece, the pieces."""
    raw = [piece if isinstance(piece, bytes) else piece.tobytes() for piece in pieces]
    stream.write(np.array([len(raw), *map(len, raw)], "<i8").tobytes() + b"".join(raw))
    stream.flush()


def read_frame(stream: IO[bytes]) -> list[bytes] | None:
    """The pieces of the next frame; None where the stream ends, in mid-frame too."""
    count = stream.read(8)
    if len(count) < 8:
        return None
    lengths = np.frombuffer(stream.read(8 * int.from_bytes(count, "little")), "<i8")
    ends = np.cumsum(lengths).tolist()
    raw = stream.read(ends[-1] if ends else 0)
    if len(raw) < (ends[-1] if ends else 0):
        return None
    return [raw[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)] if ends else []


def texts_of(stream: IO[bytes]) -> Iterator[list[str]]:
    while (frame := read_frame(stream)) is not None:
        yield [str(piece, "utf-8") for piece in frame]


def main(task: str, argument: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that feeds this one
    given, answer = sys.stdin.buffer, sys.stdout.buffer
    if task == "train":
        texts = (text for batch in texts_of(given) for text in batch)
        write_frame(answer, [json.dumps(trained(texts, int(argument)), ensure_ascii=False).encode()])
        return
    with open(argument, encoding="utf-8") as file:
        encode = encoder(json.load(file))
    for texts in texts_of(given):
        write_frame(answer, encode(texts))


if __name__ == "__main__":
    main(*sys.argv[1:])
