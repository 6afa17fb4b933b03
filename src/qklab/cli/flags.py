"""Specs as command-line flags, and back."""

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import tyro

from qklab.attention.spec import AttentionSpec, CouplingKind, CouplingSpec, LatentSpec
from qklab.data.spec import DataSpec
from qklab.model.spec import DecoderSpec
from qklab.optim.control_spec import LogitControlSpec
from qklab.optim.optimiser import OptimiserSpec
from qklab.optim.schedule import ScheduleSpec
from qklab.schema import SpecError
from qklab.train.spec import BatchSpec, BudgetSpec, EvaluationSpec, ExecutionSpec, RunSpec


def flags(spec: type, **overrides: tuple[Any, Any]) -> type:
    """A dataclass of command-line flags for a spec's fields; a field without a default may be left out."""
    types = get_type_hints(spec)
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


CouplingFlags = flags(CouplingSpec, kind=(Literal[("none", *get_args(CouplingKind))], "none"))
LatentFlags = flags(LatentSpec)
SpecFlags = flags(
    AttentionSpec,
    width=(int | None, None),
    heads=(int, 8),
    coupling=(CouplingFlags, CouplingFlags()),
    latent=(LatentFlags, LatentFlags()),
)


def given(flags: Any) -> dict[str, Any]:
    """The flags that differ from their defaults."""
    return {
        field.name: getattr(flags, field.name)
        for field in dataclasses.fields(flags)
        if getattr(flags, field.name) != field.default
    }


def attention_spec(flags: Any) -> AttentionSpec:
    """Command-line flags → spec; the width is 64 per head unless given."""
    chosen = {name: v for name, v in given(flags).items() if name not in ("coupling", "latent", "json")}
    coupling, latent = given(flags.coupling), given(flags.latent)
    if "kind" in coupling:
        chosen["coupling"] = coupling
    elif coupling:
        name = next(iter(coupling))
        raise SpecError(
            f"coupling.{name} came without a coupling; add --coupling.kind, e.g. leapfrog.", "coupling.kind"
        )
    if latent:
        chosen["latent"] = latent
    chosen.setdefault("width", max(flags.heads, 1) * (flags.head_width or 64))
    return AttentionSpec.from_dict(chosen | {"heads": flags.heads})


def optional_flags(spec: type, elsewhere: Mapping[str, str] | None = None, /, **overrides: Any) -> type:
    """Flags for a spec's fields that all may be left out, so that a file or the defaults decide.

    An override is another type for a field, or None to leave the field out; `elsewhere` says what holds by default
    where that is not the field's own default.
    """
    types = get_type_hints(spec) | overrides
    made: list[tuple[str, Any, Any]] = []
    for field in dataclasses.fields(spec):
        kind = types[field.name]
        if dataclasses.is_dataclass(kind) and isinstance(kind, type):
            made.append((field.name, kind, dataclasses.field(default=kind())))
        elif kind is not None:
            default = (elsewhere or {}).get(field.name, field.default)
            made.append((field.name, optional(kind, default), dataclasses.field(default=None)))
    made_class = dataclasses.make_dataclass(f"{spec.__name__}Choices", made, frozen=True)
    made_class.__doc__ = spec.__doc__
    return made_class


def optional(kind: Any, default: Any = None) -> Any:
    """The type of a flag that may be left out; its help shows what then holds, instead of None."""
    words = get_args(kind) if get_origin(kind) is Literal else ("True", "False") if kind is bool else ()
    plain = next((t for t in get_args(kind) if t is not type(None)), kind)
    metavar = "{" + ",".join(words) + "}" if words else getattr(plain, "__name__", str(plain)).upper()
    known = default is not None and default is not dataclasses.MISSING
    hint = f"(default: {default})" if known else ""
    return Annotated[kind | None, tyro.conf.arg(metavar=metavar, help_behavior_hint=hint)]


def chosen(flags: Any) -> dict[str, Any]:
    """The optional flags that were given, nested as they are."""
    values: dict[str, Any] = {}
    for field in dataclasses.fields(flags):
        value = getattr(flags, field.name)
        if dataclasses.is_dataclass(value):
            value = chosen(value) or None
        if value is not None:
            values[field.name] = value
    return values


def run_flags() -> type:
    """Every field of a run as a flag, as in its TOML file: --model.recipe, --attention.share, --optimiser.lr, …"""
    coupling = optional_flags(CouplingSpec, {"kind": "none"}, kind=Literal[("none", *get_args(CouplingKind))])
    sized: dict[str, str] = dict.fromkeys(("heads", "position", "bias"), "the recipe's")
    latent = optional_flags(LatentSpec)
    attention = optional_flags(AttentionSpec, sized, width=None, coupling=coupling, latent=latent)
    sized = dict.fromkeys(("width", "layers", "context", "mlp", "norm", "bias"), "the recipe's")
    model = optional_flags(DecoderSpec, sized | {"vocab": "the tokenizer's"}, attention=None)
    recipe = [("recipe", optional(str, "nano"), dataclasses.field(default=None))]
    model = dataclasses.make_dataclass("ModelChoices", recipe, bases=(model,), frozen=True)
    model.__doc__ = "A recipe's name (nano, 51m, 60m, 124m, …) and changes to it."
    parts = {
        "corpus": optional_flags(DataSpec),
        "batch": optional_flags(BatchSpec),
        "optimiser": optional_flags(OptimiserSpec),
        "logit_control": optional_flags(LogitControlSpec, {"method": "none"}),
        "schedule": optional_flags(ScheduleSpec),
        "budget": optional_flags(BudgetSpec),
        "evaluation": optional_flags(EvaluationSpec),
    }
    more = {"attention": attention, "execution": optional_flags(ExecutionSpec)}
    extra = [(name, kind, dataclasses.field(default=kind())) for name, kind in more.items()]
    return dataclasses.make_dataclass(
        "RunChoices", extra, bases=(optional_flags(RunSpec, model=model, **parts),), frozen=True
    )


RunChoices = run_flags()
CorpusChoices = optional_flags(DataSpec, source=None)
