"""Families: what the conversion has to know about each kind of Transformers model.

A family says where its attention layers keep their projections and what else they hand to the attention function. Names
of existing weights stay as they are, so that tools which find modules by name go on working.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from qklab.schema import suggest_name


@dataclass
class Weights:
    """The projections of one layer by heads: q [H, D, width], k and v [G, D, width], o [width, H, D], biases alike.

    v is None where key and value are one tensor.
    """

    q: Tensor
    k: Tensor
    v: Tensor | None
    o: Tensor
    q_bias: Tensor | None = None
    k_bias: Tensor | None = None
    v_bias: Tensor | None = None
    o_bias: Tensor | None = None


class Layout:
    """How a layer keeps its projections: `project` and `output` use them, `read` and `write` exchange them."""

    inputs: tuple[str, ...]  # the submodules that make q, k and v
    output: str  # the submodule that maps the heads back to the width

    @property
    def projections(self) -> tuple[str, ...]:
        return (*self.inputs, self.output)

    def project(self, layer: Any, x: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """x [B, T, d] → q [B, T, H, D], k and v [B, T, G, D]; v is None where it is k."""
        raise NotImplementedError

    def finish(self, layer: Any, heads: Tensor) -> Tensor:
        """[B, T, H·D] → [B, T, d]."""
        return getattr(layer, self.output)(heads)

    def read(self, layer: Any, width: int) -> Weights:
        raise NotImplementedError

    def write(self, layer: Any, weights: Weights) -> None:
        """Replace the projections by modules that hold `weights`."""
        raise NotImplementedError


def linear(weight: Tensor, bias: Tensor | None, like: nn.Module) -> nn.Linear:
    """A linear layer with weight [outputs, inputs], in the precision and on the device of `like`."""
    made = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    return filled(made, weight, bias, like)


def conv1d(weight: Tensor, bias: Tensor, like: nn.Module) -> Conv1D:
    """GPT-2's linear layer, whose weight is [inputs, outputs]."""
    with torch.device("meta"):
        made = Conv1D(weight.shape[0], weight.shape[1])
    return filled(made, weight.mT, bias, like)


def filled(made: Any, weight: Tensor, bias: Tensor | None, like: nn.Module) -> Any:
    old = like.get_parameter("weight")
    made.weight = nn.Parameter(weight.to(old).contiguous(), requires_grad=old.requires_grad)
    if bias is not None:
        made.bias = nn.Parameter(bias.to(old).contiguous(), requires_grad=old.requires_grad)
    return made.train(like.training)


def heads_of(flat: Tensor | None, width: int) -> Tensor | None:
    return None if flat is None else flat.detach().unflatten(0, (-1, width))


class Separate(Layout):
    """q_proj, k_proj, v_proj and o_proj; a layer whose value is its key has no v_proj."""

    inputs = ("q_proj", "k_proj", "v_proj")
    output = "o_proj"

    def project(self, layer: Any, x: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor | None]:
        shape = (*x.shape[:-1], -1, width)
        v = None if layer.v_proj is None else layer.v_proj(x).view(shape)
        return layer.q_proj(x).view(shape), layer.k_proj(x).view(shape), v

    def read(self, layer: Any, width: int) -> Weights:
        q, k, v = (getattr(layer, name) for name in self.inputs)
        return Weights(
            q=q.weight.detach().unflatten(0, (-1, width)),
            k=k.weight.detach().unflatten(0, (-1, width)),
            v=None if v is None else heads_of(v.weight, width),
            o=layer.o_proj.weight.detach().unflatten(1, (-1, width)),
            q_bias=heads_of(q.bias, width),
            k_bias=heads_of(k.bias, width),
            v_bias=None if v is None else heads_of(v.bias, width),
            o_bias=None if layer.o_proj.bias is None else layer.o_proj.bias.detach(),
        )

    def write(self, layer: Any, weights: Weights) -> None:
        layer.q_proj = linear(weights.q.flatten(0, 1), flat(weights.q_bias), layer.q_proj)
        layer.k_proj = linear(weights.k.flatten(0, 1), flat(weights.k_bias), layer.k_proj)
        if weights.v is None:
            layer.v_proj = None
        else:
            layer.v_proj = linear(weights.v.flatten(0, 1), flat(weights.v_bias), layer.v_proj)
        layer.o_proj = linear(weights.o.flatten(1), weights.o_bias, layer.o_proj)


def flat(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.flatten()


class Stacked(Layout):
    """GPT-2: one Conv1D makes all queries, then all keys, then all values."""

    inputs = ("c_attn",)
    output = "c_proj"

    def project(self, layer: Any, x: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor | None]:
        made = layer.c_attn(x).split(layer.embed_dim, -1)
        q, k, *v = (part.unflatten(-1, (-1, width)) for part in made)
        return q, k, v[0] if v else None

    def finish(self, layer: Any, heads: Tensor) -> Tensor:
        return layer.resid_dropout(layer.c_proj(heads))

    def read(self, layer: Any, width: int) -> Weights:
        rows = layer.c_attn.weight.detach().mT.split(layer.embed_dim)
        biases = layer.c_attn.bias.detach().split(layer.embed_dim)
        q, k, *v = (part.unflatten(0, (-1, width)) for part in rows)
        q_bias, k_bias, *v_bias = (part.unflatten(0, (-1, width)) for part in biases)
        o = layer.c_proj.weight.detach().mT.unflatten(1, (-1, width))
        value = (v[0], v_bias[0]) if v else (None, None)
        return Weights(q, k, value[0], o, q_bias, k_bias, value[1], layer.c_proj.bias.detach())

    def write(self, layer: Any, weights: Weights) -> None:
        assert weights.q_bias is not None
        assert weights.k_bias is not None
        assert weights.o_bias is not None
        rows, biases = [weights.q, weights.k], [weights.q_bias, weights.k_bias]
        if weights.v is not None:
            assert weights.v_bias is not None
            rows, biases = [*rows, weights.v], [*biases, weights.v_bias]
        layer.c_attn = conv1d(torch.cat(rows).flatten(0, 1), torch.cat(biases).flatten(), layer.c_attn)
        layer.c_proj = conv1d(weights.o.flatten(1), weights.o_bias, layer.c_proj)


class Interleaved(Layout):
    """GPT-NeoX: one linear layer makes the query, the key and the value of the first head, then of the second, …"""

    inputs = ("query_key_value",)
    output = "dense"

    def project(self, layer: Any, x: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor | None]:
        heads = layer.config.num_attention_heads
        q, k, *v = layer.query_key_value(x).unflatten(-1, (heads, -1)).split(width, -1)
        return q, k, v[0] if v else None

    def read(self, layer: Any, width: int) -> Weights:
        heads = layer.config.num_attention_heads
        source, dense = layer.query_key_value, layer.dense
        q, k, *v = source.weight.detach().unflatten(0, (heads, -1, width)).unbind(1)
        biases: list[Any] = [None] * 3
        if source.bias is not None:
            biases = [*source.bias.detach().unflatten(0, (heads, -1, width)).unbind(1), None]
        o = dense.weight.detach().unflatten(1, (-1, width))
        o_bias = None if dense.bias is None else dense.bias.detach()
        return Weights(q, k, v[0] if v else None, o, biases[0], biases[1], biases[2], o_bias)

    def write(self, layer: Any, weights: Weights) -> None:
        rows, biases = [weights.q, weights.k], [weights.q_bias, weights.k_bias]
        if weights.v is not None:
            rows, biases = [*rows, weights.v], [*biases, weights.v_bias]
        bias = None if weights.q_bias is None else torch.stack([part for part in biases if part is not None], 1)
        layer.query_key_value = linear(
            torch.stack(rows, 1).flatten(0, 2), None if bias is None else bias.flatten(), layer.query_key_value
        )
        layer.dense = linear(weights.o.flatten(1), weights.o_bias, layer.dense)


def plain(layer: Any) -> dict[str, Any]:
    return {"dropout": layer.attention_dropout if layer.training else 0.0}


def dropping(layer: Any) -> dict[str, Any]:
    return {"dropout": layer.attn_dropout.p if layer.training else 0.0}


def windowed(layer: Any) -> dict[str, Any]:
    return {**plain(layer), "sliding_window": layer.sliding_window}


def windowed_by_config(layer: Any) -> dict[str, Any]:
    return {**plain(layer), "sliding_window": getattr(layer.config, "sliding_window", None)}


def capped(layer: Any) -> dict[str, Any]:
    return {**windowed(layer), "softcap": layer.attn_logit_softcapping}


@dataclass(frozen=True)
class Family:
    """One kind of model.

    Args:
        title: What people call it.
        model_type: `config.model_type`.
        module: The Transformers module with its classes.
        attention: The name of its attention class.
        layout: How that keeps its projections.
        extras: What it hands to the attention function besides q, k, v, mask and scale.
        rotated: Whether RoPE turns q and k.
        normed: Whether it has q_norm and k_norm of its own.
        grouped: Whether its configuration knows key/value heads.
        rotary_by_kind: Whether its rotary module wants to know the kind of the layer.
    """

    title: str
    model_type: str
    module: str
    attention: str
    layout: Layout
    extras: Callable[[Any], dict[str, Any]]
    rotated: bool = True
    normed: bool = False
    grouped: bool = True
    rotary_by_kind: bool = False

    @property
    def source(self) -> Any:
        return importlib.import_module(f"transformers.models.{self.module}.modeling_{self.module}")

    @property
    def attention_class(self) -> type[nn.Module]:
        return getattr(self.source, self.attention)

    def layers(self, model: nn.Module) -> dict[str, Any]:
        """The attention layers by name, in the order of the model."""
        return {name: m for name, m in model.named_modules() if isinstance(m, self.attention_class)}

    def width(self, layer: Any) -> int:
        """D."""
        return layer.head_dim if hasattr(layer, "head_dim") else layer.head_size

    def kv_heads(self, config: Any) -> int:
        return config.num_key_value_heads if self.grouped else config.num_attention_heads


FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        Family("Llama", "llama", "llama", "LlamaAttention", Separate(), plain),
        Family("Mistral", "mistral", "mistral", "MistralAttention", Separate(), windowed_by_config),
        Family("Qwen2", "qwen2", "qwen2", "Qwen2Attention", Separate(), windowed),
        Family("Qwen3", "qwen3", "qwen3", "Qwen3Attention", Separate(), windowed, normed=True),
        Family("GPT-2", "gpt2", "gpt2", "GPT2Attention", Stacked(), dropping, rotated=False, grouped=False),
        Family("GPT-NeoX", "gpt_neox", "gpt_neox", "GPTNeoXAttention", Interleaved(), plain, grouped=False),
        Family("Gemma 2", "gemma2", "gemma2", "Gemma2Attention", Separate(), capped),
        Family(
            "Gemma 3 (text)",
            "gemma3_text",
            "gemma3",
            "Gemma3Attention",
            Separate(),
            windowed,
            normed=True,
            rotary_by_kind=True,
        ),
    )
}


def family_of(model: object) -> Family:
    """The family of a loaded model, or a sentence that says why it has none here."""
    known = ", ".join(family.title for family in FAMILIES.values())
    if not isinstance(model, PreTrainedModel):
        raise ValueError(
            f"a loaded Transformers model was expected ({known}), but a {type(model).__name__} came; "
            "wrappers such as PEFT, DDP or a compiled model go around the model after its conversion."
        )
    kind = getattr(model.config, "model_type", None)
    if kind not in FAMILIES:
        hint = suggest_name(kind, FAMILIES)
        raise ValueError(f"models of type {kind!r} cannot be converted{hint}; the families known here are {known}.")
    return FAMILIES[kind]
