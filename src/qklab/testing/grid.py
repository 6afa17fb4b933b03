"""Every legal spec over a grid of choices, read from the specs themselves: a new choice is under test by existing."""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import nn

from qklab.attention.spec import AttentionSpec, CouplingSpec, LatentSpec
from qklab.schema import Spec, SpecError

Module = TypeVar("Module", bound=nn.Module)
SIZE: dict[str, Any] = {"width": 8, "heads": 4, "head_width": 4}
# numbers worth trying; choices and flags are found by themselves
NUMBERS: dict[type[Spec], dict[str, tuple[Any, ...]]] = {
    AttentionSpec: {"rope_fraction": (0.5,)},
    CouplingSpec: {"steps": (3,), "force_width": (6,), "step_size": (0.3,), "scale_limit": (0.5,)},
}


def choices(kind: type[Spec]) -> dict[str, tuple[Any, ...]]:
    """Field → all values of its choice or flag."""
    fields = dataclasses.fields(kind)  # pyright: ignore[reportArgumentType]
    return {field.name: tuple(field.metadata["among"]) for field in fields if "among" in field.metadata}


def departures(kind: type[Spec], besides: Iterable[str]) -> list[dict[str, Any]]:
    """One field at a time away from its default."""
    defaults = {field.name: field.default for field in dataclasses.fields(kind)}  # pyright: ignore[reportArgumentType]
    options = {name: values for name, values in choices(kind).items() if name not in besides} | NUMBERS[kind]
    return [{name: value} for name, values in options.items() for value in values if value != defaults[name]]


def legal(combinations: Iterable[dict[str, Any]]) -> Iterator[AttentionSpec]:
    for combination in combinations:
        try:
            yield AttentionSpec(**SIZE | combination)
        except SpecError:
            continue


def couplings() -> Iterator[CouplingSpec]:
    """Every kind, alone and with each option that it allows."""
    for kind in choices(CouplingSpec)["kind"]:
        for option in [{}, *departures(CouplingSpec, besides=("kind",))]:
            try:
                yield CouplingSpec(kind=kind, **option)
            except SpecError:
                continue


def grid() -> list[AttentionSpec]:
    """share × mix × norm × coupling kind × {no groups, groups} in full; every coupling option with groups; every other
    option on top of every (share, mix) both ways round in time; and latents."""
    stage = choices(AttentionSpec)
    kinds = [None, *(CouplingSpec(kind=kind) for kind in choices(CouplingSpec)["kind"])]
    full = (
        {"share": share, "mix": mix, "norm": norm, "coupling": coupling, "kv_heads": kv_heads}
        for share, mix, norm, coupling, kv_heads in itertools.product(
            stage["share"], stage["mix"], stage["norm"], kinds, (4, 2)
        )
    )
    coupled = ({"coupling": coupling, "kv_heads": 2} for coupling in couplings())
    options = [{}, *departures(AttentionSpec, besides=("share", "mix", "norm", "causal"))]
    options += [{"kv_heads": 1}, {"kv_heads": 1, "coupling": CouplingSpec()}]
    options += [{"asymmetry_2d": True, "asymmetry_free_scale": True}]
    optional = (
        {"share": share, "mix": mix, "causal": causal} | option
        for share, mix, causal, option in itertools.product(stage["share"], stage["mix"], stage["causal"], options)
    )
    latents = (
        {
            "latent": LatentSpec(query_rank=6, kv_rank=5, rope_width=rope_width, norm=norm),
            "position": "rope" if rope_width else "none",
            "causal": causal,
            "bias": bias,
        }
        for rope_width, norm, causal, bias in itertools.product((2, 0), (True, False), (True, False), (True, False))
    )
    return list(dict.fromkeys(legal(itertools.chain(full, coupled, optional, latents))))


# layers of one model that differ in what is projected, coupled, rotated, mixed and cached
PATTERNS: tuple[tuple[AttentionSpec, ...], ...] = (
    (AttentionSpec(**SIZE), AttentionSpec(**SIZE, share="k=v")),
    (
        AttentionSpec(**SIZE, kv_heads=2, coupling=CouplingSpec(), norm="qk"),
        AttentionSpec(**SIZE, kv_heads=2, coupling=CouplingSpec(), norm="qk"),
        AttentionSpec(**SIZE, latent=LatentSpec(query_rank=6, kv_rank=5, rope_width=2)),
    ),
    (AttentionSpec(**SIZE, position="none"), AttentionSpec(**SIZE, mix="differential-v2", rope_base=50.0, kv_heads=1)),
    (
        AttentionSpec(**SIZE, share="k=v", kv_rotation="on-read"),
        AttentionSpec(width=8, heads=2, mix="differential", share="q=k=v", kv_rotation="on-read"),
    ),
)


def randomise(module: Module, seed: int = 0) -> Module:
    """The module in float64 with noise on every parameter, so that nothing sits at a special value such as 0 or 1."""
    generator = torch.Generator().manual_seed(seed)
    module = module.double()
    with torch.no_grad():
        for parameter in module.parameters():
            noise = torch.empty(parameter.shape, dtype=torch.float64).normal_(0, 0.3, generator=generator)
            parameter.add_(noise.to(parameter.device))
    return module
