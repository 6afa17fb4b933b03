"""Every legal spec over a grid of choices, read from the specs themselves: a new choice is under test by existing."""

import dataclasses
import heapq
import itertools
from collections.abc import Collection, Iterable, Iterator
from functools import cache
from typing import Any, TypeVar

import torch
from torch import nn

from qklab import register
from qklab.attention.coupling_spec import CouplingSpec
from qklab.attention.spec import AttentionSpec, LatentSpec
from qklab.model.spec import DecoderSpec
from qklab.schema import Spec, SpecError

Module = TypeVar("Module", bound=nn.Module)
SIZE: dict[str, Any] = {"width": 8, "heads": 4, "head_width": 4}
# numbers worth trying; choices and flags are found by themselves
NUMBERS: dict[type[Spec], dict[str, tuple[Any, ...]]] = {
    AttentionSpec: {"rope_fraction": (0.5,), "short_conv": (3,), "window": (2,)},
    CouplingSpec: {"steps": (3,), "force_width": (6,), "step_size": (0.3,), "scale_limit": (0.5,)},
}


# everything that looks back at once: each has its own part of the cache
LOOKING_BACK: dict[str, Any] = {
    "short_conv": 3,
    "coupling": CouplingSpec(kind="cca"),
    "key_shift": True,
    "rope_fraction": 0.5,
    "kv_heads": 2,
}


def choices(kind: type[Spec]) -> dict[str, tuple[Any, ...]]:
    """Field → all values of its choice or flag."""
    fields = dataclasses.fields(kind)  # pyright: ignore[reportArgumentType]
    return {field.name: tuple(field.metadata["among"]) for field in fields if "among" in field.metadata}


def list_departures(kind: type[Spec], besides: Iterable[str]) -> list[dict[str, Any]]:
    """One field at a time away from its default."""
    defaults = {field.name: field.default for field in dataclasses.fields(kind)}  # pyright: ignore[reportArgumentType]
    options = {name: values for name, values in choices(kind).items() if name not in besides} | NUMBERS[kind]
    return [{name: value} for name, values in options.items() for value in values if value != defaults[name]]


def keep_legal(combinations: Iterable[dict[str, Any]]) -> Iterator[AttentionSpec]:
    for combination in combinations:
        try:
            yield AttentionSpec(**SIZE | combination)
        except SpecError:
            continue


def list_couplings() -> Iterator[CouplingSpec]:
    """Every kind, alone and with each option that it allows."""
    for kind in choices(CouplingSpec)["kind"]:
        for option in [{}, *list_departures(CouplingSpec, besides=("kind",))]:
            try:
                yield CouplingSpec(kind=kind, **option)
            except SpecError:
                continue


def list_choices(spec: AttentionSpec) -> list[tuple[str, Any]]:
    """Every choice that a spec makes, those of its parts under the part's name."""
    found: dict[str, Any] = {}
    for name, value in spec.to_dict().items():
        found |= {f"{name}.{key}": part for key, part in value.items()} if isinstance(value, dict) else {name: value}
    return list(found.items())


def cover_choices(
    specs: Iterable[AttentionSpec], together: int, among: Collection[str] | None = None
) -> list[AttentionSpec]:
    """So few of the specs that any so many choices which one of them makes together are made by one of these; choices
    of all fields, or of those named."""

    def combine(spec: AttentionSpec) -> set[Any]:
        chosen = (choice for choice in list_choices(spec) if among is None or choice[0] in among)
        return set(itertools.combinations(chosen, together))

    made = {spec: combine(spec) for spec in specs}
    every, kept, left = list(made), list[AttentionSpec](), set[Any]().union(*made.values())
    queue = [(-len(made[spec]), number) for number, spec in enumerate(every)]
    heapq.heapify(queue)
    while left:
        number = heapq.heappop(queue)[1]  # of those with the most that was left when they were last asked
        new = made[every[number]] & left
        if queue and len(new) < -queue[0][0]:
            heapq.heappush(queue, (-len(new), number))
            continue
        kept.append(every[number])
        left -= new
    return kept


@cache
def grid() -> list[AttentionSpec]:
    """share × mix × norm × coupling kind × {no groups, groups} in full; every coupling option with groups; any two
    options with each other, and on (share, mix) both ways round in time; and latents."""
    stage = choices(AttentionSpec)
    kinds = [None, *(CouplingSpec(kind=kind) for kind in choices(CouplingSpec)["kind"])]
    full = (
        {"share": share, "mix": mix, "norm": norm, "coupling": coupling, "kv_heads": kv_heads}
        for share, mix, norm, coupling, kv_heads in itertools.product(
            stage["share"], stage["mix"], stage["norm"], kinds, (4, 2)
        )
    )
    coupled = ({"coupling": coupling, "kv_heads": 2} for coupling in list_couplings())
    options = [{}, *list_departures(AttentionSpec, besides=("share", "mix", "causal"))]
    options += [{"kv_heads": 1}, *({"coupling": coupling} for coupling in kinds)]
    options += [{"asymmetry_2d": True, "asymmetry_free_scale": True}]
    options += [{"key_shift": True, "rope_fraction": 0.5}, LOOKING_BACK]
    optional = (
        {"share": share, "mix": mix, "causal": causal} | one | other
        for share, mix, causal, (one, other) in itertools.product(
            stage["share"], stage["mix"], stage["causal"], itertools.combinations(options, 2)
        )
    )
    latents = (
        {
            "latent": LatentSpec(query_rank=6, kv_rank=5, rope_width=rope_width, norm=norm),
            "position": "rope" if rope_width else "none",
            "causal": causal,
        }
        | option
        for rope_width, norm, causal, option in itertools.product((2, 0), (True, False), (True, False), options)
    )
    latent = LatentSpec(query_rank=6, kv_rank=5, rope_width=2)
    moved = ({"latent": latent, "coupling": coupling} for coupling in list_couplings())
    covering = (cover_choices(keep_legal(each), 2) for each in (optional, latents))
    specs = itertools.chain(keep_legal(full), keep_legal(coupled), *covering, keep_legal(moved))
    return list(dict.fromkeys(specs))


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
    (
        AttentionSpec(**SIZE, window=2, sinks=True),
        AttentionSpec(**SIZE, window=3, kv_heads=2, rope_base=50.0, norm="qk", value_norm=True),
        AttentionSpec(**SIZE, kv_heads=1, share="k=v", norm="qk", value_norm=True, gate="head", exclusive=True),
    ),
)


def list_decoders(pattern: str) -> list[DecoderSpec]:
    """Small decoders whose layers follow a registered pattern, with and without groups, under every share it allows."""
    found = []
    for share, kv_heads in itertools.product(choices(AttentionSpec)["share"], (4, 2)):
        try:
            specs = tuple(
                AttentionSpec.from_dict(SIZE | {"share": share, "kv_heads": kv_heads} | layer)
                for layer in register.pattern[pattern]()
            )
            found.append(DecoderSpec(vocab=11, width=SIZE["width"], layers=len(specs) + 1, attention=specs, context=8))
        except SpecError:
            continue
    return found


def randomise(module: Module, seed: int = 0) -> Module:
    """The module in float64 with noise on every parameter, so that nothing sits at a special value such as 0 or 1."""
    generator = torch.Generator().manual_seed(seed)
    module = module.double()
    with torch.no_grad():
        for parameter in module.parameters():
            noise = torch.empty(parameter.shape, dtype=torch.float64).normal_(0, 0.3, generator=generator)
            parameter.add_(noise.to(parameter.device))
    return module
