"""One attention layer after the other: fit, replace, insert, and measure what that did."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from qklab.attention.norm import QKNorm
from qklab.hf.convert.attention import converted_class
from qklab.hf.convert.calibrate import LayerRecord, LayerWalk, measure_change, measure_moments
from qklab.hf.convert.record import Conversion, LayerReport, make_attention_spec
from qklab.hf.convert.solve import Fit, Moments, merge_heads, share_key_value
from qklab.hf.families import text_config
from qklab.hf.layout import ConvertibleFamily, Weights
from qklab.model.initialise import seed_of


def find_decoder_layer(model: nn.Module, name: str) -> nn.Module:
    """The decoder layer around the attention layer `name`."""
    return model.get_submodule(name.rpartition(".")[0])


def list_decoder_layers(model: nn.Module, name: str) -> list[nn.Module]:
    """The decoder layers among which is that of the attention layer `name`, with attention or without."""
    return list(model.get_submodule(name.rpartition(".")[0].rpartition(".")[0]).children())


def copy_projections(layer: nn.Module, family: ConvertibleFamily) -> dict[str, nn.Module]:
    """Copies of a layer's projections in CPU memory."""
    return {name: copy.deepcopy(getattr(layer, name)).to("cpu") for name in family.projections}


def convert_layers(
    model: PreTrainedModel, conversion: Conversion, walk: LayerWalk | None, weight: float, seed: int
) -> tuple[list[LayerReport], Conversion]:
    family = conversion.layout
    layers = family.layers(model)
    centre = False
    if conversion.fits_share:
        first = family.read(next(iter(layers.values())))
        centre = first.k_bias is not None
        conversion = conversion.replace(output_bias=centre and first.o_bias is None)
    config = text_config(model)
    reports: list[LayerReport] = []
    for name, layer in layers.items():
        report = LayerReport(name)
        seen = None if walk is None else walk.observe(find_decoder_layer(model, name), layer)
        if conversion.overwrites:
            weights = family.read(layer)
            heads = conversion.kv_heads or weights.k.shape[0]
            moments = measure_group_moments(layer, family, weights, heads, seen)
            if not bool(moments.second.isfinite().all()):
                raise ValueError(
                    f"keys or values of {name} are not finite, so nothing can be fitted to them; look at the model's "
                    "weights, and give a calibration text that it computes finite logits for."
                )
            fit = fit_heads(layer, moments, conversion, weights.k.shape[0] // heads, weight, centre)
            report.keys, report.values = fit.errors(moments)
            if conversion.kv_heads is not None:
                set_groups(layer, config, heads)
            family.write(layer, apply_fit(weights, fit))
        if conversion.structural:
            insert_stages(name, layer, conversion, find_rotary(model, name), seed)
        if conversion.norm:
            set_gains(layer, family, seen)
        if walk is not None and seen is not None:
            after = walk.advance(layer)
            report.output = measure_change(seen.outputs, after.outputs)
        reports.append(report)
    if conversion.kv_heads is not None:
        set_kv_heads(model, family, conversion.kv_heads)
    return reports, conversion


def find_rotary(model: nn.Module, name: str) -> tuple[nn.Module, ...]:
    """The module that makes RoPE's angles for the attention layer `name`, if there is one: that of the nearest module
    around it."""
    while name:
        name = name.rpartition(".")[0]
        found = getattr(model.get_submodule(name), "rotary_emb", None)
        if found is not None:
            return (found,)
    return ()


def insert_stages(name: str, layer: Any, conversion: Conversion, rotary: tuple[nn.Module, ...], seed: int) -> None:
    """Make `layer` a converted one, with the coupling and the norm that the conversion asks for."""
    family = conversion.layout
    spec = make_attention_spec(conversion, layer)
    like = getattr(layer, family.output).weight
    layer.__class__ = converted_class(type(family))
    layer.rotary = rotary
    layer.couple, layer.normalise = None, None
    if spec.coupler is not None:
        couple = spec.coupler(spec)
        for path, module in reversed(list(couple.named_modules())):
            if callable(reset := getattr(module, "reset", None)):
                reset(torch.Generator().manual_seed(seed_of(seed, f"{name}.couple.{path}")))
        layer.couple = couple.to(device=like.device, dtype=like.dtype).train(layer.training)
    if conversion.norm:
        layer.normalise = QKNorm(spec).to(device=like.device, dtype=like.dtype).train(layer.training)


def reshape_projections(layer: Any, conversion: Conversion) -> None:
    """Give a layer that is about to be loaded the projections of a converted one."""
    family = conversion.layout
    if not conversion.fits_share:
        return
    weights = family.read(layer)
    weights.v, weights.v_bias = None, None
    if conversion.output_bias:
        weights.o_bias = weights.o.new_zeros(weights.o.shape[0])
    family.write(layer, weights)


def measure_group_moments(
    layer: Any, family: ConvertibleFamily, weights: Weights, groups: int, seen: LayerRecord | None
) -> Moments:
    """Moments of y = [keys, values] of each group of heads that become one, from what was seen or from the weights."""

    def group_heads(k: Tensor, v: Tensor) -> Tensor:
        """[rows, G, D] → [rows, N, 2mD]."""
        return torch.cat([part.unflatten(1, (groups, -1)).flatten(2) for part in (k, v)], -1)

    assert weights.v is not None
    if seen is None:
        weight = group_heads(weights.k.permute(2, 0, 1), weights.v.permute(2, 0, 1)).permute(1, 2, 0)
        bias = None
        if weights.k_bias is not None and weights.v_bias is not None:
            bias = group_heads(weights.k_bias[None], weights.v_bias[None])[0]
        return Moments.of_weights(weight, bias)

    def project_inputs():
        for x in seen.inputs:
            made = family.project(layer, x[None])
            assert made.v is not None
            yield group_heads(made.k[0], made.v[0])

    return measure_moments(project_inputs())


def fit_heads(layer: Any, moments: Moments, conversion: Conversion, members: int, weight: float, centre: bool) -> Fit:
    family = conversion.layout
    pairs = None if family.has_norms(layer) else family.pair_entries(layer)
    fit = merge_heads(moments, members, least_squares=conversion.merge == "least-squares", pairs=pairs)
    return share_key_value(fit, moments, weight=weight, centre=centre) if conversion.share else fit


def apply_fit(old: Weights, fit: Fit) -> Weights:
    """The weights of a layer after its fit: E_k, E_v on keys and values, Q_jᵀ on queries, V_j and c_j on the output."""
    assert old.v is not None
    groups, members = fit.queries.shape[:2]

    def stack_key_value(k: Tensor, v: Tensor) -> Tensor:
        return torch.cat([part.double().unflatten(0, (groups, -1)).flatten(1, 2) for part in (k, v)], 1)

    def transform_queries(q: Tensor) -> Tensor:
        apart = q.double().unflatten(0, (groups, members, -1))  # [N, m, R, D, …]
        return torch.einsum("nmji,nmrj...->nmri...", fit.queries, apart).flatten(0, 2)

    y = stack_key_value(old.k, old.v)  # [N, 2mD, width]
    o = old.o.double().unflatten(1, (groups, members, -1))  # [width, N, m, R, D]
    new = Weights(
        q=transform_queries(old.q),
        k=fit.key @ y,
        v=None if fit.value is None else fit.value @ y,
        o=torch.einsum("wnmrj,nmji->wnmri", o, fit.values).flatten(1, 3),
        q_bias=None if old.q_bias is None else transform_queries(old.q_bias),
        o_bias=old.o_bias,
    )
    if old.k_bias is not None and old.v_bias is not None:
        bias = stack_key_value(old.k_bias, old.v_bias)[..., None]
        new.k_bias = (fit.key @ bias)[..., 0] + fit.key_offset
        new.v_bias = None if fit.value is None else (fit.value @ bias)[..., 0]
        if fit.value is None:
            constant = torch.einsum("wnmrj,nmj->w", o, fit.offsets)
            new.o_bias = constant if old.o_bias is None else old.o_bias.double() + constant
    return new


def set_gains(layer: Any, family: ConvertibleFamily, seen: LayerRecord | None) -> None:
    """Gains g_i = √(E u_i² / E (u_i/rms(u))²), over tokens and heads: each entry keeps its mean square."""
    squares: list[list[Tensor]] = [[], []]
    normed: list[list[Tensor]] = [[], []]
    if seen is None:
        weights = family.read(layer)
        for side, (weight, bias) in enumerate(((weights.q, weights.q_bias), (weights.k, weights.k_bias))):
            square = weight.double().square().sum(-1) + (0 if bias is None else bias.double().square())
            squares[side].append(square)
            normed[side].append(square / (square.mean(-1, keepdim=True) + layer.normalise.eps))
    else:
        for x in seen.inputs:
            for side, u in enumerate(family.project(layer, x[None])[:2]):
                square = u.double().square().flatten(0, -2)
                squares[side].append(square)
                normed[side].append(square / (square.mean(-1, keepdim=True) + layer.normalise.eps))
    for gain, above, below in zip((layer.normalise.query_gain, layer.normalise.key_gain), squares, normed, strict=True):
        above, below = torch.cat(above).mean(0), torch.cat(below).mean(0)
        gain.copy_((above / below.clamp(min=torch.finfo(below.dtype).tiny)).sqrt())


def set_kv_heads(model: PreTrainedModel, family: ConvertibleFamily, heads: int) -> None:
    config = text_config(model)
    config.num_key_value_heads = heads
    for layer in family.layers(model).values():
        set_groups(layer, config, heads)


def set_groups(layer: Any, config: Any, kv_heads: int) -> None:
    layer.num_key_value_groups = config.num_attention_heads // kv_heads
    if hasattr(layer, "num_key_value_heads"):
        layer.num_key_value_heads = kv_heads
