"""Diagnoses: the scores are the layer's own in every legal spec, and each quantity is what its formula says."""

import math
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from qklab import AttentionSpec, CouplingSpec, Decoder, DecoderSpec, LatentSpec, recipe
from qklab.attention import Attention, mix
from qklab.model.diagnose import Diagnosis, diagnose, logit_change
from qklab.testing import randomise

NAIVE = runpy.run_path(str(Path(__file__).parents[1] / "attention/transcription.py"))
SEGMENTS = torch.tensor([[7, 7, 7, 7, 1, 7, 7], [0, 0, 2, 2, 2, 2, 2]])
SOMETIMES = {"step_size", "query_shift", "key_shift"}  # only with coupling


def decoder(spec: Any, **changes: Any) -> Decoder:
    """Two layers in float64 with noise on every parameter, so that nothing sits at a special value."""
    shape: dict[str, Any] = {"vocab": 11, "width": 8, "layers": 2, "context": 8, "mlp_ratio": 1.0}
    return randomise(Decoder(DecoderSpec(attention=spec, **shape | changes), seed=0), seed=1)


def tokens(batch: int = 2, length: int = 7) -> Tensor:
    return torch.randint(11, (batch, length), generator=torch.Generator().manual_seed(2))


@torch.no_grad()
def watched(model: Decoder, ids: Tensor, segments: Tensor | None = None) -> list[tuple[Tensor, Tensor]]:
    """Input and output of every attention layer in the model's own forward."""
    seen = []
    hooks = [
        model.attention(layer).register_forward_hook(lambda _, inputs, y: seen.append((inputs[0], y)))
        for layer in range(model.spec.layers)
    ]
    model(ids, segments=segments)
    for hook in hooks:
        hook.remove()
    return seen


def close(actual: Tensor, expected: Any, tolerance: float = 1e-9) -> None:
    expected = torch.as_tensor(expected, dtype=actual.dtype)
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance, equal_nan=True)


def calls(spec: AttentionSpec, maps: Tensor) -> list[Tensor]:
    """The weights [B, H, T, T] call by call: differential attention calls once for each map of its pairs of heads."""
    if spec.mix != "differential":
        return [maps]
    both = maps.unflatten(1, (spec.kv_heads // 2, 2, spec.heads // spec.kv_heads))
    return [each.flatten(1, 2) for each in both.unbind(2)]


def bounded(found: Diagnosis, spec: AttentionSpec) -> None:
    for name, values in found.items():
        assert values.shape == (2, spec.query_heads), name
        assert not values.requires_grad
        assert name in SOMETIMES or values.isfinite().all(), name
    # a query is never less decided than a uniform choice
    most = (found.visible.sum(-1) + spec.sinks).double().log().mean()
    assert (found["entropy"] >= 0).all()
    assert (found["entropy"] <= most + 1e-12).all()
    assert ((found["sink_mass"] >= 0) & (found["sink_mass"] <= 1)).all()
    assert ((found["effective_rank"] >= 1) & (found["effective_rank"] <= 7)).all()
    assert ((found["spectral_gap"] >= 0) & (found["spectral_gap"] <= 1)).all()
    assert found["query_shift"].isnan().all() == found["key_shift"].isnan().all() == (spec.coupling is None)
    stepped = spec.coupling is not None and spec.coupling.kind != "affine"
    assert found["step_size"].isnan().all() == (not stepped)
    if spec.key_is_value and not spec.value_norm:
        close(found["key_value_cosine"], torch.ones(2, spec.query_heads))


def built(**choices: Any) -> AttentionSpec:
    return AttentionSpec(**{"width": 8, "heads": 4, "head_width": 4, **choices})


SPECS: dict[str, AttentionSpec] = {
    "standard": built(bias=True),
    "leapfrog gqa": built(
        kv_heads=2, coupling=CouplingSpec(kind="leapfrog", step_size=0.3, step_sharing="per-head", steps=2)
    ),
    "affine (Q,K=V) qk-norm": built(share="k=v", kv_heads=2, norm="qk", coupling=CouplingSpec(kind="affine")),
    "on-read": built(share="q=k=v", kv_rotation="on-read"),
    "2-D asymmetry": built(share="q=k", causal=False, asymmetry_2d=True, asymmetry_free_scale=True),
    "differential": built(mix="differential", kv_heads=2),
    "differential-v2": built(mix="differential-v2", kv_heads=2, position="learned"),
    "window and sinks": built(window=3, sinks=True, kv_heads=2),
    "value norm": built(share="k=v", norm="qk", value_norm=True),
    "MLA": built(latent=LatentSpec(query_rank=6, kv_rank=5, rope_width=2, norm=False), bias=True),
    "MLA normed": built(latent=LatentSpec(query_rank=6, kv_rank=5, rope_width=2)),
}
every_spec = pytest.mark.parametrize("name", SPECS)


@pytest.mark.parametrize("segments", [None, SEGMENTS], ids=["whole", "packed"])
@every_spec
def test_maps_are_the_layers_own(name: str, segments: Tensor | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its weights replaced by the diagnosed ones, every layer still gives its output; and weights have bounds."""
    spec = SPECS[name]
    model, ids = decoder(spec), tokens()
    found = diagnose(model, ids, segments, maps=True)
    assert found.maps is not None
    for layer, (x, y) in enumerate(watched(model, ids, segments)):
        maps = iter(calls(spec, found.maps[layer]))

        def weigh(q: Tensor, stored: mix.KeyValue, *_: Any, maps: Iterator[Tensor] = maps) -> Tensor:
            v = stored.separate()[1]
            v = v.repeat_interleave(q.shape[2] // v.shape[2], 2)
            return torch.einsum("bhts,bshd->bthd", next(maps), v)

        monkeypatch.setattr(mix, "attend", weigh)
        close(model.attention(layer)(x, segments=segments), y)
        monkeypatch.undo()
    assert found.maps.shape == (2, 2, spec.query_heads, 7, 7)
    if spec.sinks:
        assert (found.maps.sum(-1) < 1).all()
    else:
        close(found.maps.sum(-1), torch.ones(found.maps.shape[:-1]))
    bounded(found, spec)


class Rows:
    """A layer's tokens by the naive transcription, and the quantities as loops over queries, keys and tokens."""

    def __init__(self, attention: Attention, x: Tensor, segments: Tensor | None):
        self.spec, self.state, self.rows, self.stages = attention.spec, attention.state_dict(), [], []
        for b in range(x.shape[0]):
            ids = [0] * x.shape[1] if segments is None else segments[b].tolist()
            self.rows.append(NAIVE["prepared"](self.spec, self.state, list(x[b]), *NAIVE["packed"](ids)))
            if self.spec.latent is None:
                self.stages += [self.by_stage(token) for token in x[b]]

    def by_stage(self, x: Tensor) -> tuple[Any, Any, Any]:
        q, k, v = NAIVE["project"](self.spec, self.state, x)
        coupled = NAIVE["couple"](self.spec, self.state, q, k)
        normed = NAIVE["normalise"](self.spec, self.state, *coupled)
        if self.spec.value_norm:
            v = [NAIVE["rms_norm"](key, self.spec.norm_eps) for key in v or coupled[1]]
        return (q, k), coupled, (*normed, v or normed[1])

    def key_head(self, h: int, keys: list[Tensor]) -> int:
        return h * len(keys) // self.spec.query_heads

    def weights(self, h: int) -> list[tuple[int, int, Any, list[float]]]:
        """(row, query, its token, its weights) for every query."""
        return [
            (b, i, tokens[i], [float(w) for w in NAIVE["attention"](self.spec, self.state, tokens, i, h)])
            for b, tokens in enumerate(self.rows)
            for i in range(len(tokens))
        ]

    def scores(self, h: int) -> np.ndarray:
        """[B, T, T], all pairs. The transcription's constant per row of the 2-D asymmetry is left out."""
        scores = np.zeros((len(self.rows), len(self.rows[0]), len(self.rows[0])))
        for b, tokens in enumerate(self.rows):
            for i, here in enumerate(tokens):
                for j, there in enumerate(tokens):
                    g = self.key_head(h, here.k)
                    scores[b, i, j] = NAIVE["score"](self.spec, self.state, here, there, h, g) - self.constant(here)
        return scores

    def constant(self, here: Any) -> float:
        if not self.spec.asymmetry_2d:
            return 0.0
        channels = zip(self.state["rotate.asymmetry.weight"], NAIVE["sinusoids"](here.position, 0)[:5], strict=False)
        return sum(float(w) * p for w, p in channels)

    def entropy(self, h: int) -> float:
        """What a sink takes is one more share."""
        shares = [[*row, (1 - sum(row)) * self.spec.sinks] for *_, row in self.weights(h)]
        return float(np.mean([-sum(w * math.log(w) for w in row if w > 0) for row in shares]))

    def sink_mass(self, h: int) -> float:
        return float(np.mean([row[i - here.position] for _, i, here, row in self.weights(h) if here.position > 0]))

    def largest_logit(self, h: int) -> float:
        scores = self.scores(h)
        return max(abs(scores[b, i, j]) for b, i, _, row in self.weights(h) for j, w in enumerate(row) if w > 0)

    def effective_rank(self, h: int) -> float:
        ranks = []
        for matrix in self.scores(h):
            sigma = np.linalg.svd(matrix, compute_uv=False)
            share = [s / sigma.sum() for s in sigma if s > 1e-13 * sigma[0]]
            ranks.append(math.exp(-sum(p * math.log(p) for p in share)))
        return float(np.mean(ranks))

    def spectral_gap(self, h: int) -> float:
        sigmas = [np.linalg.svd(matrix, compute_uv=False) for matrix in self.scores(h)]
        return float(np.mean([(sigma[0] - sigma[1]) / sigma[0] for sigma in sigmas]))

    def query_key_cosine(self, h: int) -> float:
        """From the rotated vectors: at one position the rotation cancels."""
        tokens = [token for row in self.rows for token in row]
        return float(np.mean([cosine(t.q[h], t.k[self.key_head(h, t.k)]) for t in tokens]))

    def key_value_cosine(self, h: int) -> float:
        if self.spec.latent is not None:
            tokens = [token for row in self.rows for token in row]
            return float(np.mean([cosine(t.k[h][: self.spec.head_width], t.v[h]) for t in tokens]))
        pairs = [(k[self.key_head(h, k)], v[self.key_head(h, v)]) for *_, (_, k, v) in self.stages]
        return float(np.mean([cosine(k, v) for k, v in pairs]))

    def query_value_cosine(self, h: int) -> float:
        if self.spec.latent is not None:
            tokens = [token for row in self.rows for token in row]
            return float(np.mean([cosine(t.q[h][: self.spec.head_width], t.v[h]) for t in tokens]))
        return float(np.mean([cosine(q[h], v[self.key_head(h, v)]) for *_, (q, _, v) in self.stages]))

    def key_value_alignment(self, h: int) -> float:
        """From the tokens' similarities to each other, K Kᵀ and V Vᵀ, instead of their features' (Kornblith et al.)."""
        if self.spec.latent is not None:
            width = self.spec.head_width
            pairs = [([k[:width] for k in t.k], t.v) for row in self.rows for t in row]
        else:
            pairs = [(k, v) for *_, (_, k, v) in self.stages]
        pairs = [(np.concatenate(k), np.concatenate(v)) for k, v in pairs]
        keys, values = (np.stack(side) for side in zip(*pairs, strict=True))
        centre = np.eye(len(keys)) - 1 / len(keys)
        first, second = (centre @ side @ side.T @ centre for side in (keys, values))
        return float((first * second).sum() / math.sqrt((first * first).sum() * (second * second).sum()))

    def query_shift(self, h: int) -> float:
        return relative([(old[0][h], new[0][h]) for old, new, _ in self.stages]) if self.spec.coupling else math.nan

    def key_shift(self, h: int) -> float:
        pairs = [(old[1], new[1], self.key_head(h, old[1])) for old, new, _ in self.stages]
        return relative([(old[g], new[g]) for old, new, g in pairs]) if self.spec.coupling else math.nan


def cosine(a: Tensor, b: Tensor) -> float:
    u, v = a.numpy(), b.numpy()
    return float(u @ v / math.sqrt((u @ u) * (v @ v)))


def relative(pairs: list[tuple[Tensor, Tensor]]) -> float:
    moved = sum(float(((new - old) ** 2).sum()) for old, new in pairs)
    return math.sqrt(moved / sum(float((old**2).sum()) for old, _ in pairs))


QUANTITIES = [name for name in vars(Rows) if name in diagnose(decoder(SPECS["standard"]), tokens())]


@pytest.mark.parametrize("packed", [False, True])
@every_spec
def test_quantities_are_their_formulas(name: str, packed: bool) -> None:
    model, ids, segments = decoder(SPECS[name]), tokens(), SEGMENTS if packed else None
    found = diagnose(model, ids, segments)
    for layer, (x, _) in enumerate(watched(model, ids, segments)):
        naive = Rows(model.attention(layer), x, segments)
        for quantity in QUANTITIES:
            expected = [getattr(naive, quantity)(h) for h in range(SPECS[name].query_heads)]
            close(found[quantity][layer], expected, 1e-7)
    assert len(QUANTITIES) == 11


def norm_of(model: Decoder, head: int, *weights: str) -> float:
    """√Σ w² over the rows of `head` (of all heads for a name with a star) of layer 1's parameters."""
    total, state = 0.0, model.attention(1).state_dict()
    for name in weights:
        matrix = state[name.removesuffix("*")].reshape(-1, *state[name.removesuffix("*")].shape[1:])
        width = 2 if "rope" in name else 4
        rows = matrix if name.endswith("*") else matrix[head * width : (head + 1) * width]
        total += float((rows**2).sum())
    return math.sqrt(total)


def test_norms_are_of_the_matrices_that_make_queries_and_keys() -> None:
    model = decoder(SPECS["standard"])
    found = diagnose(model, tokens())
    for side in ("query", "key"):
        expected = [norm_of(model, h, f"project.{side}.weight", f"project.{side}.bias") for h in range(4)]
        close(found[f"{side}_norm"][1], expected)
    model = decoder(SPECS["leapfrog gqa"])  # two queries read one key
    close(diagnose(model, tokens())["key_norm"][1], [norm_of(model, h // 2, "project.key.weight") for h in range(4)])
    found = diagnose(decoder(SPECS["on-read"]), tokens())
    close(found["query_norm"], found["key_norm"])
    found = diagnose(decoder(SPECS["differential-v2"]), tokens())
    assert found["query_norm"].shape == (2, 8)


def test_norms_through_a_latent() -> None:
    model = decoder(SPECS["MLA"])
    found, state = diagnose(model, tokens()), model.attention(1).state_dict()
    down_q = torch.cat([state["project.down_query.weight"], state["project.down_query.bias"][:, None]], 1)
    down = torch.cat([state["project.down_key_value.weight"], state["project.down_key_value.bias"][:, None]], 1)
    rope = state["project.rope_key.weight"].square().sum() + state["project.rope_key.bias"].square().sum()
    for h in range(4):
        up_q = state["project.up_query.weight"][4 * h : 4 * h + 4]
        query = torch.cat([up_q, state["project.rope_query.weight"][2 * h : 2 * h + 2]]) @ down_q
        key = state["mix.up_key.weight"][4 * h : 4 * h + 4] @ down
        close(found["query_norm"][1, h], query.square().sum().sqrt())
        close(found["key_norm"][1, h], (key.square().sum() + rope).sqrt())
    model = decoder(SPECS["MLA normed"])
    before = diagnose(model, tokens())
    with torch.no_grad():
        for layer in range(2):
            model.attention(layer).get_submodule("project.down_query").get_parameter("weight").mul_(5)
            model.attention(layer).get_submodule("project").get_parameter("key_value_gain").mul_(3)
    after = diagnose(model, tokens())
    close(after["query_norm"], before["query_norm"])  # the norm takes the size of W_dq out again
    rope = norm_of(model, 0, "project.rope_key.weight*")
    close(after["key_norm"][1] ** 2 - rope**2, 9 * (before["key_norm"][1] ** 2 - rope**2))


def test_step_sizes_stand_at_the_queries_of_their_key() -> None:
    model = decoder(SPECS["leapfrog gqa"])
    step = model.attention(1).get_submodule("couple").get_parameter("step").flatten()
    close(diagnose(model, tokens())["step_size"][1], step.detach()[[0, 0, 1, 1]])
    model = decoder(built(coupling=CouplingSpec(kind="euler")))
    step = model.attention(1).get_submodule("couple").get_parameter("step")
    close(diagnose(model, tokens())["step_size"][1], step.detach().expand(4))


def test_chosen_layers_are_those_of_the_whole() -> None:
    model, ids = decoder(SPECS["standard"], layers=4), tokens()
    whole, some = diagnose(model, ids), diagnose(model, ids, layers=[2, 0])
    assert some.layers == [0, 2]
    assert some.maps is None
    for name, values in some.items():
        close(values, whole[name][[0, 2]])
    for wrong in ([4], [-1], []):
        with pytest.raises(ValueError, match=r"layers must be some of 0 to 3, but \["):
            diagnose(model, ids, layers=wrong)


def test_layers_of_different_heads_stand_in_one_table() -> None:
    """Each as its formulas say; NaN where a layer has no such head."""
    specs = SPECS["differential-v2"].replace(position="rope"), SPECS["leapfrog gqa"], SPECS["MLA"]
    model, ids = decoder(specs, layers=3), tokens()
    found = diagnose(model, ids, SEGMENTS, maps=True)
    assert found.heads == [8, 4, 4]
    for layer, spec in enumerate(specs):
        x = watched(model, ids, SEGMENTS)[layer][0]
        naive = Rows(model.attention(layer), x, SEGMENTS)
        for quantity in QUANTITIES:
            expected = [getattr(naive, quantity)(h) for h in range(spec.query_heads)]
            close(found[quantity][layer, : spec.query_heads], expected, 1e-7)
    assert found["entropy"][1:, 4:].isnan().all()
    change = logit_change(found.logits, found)["logit_change"]
    assert torch.equal(change.isnan(), found["entropy"].isnan())
    assert found.maps is not None
    assert not found.maps[1, :, 4:].any()


def test_bad_batches_are_named() -> None:
    model = decoder(SPECS["standard"])
    with pytest.raises(ValueError, match=r"at least one token, but ids of shape \[2, 0\] came"):
        diagnose(model, tokens()[:, :0])
    with pytest.raises(ValueError, match="ids must be a tensor of whole numbers"):
        diagnose(model, torch.zeros(2, 3))
    with pytest.raises(ValueError, match="segments must be a tensor of whole numbers"):
        diagnose(model, tokens(), SEGMENTS[:, :3])


def test_one_token_has_no_later_query_and_one_singular_value() -> None:
    found = diagnose(decoder(SPECS["standard"]), tokens(length=1))
    assert found["sink_mass"].isnan().all()
    close(found["effective_rank"], torch.ones(2, 4))
    close(found["spectral_gap"], torch.ones(2, 4))
    close(found["entropy"], torch.zeros(2, 4))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_diverged_model_is_diagnosed_with_nans(value: float) -> None:
    model = decoder(SPECS["standard"])
    with torch.no_grad():
        model.attention(1).get_submodule("project.query").get_parameter("weight")[:4] = value
    found = diagnose(model, tokens())
    assert found["effective_rank"][0].isfinite().all()
    assert found["effective_rank"][1].isnan().tolist() == [True, False, False, False]


def test_precision_is_the_parameters_own_and_dropout_is_off() -> None:
    """Neither autocast nor training mode is seen, and random state and mode stay as they were."""
    model = Decoder(recipe("nano", vocab=11, context=8, layers=2).replace(dropout=0.5), seed=0).train()
    before, random = diagnose(model, tokens()), torch.get_rng_state()
    with torch.autocast("cpu", torch.bfloat16):
        again = diagnose(model, tokens())
        change = logit_change(before.logits, again)
    assert all(torch.equal(before[name], again[name]) or before[name].isnan().all() for name in before)
    assert not change["largest_logit_change"].any()
    assert {values.dtype for values in change.values()} == {torch.float32}
    assert all(module.training for module in model.modules())
    assert torch.equal(torch.get_rng_state(), random)
    assert {values.dtype for values in before.values()} == {torch.float32}
    model.eval()
    diagnose(model, tokens())
    assert not any(module.training for module in model.modules())


def test_logit_change_is_over_visible_pairs() -> None:
    model, ids = decoder(SPECS["2-D asymmetry"].replace(asymmetry_2d=False, asymmetry_free_scale=False)), tokens()
    before = diagnose(model, ids, SEGMENTS)
    with torch.no_grad():
        model.attention(1).get_submodule("project.key").get_parameter("weight").mul_(1.5)
    after = diagnose(model, ids, SEGMENTS)
    change = logit_change(before.logits, after)
    close(change["logit_change"][0], torch.zeros(4))
    for h in range(4):
        scores = before.logits.of_layer(1)[:, h]
        moved = [1.25 * float(scores[b, i, j]) for b, _, i, j in before.visible[0].nonzero().tolist()]  # 1.5² − 1
        close(change["logit_change"][1, h], math.sqrt(sum(m * m for m in moved) / len(moved)))
        close(change["largest_logit_change"][1, h], max(map(abs, moved)))
    with pytest.raises(ValueError, match=r"one batch .* \[2, 2, 7, 4, 4\] came first and \[2, 1, 7, 4, 4\] later"):
        logit_change(before.logits, diagnose(model, ids[:1]))
