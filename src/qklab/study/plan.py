"""Which runs a study consists of, and where each of them lives."""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from qklab.study.spec import StudySpec
from qklab.train.spec import RunSpec

LONGEST = 100  # bytes of a path's component; file systems take 255


@dataclass(frozen=True)
class PlannedRun:
    """One run: at which learning rate an arm trains on a corpus from a seed."""

    corpus: str
    arm: str
    lr: float
    seed: int

    def folder_in(self, study: Path) -> Path:
        return study / "runs" / self.path

    @property
    def path(self) -> Path:
        """The run's own path within a study."""
        return Path(
            encode_file_name(self.corpus), encode_file_name(self.arm), f"lr{write_number(self.lr)}-seed{self.seed}"
        )

    def resolve_spec(self, study: StudySpec) -> RunSpec:
        return study.run(self.arm, self.corpus, self.lr, self.seed)

    @property
    def name(self) -> str:
        return f"{self.arm} · {self.corpus} · lr {write_number(self.lr)} · seed {self.seed}"


def write_number(number: float) -> str:
    """The number in as few digits as tell it from every other."""
    short = f"{number:g}"
    return short if float(short) == number else repr(number)


def write_rounded(number: float, digits: int = 2) -> str:
    """The number in so many digits, or all before the point: 0.14, 2.6, 1,230."""
    return f"{number:.{digits}g}" if abs(number) < 10**digits else f"{number:,.0f}"


def encode_file_name(name: str) -> str:
    """A name as one component of a path, different names different."""
    plain = quote(name, safe="=+")
    if plain.startswith("."):
        plain = f"%2E{plain[1:]}"
    if len(plain) <= LONGEST:
        return plain
    return f"{plain[: LONGEST - 18]}%~{hashlib.sha256(name.encode()).hexdigest()[:16]}"  # quote never writes %~


@dataclass(frozen=True)
class RateGrid:
    """The learning rates that every arm tries on a corpus; `final` where no result to come can extend it."""

    lrs: list[float]
    final: bool


def plan_tuning_runs(study: StudySpec, grids: Mapping[str, RateGrid] | None = None) -> Iterator[PlannedRun]:
    """Every arm at every learning rate, for the seeds that tune; a seed's arms next to each other. `grids`: as results
    have extended them, by corpus."""
    for corpus in study.corpora:
        for seed in range(study.tuning_seeds):
            for lr in study.lrs if grids is None else grids[corpus].lrs:
                for arm in study.arms:
                    yield PlannedRun(corpus, arm, lr, seed)


def plan_confirming_runs(study: StudySpec, lrs: Mapping[tuple[str, str], float | None]) -> Iterator[PlannedRun]:
    """The other seeds, at the learning rate `lrs` has for (corpus, arm); none for an arm that found none."""
    for corpus in study.corpora:
        for seed in range(study.tuning_seeds, study.seeds):
            for arm in study.arms:
                lr = lrs.get((corpus, arm))
                if lr is not None:
                    yield PlannedRun(corpus, arm, lr, seed)


def count_runs(study: StudySpec, grids: Mapping[str, RateGrid] | None = None) -> int:
    """How many runs a study has if no arm diverges at every learning rate."""
    rates = sum(len(study.lrs if grids is None else grids[corpus].lrs) for corpus in study.corpora)
    confirming = len(study.corpora) * (study.seeds - study.tuning_seeds)
    return len(study.arms) * (study.tuning_seeds * rates + confirming)
