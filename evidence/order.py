"""Which studies are to be done, which arms of them first, and how long what has no records yet takes (order.toml)."""

import math
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from urllib.parse import unquote

from records import read_records

from qklab.study.spec import StudySpec, read_study

START = 0.8  # minutes of a population in which the card idles: processes, compiling, the end
LANES = 2  # populations at a time, so that one trains while another starts


@dataclass(frozen=True)
class PlannedStudy:
    """A study of the order. `minutes` that a population has one H200 to itself, `slower`: of arms that take longer;
    `population`: how many runs that is, by default all of an arm; `begins_with`: studies whose runs of the arms that
    both have are taken over."""

    folder: Path
    minutes: float
    slower: Mapping[str, float] = field(default_factory=dict)
    population: int | None = None
    begins_with: Sequence[str] = ()

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def file(self) -> Path:
        return self.folder / "study.toml"

    @cached_property
    def spec(self) -> StudySpec:
        return read_study(self.file)

    @cached_property
    def runs(self) -> int:
        """Of an arm on a corpus."""
        return len(self.spec.lrs) * self.spec.tuning_seeds + self.spec.seeds - self.spec.tuning_seeds

    def split_runs(self, runs: int) -> list[int]:
        """So many runs of an arm as populations."""
        most = self.population or self.runs
        return [min(most, runs - first) for first in range(0, runs, most)]

    def measure_work(self, arm: str, runs: int) -> float:
        """Minutes that so many runs of one population have the card to themselves."""
        return self.slower.get(arm, self.minutes) * runs / (self.population or self.runs)

    def count_missing_runs(self, arm: str) -> int:
        """That nobody has kept, without what a grid that is extended adds."""
        kept = sum(unquote(record["place"].split("/")[1]) == arm for record in read_records(self.folder))
        return max(0, len(self.spec.corpora) * self.runs - kept)

    def count_missing_minutes(self, arm: str) -> float:
        """Of an H200 on which others train while a population starts."""
        works = [self.measure_work(arm, runs) for runs in self.split_runs(self.count_missing_runs(arm))]
        return sum(max(work, (START + work) / LANES) for work in works)

    def find_origin(self, arm: str, order: Mapping[str, "PlannedStudy"]) -> str:
        """The study whose runs of the arm this one uses: itself, or one that it begins with."""
        for name in self.begins_with:
            if arm in order[name].spec.arms:
                return order[name].find_origin(arm, order)
        return self.name


def read_order(evidence: Path) -> dict[str, PlannedStudy]:
    """Name → study."""
    listed = tomllib.loads((evidence / "order.toml").read_text(encoding="utf-8"))["studies"]
    return {name: PlannedStudy(evidence / name, **own) for name, own in listed.items()}


def read_queue(evidence: Path, order: Mapping[str, PlannedStudy]) -> list[tuple[str, str]]:
    """(study, arm), first what is to be done first; what order.toml does not put first comes study by study."""
    first = tomllib.loads((evidence / "order.toml").read_text(encoding="utf-8")).get("first", [])
    named = [(name, arm) for name, *arms in first for arm in arms]
    if unknown := [f"{name}: {arm}" for name, arm in named if name not in order or arm not in order[name].spec.arms]:
        raise ValueError(f"order.toml puts first what no plan has: {', '.join(unknown)}; correct the name.")
    return list(dict.fromkeys([*named, *((name, arm) for name, study in order.items() for arm in study.spec.arms)]))


def count_missing_minutes(
    studies: Sequence[str], arms: set[str], order: Mapping[str, PlannedStudy]
) -> dict[str, float]:
    """Study → minutes for those of these arms that these studies need and nobody has run."""
    needed = {
        (order[name].find_origin(arm, order), arm)
        for name in studies
        if name in order
        for arm in arms & order[name].spec.arms.keys()
    }
    missing = [(name, order[name].count_missing_minutes(arm)) for name, arm in sorted(needed)]
    return {name: total for name in order if (total := sum(minutes for own, minutes in missing if own == name))}


class SharedCard:
    """What the populations under way still need, in minutes: to start, each for itself, then of a card that they share
    evenly."""

    def __init__(self, left: Mapping[str, Sequence[float]] | None = None):
        self.left = {name: [start, work] for name, (start, work) in (left or {}).items()}

    def advance(self, minutes: float = math.inf) -> float:
        """Let so many minutes go by, or as many as anything is under way; how many those were."""
        passed = 0.0
        while minutes - passed > 1e-9:
            starting = [own for own in self.left.values() if own[0] > 1e-9]
            working = [own for own in self.left.values() if own[0] <= 1e-9 < own[1]]
            if not (starting or working):
                break
            ends = [own[0] for own in starting] + [own[1] * len(working) for own in working]
            step = min(minutes - passed, *ends)
            for own in starting:
                own[0] -= step
            for own in working:
                own[1] -= step / len(working)
            passed += step
        return passed

    def take_ended(self) -> list[str]:
        ended = [name for name, (start, work) in self.left.items() if start + work <= 1e-6]
        for name in ended:
            del self.left[name]
        return ended

    def foresee_end(self, start: float, work: float) -> float:
        """Minutes until all has ended if this is begun now."""
        return SharedCard(self.left | {"": [start, work]}).advance()


def foresee_queue(evidence: Path, lanes: int = LANES) -> Iterator[tuple[float, str, str]]:
    """After how many minutes which arm of which study has ended, if what has no records is done from now on."""
    order, card, now = read_order(evidence), SharedCard(), 0.0
    waiting = [
        (name, arm, sum(START + order[name].measure_work(arm, runs) for runs in order[name].split_runs(missing)))
        for name, arm in read_queue(evidence, order)
        if order[name].find_origin(arm, order) == name and (missing := order[name].count_missing_runs(arm))
    ]
    while waiting or card.left:
        busy = {name.partition(": ")[0] for name in card.left}
        free = [one for one in waiting if one[0] not in busy]
        while free and len(card.left) < lanes:
            name, arm, minutes = free[0]
            card.left[f"{name}: {arm}"] = [START, minutes - START]
            waiting.remove(free[0])
            free = [one for one in free if one[0] != name]
        now += card.advance(0.1)
        for ended in card.take_ended():
            name, _, arm = ended.partition(": ")
            yield now, name, arm
