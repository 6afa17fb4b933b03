"""Attention: the five stages in order."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from qklab.attention.cache import Cache, cache_class
from qklab.attention.couple import Linear
from qklab.attention.norm import QKNorm
from qklab.attention.places import Places, locate
from qklab.attention.project import Projected, Projection
from qklab.attention.spec import AttentionSpec
from qklab.ops.coupling import Norm


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
        self.couple = spec.coupling.mechanism(spec) if spec.coupling is not None else None
        self.watched: Tensor | None = None  # [heads], raised to the largest logit of every training pass
        self.recomputes = False  # whether backward passes project anew rather than keep what a coupling came from

    def forward(
        self, x: Tensor, *, segments: Tensor | None = None, cache: Cache | None = None, places: Places | None = None
    ) -> Tensor:
        """x [B, T, width] → [B, T, width].

        `segments` [B, T] packs several texts into a row: attention stays inside runs of equal ids. With `cache`, x
        follows what the cache holds and is added to it. `places`, from `self.locate`, is for callers that share it.
        """
        if places is None:
            places = self.locate(x, segments, cache)
        elif segments is not None:
            raise ValueError("places already say where the segments are; give one of the two.")
        if self.recomputes and torch.is_grad_enabled():
            q, k, v = checkpoint(
                self.prepare, x, places, use_reentrant=False, preserve_rng_state=False, context_fn=keeping_coupled
            )
        else:
            q, k, v = self.prepare(x, places)
        if cache is not None:
            k, v = remember(cache, k, v)
        k, v = self.rotate.read(k, v, places)
        if self.watched is not None and self.training:
            largest = self.mix.largest_logits(q, k, places, self.rotate.bias(places))
            self.watched.copy_(torch.maximum(self.watched, largest))
        o = self.mix(q, k, v, x, places, self.rotate.bias(places))
        o = self.mix.finish(self.rotate.undo(o, places))
        return self.output(o.flatten(2))

    def prepare(self, x: Tensor, places: Places) -> Projected:
        """Stages 1 to 4 of the new tokens: x [B, T, width] → q [B, T, H, D], k and v [B, T, G, D]."""
        q, k, v = self.project(x)
        if self.couple is not None:
            q, k = self.coupled(q, k, places)
        else:
            q, k = self.rotate(*self.normalise(q, k), places)
        return q, k, v

    def coupled(self, q: Tensor, k: Tensor, places: Places) -> tuple[Tensor, Tensor]:
        """Stages 2 to 4 as one operation, which reads q and k once and writes them once."""
        assert self.couple is not None
        norm = self.normalise
        norm = Norm(norm.eps, norm.query_gain, norm.key_gain) if isinstance(norm, QKNorm) else None
        angles, turns_key = self.rotate.turning(places)
        q, k = self.couple(q, k, norm, angles, turns_key)
        return self.rotate.scaled(q), k

    def locate(self, x: Tensor, segments: Tensor | None = None, cache: Cache | None = None) -> Places:
        """Positions, mask and angles for x [B, T, width]; the same for every layer of one spec."""
        if x.dim() != 3 or x.shape[-1] != self.spec.width:
            raise ValueError(f"x must have shape [batch, tokens, {self.spec.width}], but {list(x.shape)} came.")
        check_packing(x.shape[:2], segments, cache)
        return locate(self.spec, x, segments, cache)

    def new_cache(
        self,
        batch: int,
        tokens: int,
        dtype: torch.dtype | None = None,
        *,
        grow: bool = True,
        left_padding: Tensor | None = None,
    ) -> Cache:
        """An empty cache with room for `tokens` tokens, in the layer's own precision unless `dtype` says otherwise.

        `left_padding` [batch] says how many leading tokens of each row are padding.
        """
        weight = self.output.weight
        return cache_class(self.spec)(
            self.spec, batch, tokens, dtype or weight.dtype, weight.device, grow=grow, left_padding=left_padding
        )

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
        plain.project.set_columns(*self.couple(*self.project.columns()))
        return plain.train(self.training)

    def extra_repr(self) -> str:
        return self.spec.name


def keeping_coupled() -> Any:
    """For checkpoint: what the coupling's kernel gives is kept, since attention keeps it anyway, all else is not."""
    coupled = torch.ops.qklab.couple.default

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op is coupled else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def remember(cache: Cache, k: Tensor, v: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Everything the cache now holds: keys and, where they are separate, values."""
    if v is None:
        return cache.append(k)[0], None
    keys, values = cache.append(k, v)
    return keys, values


def check_packing(shape: torch.Size, segments: Tensor | None, cache: Cache | None) -> None:
    if cache is not None and not isinstance(cache, Cache):
        raise ValueError(f"a layer's cache comes from its new_cache, but a {type(cache).__name__} came.")
    if segments is None:
        return
    if cache is not None:
        raise ValueError("segments and a cache exclude each other; decode packed texts as separate rows.")
    if not isinstance(segments, Tensor) or segments.shape != shape or segments.is_floating_point():
        came = f"{segments.dtype} {list(segments.shape)}" if isinstance(segments, Tensor) else type(segments).__name__
        raise ValueError(f"segments must be a tensor of whole numbers of shape {list(shape)}, but {came} came.")
