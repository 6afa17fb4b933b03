"""Which rows of which weights make the queries and keys of which head: what logit control acts on."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from qklab.attention.couple import Linear
from qklab.attention.layer import Attention
from qklab.attention.mix import LatentSoftmax
from qklab.attention.project import Latent, Projection
from qklab.schema import format_value, suggest_name

Coupling = Literal["none", "linear", "nonlinear"]
COUPLINGS: tuple[Coupling, ...] = get_args(Coupling)

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
        weight = linear if isinstance(linear, Tensor) else getattr(linear, "weight", None)
        if not isinstance(weight, Tensor) or weight.dim() != 2:
            raise ValueError(f"a linear layer or a matrix is needed to find rows in, but {format_value(linear)} came.")
        axis = 1 if any(kind.__name__ == "Conv1D" for kind in type(linear).__mro__) else 0
        start, stop = among or (0, weight.shape[axis])
        if not isinstance(heads, int) or heads < 1 or (stop - start) % heads:
            raise ValueError(
                f"heads must divide the {stop - start} rows of the matrix, but {format_value(heads)} came."
            )
        rows = torch.arange(start, stop).view(heads, -1)
        if within is not None:
            rows = rows[:, within[0] : within[1]]
        return cls(weight, rows, None if isinstance(linear, Tensor) else getattr(linear, "bias", None), axis, gain)

    @property
    def heads(self) -> int:
        return len(self.rows)

    @property
    def tensors(self) -> list[Tensor]:
        """The parameters that have these rows."""
        return [self.weight] if self.bias is None else [self.weight, self.bias]


@dataclass(frozen=True, eq=False)
class LayerRoles:
    """The parts of one attention layer that decide its logits, by their symbol.

    `q` and `k`; or `qk` where one matrix makes both; or, for MLA, `uq`, `dkv`, `uk` and, where they exist, `dq`, `qr`,
    `kr`. A latent whose up-projections have a `gain` is normalised.

    Args:
        parts: Symbol → rows. Query head h reads key head ⌊h·G/H⌋.
        coupling: Whether q and k evolve together, and whether by a linear map.
        qk_norm: Whether q and k are normalised.
        key_is_value: Whether the key is also the value.
        module: The attention module, where logits can be watched.
    """

    parts: dict[str, Rows]
    coupling: Coupling = "none"
    qk_norm: bool = False
    key_is_value: bool = False
    module: nn.Module | None = field(default=None, repr=False)

    @property
    def kind(self) -> Literal["separate", "shared", "latent"]:
        return "shared" if "qk" in self.parts else "separate" if "q" in self.parts else "latent"

    @property
    def query(self) -> Rows:
        """The rows whose heads are the layer's softmaxes."""
        return self.parts[{"separate": "q", "shared": "qk", "latent": "uq"}[self.kind]]


Roles = dict[str, LayerRoles]


def layer_roles(
    *,
    query: nn.Module | Tensor | Rows | None = None,
    key: nn.Module | Tensor | Rows,
    heads: int,
    kv_heads: int | None = None,
    coupling: Coupling = "none",
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

    if coupling not in COUPLINGS:
        words = ", ".join(map(repr, COUPLINGS))
        raise ValueError(
            f"coupling must be one of {words}{suggest_name(coupling, COUPLINGS)}, but {format_value(coupling)} came."
        )
    k = rows(key, heads if kv_heads is None else kv_heads)
    parts = {"qk": k} if query is None or query is key else {"q": rows(query, heads), "k": k}
    if "q" in parts and parts["q"].heads % k.heads:
        raise ValueError(f"the key heads must divide the {parts['q'].heads} query heads, but there are {k.heads}.")
    return LayerRoles(parts, coupling, qk_norm, key_is_value)


def attention_roles(model: nn.Module) -> Roles:
    """Layer name → roles, for every attention layer of a qklab model or of Transformers' Llama, Qwen2, Qwen3, GPT-2,
    GPT-NeoX, DeepSeek-V3 and others that name their projections alike.

    Call it on the model the optimiser sees: after moving, sharding or converting its parameters.
    """
    found: Roles = {}
    for name, module in model.named_modules():
        roles = next((roles for find in FINDERS if (roles := find(module)) is not None), None)
        if roles is not None:
            found[plain(name) or "attention"] = roles
    if not found:
        raise ValueError(
            f"no attention was recognised in {type(model).__name__}: known are qklab's own layers and Transformers' "
            "Llama, Qwen2, Qwen3, GPT-2, GPT-NeoX and DeepSeek-V3; for others pass a mapping from a layer's name to "
            "its query, key and heads."
        )
    return found


def plain(name: str) -> str:
    """A module's name without what DDP and torch.compile put into it, so that it is the same with and without them."""
    return ".".join(word for word in name.split(".") if word not in ("module", "_orig_mod"))


def as_roles(roles: Mapping[str, LayerRoles | Mapping[str, Any]]) -> Roles:
    """Roles as `attention_roles` gives them, from a mapping whose values may also be keywords of `layer_roles`."""
    if not isinstance(roles, Mapping) or not roles:
        raise ValueError(
            f"roles must be a mapping from layer names to their query and key, but {format_value(roles)} came."
        )
    made: Roles = {}
    for name, layer in roles.items():
        try:
            made[str(name)] = layer if isinstance(layer, LayerRoles) else read_roles(layer)
        except ValueError as error:
            raise ValueError(f"the roles of layer {name} cannot be read: {error}") from None
    return made


def read_roles(layer: Any) -> LayerRoles:
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


def of_qklab(module: nn.Module) -> LayerRoles | None:
    if not isinstance(module, Attention):
        return None
    spec, project, mix = module.spec, module.project, module.mix
    coupling = "none" if module.couple is None else "linear" if isinstance(module.couple, Linear) else "nonlinear"
    if isinstance(project, Projection):
        key = Rows.of(project.key, spec.kv_heads)
        query = None if project.query is None else Rows.of(project.query, spec.query_heads)
        parts = {"qk": key} if query is None else {"q": query, "k": key}
        return LayerRoles(parts, coupling, module.normalise is not None, spec.key_is_value, module)
    assert isinstance(project, Latent)
    assert isinstance(mix, LatentSoftmax)
    parts = {
        "dq": Rows.of(project.down_query, 1),
        "uq": Rows.of(project.up_query, spec.heads, gain=project.query_gain),
        "dkv": Rows.of(project.down_key_value, 1),
        "uk": Rows.of(mix.up_key, spec.heads, gain=project.key_value_gain),
    }
    if project.rope_query is not None and project.rope_key is not None:
        parts["qr"] = Rows.of(project.rope_query, spec.heads, gain=project.query_gain)
        parts["kr"] = Rows.of(project.rope_key, 1)
    return LayerRoles(parts, module=module)


def has(module: nn.Module, *names: str) -> bool:
    return all(isinstance(getattr(module, name, None), nn.Module) for name in names)


def is_a(module: nn.Module, kind: str) -> bool:
    """By the name of its class or of one it derives from: FSDP2 puts a class of its own on top."""
    return any(own.__name__ == kind for own in type(module).__mro__)


def of_llama(module: nn.Module) -> LayerRoles | None:
    """q_proj and k_proj with rows head by head: Llama, Mistral, Gemma, Qwen2, and with norms on q and k Qwen3.

    Not where q_proj also makes a gate (Qwen3-Next), nor where a convolution follows (linear attention).
    """
    width = getattr(module, "head_dim", None)
    if not has(module, "q_proj", "k_proj") or has(module, "conv1d") or not isinstance(width, int):
        return None
    layer: Any = module
    parts = {}
    for symbol, linear in (("q", layer.q_proj), ("k", layer.k_proj)):
        parts[symbol] = Rows.of(linear, linear.weight.shape[0] // width)
    heads, groups = parts["q"].heads, getattr(module, "num_key_value_groups", None)
    if groups is not None and heads != groups * parts["k"].heads:
        return None
    norms = [name for name, child in module.named_children() if "norm" in name and not isinstance(child, nn.Identity)]
    qk_norm = any(name.startswith(("q_", "k_", "qk_", "query_", "key_")) for name in norms)
    return LayerRoles(parts, qk_norm=qk_norm, module=module)


def of_gpt2(module: nn.Module) -> LayerRoles | None:
    """c_attn: the columns of q, of k and of v, side by side."""
    heads = getattr(module, "num_heads", None)
    if not is_a(module, "GPT2Attention") or not isinstance(heads, int) or not has(module, "c_attn"):
        return None
    if getattr(module, "is_cross_attention", False):
        raise ValueError("GPT-2's cross-attention is not known to attention_roles; pass a mapping of its layers.")
    fused: Any = module.c_attn
    third = fused.weight.shape[1] // 3
    q, k = (Rows.of(fused, heads, among=(i * third, (i + 1) * third)) for i in range(2))
    return LayerRoles({"q": q, "k": k}, module=module)


def of_neox(module: nn.Module) -> LayerRoles | None:
    """query_key_value: for each head the rows of its q, then of its k, then of its v."""
    width = getattr(module, "head_size", None)
    if not is_a(module, "GPTNeoXAttention") or not isinstance(width, int):
        return None
    fused: Any = module.query_key_value
    heads = fused.weight.shape[0] // (3 * width)
    q, k = (Rows.of(fused, heads, within=(i * width, (i + 1) * width)) for i in range(2))
    return LayerRoles({"q": q, "k": k}, module=module)


def of_deepseek(module: nn.Module) -> LayerRoles | None:
    """MLA as in DeepSeek-V2 and V3: fused up-projections, and the rotary key fused with the latent."""
    if not has(module, "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj"):
        return None
    layer: Any = module
    heads, nope, rank = layer.num_heads, layer.qk_nope_head_dim, layer.kv_lora_rank
    compressed = has(module, "q_a_proj", "q_b_proj")
    query = layer.q_b_proj if compressed else layer.q_proj
    gain = layer.q_a_layernorm.weight if compressed else None
    every = layer.kv_a_proj_with_mqa.weight.shape[0]
    parts = {"dq": Rows.of(layer.q_a_proj, 1)} if compressed else {}
    parts |= {
        "uq": Rows.of(query, heads, within=(0, nope), gain=gain),
        "qr": Rows.of(query, heads, within=(nope, query.weight.shape[0] // heads), gain=gain),
        "dkv": Rows.of(layer.kv_a_proj_with_mqa, 1, among=(0, rank)),
        "kr": Rows.of(layer.kv_a_proj_with_mqa, 1, among=(rank, every)),
        "uk": Rows.of(layer.kv_b_proj, heads, within=(0, nope), gain=layer.kv_a_layernorm.weight),
    }
    return LayerRoles(parts, module=module)


FINDERS: tuple[Callable[[nn.Module], LayerRoles | None], ...] = (of_qklab, of_deepseek, of_gpt2, of_neox, of_llama)


def claimed(roles: Roles) -> Iterator[tuple[str, str, Rows]]:
    """Every (layer, symbol, rows)."""
    for name, layer in roles.items():
        for symbol, rows in layer.parts.items():
            yield name, symbol, rows


def refuse_overlap(roles: Roles) -> None:
    """Raise where two roles claim the same row of a weight: it could only follow one of them."""
    owners: dict[tuple[int, int], str] = {}
    for name, symbol, rows in claimed(roles):
        for row in rows.rows.flatten().tolist():
            who = f"{MEANING[symbol]} of {name}"
            other = owners.setdefault((id(rows.weight), row), who)
            if other != who:
                raise ValueError(
                    f"roles must not overlap, but row {row} of one weight is claimed as {other} and as {who}; give "
                    "each row one role."
                )
