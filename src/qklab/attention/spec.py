"""AttentionSpec: one choice per stage, and what it costs."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from qklab import register
from qklab.attention.cache import cache_class
from qklab.attention.couple import Coupling
from qklab.attention.coupling_spec import CouplingSpec
from qklab.attention.finish import GATES, Gate
from qklab.attention.latent_couple import LATENT_COUPLINGS
from qklab.attention.look_back import KeyShift, ShortConvolution, list_remembered
from qklab.attention.mix import LatentSoftmax, Mix
from qklab.attention.norm import Normalisation
from qklab.attention.project import PROJECTIONS, Latent, Projection
from qklab.attention.rotate import KV_ROTATIONS, POSITIONS, Unrotated, choose_rotation
from qklab.attention.rules import RULES
from qklab.schema import Rule, Spec, boolean_field, choice_field, integer_field, number_field, spec_field


@dataclass(frozen=True, kw_only=True)
class LatentSpec(Spec):
    """MLA: queries and keys/values pass through latents.

    Args:
        query_rank: Width of the query latent.
        kv_rank: Width of the latent that stands for keys and values, and is cached.
        rope_width: How many further entries of each head carry RoPE; their key is shared by all heads and cached.
        norm: RMSNorm on both latents.
    """

    query_rank: int = integer_field()
    kv_rank: int = integer_field()
    rope_width: int = integer_field(at_least=0)
    norm: bool = boolean_field(True)

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "rope_width",
            lambda s: s.rope_width % 2,
            lambda s: "RoPE turns pairs of entries, so their number must be even",
            lambda s: {"rope_width": s.rope_width + 1},
        ),
    )


@dataclass(frozen=True, kw_only=True)
class AttentionSpec(Spec):
    """One choice per stage: project → couple → normalise → rotate → mix, then output.

    Illegal combinations raise `SpecError`.

    Args:
        width: Model width.
        heads: Query heads.
        kv_heads: Key/value heads; by default as many as heads.
        head_width: Width of a head; by default width/heads.
        bias: Whether the projections have biases.
        share: Which projections are one: "k=v" is (Q,K=V), "q=k" is (Q=K,V), "q=k=v" is (Q=K=V).
        latent: Keys and values through a latent (MLA).
        short_conv: Keys and values are convolved over so many tokens, their own and those before, entry by entry.
        coupling: How q and k evolve together.
        norm: "qk" normalises queries and keys.
        norm_eps: Its epsilon, and that of the norms of latents, of values and of cca.
        value_norm: Divide values by their root mean square. A key that is the value is so before its own norm and
            rotation then, and both are made on reading.
        position: "learned" positions live in the decoder.
        rope_base: Base of RoPE's frequencies.
        rope_fraction: Share of a head that RoPE turns.
        key_shift: The entries of a key that RoPE does not turn come from the token before.
        kv_rotation: Where key and value are one tensor under RoPE: rotate "once" and undo on the output, or "on-read".
        asymmetry_2d: A learned column bias that breaks the symmetry of q=k scores; only with causal=False.
        asymmetry_free_scale: Its score scale is a parameter of its own instead of the sum of its weights.
        mix: How scores become weights.
        differential_gain: Whether the norm of mix="differential" has a gain.
        sinks: A learned logit of every query head joins the softmax's denominator.
        exclusive: Take the part along a token's own value out of its output (XSA).
        gate: Multiply outputs by σ(W_g x): every "element", or each "head" as a whole.
        causal: Whether a token sees only itself and earlier ones.
        window: How many tokens it sees in one direction at most, itself counted; by default all.
    """

    width: int = integer_field()
    heads: int = integer_field(at_most=65_536)
    kv_heads: int = integer_field(None, at_most=65_536)
    head_width: int = integer_field(None)
    bias: bool = boolean_field(False)
    share: str = choice_field("none", PROJECTIONS)
    latent: LatentSpec | None = spec_field(LatentSpec, None)
    short_conv: int | None = integer_field(None, at_least=2, at_most=32)
    coupling: CouplingSpec | None = spec_field(CouplingSpec, None)
    norm: str = choice_field("none", register.norm)
    norm_eps: float = number_field(1e-6, above=0.0, at_most=1.0)
    value_norm: bool = boolean_field(False)
    position: str = choice_field("rope", POSITIONS)
    rope_base: float = number_field(10_000.0, above=1.0)
    rope_fraction: float = number_field(1.0, above=0.0, at_most=1.0)
    key_shift: bool = boolean_field(False)
    kv_rotation: str = choice_field("once", KV_ROTATIONS)
    asymmetry_2d: bool = boolean_field(False)
    asymmetry_free_scale: bool = boolean_field(False)
    mix: str = choice_field("softmax", register.mix)
    differential_gain: bool = boolean_field(True)
    sinks: bool = boolean_field(False)
    exclusive: bool = boolean_field(False)
    gate: str = choice_field("none", GATES)
    causal: bool = boolean_field(True)
    window: int | None = integer_field(None)

    rules: ClassVar[tuple[Rule, ...]] = RULES

    def defaults(self) -> dict[str, Any]:
        even = self.width % self.heads == 0
        return {"kv_heads": self.heads, "head_width": self.width // self.heads if even else None}

    @property
    def key_is_value(self) -> bool:
        """Whether one tensor serves as key and value."""
        return self.latent is None and not PROJECTIONS[self.share].own_value

    @property
    def sets_lengths(self) -> bool:
        """Whether queries and keys have a length that their projections do not decide."""
        return self.norm != "none" or (self.coupling is not None and self.coupling.mechanism.normalises)

    @property
    def makes_both_on_reading(self) -> bool:
        """Whether one tensor is stored from which key and value are made by a norm each."""
        return self.key_is_value and self.value_norm

    @property
    def shares_rotated_key(self) -> bool:
        """Whether RoPE turns what is key and value."""
        return self.key_is_value and self.position == "rope" and not self.value_norm

    @property
    def query_heads(self) -> int:
        """Query heads that are compared with keys: heads, or twice that for differential-v2."""
        return self.heads * register.mix[self.mix].query_factor

    @property
    def rotated_width(self) -> int:
        """How many entries of a head RoPE turns."""
        if self.position != "rope":
            return 0
        return self.latent.rope_width if self.latent is not None else round(self.head_width * self.rope_fraction)

    # The stage classes these choices stand for; `Attention` builds them, the counts below ask them.
    @property
    def projection(self) -> type[Projection] | type[Latent]:
        return Latent if self.latent is not None else PROJECTIONS[self.share]

    @property
    def rotation(self) -> type[Unrotated]:
        return choose_rotation(self)

    @property
    def coupler(self) -> type[Coupling] | None:
        """None where there is no coupling, or none of this kind over latents."""
        if self.coupling is None:
            return None
        kind = self.coupling.mechanism
        return kind if self.latent is None else LATENT_COUPLINGS.get(kind)

    @property
    def normalisation(self) -> type[Normalisation]:
        return register.norm[self.norm]

    @property
    def mixing(self) -> type[Mix]:
        return LatentSoftmax if self.latent is not None else register.mix[self.mix]

    @property
    def token_rings(self) -> tuple[tuple[int, int], ...]:
        """Tokens and entries of each thing that is looked back on, in the order that the layer does so."""
        return list_remembered(self)

    def stages(self) -> dict[str, Any]:
        """Stage name → the class chosen for it; None for a stage that does nothing."""
        return {
            "project": self.projection,
            "convolve": None if self.short_conv is None else ShortConvolution,
            "couple": self.coupler,
            "normalise": self.normalisation,
            "rotate": self.rotation,
            "mix": self.mixing,
        }

    def parameters(self) -> int:
        """Learned numbers in one layer, output projection included."""
        output = (self.heads * self.head_width + self.bias) * self.width
        beside = Gate.parameters_of(self) + self.query_heads * self.sinks
        stages = sum(stage.parameters_of(self) for stage in self.stages().values() if stage is not None)
        return output + beside + stages

    def flops_per_token(self, context: int) -> int:
        """Forward matrix-product FLOPs of one layer per token of a sequence of `context` tokens.

        A multiply-add is two FLOPs; scores count the whole T × T square, or a band of it as wide as a window sees;
        elementwise work is not counted.
        """
        if self.window is not None:
            context = min(context, self.window if self.causal else 2 * self.window - 1)
        output = 2 * self.heads * self.head_width * self.width + Gate.flops(self)
        return output + sum(stage.flops(self, context) for stage in self.stages().values() if stage is not None)

    def cache_bytes(self, tokens: int, dtype: torch.dtype = torch.bfloat16) -> int:
        """Bytes one layer caches for one sequence of `tokens` tokens, those that are looked back on included; a
        window keeps no more than it sees. Room for more than one draft comes on top."""
        tokens = tokens if self.window is None else min(tokens, self.window)
        behind = sum((back + 1) * entries for back, entries in self.token_rings)
        return (tokens * sum(cache_class(self).widths(self)) + behind) * dtype.itemsize

    def cache_bytes_per_token(self, dtype: torch.dtype = torch.bfloat16) -> int:
        """Bytes that one more token adds."""
        return self.cache_bytes(2, dtype) - self.cache_bytes(1, dtype)

    @property
    def name(self) -> str:
        """What people read in tables, e.g. "(Q,K=V) · leapfrog×1 · gqa4"."""
        words = [self.projection.tuple_name]
        if self.latent is not None:
            words = [f"MLA {self.latent.query_rank}/{self.latent.kv_rank}+{self.latent.rope_width}"]
            words += ["unnormed"] * (not self.latent.norm)
        words += [f"conv{self.short_conv}"] * (self.short_conv is not None)
        words += [] if self.coupling is None else [self.coupling.name]
        words += [] if self.kv_heads == self.heads else ["mqa" if self.kv_heads == 1 else f"gqa{self.kv_heads}"]
        words += [self.norm if self.normalisation.label is None else self.normalisation.label]
        words += ["value-norm"] * self.value_norm
        words += {"rope": [], "learned": ["learned"], "none": ["nope"]}[self.position]
        words += [f"rope {100 * self.rope_fraction:.4g} %"] * (self.rope_fraction != 1.0)
        words += [f"base {self.rope_base:g}"] * (self.rope_base != 10_000.0)
        words += ["key-shift"] * self.key_shift
        words += [self.kv_rotation] * (self.kv_rotation != "once")
        words += ["2d" + "+s" * self.asymmetry_free_scale] * self.asymmetry_2d
        mix = register.mix[self.mix].label
        words += [self.mix if mix is None else mix]
        words += ["sinks"] * self.sinks + ["xsa"] * self.exclusive + [f"gate {self.gate}"] * (self.gate != "none")
        words += ["ungained"] * (not self.differential_gain)
        words += [f"window {self.window}"] * (self.window is not None)
        words += ["bias"] * self.bias + ["bidirectional"] * (not self.causal)
        return " · ".join(filter(None, words))

    @property
    def formula(self) -> dict[str, str]:
        """Stage name → what it computes, in the notation of docs/mechanisms/; empty where it does nothing."""
        formulas = {name: "" if stage is None else stage.formula_of(self) for name, stage in self.stages().items()}
        formulas["project"] = " ; ".join(filter(None, (formulas["project"], formulas.pop("convolve"))))
        if self.value_norm:
            made = "v ← v/rms(v)" + (", both from what is stored" if self.makes_both_on_reading else "")
            formulas["normalise"] = " ; ".join(filter(None, (formulas["normalise"], made)))
        if self.key_shift:
            formulas["rotate"] = " ; ".join(filter(None, (formulas["rotate"], KeyShift.formula)))
        if self.position == "learned":
            added = "x_p ← x_p + e_p before the first layer"
            formulas["rotate"] = " ; ".join(filter(None, (added, formulas["rotate"])))
        return formulas | {"output": Gate.formulas.get(self.gate, "y = W_o o")}
