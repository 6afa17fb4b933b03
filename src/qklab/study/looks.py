"""How often a study was judged. Seeds may be added after a look; looks are counted, each a chance to be wrong."""

import json
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from qklab.runs.files import write_json
from qklab.study.spec import StudyError

NAME = "looks.json"


@dataclass(frozen=True)
class Look:
    seeds: int
    at: str


@dataclass(frozen=True)
class Looks:
    """At which numbers of seeds the study was judged; how many runs there were at a time; and the command that adds
    seeds, with {more} and {total} in place of their number."""

    taken: tuple[Look, ...] = ()
    at_once: int = 1
    command: str = ""

    def __len__(self) -> int:
        return len(self.taken)

    @property
    def seeds(self) -> list[int]:
        return [look.seeds for look in self.taken]

    def with_one_at(self, seeds: int, at_once: int, command: str) -> "Looks":
        """A look at so many seeds; looking again at the same ones is no new look."""
        new = () if seeds in self.seeds else (Look(seeds, datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")),)
        return Looks((*self.taken, *new), at_once, command or self.command)

    def to_add(self, more: int, seeds: int) -> str:
        """The command that adds so many seeds to those there are."""
        return self.command.replace("{more}", str(more)).replace("{total}", str(seeds + more))

    def write(self, folder: Path) -> None:
        write_json(folder / NAME, asdict(self))


def read_looks(folder: Path) -> Looks:
    """The looks taken at the study in a folder; none if there is no record."""
    path = folder / NAME
    if not path.exists():
        return Looks()
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        return Looks(tuple(Look(**look) for look in record["taken"]), record["at_once"], record["command"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StudyError(f"{path} cannot be read: {error}; restore it from a copy or delete it.") from None
