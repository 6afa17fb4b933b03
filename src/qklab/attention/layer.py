"""Attention: the five stages in order."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from qklab.attention.cache import Cache, cache_class
from qklab.attention.couple import Linear
from qklab.attention.finish import Gate
from qklab.attention.look_back import KeyShift, LookbackCoupling, ShortConvolution
from qklab.attention.mix import KeyValue
from qklab.attention.past import Past
from qklab.attention.positions import Positions, find_positions, find_slots
from qklab.attention.project import Latent, ProjectedTensors, Projection
from qklab.attention.spec import AttentionSpec
from qklab.attention.visibility import Visibility, find_visibility
from qklab.ops.norm import rms_norm


class Attention(nn.Module):
    """y = W_o mix(rotate(normalise(couple(project(x))))), each stage as `spec` chooses.

    `layer`, counted from 0, sets λ_init of differential attention.
    """

    def __init__(self, spec: AttentionSpec, layer: int = 0):
        super().__init__()
        self.spec = spec
        self.layer = layer
        self.project = spec.projection(spec)
        self.normalise = spec.normalisation(spec)
        self.rotate = spec.rotation(spec)
        self.mix = spec.mixing(spec, layer)
        self.output = nn.Linear(spec.heads * spec.head_width, spec.width, bias=spec.bias)
        # built last, so that under one seed a layer with coupling draws the same other weights as one without
        self.couple = None if spec.coupler is None else spec.coupler(spec)
        self.convolve = None if spec.short_conv is None else ShortConvolution(spec)
        self.shift = KeyShift(spec) if spec.key_shift else None
        self.gate = None if spec.gate == "none" else Gate(spec)
        self.members: int | None = None  # of a stacked model: its rows belong to so many, in equal shares
        self.watched: Tensor | None = None  # [heads], raised to the largest logit of every training pass
        self.recorder: Callable[..., None] | None = None  # called with the name of each stage and what it gave
        self.recomputes = False  # whether backward passes project anew rather than keep what a coupling came from

    def forward(
        self,
        x: Tensor,
        *,
        segments: Tensor | None = None,
        cache: Cache | None = None,
        positions: Positions | None = None,
        visibility: Visibility | None = None,
    ) -> Tensor:
        """x [B, T, width] → [B, T, width].

        `segments` [B, T] packs several texts into a row: attention stays inside runs of equal ids. With `cache`, x
        follows what the cache holds and is added to it. Callers that share positions and visibility between layers
        give both, as `self.locate` finds them.
        """
        if positions is None or visibility is None:
            positions, visibility = self.locate(x, segments, cache)
        elif segments is not None:
            raise ValueError("positions and visibility already say where the segments are; give one of the two.")
        kept = () if cache is None else cache.recall()
        if self.recomputes and torch.is_grad_enabled():
            q, k, v, seen = checkpoint(
                self.prepare, x, positions, kept, use_reentrant=False, preserve_rng_state=False, context_fn=keep_coupled
            )
        else:
            q, k, v, seen = self.prepare(x, positions, kept)
        stored = self.store(k, v, seen, positions, cache)
        q, bias = (q, None) if self.rotate.asymmetry is None else self.rotate.asymmetry(q, positions)
        self.record("mix", q, stored, bias, positions, visibility)
        if self.watched is not None and self.training:
            largest = self.mix.largest_logits(q, stored, visibility, bias)
            largest = largest.amax(0) if self.members is None else largest.unflatten(0, (self.members, -1)).amax(1)
            self.watched.copy_(torch.maximum(self.watched, largest))
        o = self.mix(q, stored, x, visibility, bias)
        if self.spec.exclusive:  # before the rotation is undone, in which the own value is the own key as it is stored
            o = self.mix.exclude(o, self.mix.values(KeyValue(k, v, make=self.make)))
        o = self.mix.finish(self.rotate.undo(o, positions))
        return self.output((o if self.gate is None else self.gate(o, x)).flatten(2))

    def prepare(
        self, x: Tensor, positions: Positions, kept: Sequence[Tensor] = ()
    ) -> tuple[Tensor, Tensor, Tensor | None, list[Tensor]]:
        """Stages 1 to 4 of the new tokens: x [B, T, width] → q [B, T, H, D], k and v [B, T, G, D], and what later ones
        look back on, of which `kept` is what the cache has.

        Stages 2 to 4 are one operation where the coupling has one that knows the norm, and nobody asks for more.
        """
        past, couple = Past(positions.new, kept), self.couple
        if isinstance(self.project, Latent):
            q, k, v = self.couple_latents(self.project, x)
        else:
            q, k, v = self.project(x)
            if self.convolve is not None:
                k, v = self.convolve(k, v, past)
            fuses = self.normalise.fuses and self.recorder is None and self.make is None
            if couple is not None and couple.fuses and fuses:
                q, k = couple.fuse(q, k, self.normalise.operand(), positions.angles, self.rotate.turns_key)
                return q, k if self.shift is None else self.shift(k, past), self.normalise_value(v), past.seen
            self.record("project", q, k, v)
            if isinstance(couple, LookbackCoupling):
                q, k, v = couple(q, k, v, past)
            elif couple is not None:
                q, k = couple(q, k)
        self.record("couple", q, k, v)
        normalised, v = self.normalise(q, k), self.normalise_value(v)
        self.record("normalise", *normalised, v if self.make is None else self.make(k)[1])
        q, k = normalised if self.make is None else (normalised[0], k)
        q, k = self.rotate(q, k, positions)
        return q, k if self.shift is None else self.shift(k, past), v, past.seen

    def normalise_value(self, v: Tensor | None) -> Tensor | None:
        return rms_norm(v, None, self.spec.norm_eps) if self.spec.value_norm and v is not None else v

    def make_both(self, stored: Tensor) -> tuple[Tensor, Tensor]:
        """The key, not yet turned, and the value from what both are made of."""
        return self.normalise.normalise_key(stored), rms_norm(stored, None, self.spec.norm_eps)

    @property
    def make(self) -> Callable[[Tensor], tuple[Tensor, Tensor]] | None:
        return self.make_both if self.spec.makes_both_on_reading else None

    def couple_latents(self, project: Latent, x: Tensor) -> ProjectedTensors:
        """Stages 1 and 2 of MLA: it is the latents that are coupled, before heads are made of them."""
        c_q, c = project.compress(x)
        if self.recorder is not None:
            self.record("project", *project.expand(c_q, c, x))
        if self.couple is not None:
            c_q, c = self.couple(c_q, c)
        return project.expand(c_q, c, x)

    def store(
        self, k: Tensor, v: Tensor | None, seen: list[Tensor], positions: Positions, cache: Cache | None
    ) -> KeyValue:
        """Keys and values of the new tokens and of those before them; no value where it is the key."""
        if cache is not None:
            k, v = cache.append(k, v) if v is not None else (*cache.append(k), None)
            cache.remember(seen)
        return KeyValue(k, v, positions=None if self.rotate.turns_key else positions, make=self.make)

    def record(self, stage: str, *given: Any) -> None:
        if self.recorder is not None:
            self.recorder(stage, *given)

    def locate(
        self, x: Tensor, segments: Tensor | None = None, cache: Cache | None = None
    ) -> tuple[Positions, Visibility]:
        """Where the tokens x [B, T, width] stand, and what each may see."""
        if x.dim() != 3 or x.shape[-1] != self.spec.width:
            raise ValueError(f"x must have shape [batch, tokens, {self.spec.width}], but {list(x.shape)} came.")
        if cache is not None and not isinstance(cache, Cache):
            raise ValueError(f"a layer's cache comes from its new_cache, but a {type(cache).__name__} came.")
        slots = find_slots(x, segments, cache)
        return find_positions(self.spec, slots, x.dtype), find_visibility(self.spec, slots, x)

    def new_cache(
        self,
        batch: int,
        tokens: int,
        dtype: torch.dtype | None = None,
        *,
        grow: bool = True,
        left_padding: Tensor | None = None,
        drafts: int = 1,
    ) -> Cache:
        """An empty cache with room for `tokens` tokens, in the layer's own precision unless `dtype` says otherwise.

        `left_padding` [batch] says how many leading tokens of each row are padding; `drafts`, how many tokens `crop`
        will take back where only the last ones are kept: behind a window, and of what is looked back on.
        """
        options: dict[str, Any] = {"grow": grow, "left_padding": left_padding, "drafts": drafts}
        weight = self.output.weight
        return cache_class(self.spec)(self.spec, batch, tokens, dtype or weight.dtype, weight.device, **options)

    @torch.no_grad()
    def fold(self) -> "Attention":
        """A plain layer with the same outputs: `linear` coupling maps q and k linearly, so it goes into W_q and W_k.

        (Q=K,V) folds to (Q,K,V) and (Q=K=V) to (Q,K=V), since the folded query and key differ.
        """
        if not isinstance(self.couple, Linear) or not isinstance(self.project, Projection):
            raise ValueError(
                f"only coupling kind='linear' folds into the projections, but this layer is {self.spec.name}."
            )
        if self.spec.asymmetry_2d:
            raise ValueError("a folded query and key differ, and the 2-D asymmetry exists only where they are one.")
        plain = Attention(self.spec.replace(coupling=None, share=self.project.folds_to), self.layer)
        plain.to(self.output.weight)
        own = {name: value for name, value in self.state_dict().items() if not name.startswith("couple.")}
        plain.load_state_dict(own, strict=False)
        assert isinstance(plain.project, Projection)
        plain.project.set_columns(*self.couple(*self.project.read_columns()))
        return plain.train(self.training)

    def extra_repr(self) -> str:
        return self.spec.name


def keep_coupled() -> Any:
    """For checkpoint: what the coupling's kernel gives is kept, since attention keeps it anyway, all else is not."""
    coupled = torch.ops.qklab.couple.default

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op is coupled else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
