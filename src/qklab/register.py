"""The doors for other packages: what settings may name, and what each name stands for.

from qklab import register

@register.coupling("turn")
class Turn(Coupling): ...

A package that names a module under the entry-point group `qklab` has it imported when a name is looked for that is not
known yet, or when all names are listed; the module registers by these decorators. qklab's own entries do the same.
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
    """Name → entry. Calling it gives the decorator that registers; `homes` are qklab's own modules that do so."""

    def __init__(self, what: str, *homes: str):
        self.what = what
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
            import_plugins()
        return name in self.entries

    def __iter__(self) -> Iterator[str]:
        self._import_homes()
        import_plugins()
        return iter(self.entries)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def _import_homes(self) -> None:
        for home in list(self.homes):
            importlib.import_module(home)
            if home in self.homes:  # one that could not be imported is tried again, and fails again
                self.homes.remove(home)


def _origin(entry: Any) -> str:
    return f"{getattr(entry, '__module__', type(entry).__module__)}.{getattr(entry, '__qualname__', repr(entry))}"


_plugins_imported = False


def import_plugins() -> None:
    """Import, once, the modules that installed packages name under the entry-point group `qklab`."""
    global _plugins_imported
    if _plugins_imported:
        return
    _plugins_imported = True  # set first: a plugin may itself list names while it registers
    for point in entry_points(group=GROUP):
        try:
            point.load()
        except Exception as error:
            package = point.dist.name if point.dist is not None else point.value
            raise RegistryError(
                f"the package {package} registers with qklab through {point.value}, which cannot be imported: {error}; "
                "mend or uninstall it."
            ) from error


coupling = Registry("coupling", "qklab.attention.couple")
mix = Registry("mix", "qklab.attention.mix")
norm = Registry("norm", "qklab.attention.norm")
metric = Registry("metric", "qklab.study.metrics")
source = Registry("corpus source", "qklab.data.sources")
family = Registry("Transformers family", "qklab.hf.families")
executor = Registry("executor", "qklab.study.executors")
