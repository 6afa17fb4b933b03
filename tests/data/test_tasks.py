"""Tasks against an independent statement of each rule: one sequence at a time, in plain Python."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qklab import register
from qklab.data import DataError, DataSpec, prepare_corpus
from qklab.data.batches import IGNORED, make_batch
from qklab.data.targets import TaskOrder, TaskWindows, measure_chance, read_sequences
from qklab.data.tasks import Draws, parse_task
from qklab.register import RegistryError

Row = tuple[list[str], list[str | None]]  # what is read, and what must be said at each token


def draw_rows(source: str, rows: int = 40, seed: int = 0) -> list[Row]:
    task = parse_task(source)
    assert task is not None
    tokens, answers = task.draw_sequences(Draws(seed), rows)
    names = task.alphabet
    assert tokens.shape == answers.shape == (rows, task.length)
    assert tokens.min() >= 0
    return [
        ([names[t] for t in x], [None if a < 0 else names[a] for a in y])
        for x, y in zip(tokens.tolist(), answers.tolist(), strict=True)
    ]


def swap(x: list[int]) -> list[int]:
    x = list(x)
    for _ in range(len(x) // 2):
        x.append(x.pop(0))
    return x


RULES = {
    "copy": list,
    "sub": lambda x: [9 - digit for digit in x],
    "reverse": lambda x: [x[-1 - i] for i in range(len(x))],
    "sort": lambda x: [digit for digit in range(10) for _ in range(x.count(digit))],
    "swap": swap,
}


@pytest.mark.parametrize("name", RULES)
@settings(max_examples=15, deadline=None)
@given(length=st.integers(2, 40), seed=st.integers(0, 9))
def test_digit_tasks_follow_their_rule(name: str, length: int, seed: int) -> None:
    for tokens, answers in draw_rows(f"task:{name}?length={length}", 20, seed):
        assert [int(a or "") for a in answers] == RULES[name]([int(t) for t in tokens])


@settings(max_examples=25, deadline=None)
@given(pairs=st.integers(1, 12), spare=st.integers(0, 30), seed=st.integers(0, 9))
def test_recall_asks_for_the_value_of_every_key_once(pairs: int, spare: int, seed: int) -> None:
    for tokens, answers in draw_rows(f"task:mqar?pairs={pairs}&length={3 * pairs + spare}&keys=16&values=5", 20, seed):
        told = {tokens[i]: tokens[i + 1] for i in range(0, 2 * pairs, 2)}
        assert len(told) == pairs
        assert all(key[0] == "k" and value[0] == "v" for key, value in told.items())
        asked = {token: answer for token, answer in zip(tokens, answers, strict=True) if answer is not None}
        assert asked == told
        assert sum(answer is not None for answer in answers) == pairs
        assert all(t == "_" or a for t, a in zip(tokens[2 * pairs :], answers[2 * pairs :], strict=True))


@settings(max_examples=25, deadline=None)
@given(block=st.integers(2, 8), spare=st.integers(0, 20), seed=st.integers(0, 9))
def test_induction_asks_for_what_followed_the_same_symbol_before(block: int, spare: int, seed: int) -> None:
    length, apart = 2 * block + spare, set()
    for tokens, answers in draw_rows(f"task:induction?block={block}&length={length}&symbols=40", 30, seed):
        asked = [i for i, answer in enumerate(answers) if answer is not None]
        assert len(asked) == block - 1
        for i in asked:
            before = tokens.index(tokens[i])
            assert before < i
            assert answers[i] == tokens[before + 1] == tokens[i + 1]
            apart.add(i - before)
        assert len(set(tokens)) == length - block
    assert len(apart) > 1 or spare == 0  # or a layer alone could look so far back


@settings(max_examples=25, deadline=None)
@given(tokens=st.integers(1, 10), spare=st.integers(0, 20), seed=st.integers(0, 9))
def test_selective_copying_asks_for_the_symbols_in_order(tokens: int, spare: int, seed: int) -> None:
    for read, answers in draw_rows(f"task:selective-copy?tokens={tokens}&length={2 * tokens + spare + 2}", 20, seed):
        kept = [symbol for symbol in read if symbol not in "_?"]
        assert [answer for answer in answers if answer is not None] == kept
        assert len(kept) == tokens
        assert [answer is not None for answer in answers] == [symbol == "?" for symbol in read]


@settings(max_examples=25, deadline=None)
@given(length=st.integers(4, 60), seed=st.integers(0, 9))
def test_a_needle_is_asked_for_at_the_end_alone(length: int, seed: int) -> None:
    for tokens, answers in draw_rows(f"task:needle?length={length}", 20, seed):
        assert tokens.count("#") == 2
        assert tokens[-1] == "#"
        assert answers == [None] * (length - 1) + [tokens[tokens.index("#") + 1]]
        assert answers[-1] != "#"


@pytest.mark.parametrize("name", register.task)
def test_symbols_are_drawn_evenly_and_differ_from_row_to_row(name: str) -> None:
    rows = draw_rows(f"task:{name}", 500)
    assert len({tuple(tokens) for tokens, _ in rows}) == 500
    said = [answer for _, answers in rows for answer in answers if answer is not None]
    often = {symbol: said.count(symbol) for symbol in set(said)}
    assert min(often.values()) > 0.2 * len(said) / len(often)


SMALL = "task:mqar?pairs=3&length=12&keys=8&values=4&train=300&valid=20&test=50"


def test_prepared_like_a_corpus_the_same_in_every_process_and_split_without_a_common_sequence(tmp_path: Path) -> None:
    corpus = prepare_corpus(DataSpec(source=SMALL), out=tmp_path / "here")
    program = f"""if True:
        from qklab.data import DataSpec, prepare_corpus
        print(prepare_corpus(DataSpec(source={SMALL!r}), out={str(tmp_path / "there")!r}).hash)"""
    there = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip()
    assert corpus.hash == there
    assert corpus.hash.startswith("1e9a484bb2a4")  # as on every other machine
    corpus.verify()
    seen = {}
    for name, split in corpus.splits.items():
        tokens, answers = read_sequences(split, range(split.documents), 12, corpus.tokenizer.eot)
        assert ((answers != IGNORED).sum(1) == 3).all()
        seen[name] = {tuple(row) for row in tokens.tolist()}
    assert [corpus.splits[name].documents for name in ("train", "valid", "test")] == [300, 20, 50]
    assert not seen["train"] & seen["test"]
    assert not seen["train"] & seen["valid"]
    assert not seen["valid"] & seen["test"]


def test_held_out_sequences_of_a_small_world_are_not_trained_on(tmp_path: Path) -> None:
    source = "task:copy?length=3&digits=4&train=400&valid=5&test=9"  # 64 sequences in all
    corpus = prepare_corpus(DataSpec(source=source), out=tmp_path / "corpus")
    rows = {
        name: read_sequences(split, range(split.documents), 3, corpus.tokenizer.eot)[0].tolist()
        for name, split in corpus.splits.items()
    }
    assert 300 < len(rows["train"]) < 400
    assert not [row for row in rows["train"] + rows["valid"] if row in rows["test"]]
    with pytest.raises(DataError, match="train"):
        prepare_corpus(DataSpec(source="task:copy?length=2&digits=2&test=1000"), out=tmp_path / "empty")


def test_an_epoch_has_every_sequence_once_and_evaluation_all_of_a_split(tmp_path: Path) -> None:
    corpus = prepare_corpus(DataSpec(source=SMALL), out=tmp_path / "corpus")
    order = TaskOrder(corpus.splits["train"], 7, 30, 12, "packed", corpus.tokenizer.eot)
    epoch = [make_batch(order.rows(step)) for step in range(10)]
    assert len({tuple(row) for batch in epoch for row in batch.ids.tolist()}) == 300
    assert epoch[0].ids.tolist() != make_batch(order.rows(10)).ids.tolist()
    halves = [order.rows(4, rank, 2).targets for rank in (0, 1)]
    assert np.array_equal(np.concatenate([half for half in halves if half is not None]), epoch[4].targets)
    windows = TaskWindows(corpus.splits["test"], 12, corpus.tokenizer.eot, True)
    batch = windows.batch(windows.select_windows(None))
    assert batch.ids.shape == (50, 12)
    assert len(windows.select_windows(120)) == 10
    tokens, answers = read_sequences(corpus.splits["test"], range(50), 12, corpus.tokenizer.eot)
    assert np.array_equal(batch.ids, tokens)
    assert np.array_equal(batch.targets, answers)


def test_chance_is_what_the_most_frequent_answer_of_each_place_gets_right(tmp_path: Path) -> None:
    corpus = prepare_corpus(DataSpec(source="task:sort?length=4&train=2000&valid=10&test=300"), out=tmp_path / "corpus")
    rows = {
        name: read_sequences(split, range(split.documents), 4, corpus.tokenizer.eot)[1].tolist()
        for name, split in corpus.splits.items()
    }
    columns = [[row[i] for row in rows["train"]] for i in range(4)]
    guess = [max(range(10), key=column.count) for column in columns]
    found = measure_chance(corpus, 4, "test")
    assert found["chance"] == pytest.approx(
        sum(row[i] == guess[i] for row in rows["test"] for i in range(4)) / (4 * len(rows["test"]))
    )
    assert found["chance"] > 0.2  # more than one of ten digits: the first is often 0, the last 9
    assert found["sequence_chance"] == pytest.approx(sum(row == guess for row in rows["test"]) / len(rows["test"]))
    assert 0 < found["unigram_loss"] < np.log(10)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("task:revers", r"no task 'revers' \(did you mean 'reverse'\?\); registered are copy"),
        ("task:", "no task ''"),
        ("task:sort?lenght=8", r"no field 'lenght' \(did you mean 'length'\?\)"),
        ("task:sort?length=8.5", "whole numbers, each once, as in task:sort"),
        ("task:sort?length=8&length=9", "each once"),
        ("task:sort?length", "whole numbers"),
        ("task:mqar?pairs=30", "pairs=30 is refused: a pair takes two tokens.*nearest legal: pairs=21"),
        ("task:induction?block=40", "it must fit twice"),
        ("task:induction?symbols=8", "nearest legal: symbols=48"),
        ("task:selective-copy?tokens=60", "a place of its own"),
    ],
)
def test_what_is_no_task_is_told_in_one_sentence(source: str, said: str) -> None:
    with pytest.raises((DataError, RegistryError), match=said):
        parse_task(source)


def test_settings_of_text_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="tokenizer is for text, but the source is task:copy; leave it out"):
        prepare_corpus(DataSpec(source="task:copy", tokenizer="bytes"), out=tmp_path / "corpus")


def test_symbols_are_written_and_read(tmp_path: Path) -> None:
    tokenizer = prepare_corpus(DataSpec(source=SMALL), out=tmp_path / "corpus").tokenizer
    ids = tokenizer.encode(["k3 v1 _"])[0]
    assert tokenizer.decode(ids) == "k3 v1 _ "
    assert tokenizer.byte_lengths.sum() == 0
    assert json.loads(json.dumps(tokenizer.definition)) == tokenizer.definition
    with pytest.raises(DataError, match="no symbol 'k9'"):
        tokenizer.encode(["k9"])
