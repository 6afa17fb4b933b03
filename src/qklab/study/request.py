"""What a comparison is asked to be, and what of it is left open."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from qklab.data.tasks import parse_task
from qklab.schema import suggest_name
from qklab.study.arms import select_arms
from qklab.study.sizes import SIZES, Size
from qklab.study.spec import StudyError

SMALLEST = "pico"


@dataclass(frozen=True)
class ComparisonRequest:
    """What a comparison is asked to be, None where that is left open. Without `minutes` the size fixes what runs are
    trained on, and nothing depends on how fast a machine is. `final_tokens`: how much of validation and of
    test is read at the end of a run, 0 for all; `reading`: settings of a corpus that say how its files are read."""

    texts: tuple[str, ...] = ()
    arms: tuple[str, ...] | None = None
    minutes: float | None = None
    seeds: int | None = None
    size: str | None = None
    final_tokens: int | None = None
    reading: dict[str, Any] = field(default_factory=dict)
    sizes: tuple[str, ...] | None = None
    tokens_per_parameter: float | None = None

    def __post_init__(self) -> None:
        if self.sizes is not None:
            self.refuse_unusable_sizes(self.sizes)
        elif self.tokens_per_parameter is not None:
            raise StudyError("--tokens-per-parameter is of --sizes; name two sizes or more, or leave it out.")
        if self.minutes is not None and not 0 < self.minutes < 1e6:
            raise StudyError(f"minutes must be a number above 0, but {self.minutes:g} came.")
        if self.size is not None and self.size not in SIZES:
            raise StudyError(
                f"size must be one of {', '.join(SIZES)}{suggest_name(self.size, SIZES)}, but {self.size!r} came."
            )
        if self.arms is not None:
            select_arms(self.arms)

    @property
    def asks_tasks(self) -> bool:
        """Whether it is tasks that are compared on; text and tasks together are refused."""
        tasks = [parse_task(text) for text in self.texts]
        if any(tasks) and not all(tasks):
            raise StudyError("tasks are compared by accuracy and texts by loss, but both came; compare them apart.")
        return any(tasks)

    def refuse_unusable_sizes(self, sizes: tuple[str, ...]) -> None:
        if self.asks_tasks:
            raise StudyError("--sizes compares on text, in bits per byte, but a task came; leave --sizes out.")
        for name, value in (("minutes", self.minutes), ("size", self.size)):
            if value is not None:
                raise StudyError(
                    f"--sizes fixes how many tokens each size gets, so --{name} has nothing to say; leave it out, or "
                    "set --tokens-per-parameter."
                )
        unknown = next((size for size in sizes if size not in SIZES), None)
        if unknown is not None or len({*sizes}) < max(2, len(sizes)):
            came = suggest_name(unknown, SIZES) if unknown is not None else ""
            raise StudyError(
                f"sizes must be two or more different ones of {', '.join(SIZES)}{came}, but {', '.join(sizes)} came."
            )

    def fill_defaults(self) -> "ComparisonRequest":
        """As a comparison is begun; study.json keeps it, by which the same command is known again."""
        by_size = self.minutes is None and self.sizes is None
        size = SMALLEST if by_size and self.size is None else self.size
        own = SIZES[size].seeds if by_size and size is not None else Size.seeds
        return replace(self, size=size, seeds=own if self.seeds is None else self.seeds)


def default_comparison_folder(texts: Sequence[str], sizes: Sequence[str] | None = None) -> Path:
    """Where a comparison lives unless told otherwise."""
    return Path("comparisons") / (("-".join(Path(text).name for text in texts) or "stdlib") + "-sizes" * bool(sizes))
