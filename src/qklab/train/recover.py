"""What may have happened to a run directory since its last process: what can be recovered is, and that is said."""

from collections.abc import Callable

from qklab.data.shards import Corpus
from qklab.data.spec import DataError
from qklab.data.tokenizer import Tokenizer
from qklab.runs.directory import RunDirectory

TOKENIZER = "tokenizer.json"


def discard_summary(directory: RunDirectory, warn: Callable[[str], None]) -> None:
    """Make room for a new summary where the one that is there cannot be read."""
    wrong = directory.discard_damaged_summary()
    if wrong is not None:
        warn(f"{wrong}; the run's end is evaluated again and its summary written anew.")


def has_tokenizer(directory: RunDirectory, expected: str) -> bool:
    """Whether the tokenizer in the run directory is the one with this hash."""
    try:
        return Tokenizer.load(directory.path / TOKENIZER).hash == expected
    except DataError:
        return False


def restore_tokenizer(directory: RunDirectory, corpus: Corpus, warn: Callable[[str], None]) -> None:
    """Bring a tokenizer that is missing or damaged back from the corpus."""
    if not has_tokenizer(directory, corpus.tokenizer.hash):
        corpus.tokenizer.save(directory.path / TOKENIZER)
        warn(f"{directory.path / TOKENIZER} was missing or damaged; it is brought back from {corpus.folder}.")


def find_lost_steps(directory: RunDirectory, step: int) -> list[int]:
    """Steps up to `step`, which a checkpoint has, that metrics.jsonl should have a record of and has not."""
    recorded = {record["step"] for record in directory.metrics("train")}
    return [one for one in range(1, step + 1) if one not in recorded]


def describe_lost_steps(directory: RunDirectory, lost: list[int]) -> str:
    which = f"step {lost[0]}" if len(lost) == 1 else f"{len(lost):,} steps ({lost[0]:,} to {lost[-1]:,})"
    return (
        f"{directory.metrics_path} was deleted or cut: its records of {which} are lost, and curves lack them; the "
        "model and what follows are not touched by it."
    )
