"""The command line: parse, call, print."""

import dataclasses
import functools
import json
import operator
import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any, Literal, NoReturn, get_args, get_type_hints

from qklab import demo, describe
from qklab.attention.spec import AttentionSpec, CouplingKind, CouplingSpec, LatentSpec
from qklab.schema import SpecError


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


@dataclasses.dataclass(frozen=True)
class Describe(SpecFlags):
    __doc__ = SpecFlags.__doc__
    json: bool = False


@dataclasses.dataclass(frozen=True)
class Demo:
    pass


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


def run_describe(flags: Any) -> int:
    """Name, formula, parameters, FLOPs and cache bytes of an attention layer, against (Q,K,V); or why it is illegal."""
    spec = attention_spec(flags)
    print(json.dumps(describe.as_dict(spec), indent=2, ensure_ascii=False) if flags.json else describe.as_text(spec))
    return 0


def run_demo(flags: Any) -> int:
    """Build every mechanism, print what it costs, and check that decoding from its cache equals the full forward."""
    from rich.console import Console

    return 0 if demo.run(Console(width=None if sys.stdout.isatty() else 140)) else 1


COMMANDS = {"describe": (Describe, run_describe), "demo": (Demo, run_demo)}


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Entry point of `qklab`: bad input ends in one sentence on stderr and exit code 2."""
    try:
        import tyro
    except ImportError:
        sys.exit("qklab: the command line needs the package tyro; install it with: pip install tyro")
    parsers: list[Any] = [
        Annotated[flags, tyro.conf.subcommand(name, description=run.__doc__)] for name, (flags, run) in COMMANDS.items()
    ]
    either: Any = functools.reduce(operator.or_, parsers)
    try:
        chosen = tyro.cli(either, prog="qklab", description="Attention, between Q and K.", args=arguments)
        code = next(run for flags, run in COMMANDS.values() if isinstance(chosen, flags))(chosen)
    except ValueError as error:
        print(f"qklab: {error}", file=sys.stderr)
        code = 2
    except BrokenPipeError:  # the reader, e.g. `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    sys.exit(code)


if __name__ == "__main__":
    main()
