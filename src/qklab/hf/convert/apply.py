"""convert and revert: change a loaded Transformers model in place, and undo it where that is possible."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from torch import Tensor, nn
from transformers import PreTrainedModel

from qklab.attention.coupling_spec import CouplingSpec
from qklab.hf.convert.attention import ConvertedAttention
from qklab.hf.convert.calibrate import LayerWalk, Text, evaluation_mode, measure_change, read_batches
from qklab.hf.convert.check import check_options, read_coupling, read_merge, refuse_converted, refuse_unfit_model
from qklab.hf.convert.layers import convert_layers, copy_projections, list_decoder_layers, set_kv_heads
from qklab.hf.convert.record import Conversion, ConversionReport, find_conversion
from qklab.hf.convert.store import mark_converted, plain_config_class
from qklab.hf.families import find_family, text_config
from qklab.hf.layout import ConvertibleFamily
from qklab.hf.paged import hold_one_tensor

# What PEFT would write down as the model that its adapters belong to: in memory there is none yet that could be loaded.
UNSAVED = "a model converted by qklab in memory: save it, load it by load_converted and wrap that"


@dataclass
class Unconverted:
    """What `revert` needs: the replaced projections by layer, the key/value heads, the parameters that were frozen,
    where the model came from, and the record of an earlier conversion that left it a plain one of its family."""

    projections: dict[str, dict[str, nn.Module]] = field(default_factory=dict)
    kv_heads: int | None = None
    frozen: list[str] = field(default_factory=list)
    name_or_path: str = ""
    record: dict[str, Any] | None = None
    earlier: Unconverted | None = None


def convert(
    model: PreTrainedModel,
    *,
    coupling: CouplingSpec | str | None = None,
    share: Literal["k=v"] | None = None,
    norm: Literal["qk-norm"] | None = None,
    kv_heads: int | None = None,
    merge: Literal["least-squares", "mean"] | None = None,
    calibration: Text | None = None,
    weight: float = 0.5,
    norm_eps: float = 1e-6,
    keep_original: bool = False,
    trainable: Literal["coupling", "inserted"] | None = None,
    seed: int = 0,
) -> ConversionReport:
    """Change a loaded Transformers model in place (of a family in `register.family`).

    Args:
        coupling: Insert a coupling of this kind at identity: the logits stay what they were, bit for bit.
        share: "k=v" makes key and value one tensor s: key ≈ s, value ≈ M s + c with M and c folded into the output
            projection; fitted in closed form. The cache then holds s alone.
        norm: "qk-norm" inserts RMSNorm on queries and keys, with gains that keep each entry's mean square.
        kv_heads: Merge key/value heads until this many are left (1 is multi-query attention).
        merge: How: "least-squares" (default) or "mean".
        calibration: Token ids [batch, tokens] or a list of them, by which share, norm and merge are fitted and
            measured. Without it the layers' inputs count as uncorrelated with equal variance.
        weight: How much keys count against values in share's fit, between 0 and 1.
        norm_eps: Epsilon of the inserted norm.
        keep_original: Keep the weights that share and kv_heads replace in CPU memory, so that `revert` can undo them.
        trainable: "coupling" freezes everything but the coupling, "inserted" everything but coupling and norm.
        seed: Of the coupling's forces.
    """
    family, config = find_family(model), text_config(model)
    refuse_converted(model, family)
    conversion = Conversion(
        family=config.model_type,
        coupling=read_coupling(coupling),
        share=share,
        norm=norm,
        norm_eps=norm_eps,
        kv_heads=kv_heads,
        merge=read_merge(merge, kv_heads),
    )
    refuse_unfit_model(model, family, conversion)
    check_options(conversion, calibration, weight, trainable)
    layers = list(family.layers(model).values())
    heads_before, cache_before = family.count_kv_heads(layers[0]), sum(count_cached(layer, family) for layer in layers)
    count_before = count_parameters(model)
    batches = None if calibration is None else read_batches(calibration, model)
    before = Unconverted(
        kv_heads=heads_before if kv_heads is not None else None,
        name_or_path=str(model.name_or_path),
        record=getattr(config, "qklab", None),
        earlier=model.__dict__.get("qklab_before"),
    )
    if keep_original and conversion.overwrites:
        before.projections = {name: copy_projections(layer, family) for name, layer in family.layers(model).items()}
    with all_or_nothing(model, family), evaluation_mode(model):
        logits = None if batches is None else compute_logits(model, batches[0])
        blocks = list_decoder_layers(model, next(iter(family.layers(model))))
        walk = None if batches is None else LayerWalk(model, blocks, batches)
        reports, conversion = convert_layers(model, conversion, walk, weight, seed)
        record_conversion(model, conversion)
        moved = None
        if batches is not None and logits is not None:
            moved = measure_change([logits], [cast(Tensor, compute_logits(model, batches[0]))])
    for layer in layers:
        layer.train(layer.training)  # what is new in it as well
    before.frozen = freeze_parameters(model, trainable)
    model.__dict__["qklab_before"] = before
    hold_one_tensor(model, share is not None)
    inserted = sum(p.numel() for _, p in list_inserted_parameters(model))
    notes = []
    if batches is None and (conversion.overwrites or conversion.norm):
        notes.append("No calibration text: the fit took the layers' inputs as uncorrelated with equal variance.")
    return ConversionReport(
        conversion=conversion,
        parameters_before=count_before,
        parameters=count_parameters(model),
        inserted=inserted,
        trainable=sum(p.numel() for p in model.parameters() if p.requires_grad),
        cache_share=sum(count_cached(layer, family) for layer in layers) / cache_before,
        layers=reports,
        logits=moved,
        notes=notes,
    )


@contextmanager
def all_or_nothing(model: PreTrainedModel, family: ConvertibleFamily) -> Iterator[None]:
    """Where the block fails, the layers and the configuration are what they were before it."""
    config, layers = text_config(model), family.layers(model).values()
    kept = [(part, type(part), dict(vars(part))) for part in (config, *layers)]
    name_or_path = model.name_or_path
    modules = {id(layer): dict(layer._modules) for layer in layers}
    try:
        yield
    except BaseException:
        for part, kind, values in kept:
            part.__class__ = kind
            part.__dict__.clear()
            part.__dict__.update(values)
            if id(part) in modules:
                part.__dict__["_modules"] = modules[id(part)]
        model.__dict__["name_or_path"] = name_or_path
        raise


def revert(model: PreTrainedModel) -> None:
    """Undo the last `convert`.

    An inserted coupling or norm is dropped, with whatever it has learned, and all else is left as it is now. Weights
    that share and kv_heads replaced come back as they were then, if `convert` was told keep_original=True.
    """
    family = find_family(model)
    conversion = find_conversion(model)
    if conversion is None:
        raise ValueError("this model is not converted, so there is nothing to revert.")
    before = model.__dict__.get("qklab_before", Unconverted())
    if conversion.overwrites and not before.projections:
        what = "share" if conversion.share else "kv_heads"
        raise ValueError(
            f"{what} replaced weights that were not kept, so it cannot be undone; load the original model again, or "
            "convert with keep_original=True."
        )
    for name, layer in family.layers(model).items():
        if isinstance(layer, ConvertedAttention):
            for part in ("couple", "normalise"):
                delattr(layer, part)
            del layer.__dict__["rotary"]
            cast(Any, layer).__class__ = family.attention_class
        old = getattr(layer, family.output).weight
        for part, module in before.projections.get(name, {}).items():
            setattr(layer, part, module.to(device=old.device, dtype=old.dtype).train(layer.training))
    if before.kv_heads is not None:
        set_kv_heads(model, family, before.kv_heads)
    for name in before.frozen:
        model.get_parameter(name).requires_grad_(True)
    forget_conversion(model, before)


def compute_logits(model: PreTrainedModel, batch: Mapping[str, Tensor]) -> Tensor | None:
    """Logits of the batch's real tokens; None for a model without a head."""
    logits = getattr(model(**batch, use_cache=False), "logits", None)
    if logits is None or logits.dim() < 3:
        return logits
    return logits[batch["attention_mask"].bool()]


def count_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def count_cached(layer: nn.Module, family: ConvertibleFamily) -> int:
    """Numbers that a layer caches for a token, in heads' widths: Transformers caches keys and values apart."""
    tensors = 1 if isinstance(layer, ConvertedAttention) and family.shares_value(layer) else 2
    return tensors * family.count_kv_heads(layer) * family.width(layer)


def list_inserted_parameters(model: PreTrainedModel) -> list[tuple[str, nn.Parameter]]:
    """The parameters of coupling and norm, by name."""
    found = []
    for name, layer in find_family(model).layers(model).items():
        for part in ("couple", "normalise"):
            module = getattr(layer, part, None) if isinstance(layer, ConvertedAttention) else None
            if module is not None:
                found += [(f"{name}.{part}.{path}", value) for path, value in module.named_parameters()]
    return found


def freeze_parameters(model: PreTrainedModel, trainable: str | None) -> list[str]:
    """Freeze all but what `trainable` names; the names of what was frozen."""
    if trainable is None:
        return []
    mark = (".couple.",) if trainable == "coupling" else (".couple.", ".normalise.")
    kept = {id(value) for name, value in list_inserted_parameters(model) if any(part in name for part in mark)}
    frozen = []
    for name, parameter in model.named_parameters():
        if id(parameter) not in kept and parameter.requires_grad:
            parameter.requires_grad_(False)
            frozen.append(name)
    return frozen


def record_conversion(model: PreTrainedModel, conversion: Conversion) -> None:
    """Record the conversion in the configuration and let that be written as a converted model's."""
    config = text_config(model)
    config.qklab = conversion.to_record()
    if conversion.structural:
        mark_converted(config)
        model.__dict__["name_or_path"] = UNSAVED


def forget_conversion(model: PreTrainedModel, before: Unconverted) -> None:
    config = text_config(model)
    del config.qklab
    hold_one_tensor(model, False)
    config.__class__ = plain_config_class(type(config))
    if before.record is not None:
        config.qklab = before.record
    model.__dict__["name_or_path"] = before.name_or_path
    model.__dict__["qklab_before"] = before.earlier or Unconverted()
