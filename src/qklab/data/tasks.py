"""Synthetic problems as corpora: `task:mqar?pairs=16&length=256` is generated, seeded, split and hashed like any text.

A sequence is what the model reads and, beside each token, what it must say there or that nothing is asked. Both are
written one after the other into a document; `TaskOrder` and `TaskWindows` take them apart again.

@register.task("double")
class Double(DigitTask): ...  # corpus.source = "task:double?length=32"
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar
from urllib.parse import parse_qsl

import numpy as np

from qklab import register
from qklab.data.order import combine_numbers, mix_bits
from qklab.data.sources import Document, Source
from qklab.data.spec import DataError
from qklab.schema import Rule, Spec, SpecError, integer_field

PREFIX = "task:"
NOTHING = -1  # the answer where none is asked for
FORMAT = 1  # of what is generated: another number, another corpus
CHUNK = 2048  # sequences generated at a time
ORDER = ("test", "valid", "train")  # held-out ones first: what they have, training has not


class Draws:
    """Random numbers that depend on nothing but the numbers they begin with, whatever the machine or numpy's
    version."""

    def __init__(self, *numbers: int):
        self.key, self.drawn = combine_numbers(*numbers), 0

    def draw_bits(self, *shape: int) -> np.ndarray:
        count = int(np.prod(shape))
        place = np.arange(self.drawn + 1, self.drawn + count + 1, dtype=np.uint64)
        self.drawn += count
        return mix_bits(self.key + place * np.uint64(0x9E3779B97F4A7C15)).reshape(shape)

    def integers(self, below: int | np.ndarray, *shape: int) -> np.ndarray:
        """Whole numbers from 0 to below − 1."""
        return (self.draw_bits(*shape) % np.asarray(below, np.uint64)).astype(np.int64)

    def select(self, count: int, below: int, rows: int) -> np.ndarray:
        """In each row `count` different numbers below `below`, in random order: [rows, count]."""
        return np.argsort(self.draw_bits(rows, below), axis=1, kind="stable")[:, :count]


@dataclass(frozen=True, kw_only=True)
class Task(Spec):
    """Sequences of `length` tokens and their answers: `train`, `valid` and `test` of them, which follow from `seed`.

    sees_ahead: an answer depends on later tokens, so a causal model cannot know it; shows_answers: an answer is read
    later in the sequence, so a model that sees both ways need not work it out.
    """

    length: int = integer_field(64, at_least=2, at_most=2**20)
    train: int = integer_field(50_000)
    valid: int = integer_field(1_000)
    test: int = integer_field(10_000)
    seed: int = integer_field(0, at_least=0)

    sees_ahead: ClassVar[bool] = False
    shows_answers: ClassVar[bool] = False

    @property
    def alphabet(self) -> list[str]:
        """The symbols that tokens stand for, in the order of their numbers."""
        raise NotImplementedError

    def draw_sequences(self, draws: Draws, rows: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and answers [rows, length]; an answer that is not asked for is NOTHING."""
        raise NotImplementedError


def at_most(field: str, most: Any, why: str) -> Rule:
    """`field` may not exceed what `most` says of the other arguments."""
    return Rule(field, lambda s: getattr(s, field) > most(s), lambda s: why, lambda s: {field: max(1, most(s))})


@dataclass(frozen=True, kw_only=True)
class DigitTask(Task):
    """Random digits, and an answer at every one of them."""

    digits: int = integer_field(10, at_least=2, at_most=10)

    @property
    def alphabet(self) -> list[str]:
        return [str(digit) for digit in range(self.digits)]

    def draw_sequences(self, draws: Draws, rows: int) -> tuple[np.ndarray, np.ndarray]:
        x = draws.integers(self.digits, rows, self.length)
        return x, self.answer(x)

    def answer(self, x: np.ndarray) -> np.ndarray:
        """What must be said at each digit of x [rows, length]."""
        raise NotImplementedError


@register.task("copy")
class CopyDigits(DigitTask):
    """The digit itself."""

    def answer(self, x: np.ndarray) -> np.ndarray:
        return x


@register.task("sub")
class SubtractDigits(DigitTask):
    """The largest digit minus this one: 9 − x."""

    def answer(self, x: np.ndarray) -> np.ndarray:
        return self.digits - 1 - x


@register.task("reverse")
class ReverseDigits(DigitTask):
    """The digits from the last to the first."""

    sees_ahead = True

    def answer(self, x: np.ndarray) -> np.ndarray:
        return x[:, ::-1]


@register.task("sort")
class SortDigits(DigitTask):
    """The digits from the smallest to the largest."""

    sees_ahead = True

    def answer(self, x: np.ndarray) -> np.ndarray:
        return np.sort(x, axis=1)


@register.task("swap")
class SwapHalves(DigitTask):
    """The second half, then the first."""

    sees_ahead = True

    def answer(self, x: np.ndarray) -> np.ndarray:
        half = self.length // 2
        return np.concatenate([x[:, half:], x[:, :half]], axis=1)


@register.task("mqar")
@dataclass(frozen=True, kw_only=True)
class AssociativeRecall(Task):
    """Multi-query associative recall, after Zoology: `pairs` pairs of a key and its value, then every key once more, in
    any order and between blanks; at each of these its value is asked."""

    pairs: int = integer_field(8)
    keys: int = integer_field(64, at_most=2**15)
    values: int = integer_field(64, at_least=2, at_most=2**15)

    rules: ClassVar[tuple[Rule, ...]] = (
        at_most("pairs", lambda s: s.length // 3, "a pair takes two tokens and its query one, and all must fit"),
        at_most("pairs", lambda s: s.keys, "the keys of a sequence are all different"),
    )

    @property
    def alphabet(self) -> list[str]:
        return ["_", *(f"k{i}" for i in range(self.keys)), *(f"v{i}" for i in range(self.values))]

    def draw_sequences(self, draws: Draws, rows: int) -> tuple[np.ndarray, np.ndarray]:
        keys = 1 + draws.select(self.pairs, self.keys, rows)
        values = 1 + self.keys + draws.integers(self.values, rows, self.pairs)
        first = 2 * self.pairs
        places = first + draws.select(self.pairs, self.length - first, rows)
        x = np.zeros((rows, self.length), np.int64)
        x[:, 0:first:2], x[:, 1:first:2] = keys, values
        answers = np.full_like(x, NOTHING)
        np.put_along_axis(x, places, keys, 1)
        np.put_along_axis(answers, places, values, 1)
        return x, answers


@register.task("induction")
@dataclass(frozen=True, kw_only=True)
class Induction(Task):
    """Different symbols, of which a stretch of `block` comes once more later on; asked, inside the second, what comes
    next. How far apart the two are differs, so what followed must be found by what came before: two layers can."""

    block: int = integer_field(16, at_least=2)
    symbols: int = integer_field(64, at_least=2, at_most=2**15)

    shows_answers = True
    rules: ClassVar[tuple[Rule, ...]] = (
        at_most("block", lambda s: s.length // 2, "it must fit twice"),
        Rule(
            "symbols",
            lambda s: s.symbols < s.length - s.block,
            lambda s: "all but the repeated stretch are different, and there must be enough",
            lambda s: {"symbols": s.length - s.block},
        ),
    )

    @property
    def alphabet(self) -> list[str]:
        return [f"s{i}" for i in range(self.symbols)]

    def draw_sequences(self, draws: Draws, rows: int) -> tuple[np.ndarray, np.ndarray]:
        rest = draws.select(self.length - self.block, self.symbols, rows)
        room = self.length - 2 * self.block
        start = draws.integers(room + 1, rows, 1)
        again = start + self.block + draws.integers(room - start + 1, rows, 1)
        place = np.arange(self.length)[None]
        inside = (place >= again) & (place < again + self.block)
        source = np.where(inside, place - again + start, np.where(place < again, place, place - self.block))
        x = np.take_along_axis(rest, source, 1)
        following = np.concatenate([x[:, 1:], x[:, :1]], 1)
        return x, np.where(inside & (place < again + self.block - 1), following, NOTHING)


@register.task("selective-copy")
@dataclass(frozen=True, kw_only=True)
class SelectiveCopy(Task):
    """`tokens` symbols scattered over blanks, then as many marks; asked, at each mark in turn, the symbols in their
    order."""

    tokens: int = integer_field(8)
    symbols: int = integer_field(16, at_least=2, at_most=2**15)

    rules: ClassVar[tuple[Rule, ...]] = (
        at_most("tokens", lambda s: s.length // 2, "each takes a place of its own and a mark"),
    )

    @property
    def alphabet(self) -> list[str]:
        return ["_", "?", *(f"s{i}" for i in range(self.symbols))]

    def draw_sequences(self, draws: Draws, rows: int) -> tuple[np.ndarray, np.ndarray]:
        first = self.length - self.tokens
        places = np.sort(draws.select(self.tokens, first, rows), axis=1)
        symbols = 2 + draws.integers(self.symbols, rows, self.tokens)
        x = np.zeros((rows, self.length), np.int64)
        np.put_along_axis(x, places, symbols, 1)
        x[:, first:] = 1
        answers = np.full_like(x, NOTHING)
        answers[:, first:] = symbols
        return x, answers


@register.task("needle")
@dataclass(frozen=True, kw_only=True)
class Needle(Task):
    """Random symbols with one mark among them, and a mark at the end, where the symbol after the first is asked."""

    length: int = integer_field(256, at_least=4, at_most=2**20)
    symbols: int = integer_field(64, at_least=2, at_most=2**15)

    @property
    def alphabet(self) -> list[str]:
        return ["#", *(f"s{i}" for i in range(self.symbols))]

    def draw_sequences(self, draws: Draws, rows: int) -> tuple[np.ndarray, np.ndarray]:
        x = 1 + draws.integers(self.symbols, rows, self.length)
        place = draws.integers(self.length - 2, rows, 1)
        answers = np.full_like(x, NOTHING)
        answers[:, -1:] = np.take_along_axis(x, place + 1, 1)
        np.put_along_axis(x, place, 0, 1)
        x[:, -1] = 0
        return x, answers


def parse_task(source: str) -> Task | None:
    """The task that a corpus's source names, "task:sort?length=16"; None where it names none."""
    if not source.startswith(PREFIX):
        return None
    name, _, arguments = source.removeprefix(PREFIX).partition("?")
    kind = register.task[name]
    try:
        given = parse_qsl(arguments, keep_blank_values=True, strict_parsing=bool(arguments))
        values = {field: int(value) for field, value in given}
        if len(values) < len(given):
            raise ValueError
    except ValueError:
        raise DataError(
            f"arguments of a task are whole numbers, each once, as in {PREFIX}{name}?length=32&train=1000, but "
            f"{arguments!r} came."
        ) from None
    try:
        return kind.from_dict(values)
    except SpecError as error:
        raise DataError(f"{PREFIX}{name}: {error}") from None


@register.source("task")
class TaskSource(Source):
    """Sequences of a task as documents: its symbols, then the answers, with end-of-text where none is asked."""

    splits = frozenset(ORDER)
    without: ClassVar[dict[str, str]] = dict.fromkeys(
        ("tokenizer", "vocab", "valid", "test", "limit_bytes", "column", "encoding", "skip_bad"),
        "is for text",
    )

    def __init__(self, name: str):
        super().__init__(name)
        task = parse_task(name)
        if task is None:
            raise DataError(f"a task is written {PREFIX}NAME, but {name} came; there are {', '.join(register.task)}.")
        self.task, self.alphabet = task, task.alphabet
        self.size = sum(getattr(task, split) for split in ORDER)

    def list_contents(self) -> list[list[Any]]:
        return [[self.name.partition("?")[0], FORMAT, self.task.to_dict()]]

    def read_documents(self) -> Iterator[Document]:
        words = np.array([f"{symbol} ".encode() for symbol in [*self.task.alphabet, "."]], object)
        position = 0
        for number, split in enumerate(ORDER):
            count = getattr(self.task, split)
            for chunk, first in enumerate(range(0, count, CHUNK)):
                draws = Draws(self.task.seed, number, chunk)
                tokens, answers = self.task.draw_sequences(draws, CHUNK)
                rows = words[np.concatenate([tokens, answers], 1)[: count - first]]
                for row in rows.tolist():
                    position += 1
                    yield Document(b"".join(row), split, position)
