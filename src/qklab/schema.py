"""Specs: frozen dataclasses that check themselves and say what to do when they are wrong.

A spec class lists its fields by the functions `…_field` below and, where fields must agree with each other, a tuple of
`Rule`s. Building one either succeeds or raises `SpecError`, a `ValueError` of one sentence that names the
field, the reason and the nearest legal choice.
"""

import dataclasses
import difflib
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, ClassVar, Self

MISSING = dataclasses.MISSING


class SpecError(ValueError):
    """A spec that cannot be built: `field` is at fault; `nearest` holds the changes that make it legal, if known."""

    def __init__(self, message: str, field: str, nearest: dict[str, Any] | None = None):
        super().__init__(message)
        self.field = field
        self.nearest = nearest

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.field, self.nearest)  # so that it survives the way back from a worker


def format_value(value: object) -> str:
    """One line of at most sixty characters that stands for `value` in a sentence."""
    text = repr(value).replace("\n", " ")
    return text if len(text) <= 60 else text[:57] + "..."


def describe_change(name: str, value: object, before: object) -> str:
    """ "name=value", or where both are specs only their fields that differ: "name.field=value"."""
    if not (isinstance(value, Spec) and isinstance(before, Spec)):
        return f"{name}={getattr(value, 'name', None) or format_value(value)}"
    pairs = [(field, getattr(value, field), getattr(before, field)) for field in value.to_dict()]
    return ", ".join(describe_change(f"{name}.{field}", new, old) for field, new, old in pairs if new != old)


def suggest_name(word: object, known: Iterable[object]) -> str:
    """ " (did you mean 'x'?)" when `word` is close to something known, else nothing."""
    close = difflib.get_close_matches(str(word), [str(k) for k in known], n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


Check = Callable[[Any], Any]


def checked_field(check: Check, default: Any = MISSING, **metadata: Any) -> Any:
    """A dataclass field whose value passes through `check`, which returns it or raises ValueError("must be …")."""
    return dataclasses.field(default=default, metadata={"check": check, **metadata})


def integer_field(default: Any = MISSING, *, at_least: int = 1, at_most: int = 2**31 - 1) -> Any:
    """A whole number between `at_least` and `at_most`. With default None the spec fills the value in itself."""

    def check(value: Any) -> Any:
        if value is None and default is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not at_least <= value <= at_most:
            raise ValueError(f"must be a whole number from {at_least} to {at_most}")
        return value

    return checked_field(check, default)


def number_field(
    default: Any = MISSING, *, above: float = -math.inf, at_least: float = -math.inf, at_most: float = math.inf
) -> Any:
    """A finite number within these bounds. With default None it may be left out."""

    def check(value: Any) -> Any:
        if value is None and default is None:
            return None
        number = value if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
        if not math.isfinite(number) or not (above < number <= at_most and number >= at_least):
            bounds = [f"above {above:g}"] * (above > -math.inf) + [f"at least {at_least:g}"] * (at_least > -math.inf)
            bounds += [f"at most {at_most:g}"] * (at_most < math.inf)
            raise ValueError(" ".join(["must be a finite number", " and ".join(bounds)]).strip())
        return float(number)

    return checked_field(check, default)


def text_field(default: Any = MISSING) -> Any:
    """A string that is not empty. With default None it may be left out."""

    def check(value: Any) -> Any:
        if (value is None and default is None) or (isinstance(value, str) and value):
            return value
        raise ValueError("must be a text that is not empty")

    return checked_field(check, default)


def boolean_field(default: bool) -> Any:
    """True or False, nothing that merely looks like it."""

    def check(value: Any) -> Any:
        if not isinstance(value, bool):
            raise ValueError("must be True or False")
        return value

    return checked_field(check, default, among=(False, True))


def choice_field(default: Any, among: Collection[str]) -> Any:
    """One of a few words: the keys of a registry, also of what is registered later, or a tuple. With default None the
    spec fills the value in itself."""

    def check(value: Any) -> Any:
        if value is None and default is None:
            return None
        if not isinstance(value, str) or value not in among:
            raise ValueError(f"must be one of {', '.join(map(repr, among))}{suggest_name(value, among)}")
        return value

    return checked_field(check, default, among=among)


def spec_field(kind: type["Spec"], default: Any = MISSING) -> Any:
    """Another spec, or None where None is the default."""

    def check(value: Any) -> Any:
        if isinstance(value, kind) or (value is None and default is None):
            return value
        raise ValueError(f"must be of type {kind.__name__}{' or None' if default is None else ''}")

    return checked_field(check, default, spec=kind)


def spec_list_field(kind: type["Spec"]) -> Any:
    """Any number of specs, one of them without a list; by default none."""

    def check(value: Any) -> Any:
        several = (value,) if isinstance(value, kind) else tuple(value) if isinstance(value, list | tuple) else (value,)
        if not all(isinstance(one, kind) for one in several):
            raise ValueError(f"must be of type {kind.__name__}, or a list of these")
        return several

    return checked_field(check, (), spec=kind)


def spec_pattern_field(kind: type["Spec"]) -> Any:
    """A spec, or several that repeat: kept as the shortest tuple that does, or as the spec itself where all are one."""

    def check(value: Any) -> Any:
        if isinstance(value, kind):
            return value
        if not isinstance(value, list | tuple) or not value or not all(isinstance(one, kind) for one in value):
            raise ValueError(f"must be of type {kind.__name__}, or several of these that repeat")
        whole = tuple(value)
        periods = (n for n in range(1, len(whole) + 1) if len(whole) % n == 0)
        shortest = next(whole[:n] for n in periods if whole[:n] * (len(whole) // n) == whole)
        return shortest[0] if len(shortest) == 1 else shortest

    return checked_field(check, spec=kind)


@dataclasses.dataclass(frozen=True)
class Rule:
    """Fields that must agree: if `broken(spec)`, `field` is refused for `reason(spec)`, and `repair(spec)` mends it."""

    field: str
    broken: Callable[[Any], Any]
    reason: Callable[[Any], str]
    repair: Callable[[Any], dict[str, Any]]


def require_value(field: str, value: Any, where: Callable[[Any], Any], reason: str | Callable[[Any], str]) -> Rule:
    """Where `where(spec)`, `field` must be `value`."""
    return Rule(
        field,
        lambda spec: getattr(spec, field) != value and where(spec),
        reason if callable(reason) else lambda spec: reason,
        lambda spec: {field: value},
    )


class Spec:
    """Base of all specs; subclasses are `@dataclass(frozen=True, kw_only=True)` with `checked_field`s.

    Order of construction: each field's own check, then `defaults()` fills what was left None, then `rules`.
    """

    rules: ClassVar[tuple[Rule, ...]] = ()

    def defaults(self) -> dict[str, Any]:
        """Values for fields that were left None."""
        return {}

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):  # pyright: ignore[reportArgumentType]
            value = getattr(self, field.name)
            try:
                object.__setattr__(self, field.name, field.metadata["check"](value))
            except ValueError as error:
                raise SpecError(f"{field.name} {error}, but {format_value(value)} came.", field.name) from None
        for name, value in self.defaults().items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        broken = next((rule for rule in self.rules if rule.broken(self)), None)
        if broken is not None:
            value = getattr(self, broken.field)
            came = broken.field if isinstance(value, Spec | tuple) else f"{broken.field}={format_value(value)}"
            nearest = self._nearest()
            changes = ", ".join(describe_change(name, value, getattr(self, name)) for name, value in nearest.items())
            raise SpecError(
                f"{came} is refused: {broken.reason(self)}; nearest legal: {changes}.", broken.field, nearest
            )

    def _nearest(self) -> dict[str, Any]:
        """The changes that make this spec legal: each broken rule's repair in turn until none is broken."""
        draft = object.__new__(type(self))
        for field in dataclasses.fields(self):  # pyright: ignore[reportArgumentType]
            object.__setattr__(draft, field.name, getattr(self, field.name))
        changes: dict[str, Any] = {}
        for _ in range(4 * len(self.rules)):
            broken = next((rule for rule in self.rules if rule.broken(draft)), None)
            if broken is None:
                break
            repair = broken.repair(draft)
            changes.update(repair)
            for name, value in repair.items():
                object.__setattr__(draft, name, value)
        before, after = self.defaults(), draft.defaults()
        for name in before:  # a value that followed from others must be named once those others change
            if getattr(self, name) in (None, before[name]) and after[name] != getattr(draft, name):
                changes[name] = getattr(draft, name)
        return {name: value for name, value in changes.items() if name in before or value != getattr(self, name)}

    def replace(self, **changes: Any) -> Self:
        """This spec with some fields changed, checked again; fields that followed from others follow again."""
        self.refuse_unknown(changes)
        derived = self.defaults()
        changes = {name: None for name in derived if getattr(self, name) == derived[name]} | changes
        return dataclasses.replace(self, **changes)  # pyright: ignore[reportArgumentType]

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists of these, strings, numbers, booleans and None: ready for JSON or TOML."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}  # pyright: ignore[reportArgumentType]
        return {name: to_plain(value) for name, value in values.items()}

    @classmethod
    def refuse_unknown(cls, names: Iterable[object]) -> None:
        """Raise for a name that is no field, pointing to the spec whose field it is or to the closest spelling."""
        fields = {f.name: f for f in dataclasses.fields(cls)}  # pyright: ignore[reportArgumentType]
        for name in names:
            if name in fields:
                continue
            inner = {field: f.metadata["spec"] for field, f in fields.items() if "spec" in f.metadata}
            owner = next((field for field, kind in inner.items() if name in kind.__dataclass_fields__), None)
            hint = suggest_name(name, fields) if owner is None else f" (it belongs to {owner})"
            known = ", ".join(fields)
            raise SpecError(
                f"{cls.__name__} has no field {format_value(name)}{hint}; its fields are {known}.", str(name)
            )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The inverse of `to_dict`. Unknown and missing keys are errors that name the key."""
        if not isinstance(values, Mapping):
            raise SpecError(f"{cls.__name__} is read from a mapping, but {format_value(values)} came.", cls.__name__)
        cls.refuse_unknown(values)
        fields = {f.name: f for f in dataclasses.fields(cls)}  # pyright: ignore[reportArgumentType]
        ready = {}
        for name, field in fields.items():
            if name not in values:
                if field.default is MISSING:
                    raise SpecError(f"{cls.__name__} needs {name}, which is missing.", name)
                continue
            value, inner = values[name], field.metadata.get("spec")
            if inner is not None and isinstance(value, Mapping):
                value = read_inner_spec(inner, value, name)
            elif inner is not None and isinstance(value, list | tuple):
                several = [
                    read_inner_spec(inner, v, f"{name}[{i}]") if isinstance(v, Mapping) else v
                    for i, v in enumerate(value)
                ]
                value = tuple(several)
            ready[name] = value
        return cls(**ready)


def to_plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [to_plain(one) for one in value]
    return value.to_dict() if isinstance(value, Spec) else value


def read_inner_spec(kind: type[Spec], values: Mapping[str, Any], name: str) -> Spec:
    """A spec inside another one, whose errors say under which name."""
    try:
        return kind.from_dict(values)
    except SpecError as error:
        raise SpecError(f"{name}: {error}", f"{name}.{error.field}", error.nearest) from None
