"""GLUE: what its tasks are, how they are read, and how they are scored.

In local files each task has a folder by GLUE's own name with train.tsv and dev.tsv as GLUE distributes them,
DATA/glue/SST-2/train.tsv or DATA/SST-2/train.tsv; where no folder is named, `datasets` reads it from the hub. The
labels of test.tsv are not public, so scores are of dev.tsv, and what is chosen is chosen on a tenth of train.tsv.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy import stats

from qklab.data.order import make_permutation
from qklab.data.sources import list_data_folders
from qklab.schema import suggest_name

Score = Callable[[np.ndarray, np.ndarray], float]
HELD_OUT = 0.1  # of the training examples, on which learning rates are chosen
LARGEST_SCORE = 5.0  # of STS-B
HUB = "nyu-mll/glue"


def score_accuracy(said: np.ndarray, right: np.ndarray) -> float:
    return float((said == right).mean())


def score_f1(said: np.ndarray, right: np.ndarray) -> float:
    """2 · hits / (said + there) of class 1; 0 where it was neither said nor there."""
    hits, both = ((said == 1) & (right == 1)).sum(), (said == 1).sum() + (right == 1).sum()
    return float(2 * hits / both) if both else 0.0


def score_matthews(said: np.ndarray, right: np.ndarray) -> float:
    """The correlation of two binary classifications; 0 where one of them is constant."""
    said, right = said.astype(float), right.astype(float)
    if said.std() == 0 or right.std() == 0:
        return 0.0
    return float(((said - said.mean()) * (right - right.mean())).mean() / (said.std() * right.std()))


def score_pearson(said: np.ndarray, right: np.ndarray) -> float:
    return 0.0 if np.ptp(said) == 0 else float(stats.pearsonr(said, right)[0])  # pyright: ignore[reportArgumentType]


def score_spearman(said: np.ndarray, right: np.ndarray) -> float:
    return 0.0 if np.ptp(said) == 0 else float(stats.spearmanr(said, right)[0])  # pyright: ignore[reportArgumentType]


@dataclass(frozen=True)
class GlueTask:
    """Its folder, the columns of its sentences and its label, the words of its labels (none: a number from 0 to 5), and
    what it is scored by; the mean of several is its score. Files without a header have none."""

    folder: str
    sentences: tuple[int, ...]
    label: int
    words: tuple[str, ...]
    scores: dict[str, Score]
    header: bool = True


BINARY = ("0", "1")
ACCURACY = {"accuracy": score_accuracy}
GLUE: dict[str, GlueTask] = {
    "cola": GlueTask("CoLA", (3,), 1, BINARY, {"matthews": score_matthews}, header=False),
    "sst2": GlueTask("SST-2", (0,), 1, BINARY, ACCURACY),
    "mrpc": GlueTask("MRPC", (3, 4), 0, BINARY, ACCURACY | {"f1": score_f1}),
    "stsb": GlueTask("STS-B", (7, 8), 9, (), {"pearson": score_pearson, "spearman": score_spearman}),
    "rte": GlueTask("RTE", (1, 2), 3, ("not_entailment", "entailment"), ACCURACY),
    "wnli": GlueTask("WNLI", (1, 2), 3, BINARY, ACCURACY),
}


class Examples(NamedTuple):
    """Texts of one or two sentences, and the label of each."""

    texts: list[tuple[str, ...]]
    labels: np.ndarray  # [n], whole numbers, or float32 between 0 and 5


def find_glue_task(name: str) -> GlueTask:
    if name not in GLUE:
        raise ValueError(f"there is no GLUE task {name!r}{suggest_name(name, GLUE)}; there are {', '.join(GLUE)}.")
    return GLUE[name]


def read_glue(name: str, data: Path | None, limit: int | None = None) -> dict[str, Examples]:
    """The splits train (its first `limit` examples), valid (a tenth of GLUE's train) and test (GLUE's dev) of a
    task."""
    task, named = find_glue_task(name), list_data_folders(data)
    if named:
        folders = [root / part for root in named for part in (f"glue/{task.folder}", task.folder)]
        folder = next((folder for folder in folders if folder.is_dir()), folders[0])
        train, dev = read_examples(task, folder / "train.tsv"), read_examples(task, folder / "dev.tsv")
    else:
        train, dev = load_examples(name)
    order = make_permutation(len(train.texts), 0, 5)
    held = max(1, round(HELD_OUT * len(order)))
    return {
        "train": take_examples(train, np.sort(order[held:])[:limit]),
        "valid": take_examples(train, np.sort(order[:held])),
        "test": dev,
    }


def take_examples(examples: Examples, places: np.ndarray) -> Examples:
    return Examples([examples.texts[i] for i in places.tolist()], examples.labels[places])


def load_examples(name: str) -> tuple[Examples, Examples]:
    """GLUE's train and dev of a task through `datasets`, which has columns and labels of its own."""
    task = GLUE[name]
    try:
        found = import_module("datasets").load_dataset(HUB, name)
    except Exception as error:  # whatever the network, the hub or its files do, or no datasets at all
        why = (str(error) or type(error).__name__).splitlines()[0]
        raise ValueError(
            f"{name} cannot be loaded from the hub ({HUB}: {why}): say with --data or QKLAB_DATA which folder holds "
            f"glue/{task.folder}/train.tsv."
        ) from None
    columns = ("sentence",) if len(task.sentences) == 1 else ("sentence1", "sentence2")
    splits: list[Examples] = []
    for rows in (found["train"], found["validation"]):
        texts = list(zip(*(rows[column] for column in columns), strict=True))
        names = getattr(rows.features["label"], "names", ())  # in RTE's the other way round
        cells = [names[label] if names and names[label] in task.words else str(label) for label in rows["label"]]
        labels = [read_label(task, cell, f"row {row} of {HUB}, {name}") for row, cell in enumerate(cells, 1)]
        splits.append(Examples(texts, np.array(labels, np.int64 if task.words else np.float32)))
    return splits[0], splits[1]


def read_examples(task: GlueTask, path: Path) -> Examples:
    try:
        # a quotation mark is one, and of the marks that end a line for Python only those that do in a file of lines
        lines = path.read_text(encoding="utf-8-sig").removesuffix("\n").split("\n")[task.header :]
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise ValueError(f"{path} cannot be read: {why}; put GLUE's own {task.folder}/{path.name} there.") from None
    texts: list[tuple[str, ...]] = []
    labels: list[float] = []
    for number, line in enumerate(lines, 1 + task.header):
        cells = line.split("\t")
        if len(cells) <= max(*task.sentences, task.label):
            raise ValueError(f"line {number} of {path} has {len(cells)} columns, too few for {task.folder}'s own file.")
        texts.append(tuple(cells[column] for column in task.sentences))
        labels.append(read_label(task, cells[task.label], f"line {number} of {path}"))
    if not texts:
        raise ValueError(f"{path} holds no example; put GLUE's own {task.folder}/{path.name} there.")
    return Examples(texts, np.array(labels, np.int64 if task.words else np.float32))


def read_label(task: GlueTask, cell: str, where: str) -> float:
    if task.words:
        if cell not in task.words:
            raise ValueError(f"{where} has the label {cell!r}, but labels of {task.folder} are {join_or(task.words)}.")
        return task.words.index(cell)
    try:
        number = float(cell)
    except ValueError:
        number = -1.0
    if not 0 <= number <= LARGEST_SCORE:
        raise ValueError(f"{where} has the label {cell!r}, but labels of {task.folder} are numbers from 0 to 5.")
    return number


def join_or(words: Sequence[str]) -> str:
    return " or ".join(map(repr, words))


def score_answers(task: GlueTask, outputs: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """The scores of a model's outputs [n, labels], and their mean under "glue"."""
    said = outputs.argmax(1) if task.words else outputs[:, 0]
    scores = {name: score(said, labels) for name, score in task.scores.items()}
    return scores | {"glue": sum(scores.values()) / len(scores)}


def score_constant(task: GlueTask, train: np.ndarray, labels: np.ndarray) -> float:
    """The score of saying the most frequent label of training, whatever was read."""
    guess = np.bincount(train).argmax() if task.words else train.mean()
    outputs = np.eye(max(1, len(task.words)))[np.full(len(labels), int(guess) if task.words else 0)]
    return score_answers(task, outputs, labels)["glue"]
