"""Which rows of which weights make the queries and keys of which head: what logit control acts on.

qklab's own layers are read here; layers of other people's models by the families in `register.family`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from qklab import register
from qklab.attention.couple import Linear
from qklab.attention.layer import Attention
from qklab.attention.mix import LatentSoftmax
from qklab.attention.project import Latent, Projection
from qklab.schema import format_value, suggest_name

CouplingLinearity = Literal["none", "linear", "nonlinear"]

MEANING = {
    "q": "W_q",
    "k": "W_k",
    "qk": "the matrix of q and k",
    "dq": "W_dq",
    "uq": "W_uq",
    "qr": "W_qr",
    "dkv": "W_dkv",
    "uk": "W_uk",
    "kr": "W_kr",
}


@dataclass(frozen=True, eq=False)
class Rows:
    """The outputs `rows` [heads, D] of a linear map, by head.

    Args:
        weight: Its matrix [outputs, inputs]; [inputs, outputs] where `axis` is 1, as in GPT-2.
        rows: Which outputs, a tensor of whole numbers.
        bias: Its bias [outputs], which counts as one more column of the matrix.
        axis: The weight's axis that counts outputs.
        gain: The gain [inputs] of a norm right before the map, which counts as part of the matrix.
    """

    weight: Tensor
    rows: Tensor
    bias: Tensor | None = None
    axis: int = 0
    gain: Tensor | None = None

    def __post_init__(self) -> None:
        rows, outputs = self.rows, self.weight.shape[self.axis]
        if rows.dim() != 2 or rows.is_floating_point() or not rows.numel():
            raise ValueError(f"rows must be whole numbers [heads, width], but {rows.dtype} {list(rows.shape)} came.")
        for name, vector, axis in (("gain", self.gain, 1 - self.axis), ("bias", self.bias, self.axis)):
            if vector is not None and list(vector.shape) != [self.weight.shape[axis]]:
                side = "outputs" if name == "bias" else "inputs"
                raise ValueError(
                    f"a {name} must have one entry for each of the matrix's {self.weight.shape[axis]} {side}, but "
                    f"{list(vector.shape)} came."
                )
        if rows.min() < 0 or rows.max() >= outputs or len(rows.unique()) != rows.numel():
            raise ValueError(
                f"rows must be different ones of the {outputs} the matrix has, but {format_value(rows)} came."
            )

    @classmethod
    def at(cls, linear: nn.Module | Tensor, rows: Tensor, gain: Tensor | None = None) -> Rows:
        """The outputs `rows` [heads, D] of a linear layer, or of a bare matrix."""
        weight = linear if isinstance(linear, Tensor) else getattr(linear, "weight", None)
        if not isinstance(weight, Tensor) or weight.dim() != 2:
            raise ValueError(f"a linear layer or a matrix is needed to find rows in, but {format_value(linear)} came.")
        if getattr(linear, "base_layer", None) is not None:
            raise ValueError(
                f"an adapter lies on queries or keys ({type(linear).__name__} of PEFT), and low-rank updates are not "
                "controlled; merge it first, or put adapters on values and outputs alone."
            )
        bias = None if isinstance(linear, Tensor) else getattr(linear, "bias", None)
        return cls(weight, rows, bias, output_axis(linear), gain)

    @classmethod
    def of(
        cls,
        linear: nn.Module | Tensor,
        heads: int,
        *,
        within: tuple[int, int] | None = None,
        among: tuple[int, int] | None = None,
        gain: Tensor | None = None,
    ) -> Rows:
        """The rows of a linear layer (or of a bare matrix), divided evenly among `heads`.

        `among` = (start, stop) takes only these of the layer's outputs; `within` = (start, stop) then takes only these
        of each head's rows.
        """
        every = cls.at(linear, torch.zeros(1, 1, dtype=torch.long))
        start, stop = among or (0, every.weight.shape[every.axis])
        if not isinstance(heads, int) or heads < 1 or (stop - start) % heads:
            raise ValueError(
                f"heads must divide the {stop - start} rows of the matrix, but {format_value(heads)} came."
            )
        rows = torch.arange(start, stop).view(heads, -1)
        return cls.at(linear, rows if within is None else rows[:, within[0] : within[1]], gain)

    @property
    def heads(self) -> int:
        return len(self.rows)

    @property
    def tensors(self) -> list[Tensor]:
        """The parameters that have these rows."""
        return [self.weight] if self.bias is None else [self.weight, self.bias]


def output_axis(linear: nn.Module | Tensor) -> int:
    """The axis of its weight that counts outputs."""
    return int(any(kind.__name__ == "Conv1D" for kind in type(linear).__mro__))


@dataclass(frozen=True, eq=False)
class LayerRoles:
    """The projections of one attention layer that decide its logits, by their symbol.

    `q` and `k`; or `qk` where one matrix makes both; or, for MLA, `uq`, `dkv`, `uk` and, where they exist, `dq`, `qr`,
    `kr`. A latent whose up-projections have a `gain` is normalised.

    Args:
        projections: Symbol → rows. Query head h reads key head ⌊h·G/H⌋.
        coupling: Whether q and k evolve together, and whether by a linear map.
        qk_norm: Whether q and k are normalised.
        key_is_value: Whether the key is also the value.
        biased: Whether something is added to the logits that is no product of q and k.
        watch: Called with a tensor [heads], has it raised to the largest logit of every training pass from then on.
    """

    projections: dict[str, Rows]
    coupling: CouplingLinearity = "none"
    qk_norm: bool = False
    key_is_value: bool = False
    biased: bool = False
    watch: Callable[[Tensor], None] | None = field(default=None, repr=False)

    @property
    def kind(self) -> Literal["separate", "shared", "latent"]:
        return "shared" if "qk" in self.projections else "separate" if "q" in self.projections else "latent"

    @property
    def query(self) -> Rows:
        """The rows whose heads are the layer's softmaxes."""
        return self.projections[{"separate": "q", "shared": "qk", "latent": "uq"}[self.kind]]


Roles = dict[str, LayerRoles]


def layer_roles(
    *,
    query: nn.Module | Tensor | Rows | None = None,
    key: nn.Module | Tensor | Rows,
    heads: int,
    kv_heads: int | None = None,
    coupling: CouplingLinearity = "none",
    qk_norm: bool = False,
    key_is_value: bool = False,
) -> LayerRoles:
    """The roles of a layer of one's own: its query and key as linear layers, matrices or `Rows` of fused ones.

    Without `query` the key's matrix makes both.
    """

    def rows(part: nn.Module | Tensor | Rows, count: int) -> Rows:
        found = part if isinstance(part, Rows) else Rows.of(part, count)
        if found.heads != count:
            raise ValueError(f"rows of {found.heads} heads came where {count} are named.")
        return found

    check_choice("coupling", coupling, get_args(CouplingLinearity))
    k = rows(key, heads if kv_heads is None else kv_heads)
    parts = {"qk": k} if query is None or query is key else {"q": rows(query, heads), "k": k}
    if "q" in parts and parts["q"].heads % k.heads:
        raise ValueError(f"the key heads must divide the {parts['q'].heads} query heads, but there are {k.heads}.")
    return LayerRoles(parts, coupling, qk_norm, key_is_value)


def attention_roles(model: nn.Module) -> Roles:
    """Layer name → roles, for every attention layer of a qklab model or of one whose family is registered:
    those that `qklab.hf.convert` knows, DeepSeek-V3, and others that name their projections alike.

    Call it on the model the optimiser sees: after moving, sharding or converting its parameters.
    """
    found: Roles = {}
    for name, module in model.named_modules():
        roles = read_own_layer(module) if isinstance(module, Attention) else read_foreign_layer(module)
        if roles is not None:
            found[strip_wrappers(name) or "attention"] = roles
    if not found:
        raise ValueError(
            f"no attention was recognised in {type(model).__name__}: known are qklab's own layers and those of the "
            "families in docs/transformers.md; for others pass a mapping from a layer's name to its query, key and "
            "heads."
        )
    return found


def strip_wrappers(name: str) -> str:
    """A module's name without what DDP and torch.compile put into it, so that it is the same with and without them."""
    return ".".join(word for word in name.split(".") if word not in ("module", "_orig_mod"))


def read_roles(roles: Mapping[str, LayerRoles | Mapping[str, Any]]) -> Roles:
    """Roles as `attention_roles` gives them, from a mapping whose values may also be keywords of `layer_roles`."""
    if not isinstance(roles, Mapping) or not roles:
        raise ValueError(
            f"roles must be a mapping from layer names to their query and key, but {format_value(roles)} came."
        )
    made: Roles = {}
    for name, layer in roles.items():
        try:
            made[str(name)] = layer if isinstance(layer, LayerRoles) else read_layer(layer)
        except ValueError as error:
            raise ValueError(f"the roles of layer {name} cannot be read: {error}") from None
    return made


def read_layer(layer: Any) -> LayerRoles:
    if not isinstance(layer, Mapping):
        raise ValueError(f"they must be a mapping with query, key and heads, but {format_value(layer)} came.")
    words = inspect.signature(layer_roles).parameters
    for name in layer:
        if name not in words:
            raise ValueError(f"there is no {name!r}{suggest_name(name, words)}; known are {', '.join(words)}.")
    for name in ("key", "heads"):
        if name not in layer:
            raise ValueError(f"{name!r} is missing.")
    return layer_roles(**layer)


def read_foreign_layer(module: nn.Module) -> LayerRoles | None:
    """What the registered families know of a layer that is neither torch's nor ours."""
    packages = {kind.__module__.partition(".")[0] for kind in type(module).__mro__}
    if packages <= {"builtins", "typing", "torch", "qklab"}:
        return None
    try:
        families = [family() for family in register.family.values()]
    except ImportError:  # without Transformers there is nothing of it to recognise
        if "transformers" in packages:
            raise
        return None
    return next((roles for family in families if (roles := family.layer_roles(module)) is not None), None)


def coupling_kind(couple: nn.Module | None) -> CouplingLinearity:
    return "none" if couple is None else "linear" if isinstance(couple, Linear) else "nonlinear"


def read_own_layer(module: Attention) -> LayerRoles:
    spec, project, mix = module.spec, module.project, module.mix
    if isinstance(project, Projection):
        key = Rows.of(project.key, spec.kv_heads)
        query = None if project.query is None else Rows.of(project.query, spec.query_heads)
        rows = {"qk": key} if query is None else {"q": query, "k": key}
    else:
        assert isinstance(project, Latent)
        assert isinstance(mix, LatentSoftmax)
        rows = {
            "dq": Rows.of(project.down_query, 1),
            "uq": Rows.of(project.up_query, spec.heads, gain=project.query_gain),
            "dkv": Rows.of(project.down_key_value, 1),
            "uk": Rows.of(mix.up_key, spec.heads, gain=project.key_value_gain),
        }
        if project.rope_query is not None and project.rope_key is not None:
            rows["qr"] = Rows.of(project.rope_query, spec.heads, gain=project.query_gain)
            rows["kr"] = Rows.of(project.rope_key, 1)
    return LayerRoles(
        rows,
        coupling="none" if spec.latent is not None else coupling_kind(module.couple),  # it moves what goes into uq, uk
        qk_norm=spec.sets_lengths,
        key_is_value=spec.key_is_value,
        biased=spec.asymmetry_2d,
        watch=functools.partial(setattr, module, "watched"),
    )


def each_projection(roles: Roles) -> Iterator[tuple[str, str, Rows]]:
    """Every (layer, symbol, rows)."""
    for name, layer in roles.items():
        for symbol, rows in layer.projections.items():
            yield name, symbol, rows


def refuse_overlap(roles: Roles) -> None:
    """Raise where two roles claim the same row of a weight: it could only follow one of them."""
    owners: dict[tuple[int, int], str] = {}
    for name, symbol, rows in each_projection(roles):
        for row in rows.rows.flatten().tolist():
            who = f"{MEANING[symbol]} of {name}"
            other = owners.setdefault((id(rows.weight), row), who)
            if other != who:
                raise ValueError(
                    f"roles must not overlap, but row {row} of one weight is claimed as {other} and as {who}; give "
                    "each row one role."
                )


def check_choice(name: str, value: Any, among: tuple[str, ...]) -> Any:
    if value not in among:
        words = ", ".join(map(repr, among))
        raise ValueError(f"{name} must be one of {words}{suggest_name(value, among)}, but {format_value(value)} came.")
    return value
