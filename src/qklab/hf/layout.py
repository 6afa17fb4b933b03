"""Layouts: what a family of models has to say about its attention layers, so that conversion, logit control and
watching all read the same, on a converted model as on any other."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from qklab.attention.spec import LatentSpec
from qklab.hf.watch import watch_logits
from qklab.optim.roles import CouplingLinearity, LayerRoles, Rows, coupling_kind, output_axis

MODELS = "transformers.models"


class Family:
    """One kind of model, as logit control sees it: its attention layers, and the rows of queries and keys in them."""

    title: ClassVar[str]  # what people call it
    attention: ClassVar[str]  # its attention class, with the module that has it

    def is_attention(self, module: nn.Module) -> bool:
        """By the name of its class or of one it derives from: FSDP2 and conversion put a class of their own on top."""
        return any(kind.__name__ == self.attention.rpartition(".")[2] for kind in type(module).__mro__)

    def rows(self, layer: Any) -> dict[str, Rows]:
        """The rows that make its queries and keys, by symbol."""
        raise NotImplementedError

    def shares_value(self, layer: Any) -> bool:
        """Whether the key is also the value."""
        return False

    def has_keys(self, layer: Any) -> bool:
        """Whether the layer makes keys of its own, and not reads those of an earlier one: others are left alone."""
        return True

    def find_coupling(self, layer: Any) -> CouplingLinearity:
        """By what kind of map queries and keys evolve together once they are made."""
        return coupling_kind(getattr(layer, "couple", None))

    def layer_roles(self, module: nn.Module) -> LayerRoles | None:
        """What logit control acts on in `module`, or None where it is no attention layer of this family."""
        if not self.is_attention(module) or not self.has_keys(module):
            return None
        return LayerRoles(
            self.rows(module),
            coupling=self.find_coupling(module),
            qk_norm=self.normalises(module),
            key_is_value=self.shares_value(module),
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


class Projected(NamedTuple):
    """What is made of x [B, T, d]: q [B, T, H, D], k and v [B, T, G, D]; v is None where it is k."""

    q: Tensor
    k: Tensor
    v: Tensor | None = None
    g: Tensor | None = None  # [B, T, H, D], a gate on what the heads give, where the family has one


class ConvertibleFamily(Family):
    """A family whose layers can be converted. All it has to say of its layout is `split`."""

    inputs: ClassVar[Mapping[str, str]]  # the submodules that make q, k and v → what they make, in order
    output: ClassVar[str]  # the submodule that maps the heads back to the width
    rotated: ClassVar[bool] = True  # whether RoPE turns q and k
    interleaved: ClassVar[bool] = False  # whether RoPE's pairs are (x_2i, x_{2i+1}), not (x_i, x_{i+r/2})
    repeats_angles: ClassVar[bool] = True  # whether its cos and sin hold each angle twice
    rotary_by_kind: ClassVar[bool] = False  # whether its rotary module wants to know the kind of the layer
    norms: ClassVar[tuple[str, str]] = ("q_norm", "k_norm")  # of queries and keys, where a layer has them
    norms_span_heads: ClassVar[bool] = False  # whether those norms know of each head apart
    grouped: ClassVar[bool] = True  # whether its configuration knows key/value heads
    latent: ClassVar[bool] = False  # whether queries and keys are made of latents, which is what can be coupled
    shares_already: ClassVar[bool] = False  # whether share="k=v" is for layers whose key is the value as it is
    unfolded: ClassVar[str | None] = None  # what of it keeps a map of the values from being folded into the output

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

    def rotates(self, layer: Any) -> bool:
        """Whether RoPE turns the queries and keys of this layer."""
        return self.rotated

    def rotate(self, layer: Any, q: Tensor, k: Tensor, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """q [B, H, T, D] and k [B, G, T, D] turned, as the family does it."""
        return self.source.apply_rotary_pos_emb(q, k, *angles)

    def rotated_width(self, layer: Any) -> int:
        """How many of the first entries of a head RoPE turns."""
        rope = getattr(layer.config, "rope_parameters", None) or {}
        return int(self.width(layer) * (rope.get("partial_rotary_factor") or 1.0))

    def has_norms(self, layer: Any) -> bool:
        """Whether the layer has a norm of the family's own on queries and keys."""
        return layer._modules.get(self.norms[0]) is not None

    def list_refusals(self, layer: Any) -> dict[str, str]:
        """What cannot be asked of its layers: option of `convert` → why, after the family's title."""
        found: dict[str, str] = {}
        if not self.grouped:
            found["kv_heads"] = "has as many key/value heads as heads and no setting for fewer"
        elif self.norms_span_heads and self.has_norms(layer):
            found["kv_heads"] = "has a norm on its keys that knows each head apart"
        if self.unfolded is not None:
            why = f"has {self.unfolded} between values and output projection, which cannot take up what is fitted"
            found |= {"share": why, "kv_heads": why}
        if self.has_norms(layer):
            found["norm"] = "already normalises queries and keys"
        return found

    def scale_queries(self, layer: Any, q: Tensor, position_ids: Tensor | None) -> Tensor:
        """q [B, H, T, D], turned, by what the family makes of its positions besides."""
        return q

    def lend_keys(self, layer: Any, k: Tensor, v: Tensor, states: Any) -> None:
        """Leave keys and values in `states` for later layers, where the family has layers without their own."""

    def pair_entries(self, layer: Any) -> tuple[Tensor, Tensor]:
        """The entries of a head that RoPE turns together, [D/2] twice; what it does not turn is paired as well."""
        width, turned = self.width(layer), self.rotated_width(layer)
        if self.interleaved:
            every = torch.arange(width)
            return every[::2], every[1::2]
        low = torch.cat([torch.arange(turned // 2), torch.arange(turned, turned + (width - turned) // 2)])
        every = torch.ones(width, dtype=torch.bool).index_fill(0, low, False)
        return low, every.nonzero()[:, 0]

    def normalise(self, layer: Any, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """The family's own norms on q [B, T, H, D] and k [B, S, G, D], before rotation."""
        norms = (getattr(layer, name) for name in self.norms)
        return self.apply_norm(next(norms), q), self.apply_norm(next(norms), k)

    def apply_norm(self, norm: Any, u: Tensor) -> Tensor:
        return norm(u)

    def normalise_value(self, layer: Any, v: Tensor) -> Tensor:
        """The family's own norm on v [B, S, G, D], where it has one."""
        return v

    def count_kv_heads(self, layer: Any) -> int:
        return layer.config.num_attention_heads // (layer.num_key_value_groups if self.grouped else 1)

    def read_latent(self, layer: Any) -> LatentSpec | None:
        """The widths of the latents, where queries and keys are made of such."""
        return None

    def compress(self, layer: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [B, T, d] → the latents of queries and of keys and values, normalised, and the part of the key that RoPE
        turns, [B, T, ·] each."""
        raise NotImplementedError

    def expand(
        self, layer: Any, query_latent: Tensor, latent: Tensor, turned: Tensor, angles: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q [B, H, T, ·], and what is cached: the latent and the turned part of the key, [B, 1, T, ·] each."""
        raise NotImplementedError

    @functools.cached_property
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
        kind = self.attention_class
        return {name: m for name, m in model.named_modules() if isinstance(m, kind) and self.has_keys(m)}

    def number_rows(self, layer: Any) -> Iterator[tuple[str, nn.Module, Tensor]]:
        """Symbol, linear layer, and which of its outputs make that, [heads, D]."""
        for name in self.inputs:
            linear = getattr(layer, name)
            if linear is not None:
                numbers = torch.arange(linear.weight.shape[output_axis(linear)], device="cpu")
                for symbol, rows in self.split(layer, name, numbers).items():
                    yield symbol, linear, rows

    def rows(self, layer: Any) -> dict[str, Rows]:
        return {symbol: Rows.at(linear, rows) for symbol, linear, rows in self.number_rows(layer) if symbol in "qk"}

    def shares_value(self, layer: Any) -> bool:
        return "v" not in {symbol for symbol, _, _ in self.number_rows(layer)}

    def project(self, layer: Any, x: Tensor) -> Projected:
        made: dict[str, Tensor] = {}
        for name in self.inputs:
            linear = getattr(layer, name)
            if linear is not None:
                made.update(self.split(layer, name, linear(x)))
        return Projected(**made)

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
