"""What the attention of a decoder does on a batch: one number per quantity, layer and softmax.

The five stages are run by hand and eagerly, one layer at a time, so a compiled training step next to it stays as it
is, and memory at that of one layer's scores. docs/probes.md says how to read each quantity.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qklab.attention.layer import Attention
from qklab.attention.mix import LatentSoftmax
from qklab.attention.parts import Parts, at_queries, exact, product, take_apart
from qklab.attention.places import Places, triangle
from qklab.attention.project import Latent, Projection, columns
from qklab.model.decoder import Block, Decoder


@dataclass(frozen=True)
class Logits:
    """The scores of every layer before any mask, as the product they are: `queries` · `keys`ᵀ, scale included."""

    queries: Tensor  # [layers, B, T, H, E]
    keys: Tensor  # [layers, B, T, G, E]

    def of_layer(self, index: int) -> Tensor:
        """[B, H, T, T]."""
        return product(self.queries[index], self.keys[index])


class Diagnosis(dict[str, Tensor]):
    """Quantity → [layers, H], NaN where the mechanism has no such quantity.

    H counts softmaxes: twice the heads for differential-v2. What belongs to a key head stands at each of its queries.
    """

    def __init__(
        self, table: Mapping[str, Tensor], layers: list[int], logits: Logits, visible: Tensor, maps: Tensor | None
    ):
        super().__init__(table)
        self.layers = layers
        self.logits = logits
        self.visible = visible  # [B, 1, T, T], True where a query may attend
        self.maps = maps  # [layers, B, H, T, T]


@torch.no_grad()
def diagnose(
    model: Decoder,
    ids: Tensor,
    segments: Tensor | None = None,
    *,
    layers: Sequence[int] | None = None,
    maps: bool = False,
) -> Diagnosis:
    """Measure `layers` (all by default) on ids [B, T], packed as `segments` [B, T] says; `maps` keeps all softmaxes.

    The model runs in the precision of its parameters, without autocast or dropout; scores are float32 or better.
    """
    model.check(ids, None)
    if ids.numel() == 0:
        raise ValueError(f"a diagnosis needs at least one token, but ids of shape {list(ids.shape)} came.")
    chosen = checked(layers, model.spec.layers)
    rows, compared, kept = [], [], []
    with undisturbed(model, ids.device):
        embedded = model.embed(ids.long())
        places = model.attention(0).locate(embedded, segments)
        visible, positions = sees(places, ids.shape), places.positions.expand(ids.shape)
        for attention, x in inputs(model, embedded, places, chosen):
            parts = take_apart(attention, x, places)
            weights, row = from_scores(product(*parts.compared), visible, positions)
            rows.append(row | from_vectors(attention, parts) | from_parameters(attention))
            compared.append(parts.compared)
            kept += [weights] * maps
        queries, keys = (torch.stack(tensors) for tensors in zip(*compared, strict=True))
        table = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
        table |= from_spectrum(singular_values(queries, keys))
    return Diagnosis(table, chosen, Logits(queries, keys), visible, torch.stack(kept) if maps else None)


@torch.no_grad()
def logit_change(before: Logits, after: Diagnosis) -> dict[str, Tensor]:
    """How far the logits of visible pairs have moved: root mean square and largest, [layers, H] each."""
    now, hidden, pairs = after.logits, ~after.visible, after.visible.sum()
    if (before.queries.shape, before.keys.shape) != (now.queries.shape, now.keys.shape):
        raise ValueError(
            "logits can only be compared on one batch and for models of one shape, but queries "
            f"{list(before.queries.shape)} came first and {list(now.queries.shape)} later."
        )
    mean, largest = [], []
    with torch.autocast(hidden.device.type, enabled=False):
        for layer in range(len(now.queries)):
            change = (now.of_layer(layer) - before.of_layer(layer)).masked_fill(hidden, 0.0)
            mean.append((change.square().sum((0, 2, 3)) / pairs).sqrt())
            largest.append(change.abs().amax((0, 2, 3)))
    return {"logit_change": torch.stack(mean), "largest_logit_change": torch.stack(largest)}


def checked(layers: Sequence[int] | None, count: int) -> list[int]:
    chosen = list(range(count)) if layers is None else sorted(set(layers))
    if not chosen or chosen[0] < 0 or chosen[-1] >= count:
        raise ValueError(f"layers must be some of 0 to {count - 1}, but {list(layers or [])} came.")
    return chosen


@contextmanager
def undisturbed(model: nn.Module, device: torch.device) -> Iterator[None]:
    training = model.training
    model.eval()
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        model.train(training)


def inputs(model: Decoder, x: Tensor, places: Places, layers: list[int]) -> Iterator[tuple[Attention, Tensor]]:
    """Embeddings x [B, T, width] → the chosen attention layers, each with its input."""
    if model.positions is not None:
        x = x + model.positions(places)
    for layer in range(layers[-1] + 1):
        block = model.blocks[layer]
        assert isinstance(block, Block)
        if layer in layers:
            yield block.attention, block.attention_norm(x)
        if layer < layers[-1]:
            x = block(x, places, None)


def sees(places: Places, shape: torch.Size) -> Tensor:
    """[B, 1, T, T], True where a query may attend."""
    slots = torch.arange(shape[1], device=places.positions.device)
    mask = places.mask
    if mask is None:
        mask = triangle(slots, 0) if places.causal else torch.ones_like(triangle(slots, 0))
    return mask.expand(shape[0], 1, -1, -1)


def from_scores(scores: Tensor, visible: Tensor, positions: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The attention weights [B, H, T, T], and what they and the scores [B, H, T, T] tell: [H] each."""
    hidden = ~visible
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    slots = torch.arange(positions.shape[1], device=positions.device)
    first = (slots - positions)[:, None, :, None].expand(*scores.shape[:3], 1)  # slot of the segment's first token
    later = (positions > 0)[:, None]  # [B, 1, T]
    sink = (weights.gather(-1, first).squeeze(-1) * later).sum((0, 2)) / later.sum()
    return weights, {
        "entropy": torch.special.entr(weights).sum(-1).mean((0, 2)),
        "sink_mass": sink,
        "largest_logit": scores.masked_fill(hidden, 0.0).abs().amax((0, 2, 3)),
    }


def from_vectors(attention: Attention, parts: Parts) -> dict[str, Tensor]:
    """Angles between q, k and v of one token, and how far coupling moved q and k: [H] each."""
    q, k, v = parts.normalised
    k, v = at_queries(k, q), at_queries(v, q)
    moved = [q.new_full(q.shape[2:3], torch.nan)] * 2
    if attention.couple is not None:
        moved = [shift(old, new) for old, new in zip(parts.projected, parts.coupled, strict=True)]
    return {
        "query_key_cosine": F.cosine_similarity(q, k, -1).mean((0, 1)),
        "key_value_cosine": F.cosine_similarity(k[..., : v.shape[-1]], v, -1).mean((0, 1)),
        "query_shift": moved[0],
        "key_shift": moved[1].repeat_interleave(len(moved[0]) // len(moved[1])),
    }


def shift(old: Tensor, new: Tensor) -> Tensor:
    """√(Σ ‖new − old‖² / Σ ‖old‖²) over all tokens: [B, T, heads, D] → [heads]."""
    return ((new - old).square().sum((0, 1, 3)) / old.square().sum((0, 1, 3))).sqrt()


def from_parameters(attention: Attention) -> dict[str, Tensor]:
    """‖W_q‖ and ‖W_k‖ (a bias counts as one more column) and the coupling's δ: [H] each."""
    project, mix, heads = attention.project, attention.mix, attention.spec.query_heads
    if isinstance(project, Projection):
        query, key = (exact(matrix).square().sum((0, 1, 3)) for matrix in project.columns())
    else:
        assert isinstance(project, Latent)
        assert isinstance(mix, LatentSoftmax)
        query, key = latent_squares(project, mix)
    step = getattr(attention.couple, "step", None)
    step = query.new_full((1,), torch.nan) if step is None else exact(step.flatten())
    names = {"query_norm": query.sqrt(), "key_norm": key.sqrt(), "step_size": step}
    return {name: value.repeat_interleave(heads // len(value)) for name, value in names.items()}


def latent_squares(project: Latent, mix: LatentSoftmax) -> tuple[Tensor, Tensor]:
    """‖[W_uq ; W_qr] W_dq‖² and ‖[W_uk W_dkv ; W_kr]‖² per head.

    With norms on the latents the down-projection's size cancels, and the norm's gain stands in its place.
    """

    def squares(up: nn.Linear, down: nn.Linear, gain: Tensor | None) -> Tensor:
        matrix = exact(up.weight) @ exact(columns(down)[0].mT) if gain is None else exact(up.weight) * exact(gain)
        return matrix.unflatten(0, (mix.heads, -1)).square().sum((1, 2))

    query = squares(project.up_query, project.down_query, project.query_gain)
    key = squares(mix.up_key, project.down_key_value, project.key_value_gain)
    if project.rope_query is not None and project.rope_key is not None:
        query = query + squares(project.rope_query, project.down_query, project.query_gain)
        key = key + exact(columns(project.rope_key)).square().sum()
    return query, key


def singular_values(queries: Tensor, keys: Tensor) -> Tensor:
    """σ(Q Kᵀ) from the small factors of Q = U_q R_q and K = U_k R_k, since σ(Q Kᵀ) = σ(R_q R_kᵀ): no T × T problem.

    [layers, B, T, H, E], [layers, B, T, G, E] → [layers, B, H, min(T, E)]; NaN where scores are not finite.
    """
    r_q, r_k = (torch.linalg.qr(side.transpose(2, 3), mode="r").R for side in (queries, keys))
    core = r_q @ r_k.repeat_interleave(r_q.shape[2] // r_k.shape[2], 2).mT
    finite = core.isfinite().all(-1, keepdim=True).all(-2, keepdim=True)
    # cuSOLVER takes matrices wider than 32 one after another; so does a CPU, without a launch and a wait for each
    sigma = torch.linalg.svdvals(core.where(finite, 0.0).cpu()).to(core.device)
    return sigma.where(finite[..., 0], torch.nan)


def from_spectrum(sigma: Tensor) -> dict[str, Tensor]:
    """Effective rank exp(−Σ p log p), p = σ/Σσ, and gap (σ₁ − σ₂)/σ₁, mean over rows: [layers, H] each."""
    share = sigma / sigma.sum(-1, keepdim=True)
    first, second = F.pad(sigma, (0, 1))[..., :2].unbind(-1)
    return {
        "effective_rank": torch.special.entr(share).sum(-1).exp().mean(1),
        "spectral_gap": ((first - second) / first).mean(1),
    }
