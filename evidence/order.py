"""Which studies are to be done, in which order, and which arms of them have no records yet (order.toml)."""

import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from urllib.parse import unquote

from records import read_records

from qklab.study.spec import StudySpec, read_study


@dataclass(frozen=True)
class PlannedStudy:
    """A study of the order. `minutes` of one H200 a population, `population`: how many runs that is, by default all of
    an arm; `begins_with`: studies whose runs of the arms that both have are taken over."""

    folder: Path
    minutes: float
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

    def count_missing_minutes(self, arm: str) -> float:
        """Of the runs of an arm that nobody has kept, without what a grid that is extended adds."""
        spec = self.spec
        runs = len(spec.corpora) * (len(spec.lrs) * spec.tuning_seeds + spec.seeds - spec.tuning_seeds)
        kept = sum(unquote(record["place"].split("/")[1]) == arm for record in read_records(self.folder))
        return self.minutes * math.ceil(max(0, runs - kept) / (self.population or runs / len(spec.corpora)))

    def find_origin(self, arm: str, order: Mapping[str, "PlannedStudy"]) -> str:
        """The study whose runs of the arm this one uses: itself, or one that it begins with."""
        for name in self.begins_with:
            if arm in order[name].spec.arms:
                return order[name].find_origin(arm, order)
        return self.name


def read_order(evidence: Path) -> dict[str, PlannedStudy]:
    """Name → study, first what is to be done first."""
    listed = tomllib.loads((evidence / "order.toml").read_text(encoding="utf-8"))["studies"]
    return {
        own["name"]: PlannedStudy(evidence / own["name"], **{k: own[k] for k in own if k != "name"}) for own in listed
    }


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
