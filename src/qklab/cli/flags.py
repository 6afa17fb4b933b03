"""Specs as command-line flags, and back."""

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import tyro


def read_types(spec: type) -> dict[str, Any]:
    """Field → its type; a choice among words is that of these words, also of those that others registered."""
    types = get_type_hints(spec)
    for field in dataclasses.fields(spec):
        if types[field.name] is str and "among" in field.metadata:
            types[field.name] = Literal[tuple(field.metadata["among"])]
    return types


def make_flags(spec: type, **overrides: tuple[Any, Any]) -> type:
    """A dataclass of command-line flags for a spec's fields; a field without a default may be left out."""
    types = read_types(spec)
    made: list[tuple[str, Any, Any]] = []
    for field in dataclasses.fields(spec):
        kind, default = types[field.name], field.default
        if field.name in overrides:
            kind, default = overrides[field.name]
        elif default is None or default is dataclasses.MISSING:
            kind, default = kind | None, None
        made.append((field.name, kind, dataclasses.field(default=default)))
    made_class = dataclasses.make_dataclass(f"{spec.__name__}Flags", made, frozen=True)
    made_class.__doc__ = spec.__doc__
    return made_class


def select_changed(flags: Any) -> dict[str, Any]:
    """The flags that differ from their defaults."""
    return {
        field.name: getattr(flags, field.name)
        for field in dataclasses.fields(flags)
        if getattr(flags, field.name) != field.default
    }


def make_optional_flags(spec: type, elsewhere: Mapping[str, str] | None = None, /, **overrides: Any) -> type:
    """Flags for a spec's fields that all may be left out, so that a file or the defaults decide.

    An override is another type for a field, or None to leave the field out; `elsewhere` says what holds by default
    where that is not the field's own default.
    """
    types = read_types(spec) | overrides
    made: list[tuple[str, Any, Any]] = []
    for field in dataclasses.fields(spec):
        kind = types[field.name]
        if dataclasses.is_dataclass(kind) and isinstance(kind, type):
            made.append((field.name, kind, dataclasses.field(default=kind())))
        elif kind is not None:
            default = (elsewhere or {}).get(field.name, field.default)
            made.append((field.name, annotate_optional(kind, default), dataclasses.field(default=None)))
    made_class = dataclasses.make_dataclass(f"{spec.__name__}Flags", made, frozen=True)
    made_class.__doc__ = spec.__doc__
    return made_class


def annotate_optional(kind: Any, default: Any = None) -> Any:
    """The type of a flag that may be left out; its help shows what then holds, instead of None."""
    words = get_args(kind) if get_origin(kind) is Literal else ("True", "False") if kind is bool else ()
    plain = next((t for t in get_args(kind) if t is not type(None)), kind)
    metavar = "{" + ",".join(words) + "}" if words else getattr(plain, "__name__", str(plain)).upper()
    known = default is not None and default is not dataclasses.MISSING
    hint = f"(default: {default})" if known else ""
    return Annotated[kind | None, tyro.conf.arg(metavar=metavar, help_behavior_hint=hint)]


def collect_given(flags: Any) -> dict[str, Any]:
    """The optional flags that were given, nested as they are."""
    values: dict[str, Any] = {}
    for field in dataclasses.fields(flags):
        value = getattr(flags, field.name)
        if dataclasses.is_dataclass(value):
            value = collect_given(value) or None
        if value is not None:
            values[field.name] = value
    return values
