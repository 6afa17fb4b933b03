"""What was done to a model: the conversion as data, and the report that people read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from qklab import register
from qklab.attention.coupling_spec import CouplingSpec
from qklab.attention.look_back import LookbackCoupling
from qklab.attention.spec import AttentionSpec
from qklab.hf.families import find_convertible, text_config
from qklab.hf.layout import ConvertibleFamily
from qklab.schema import MISSING, Rule, Spec, boolean_field, choice_field, integer_field, number_field, spec_field

VERSION = 2  # of the record; the first one had no number
MERGES = ("least-squares", "mean")
TRAINABLE = ("coupling", "inserted")


@dataclass(frozen=True, kw_only=True)
class Conversion(Spec):
    """What a converted model differs in from its family; kept as JSON in `model.config.qklab`.

    Args:
        family: The model type of its family.
        coupling: The coupling inserted at identity.
        share: "k=v" where one tensor is key and value.
        norm: "qk-norm" where RMSNorm was inserted on queries and keys.
        norm_eps: Its epsilon.
        kv_heads: How many key/value heads were left by merging.
        merge: How they were merged.
        output_bias: Whether the output projection was given a bias (the constant part of the values).
    """

    family: str = choice_field(MISSING, register.family)
    coupling: CouplingSpec | None = spec_field(CouplingSpec, None)
    share: Literal["k=v"] | None = choice_field(None, ("k=v",))
    norm: Literal["qk-norm"] | None = choice_field(None, ("qk-norm",))
    norm_eps: float = number_field(1e-6, above=0.0, at_most=1.0)
    kv_heads: int | None = integer_field(None)
    merge: Literal["least-squares", "mean"] | None = choice_field(None, MERGES)
    output_bias: bool = boolean_field(False)

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "coupling",
            lambda c: c.coupling is not None and issubclass(c.coupling.mechanism, LookbackCoupling),
            lambda c: f"{c.coupling.kind} looks back on tokens that the family's own cache does not keep",
            lambda c: {"coupling": CouplingSpec(init="identity")},
        ),
        Rule(
            "coupling",
            lambda c: c.coupling is not None and c.coupling.init != "identity" and c.coupling.kind != "affine",
            lambda c: "a coupling is inserted where it changes nothing yet",
            lambda c: {"coupling": c.coupling.replace(init="identity", step_size=1.0)},
        ),
    )

    @property
    def layout(self) -> ConvertibleFamily:
        return find_convertible(self.family)

    @property
    def structural(self) -> bool:
        """Whether a plain model of the family has other parameters than this one."""
        return bool(self.coupling or self.share or self.norm)

    @property
    def fits_share(self) -> bool:
        """Whether one tensor was fitted to keys and values, and not found in their place."""
        return self.share is not None and not self.layout.shares_already

    @property
    def overwrites(self) -> bool:
        """Whether weights of the model were replaced."""
        return bool(self.fits_share or self.kv_heads)

    @property
    def name(self) -> str:
        words = [] if self.coupling is None else [self.coupling.name]
        words += [f"kv_heads={self.kv_heads} ({self.merge})"] * (self.kv_heads is not None)
        words += ["(Q,K=V)"] * (self.share is not None) + ["qk-norm"] * (self.norm is not None)
        return " · ".join(words)

    def to_record(self) -> dict[str, Any]:
        """As `read_record` takes it."""
        return {"version": VERSION, **self.to_dict()}


def read_record(record: Any) -> Conversion:
    """The conversion that a configuration or an adapter holds as JSON."""
    if not isinstance(record, Mapping) or record.get("version") != VERSION:
        came = record.get("version") if isinstance(record, Mapping) else record
        raise ValueError(
            f"a record of a conversion of version {VERSION} was expected, but {came!r} came; use the qklab that wrote "
            "it, or convert the original model again."
        )
    return Conversion.from_dict({name: value for name, value in record.items() if name != "version"})


def make_attention_spec(conversion: Conversion, layer: Any) -> AttentionSpec:
    """The spec of a layer's coupling and norm; rotation and mixing stay the family's."""
    family, config = conversion.layout, layer.config
    return AttentionSpec(
        width=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_attention_heads if family.latent else family.count_kv_heads(layer),
        head_width=family.width(layer),
        latent=family.read_latent(layer),
        coupling=conversion.coupling,
        norm="qk" if conversion.norm else "none",
        norm_eps=conversion.norm_eps,
        position="none",
    )


def find_conversion(model: Any) -> Conversion | None:
    """What was done to a model, or None."""
    record = getattr(text_config(model), "qklab", None)
    return None if record is None else read_record(record)


@dataclass
class LayerReport:
    """Relative errors of one layer, √(E‖new − old‖²/E‖old‖²); None where they were not measured."""

    name: str
    keys: float | None = None
    values: float | None = None
    output: float | None = None


@dataclass
class ConversionReport:
    """What a conversion changed.

    `inserted` counts new parameters of coupling and norm, `trainable` those with gradients; `logits` is the relative
    change of the logits on the first calibration batch; `cache_share` is what is left of the cache.
    """

    conversion: Conversion
    parameters_before: int
    parameters: int
    inserted: int
    trainable: int
    cache_share: float
    layers: list[LayerReport] = field(default_factory=list)
    logits: float | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def inserted_share(self) -> float:
        """New parameters as a share of the model before."""
        return self.inserted / max(1, self.parameters_before)

    def __str__(self) -> str:
        lines = [f"{self.conversion.layout.title} → {self.conversion.name}, {len(self.layers)} layers"]
        lines.append(f"parameters  {self.parameters_before:,} → {self.parameters:,}")
        lines.append(f"inserted    {self.inserted:,} ({100 * self.inserted_share:.3g} %)")
        lines.append(f"trainable   {self.trainable:,}")
        lines.append(f"cache       {100 * self.cache_share:.4g} % of before")
        if self.logits is not None:
            lines.append(f"logits      moved by {100 * self.logits:.3g} % (root mean square, first calibration batch)")
        columns = [name for name in ("keys", "values", "output") if getattr(self.layers[0], name) is not None]
        if columns:
            names = [layer.name for layer in self.layers]
            first = max(map(len, ["relative error of", *names]))
            lines.append("relative error of".ljust(first) + "".join(name.rjust(10) for name in columns))
            for layer in self.layers:
                figures = [100 * getattr(layer, name) for name in columns]
                lines.append(layer.name.ljust(first) + "".join(f"{figure:8.3g} %" for figure in figures))
        return "\n".join([*lines, *self.notes])
