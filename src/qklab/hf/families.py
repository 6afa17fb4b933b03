"""Families: the only place that knows how other people's models keep their attention, before and after conversion.

A family says where its attention layers keep queries, keys and values. Conversion, logit control and watching all read
that from here, so they agree on every model, converted or not. Names of existing weights stay as they are, so that
tools which find modules by name go on working.

@register.family("llama")          # the `model_type` of its configuration
class Llama(SeparateProjections):
    title = "Llama"
    attention = "transformers.models.llama.modeling_llama.LlamaAttention"
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from qklab import register
from qklab.hf.watch import watch_logits
from qklab.optim.roles import LayerRoles, Rows, coupling_kind, output_axis
from qklab.schema import suggest_name


class Family:
    """One kind of model, as logit control sees it: its attention layers, and the rows of queries and keys in them."""

    title: ClassVar[str]  # what people call it
    attention: ClassVar[str]  # its attention class, with the module that has it

    def is_attention(self, module: nn.Module) -> bool:
        """By the name of its class or of one it derives from: FSDP2 and conversion put a class of their own on top."""
        return any(kind.__name__ == self.attention.rpartition(".")[2] for kind in type(module).__mro__)

    def rows(self, layer: Any) -> dict[str, Rows]:
        """The rows of its projections, by symbol; "v" too, unless the value is the key."""
        raise NotImplementedError

    def layer_roles(self, module: nn.Module) -> LayerRoles | None:
        """What logit control acts on in `module`, or None where it is no attention layer of this family."""
        if not self.is_attention(module):
            return None
        rows = self.rows(module)
        return LayerRoles(
            {symbol: part for symbol, part in rows.items() if symbol != "v"},
            coupling=coupling_kind(getattr(module, "couple", None)),
            qk_norm=self.normalises(module),
            key_is_value="k" in rows and "v" not in rows,
            watch=functools.partial(self.watch, module),
        )

    def normalises(self, layer: nn.Module) -> bool:
        """Whether a norm lies on queries and keys: the family's own, by its name, or one that conversion inserted."""
        names = [name for name, child in layer.named_children() if not isinstance(child, nn.Identity)]
        own = any("norm" in name and name.startswith(("q_", "k_", "qk_", "query_", "key_")) for name in names)
        return own or "normalise" in names

    def watch(self, layer: nn.Module, largest: Tensor) -> None:
        """Raise `largest` [heads] to the largest logit of every training pass of `layer`."""
        watch_logits(layer, largest)


def has_modules(module: nn.Module, *names: str) -> bool:
    return all(isinstance(getattr(module, name, None), nn.Module) for name in names)


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


class ConvertibleFamily(Family):
    """A family whose layers can be converted. All it has to say of its layout is `split`."""

    inputs: ClassVar[Mapping[str, str]]  # the submodules that make q, k and v → what they make, in order
    output: ClassVar[str]  # the submodule that maps the heads back to the width
    rotated: ClassVar[bool] = True  # whether RoPE turns q and k
    rotates_halves: ClassVar[bool] = True  # whether its pairs are (x_i, x_{i+r/2}), not (x_2i, x_{2i+1})
    normed: ClassVar[bool] = False  # whether it has q_norm and k_norm of its own
    grouped: ClassVar[bool] = True  # whether its configuration knows key/value heads
    rotary_by_kind: ClassVar[bool] = False  # whether its rotary module wants to know the kind of the layer

    def split(self, layer: Any, name: str, y: Tensor) -> dict[str, Tensor]:
        """y [..., n], n the outputs of the submodule `name`, as views by what they are: symbol → [..., heads, D].

        The same for outputs, weights, biases and row numbers; a converted layer may make no "v".
        """
        raise NotImplementedError

    def attention_options(self, layer: Any) -> dict[str, Any]:
        """What the layer hands to the attention function besides q, k, v, mask and scale."""
        return {"dropout": layer.attention_dropout if layer.training else 0.0}

    def width(self, layer: Any) -> int:
        """D."""
        return layer.head_dim

    def kv_heads(self, config: Any) -> int:
        return config.num_key_value_heads if self.grouped else config.num_attention_heads

    @property
    def source(self) -> Any:
        """The module with its classes."""
        return importlib.import_module(self.attention.rpartition(".")[0])

    @property
    def attention_class(self) -> type[nn.Module]:
        return getattr(self.source, self.attention.rpartition(".")[2])

    @property
    def projections(self) -> tuple[str, ...]:
        return (*self.inputs, self.output)

    def layers(self, model: nn.Module) -> dict[str, Any]:
        """The attention layers by name, in the order of the model."""
        return {name: module for name, module in model.named_modules() if isinstance(module, self.attention_class)}

    def rows(self, layer: Any) -> dict[str, Rows]:
        found = {}
        for name in self.inputs:
            linear = getattr(layer, name)
            if linear is not None:
                outputs = linear.weight.shape[output_axis(linear)]
                numbers = self.split(layer, name, torch.arange(outputs, device="cpu"))
                found |= {symbol: Rows.at(linear, rows) for symbol, rows in numbers.items()}
        return found

    def project(self, layer: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """x [B, T, d] → q [B, T, H, D], k and v [B, T, G, D]; v is None where it is k."""
        made: dict[str, Tensor] = {}
        for name in self.inputs:
            linear = getattr(layer, name)
            if linear is not None:
                made.update(self.split(layer, name, linear(x)))
        return made["q"], made["k"], made.get("v")

    def finish(self, layer: Any, heads: Tensor) -> Tensor:
        """[B, T, H·D] → [B, T, d]."""
        return getattr(layer, self.output)(heads)

    def read(self, layer: Any) -> Weights:
        found: dict[str, Any] = {"v": None}
        for name in self.inputs:
            linear = getattr(layer, name)
            if linear is None:
                continue
            for symbol, part in self.split(layer, name, matrix_of(linear).mT).items():
                found[symbol] = part.permute(1, 2, 0)
            if linear.bias is not None:
                parts = self.split(layer, name, linear.bias.detach())
                found |= {f"{symbol}_bias": part for symbol, part in parts.items()}
        output = getattr(layer, self.output)
        found["o"] = matrix_of(output).unflatten(1, (-1, self.width(layer)))
        found["o_bias"] = None if output.bias is None else output.bias.detach()
        return Weights(**found)

    def write(self, layer: Any, weights: Weights) -> None:
        """Replace the projections by modules that hold `weights`."""
        for name, symbols in self.inputs.items():
            parts = {s: part for s in symbols if (part := getattr(weights, s)) is not None}
            old = getattr(layer, name)
            if old is None or not parts:
                setattr(layer, name, None)
                continue
            first, size = next(iter(parts)), sum(part.shape[0] * part.shape[1] for part in parts.values())
            columns = parts[first].new_empty(parts[first].shape[2], size)
            for symbol, view in self.split(layer, name, columns).items():
                view.copy_(parts[symbol].permute(2, 0, 1))
            bias = None
            if getattr(weights, f"{first}_bias") is not None:
                bias = columns.new_empty(size)
                for symbol, view in self.split(layer, name, bias).items():
                    view.copy_(getattr(weights, f"{symbol}_bias"))
            setattr(layer, name, new_linear(columns.mT, bias, old))
        output = getattr(layer, self.output)
        setattr(layer, self.output, new_linear(weights.o.flatten(1), weights.o_bias, output))


def matrix_of(linear: Any) -> Tensor:
    """The weight of a linear layer as [outputs, inputs]."""
    weight = linear.weight.detach()
    return weight.mT if output_axis(linear) else weight


def new_linear(weight: Tensor, bias: Tensor | None, like: nn.Module) -> nn.Module:
    """A linear layer with weight [outputs, inputs], of the kind and precision and on the device of `like`."""
    made: Any
    with torch.device("meta"):
        if isinstance(like, Conv1D):
            made, weight = Conv1D(weight.shape[0], weight.shape[1]), weight.mT
        else:
            made = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    old = like.get_parameter("weight")
    made.weight = nn.Parameter(weight.to(old).contiguous(), requires_grad=old.requires_grad)
    if bias is not None:
        made.bias = nn.Parameter(bias.to(old).contiguous(), requires_grad=old.requires_grad)
    return made.train(like.training)


class SeparateProjections(ConvertibleFamily):
    """q_proj, k_proj, v_proj and o_proj; a layer whose value is its key has no v_proj."""

    inputs = {"q_proj": "q", "k_proj": "k", "v_proj": "v"}  # noqa: RUF012
    output = "o_proj"

    def split(self, layer: Any, name: str, y: Tensor) -> dict[str, Tensor]:
        return {self.inputs[name]: y.unflatten(-1, (-1, self.width(layer)))}


@register.family("llama")
class Llama(SeparateProjections):
    title = "Llama"
    attention = "transformers.models.llama.modeling_llama.LlamaAttention"


@register.family("mistral")
class Mistral(SeparateProjections):
    title = "Mistral"
    attention = "transformers.models.mistral.modeling_mistral.MistralAttention"

    def attention_options(self, layer: Any) -> dict[str, Any]:
        return super().attention_options(layer) | {"sliding_window": getattr(layer.config, "sliding_window", None)}


@register.family("qwen2")
class Qwen2(SeparateProjections):
    title = "Qwen2"
    attention = "transformers.models.qwen2.modeling_qwen2.Qwen2Attention"

    def attention_options(self, layer: Any) -> dict[str, Any]:
        return super().attention_options(layer) | {"sliding_window": layer.sliding_window}


@register.family("qwen3")
class Qwen3(Qwen2):
    title = "Qwen3"
    attention = "transformers.models.qwen3.modeling_qwen3.Qwen3Attention"
    normed = True


@register.family("gpt2")
class GPT2(ConvertibleFamily):
    """One Conv1D makes all queries, then all keys, then all values."""

    title = "GPT-2"
    attention = "transformers.models.gpt2.modeling_gpt2.GPT2Attention"
    inputs = {"c_attn": "qkv"}  # noqa: RUF012
    output = "c_proj"
    rotated, grouped = False, False

    def split(self, layer: Any, name: str, y: Tensor) -> dict[str, Tensor]:
        parts = y.unflatten(-1, (-1, layer.config.num_attention_heads, layer.head_dim)).unbind(-3)
        return dict(zip("qkv", parts, strict=False))

    def attention_options(self, layer: Any) -> dict[str, Any]:
        return {"dropout": layer.attn_dropout.p if layer.training else 0.0}

    def finish(self, layer: Any, heads: Tensor) -> Tensor:
        return layer.resid_dropout(layer.c_proj(heads))

    def rows(self, layer: Any) -> dict[str, Rows]:
        if getattr(layer, "is_cross_attention", False):
            raise ValueError("GPT-2's cross-attention is not known to attention_roles; pass a mapping of its layers.")
        return super().rows(layer)

    def watch(self, layer: Any, largest: Tensor) -> None:
        if layer.reorder_and_upcast_attn and layer.config._attn_implementation == "eager":
            raise ValueError(
                "the logits of GPT-2 cannot be watched under reorder_and_upcast_attn with eager attention; set it to "
                "False, or use sdpa."
            )
        super().watch(layer, largest)


@register.family("gpt_neox")
class GPTNeoX(ConvertibleFamily):
    """One linear layer makes the query, the key and the value of the first head, then of the second, …"""

    title = "GPT-NeoX"
    attention = "transformers.models.gpt_neox.modeling_gpt_neox.GPTNeoXAttention"
    inputs = {"query_key_value": "qkv"}  # noqa: RUF012
    output = "dense"
    grouped = False

    def width(self, layer: Any) -> int:
        return layer.head_size

    def split(self, layer: Any, name: str, y: Tensor) -> dict[str, Tensor]:
        parts = y.unflatten(-1, (layer.config.num_attention_heads, -1, layer.head_size)).unbind(-2)
        return dict(zip("qkv", parts, strict=False))


@register.family("gemma2")
class Gemma2(Qwen2):
    title = "Gemma 2"
    attention = "transformers.models.gemma2.modeling_gemma2.Gemma2Attention"

    def attention_options(self, layer: Any) -> dict[str, Any]:
        return super().attention_options(layer) | {"softcap": layer.attn_logit_softcapping}


@register.family("gemma3_text")
class Gemma3Text(Qwen2):
    title = "Gemma 3 (text)"
    attention = "transformers.models.gemma3.modeling_gemma3.Gemma3Attention"
    normed, rotary_by_kind = True, True


@register.family("deepseek_v3")
class DeepSeek(Family):
    """MLA as in DeepSeek-V2 and V3: fused up-projections, and the rotary key fused with the latent."""

    title = "DeepSeek-V3"
    attention = "transformers.models.deepseek_v3.modeling_deepseek_v3.DeepseekV3Attention"

    def is_attention(self, module: nn.Module) -> bool:
        return has_modules(module, "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj")

    def normalises(self, layer: nn.Module) -> bool:
        return False  # its norms lie on the latents

    def rows(self, layer: Any) -> dict[str, Rows]:
        heads, nope, rank = layer.num_heads, layer.qk_nope_head_dim, layer.kv_lora_rank
        compressed = has_modules(layer, "q_a_proj", "q_b_proj")
        query = layer.q_b_proj if compressed else layer.q_proj
        gain = layer.q_a_layernorm.weight if compressed else None
        every = layer.kv_a_proj_with_mqa.weight.shape[0]
        found = {"dq": Rows.of(layer.q_a_proj, 1)} if compressed else {}
        return found | {
            "uq": Rows.of(query, heads, within=(0, nope), gain=gain),
            "qr": Rows.of(query, heads, within=(nope, query.weight.shape[0] // heads), gain=gain),
            "dkv": Rows.of(layer.kv_a_proj_with_mqa, 1, among=(0, rank)),
            "kr": Rows.of(layer.kv_a_proj_with_mqa, 1, among=(rank, every)),
            "uk": Rows.of(layer.kv_b_proj, heads, within=(0, nope), gain=layer.kv_a_layernorm.weight),
        }


@register.family("named like Llama")
class NamedLikeLlama(Family):
    """Layers of no other family with q_proj and k_proj, rows head by head: Gemma, Phi, Cohere, StableLM and others.

    Not where q_proj also makes a gate (Qwen3-Next), nor where a convolution follows (linear attention).
    """

    title = "others that name their projections alike"

    def is_attention(self, module: Any) -> bool:
        width = getattr(module, "head_dim", None)
        if not has_modules(module, "q_proj", "k_proj") or has_modules(module, "conv1d") or not isinstance(width, int):
            return False
        queries, keys = (linear.weight.shape[0] // width for linear in (module.q_proj, module.k_proj))
        groups = getattr(module, "num_key_value_groups", None)
        if groups is not None and queries != groups * keys:
            return False
        others = (kind() for kind in register.family.values() if kind is not NamedLikeLlama)
        return not any(family.is_attention(module) for family in others)

    def rows(self, layer: Any) -> dict[str, Rows]:
        linears = {"q": layer.q_proj, "k": layer.k_proj, "v": getattr(layer, "v_proj", None)}
        return {
            symbol: Rows.of(linear, linear.weight.shape[0] // layer.head_dim)
            for symbol, linear in linears.items()
            if linear is not None
        }


def convertible_families() -> dict[str, ConvertibleFamily]:
    """Model type → family, for those that can be converted."""
    return {name: kind() for name, kind in register.family.items() if issubclass(kind, ConvertibleFamily)}


def find_convertible(model_type: str) -> ConvertibleFamily:
    families = convertible_families()
    if model_type not in families:
        known = ", ".join(family.title for family in families.values())
        hint = suggest_name(model_type, families)
        raise ValueError(
            f"models of type {model_type!r} cannot be converted{hint}; the families known here are {known}."
        )
    return families[model_type]


def find_family(model: object) -> ConvertibleFamily:
    """The family of a loaded model, or a sentence that says why it has none here."""
    if not isinstance(model, PreTrainedModel):
        known = ", ".join(family.title for family in convertible_families().values())
        raise ValueError(
            f"a loaded Transformers model was expected ({known}), but a {type(model).__name__} came; "
            "wrappers such as PEFT, DDP or a compiled model go around the model after its conversion."
        )
    return find_convertible(str(getattr(model.config, "model_type", None)))
