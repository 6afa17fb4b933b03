"""The doors for other packages: what settings may name, and what each name stands for.

from qklab import register

@register.coupling("turn")
class Turn(Coupling): ...

A package that names a module under the entry-point group `qklab` has it imported when a name is looked for that is not
known yet, or when all names are listed; the module registers by these decorators. qklab's own entries do the same.
Families go into a module of their own under the group `qklab.hf`, imported where Transformers is needed anyway.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import entry_points
from typing import Any, TypeVar

from qklab.schema import suggest_name

Entry = TypeVar("Entry")
GROUP = "qklab"


class RegistryError(ValueError):
    """A name that nothing is registered under, or that is taken; told in one sentence."""


class Registry(Mapping[str, Any]):
    """Name → entry. Calling it gives the decorator that registers; `homes` are qklab's own modules that do so.

    `group` is a second group of entry points, for modules that need more than qklab itself does.
    """

    def __init__(self, what: str, *homes: str, group: str = GROUP):
        self.what, self.group = what, group
        self.homes = list(homes)
        self.entries: dict[str, Any] = {}

    def __call__(self, name: str) -> Callable[[Entry], Entry]:
        """A decorator that registers what it is put on under `name`."""
        if not isinstance(name, str) or not name:
            raise RegistryError(f"a {self.what} is registered under a name, but {name!r} came.")

        def add(entry: Entry) -> Entry:
            taken = self.entries.get(name)
            if taken is not None and _origin(taken) != _origin(entry):
                raise RegistryError(
                    f"the {self.what} {name!r} is registered already, by {_origin(taken)}; choose another name."
                )
            self.entries[name] = entry
            return entry

        return add

    def __getitem__(self, name: str) -> Any:
        if name not in self:
            raise RegistryError(
                f"there is no {self.what} {name!r}{suggest_name(name, self)}; registered are {', '.join(self)}."
            )
        return self.entries[name]

    def __contains__(self, name: object) -> bool:
        if name not in self.entries:
            self._import_homes()
        if name not in self.entries:
            self._import_plugins()
        return name in self.entries

    def __iter__(self) -> Iterator[str]:
        self._import_homes()
        self._import_plugins()
        return iter(self.entries)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def _import_homes(self) -> None:
        for home in list(self.homes):
            importlib.import_module(home)
            if home in self.homes:  # one that could not be imported is tried again, and fails again
                self.homes.remove(home)

    def _import_plugins(self) -> None:
        for group in dict.fromkeys([GROUP, self.group]):
            import_plugins(group)


def _origin(entry: Any) -> str:
    return f"{getattr(entry, '__module__', type(entry).__module__)}.{getattr(entry, '__qualname__', repr(entry))}"


_imported_groups: set[str] = set()


def import_plugins(group: str = GROUP) -> None:
    """Import, once, the modules that installed packages name under an entry-point group."""
    if group in _imported_groups:
        return
    _imported_groups.add(group)  # first: a plugin may itself list names while it registers
    for point in entry_points(group=group):
        try:
            point.load()
        except Exception as error:
            _imported_groups.remove(group)  # whoever asks again is told again
            package = point.dist.name if point.dist is not None else point.value
            raise RegistryError(
                f"the package {package} registers with qklab through {point.value}, which cannot be imported: {error}; "
                "mend or uninstall it."
            ) from error


coupling = Registry("coupling", "qklab.attention.couple", "qklab.attention.look_back")
mix = Registry("mix", "qklab.attention.mix")
norm = Registry("norm", "qklab.attention.norm")
pattern = Registry("pattern of layers")
metric = Registry("metric", "qklab.study.metrics")
source = Registry("corpus source", "qklab.data.sources", "qklab.data.tasks")
task = Registry("task", "qklab.data.tasks")
scorer = Registry("scorer of models", "qklab.hf.benchmarks", group="qklab.hf")
family = Registry("Transformers family", "qklab.hf.families", group="qklab.hf")
executor = Registry("executor", "qklab.study.executors.local", "qklab.study.executors.ray")
