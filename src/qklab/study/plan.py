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
class Planned:
    """One run: at which learning rate an arm trains on a corpus from a seed."""

    corpus: str
    arm: str
    lr: float
    seed: int

    def folder(self, study: Path) -> Path:
        return study / "runs" / self.place

    @property
    def place(self) -> Path:
        """The run's own path within a study."""
        return Path(file_name(self.corpus), file_name(self.arm), f"lr{figure(self.lr)}-seed{self.seed}")

    def spec(self, study: StudySpec) -> RunSpec:
        return study.run(self.arm, self.corpus, self.lr, self.seed)

    @property
    def name(self) -> str:
        return f"{self.arm} · {self.corpus} · lr {figure(self.lr)} · seed {self.seed}"


def figure(number: float) -> str:
    """The number in as few digits as tell it from every other."""
    short = f"{number:g}"
    return short if float(short) == number else repr(number)


def file_name(name: str) -> str:
    """A name as one component of a path, different names different."""
    plain = quote(name, safe="=+")
    if plain.startswith("."):
        plain = f"%2E{plain[1:]}"
    if len(plain) <= LONGEST:
        return plain
    return f"{plain[: LONGEST - 18]}%~{hashlib.sha256(name.encode()).hexdigest()[:16]}"  # quote never writes %~


def tuning(study: StudySpec) -> Iterator[Planned]:
    """Every arm at every learning rate, for the seeds that tune; a seed's arms next to each other."""
    for corpus in study.corpora:
        for seed in range(study.tuning_seeds):
            for lr in study.lrs:
                for arm in study.arms:
                    yield Planned(corpus, arm, lr, seed)


def confirming(study: StudySpec, chosen: Mapping[tuple[str, str], float | None]) -> Iterator[Planned]:
    """The other seeds, at the learning rate `chosen` for (corpus, arm); none for an arm that found none."""
    for corpus in study.corpora:
        for seed in range(study.tuning_seeds, study.seeds):
            for arm in study.arms:
                lr = chosen.get((corpus, arm))
                if lr is not None:
                    yield Planned(corpus, arm, lr, seed)
