"""What the attention of a decoder does on a batch: one number per quantity, layer and softmax.

The model's own forward runs eagerly and tells, layer by layer, what its stages gave; a compiled training step next to
it stays as it is, and memory at that of one layer's scores. docs/probes.md says how to read each quantity.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qklab.attention.layer import Attention
from qklab.attention.mix import KeyValue, LatentSoftmax
from qklab.attention.positions import Positions
from qklab.attention.project import Latent, Projection, read_linear_columns
from qklab.attention.visibility import Visibility, render_mask
from qklab.model.decoder import Decoder


@dataclass(frozen=True)
class Logits:
    """The scores of every layer before any mask, as the product they are: `queries` · `keys`ᵀ, scale included.

    Where layers differ in heads or widths, the smaller ones are filled up with zeros.
    """

    queries: Tensor  # [layers, B, T, H, E]
    keys: Tensor  # [layers, B, T, G, E]

    def of_layer(self, index: int) -> Tensor:
        """[B, H, T, T]."""
        return multiply_heads(self.queries[index], self.keys[index])


class Diagnosis(dict[str, Tensor]):
    """Quantity → [layers, H], NaN where the mechanism has no such quantity, or the layer no such head.

    H counts softmaxes: more than the heads where a mix has several for each. What belongs to a key head stands at each
    of its queries.
    """

    def __init__(
        self,
        table: Mapping[str, Tensor],
        layers: list[int],
        heads: list[int],
        logits: Logits,
        visible: Tensor,
        maps: Tensor | None,
    ):
        super().__init__(table)
        self.layers = layers
        self.heads = heads  # of each layer
        self.logits = logits
        self.visible = visible  # [layers, B, 1, T, T], True where a query may attend
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
    recorders = [Recorder(model.attention(layer), maps) for layer in check_layers(layers, model.spec.layers)]
    with evaluate_exactly(model, ids.device), attach_recorders(recorders):
        model.features(ids, segments=segments)
        logits = stack_logits([recorder.compared for recorder in recorders])
        table = {
            name: stack_layers([recorder.row[name] for recorder in recorders], torch.nan) for name in recorders[0].row
        }
        table |= measure_spectrum(singular_values(logits.queries, logits.keys))
    return Diagnosis(
        table,
        layers=[recorder.attention.layer for recorder in recorders],
        heads=[recorder.attention.spec.query_heads for recorder in recorders],
        logits=logits,
        visible=torch.stack([recorder.visible for recorder in recorders]),
        maps=stack_layers([recorder.weights for recorder in recorders], 0.0) if maps else None,
    )


class Recorder:
    """Listens to the stages of one layer and keeps what is measured of them."""

    row: dict[str, Tensor]  # quantity → [H]
    compared: tuple[Tensor, Tensor]  # scores = q kᵀ
    visible: Tensor  # [B, 1, T, T]
    weights: Tensor  # [B, H, T, T]

    def __init__(self, attention: Attention, keeps_weights: bool):
        self.attention = attention
        self.keeps_weights = keeps_weights
        self.stages: dict[str, Any] = {}

    def __call__(self, stage: str, *given: Any) -> None:
        self.stages[stage] = given
        if stage == "mix":
            self.measure(*given)
            self.stages.clear()

    def measure(
        self, q: Tensor, stored: KeyValue, bias: Tensor | None, positions: Positions, visibility: Visibility
    ) -> None:
        mix, shape = self.attention.mix, q.shape[:2]
        k, _ = mix.keys_and_values(stored)
        self.compared = factor_scores(mix.scale * raise_precision(q), raise_precision(k), bias)
        self.visible = render_mask(visibility).expand(shape[0], 1, -1, -1)
        scores, sinks = multiply_heads(*self.compared), mix.find_sinks(q)
        weights, row = measure_scores(scores, self.visible, positions.new.expand(shape), sinks)
        self.row = row | measure_vectors(self.attention, self.stages) | measure_parameters(self.attention)
        if self.keeps_weights:
            self.weights = weights


@contextmanager
def attach_recorders(recorders: list[Recorder]) -> Iterator[None]:
    try:
        for recorder in recorders:
            recorder.attention.recorder = recorder
        yield
    finally:
        for recorder in recorders:
            recorder.attention.recorder = None


def stack_layers(tensors: list[Tensor], fill: float) -> Tensor:
    """[…] each → [layers, …], smaller ones filled up at the end of every axis."""
    largest = [max(sizes) for sizes in zip(*(tensor.shape for tensor in tensors), strict=True)]
    if all(list(tensor.shape) == largest for tensor in tensors):
        return torch.stack(tensors)
    stacked = tensors[0].new_full((len(tensors), *largest), fill)
    for target, tensor in zip(stacked, tensors, strict=True):
        target[tuple(slice(size) for size in tensor.shape)] = tensor
    return stacked


def stack_logits(compared: list[tuple[Tensor, Tensor]]) -> Logits:
    if len({(q.shape, k.shape) for q, k in compared}) > 1:  # a head's key is then no longer found by its number
        compared = [(q, repeat_for_queries(k, q)) for q, k in compared]
    queries, keys = (stack_layers(list(side), 0.0) for side in zip(*compared, strict=True))
    return Logits(queries, keys)


def raise_precision(tensor: Tensor) -> Tensor:
    """In float32 or better."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def factor_scores(q: Tensor, k: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """q', k' with q'k'ᵀ = q kᵀ + bias. A bias b_j per column is one more entry: 1 · b_j."""
    if bias is None:
        return q, k
    assert bias.shape[1:3] == (1, 1), "only a bias per column keeps the scores a product of queries and keys"
    column = bias.to(k.dtype).permute(0, 3, 1, 2).expand(*k.shape[:3], 1)  # [B, S, G, 1]
    return torch.cat([q, torch.ones_like(q[..., :1])], -1), torch.cat([k, column], -1)


def repeat_for_queries(k: Tensor, q: Tensor) -> Tensor:
    """Key heads repeated for every query head that reads them: [B, T, G, ·] → [B, T, H, ·]."""
    return k.repeat_interleave(q.shape[2] // k.shape[2], 2)


def multiply_heads(q: Tensor, k: Tensor) -> Tensor:
    """[B, T, H, E], [B, S, G, E] → [B, H, T, S]."""
    return q.transpose(1, 2) @ repeat_for_queries(k, q).permute(0, 2, 3, 1)


@torch.no_grad()
def logit_change(before: Logits, after: Diagnosis) -> dict[str, Tensor]:
    """How far the logits of visible pairs have moved: root mean square and largest, [layers, H] each."""
    now = after.logits
    if (before.queries.shape, before.keys.shape) != (now.queries.shape, now.keys.shape):
        raise ValueError(
            "logits can only be compared on one batch and for models of one shape, but queries "
            f"{list(before.queries.shape)} came first and {list(now.queries.shape)} later."
        )
    mean, largest = [], []
    with torch.autocast(now.queries.device.type, enabled=False):
        for layer, (visible, heads) in enumerate(zip(after.visible, after.heads, strict=True)):
            change = (now.of_layer(layer) - before.of_layer(layer)).masked_fill(~visible, 0.0)[:, :heads]
            mean.append((change.square().sum((0, 2, 3)) / visible.sum()).sqrt())
            largest.append(change.abs().amax((0, 2, 3)))
    return {"logit_change": stack_layers(mean, torch.nan), "largest_logit_change": stack_layers(largest, torch.nan)}


def check_layers(layers: Sequence[int] | None, count: int) -> list[int]:
    chosen = list(range(count)) if layers is None else sorted(set(layers))
    if not chosen or chosen[0] < 0 or chosen[-1] >= count:
        raise ValueError(f"layers must be some of 0 to {count - 1}, but {list(layers or [])} came.")
    return chosen


@contextmanager
def evaluate_exactly(model: nn.Module, device: torch.device) -> Iterator[None]:
    training = model.training
    model.eval()
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        model.train(training)


def measure_scores(
    scores: Tensor, visible: Tensor, positions: Tensor, sinks: Tensor | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """The attention weights [B, H, T, T], and what they and the scores [B, H, T, T] tell: [H] each.

    A learned sink [H] takes its share of every row, which counts in the entropy.
    """
    hidden = ~visible
    compared = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        compared = torch.cat([compared, sinks[:, None, None].to(scores).expand(*scores.shape[:3], 1)], -1)
    shares = compared.softmax(-1)
    weights = shares[..., : scores.shape[-1]]
    slots = torch.arange(positions.shape[1], device=positions.device)
    first = (slots - positions)[:, None, :, None].expand(*scores.shape[:3], 1)  # slot of the segment's first token
    later = (positions > 0)[:, None]  # [B, 1, T]
    sink = (weights.gather(-1, first).squeeze(-1) * later).sum((0, 2)) / later.sum()
    return weights, {
        "entropy": torch.special.entr(shares).sum(-1).mean((0, 2)),
        "sink_mass": sink,
        "largest_logit": scores.masked_fill(hidden, 0.0).abs().amax((0, 2, 3)),
    }


def measure_vectors(attention: Attention, stages: Mapping[str, Any]) -> dict[str, Tensor]:
    """Angles between q, k and v of one token, how alike a layer's k and v are up to a turn, and how far coupling moved
    q and k: [H] each."""
    q, k, v = stages["normalise"]
    k, v = (repeat_for_queries(raise_precision(u), q) for u in attention.mix.keys_and_values(KeyValue(k, v)))
    q = raise_precision(q)
    moved = [q.new_full(q.shape[2:3], torch.nan)] * 2
    if attention.couple is not None:
        before, after = stages["project"][:2], stages["couple"][:2]
        moved = [
            measure_shift(raise_precision(old), raise_precision(new)) for old, new in zip(before, after, strict=True)
        ]
    beside_q, beside_k = q[..., : v.shape[-1]], k[..., : v.shape[-1]]  # a latent's rotated part has no value beside it
    return {
        "query_key_cosine": F.cosine_similarity(q, k, -1).mean((0, 1)),
        "key_value_cosine": F.cosine_similarity(beside_k, v, -1).mean((0, 1)),
        "query_value_cosine": F.cosine_similarity(beside_q, v, -1).mean((0, 1)),
        "key_value_alignment": measure_alignment(*(u.flatten(2).flatten(0, 1) for u in (beside_k, v))).expand(
            q.shape[2]
        ),
        "query_shift": moved[0],
        "key_shift": moved[1].repeat_interleave(len(moved[0]) // len(moved[1])),
    }


def measure_alignment(x: Tensor, y: Tensor) -> Tensor:
    """Linear CKA of the tokens' vectors x [tokens, n] and y [tokens, m] (Kornblith et al., 2019): from 0 to 1, where
    one is the other but for a rotation and a scale."""
    x, y = x - x.mean(0), y - y.mean(0)
    return (x.mT @ y).square().sum() / ((x.mT @ x).norm() * (y.mT @ y).norm())


def measure_shift(old: Tensor, new: Tensor) -> Tensor:
    """√(Σ ‖new − old‖² / Σ ‖old‖²) over all tokens: [B, T, heads, D] → [heads]."""
    return ((new - old).square().sum((0, 1, 3)) / old.square().sum((0, 1, 3))).sqrt()


def measure_parameters(attention: Attention) -> dict[str, Tensor]:
    """‖W_q‖ and ‖W_k‖ (a bias counts as one more column) and the coupling's δ: [H] each."""
    project, mix, heads = attention.project, attention.mix, attention.spec.query_heads
    if isinstance(project, Projection):
        query, key = (raise_precision(matrix).square().sum((0, 1, 3)) for matrix in project.read_columns())
    else:
        assert isinstance(project, Latent)
        assert isinstance(mix, LatentSoftmax)
        query, key = measure_latent_squares(project, mix)
    step = getattr(attention.couple, "step", None)
    step = query.new_full((1,), torch.nan) if step is None else raise_precision(step.flatten())
    names = {"query_norm": query.sqrt(), "key_norm": key.sqrt(), "step_size": step}
    return {name: value.repeat_interleave(heads // len(value)) for name, value in names.items()}


def measure_latent_squares(project: Latent, mix: LatentSoftmax) -> tuple[Tensor, Tensor]:
    """‖[W_uq ; W_qr] W_dq‖² and ‖[W_uk W_dkv ; W_kr]‖² per head.

    With norms on the latents the down-projection's size cancels, and the norm's gain stands in its place.
    """

    def squares(up: nn.Linear, down: nn.Linear, gain: Tensor | None) -> Tensor:
        matrix = (
            raise_precision(up.weight) @ raise_precision(read_linear_columns(down)[0].mT)
            if gain is None
            else raise_precision(up.weight) * raise_precision(gain)
        )
        return matrix.unflatten(0, (mix.heads, -1)).square().sum((1, 2))

    query = squares(project.up_query, project.down_query, project.query_gain)
    key = squares(mix.up_key, project.down_key_value, project.key_value_gain)
    if project.rope_query is not None and project.rope_key is not None:
        query = query + squares(project.rope_query, project.down_query, project.query_gain)
        key = key + raise_precision(read_linear_columns(project.rope_key)).square().sum()
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


def measure_spectrum(sigma: Tensor) -> dict[str, Tensor]:
    """Effective rank exp(−Σ p log p), p = σ/Σσ, and gap (σ₁ − σ₂)/σ₁, mean over rows: [layers, H] each."""
    share = sigma / sigma.sum(-1, keepdim=True)
    first, second = F.pad(sigma, (0, 1))[..., :2].unbind(-1)
    return {
        "effective_rank": torch.special.entr(share).sum(-1).exp().mean(1),
        "spectral_gap": ((first - second) / first).mean(1),
    }
