"""The attention layer a second time, from its mathematics alone: one token, one head, one number at a time.

Slow and obvious on purpose. It shares no code with the layer: it reads the spec's fields and the parameters by name and
computes every score in a loop, so that agreement with the layer means both say what the formulas say. All of it is
differentiable, so gradients can be compared as well.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from qklab.attention import AttentionSpec

State = dict[str, Tensor]
Heads = list[Tensor]  # one vector per head
Map = Callable[[Tensor], Tensor]


@dataclass
class Token:
    """One token after stage 4: what is compared with keys, what queries are compared with, and what is summed."""

    x: Tensor
    position: int
    run: int
    q: Heads
    k: Heads
    v: Heads


def transcribe(spec: AttentionSpec, state: State, x: Tensor, layer: int = 0, segments: Tensor | None = None) -> Tensor:
    """The layer's output for x [B, T, width], from its `state_dict()` (or its named parameters)."""
    rows = []
    for b in range(x.shape[0]):
        ids = [0] * x.shape[1] if segments is None else [int(i) for i in segments[b]]
        positions, runs = packed(ids)
        tokens = prepared(spec, state, list(x[b]), positions, runs)
        rows.append(torch.stack([written(spec, state, tokens, i, layer) for i in range(len(tokens))]))
    return torch.stack(rows)


def packed(ids: list[int]) -> tuple[list[int], list[int]]:
    """The position of each token within its run of equal ids, and the number of its run."""
    positions, runs = [0], [0]
    for before, here in pairwise(ids):
        same = before == here
        positions.append(positions[-1] + 1 if same else 0)
        runs.append(runs[-1] if same else runs[-1] + 1)
    return positions, runs


def prepared(spec: AttentionSpec, state: State, xs: Heads, positions: list[int], runs: list[int]) -> list[Token]:
    """Stages 1 to 4. What looks back sees every token of the row, and goes no further than its text's first."""
    row = list(zip(xs, positions, runs, strict=True))
    if spec.latent is not None:
        return [Token(x, p, run, *latent(spec, state, x, p)) for x, p, run in row]
    new = [project(spec, state, x) for x in xs]
    q, k, v = [token[0] for token in new], [token[1] for token in new], [token[2] for token in new]
    if spec.short_conv is not None:
        k = [convolved(state["convolve.key"], k, i, positions[i]) for i in range(len(k))]
        if spec.share in ("none", "q=k"):
            values = [value for value in v if value is not None]
            v = [convolved(state["convolve.value"], values, i, positions[i]) for i in range(len(v))]
    if spec.coupling is not None and spec.coupling.kind == "cca":
        pairs = [cca(spec, state, q, k, i, positions[i]) for i in range(len(q))]
        values = [value for value in v if value is not None]
        v = [half_delayed(values, i, positions[i]) for i in range(len(values))] or v
    else:
        pairs = [couple(spec, state, *pair) for pair in zip(q, k, strict=True)]
    if spec.value_norm:
        own = [k if value is None else value for (_, k), value in zip(pairs, v, strict=True)]
        v = [[rms_norm(value, spec.norm_eps) for value in heads] for heads in own]
    pairs = [normalise(spec, state, *pair) for pair in pairs]
    done = [rotate(spec, *pair, own, p) for pair, own, p in zip(pairs, v, positions, strict=True)]
    if spec.key_shift:
        done = [shifted(spec, done, i, positions[i]) for i in range(len(done))]
    return [Token(x, p, run, *made) for (x, p, run), made in zip(row, done, strict=True)]


def earlier(tokens: list[Heads], i: int, back: int, position: int) -> Heads:
    """What the token `back` before token i has, zeros where its text has not begun."""
    return tokens[i - back] if position >= back else [torch.zeros_like(u) for u in tokens[i]]


def convolved(weight: Tensor, tokens: list[Heads], i: int, position: int) -> Heads:
    """Σ_j c_j ⊙ u_{i−j}, each head and entry with its own c."""
    taps = [earlier(tokens, i, back, position) for back in range(len(weight))]
    heads = range(len(taps[0]))
    return [torch.stack([w[g] * tap[g] for w, tap in zip(weight, taps, strict=True)]).sum(0) for g in heads]


def cca(spec: AttentionSpec, state: State, q: list[Heads], k: list[Heads], i: int, p: int) -> tuple[Heads, Heads]:
    """Compressed convolutional attention: two convolutions over two tokens each, beside the mean of query and key."""
    rows, per_key, width = [a + b for a, b in zip(q, k, strict=True)], len(q[i]) // len(k[i]), spec.head_width
    weight, bias = state["couple.entry_weight"], state["couple.entry_bias"]

    def first(back: int, h: int) -> Tensor:
        now, before = (earlier(rows, i, back + more, p)[h] for more in (0, 1))
        return weight[0, h] * now + weight[1, h] * before + bias[h]

    second = [
        state["couple.head_weight"][h, :width].T @ first(0, h)
        + state["couple.head_weight"][h, width:].T @ first(1, h)
        + state["couple.head_bias"][h]
        for h in range(len(rows[i]))
    ]
    both = [(query + k[i][h // per_key]) / 2 for h, query in enumerate(q[i])]
    means = [mean(both[g * per_key : (g + 1) * per_key]) for g in range(len(k[i]))]
    new = [rms_norm(a + b, spec.norm_eps) for a, b in zip(second, both + means, strict=True)]
    keys = [temperature * key for temperature, key in zip(state["couple.temperature"], new[len(both) :], strict=True)]
    return new[: len(both)], keys


def half_delayed(v: list[Heads], i: int, position: int) -> Heads:
    """The second half of a token's value entries, counted through all heads, is the one of the token before."""
    own = v[i]
    now, before = torch.cat(own), torch.cat(earlier(v, i, 1, position))
    own_half = len(now) - len(now) // 2
    return split(torch.cat([now[:own_half], before[own_half:]]), len(own[0]))


def shifted(spec: AttentionSpec, tokens: list[tuple[Heads, Heads, Heads]], i: int, position: int) -> tuple:
    """Key entries that RoPE does not turn are those of the token before; so are the value's where it is the key."""
    q, k, v = tokens[i]
    if position == 0:
        return q, k, v
    rotated = round(spec.rope_fraction * spec.head_width)

    def mend(own: Heads, before: Heads) -> Heads:
        return [torch.cat([a[:rotated], b[rotated:]]) for a, b in zip(own, before, strict=True)]

    shared = spec.share in ("k=v", "q=k=v")
    return q, mend(k, tokens[i - 1][1]), mend(v, tokens[i - 1][2]) if shared else v


# 1. project


def linear(state: State, name: str, x: Tensor) -> Tensor:
    y = state[f"{name}.weight"] @ x
    return y + state[f"{name}.bias"] if f"{name}.bias" in state else y


def split(flat: Tensor, width: int) -> Heads:
    return [flat[start : start + width] for start in range(0, len(flat), width)]


def project(spec: AttentionSpec, state: State, x: Tensor) -> tuple[Heads, Heads, Heads | None]:
    k = split(linear(state, "project.key", x), spec.head_width)
    own_query, own_value = spec.share in ("none", "k=v"), spec.share in ("none", "q=k")
    q = split(linear(state, "project.query", x), spec.head_width) if own_query else k
    v = split(linear(state, "project.value", x), spec.head_width) if own_value else None
    return q, k, v


def latent(spec: AttentionSpec, state: State, x: Tensor, position: int) -> tuple[Heads, Heads, Heads]:
    """MLA in expanded form: every head's key and value is written out."""
    assert spec.latent is not None
    c_q, c = linear(state, "project.down_query", x), linear(state, "project.down_key_value", x)
    if spec.latent.norm:
        c_q = rms_norm(c_q, spec.norm_eps) * state["project.query_gain"]
        c = rms_norm(c, spec.norm_eps) * state["project.key_value_gain"]
    for _ in range(0 if spec.coupling is None else spec.coupling.steps):
        c_q, c = latent_step(spec, state, c_q, c)
    q = split(linear(state, "project.up_query", c_q), spec.head_width)
    k = split(linear(state, "mix.up_key", c), spec.head_width)
    v = split(linear(state, "mix.up_value", c), spec.head_width)
    if width := spec.latent.rope_width:
        parts = split(linear(state, "project.rope_query", c_q), width)
        rope_q = [turned(part, position, width, spec.rope_base) for part in parts]
        rope_k = turned(linear(state, "project.rope_key", x), position, width, spec.rope_base)
        q = [torch.cat([q[h], rope_q[h]]) for h in range(spec.heads)]
        k = [torch.cat([k[h], rope_k]) for h in range(spec.heads)]
    return q, k, v


# 2. couple


def latent_step(spec: AttentionSpec, state: State, c_q: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """MLA: the latents move each other, or in the control each itself."""
    assert spec.coupling is not None

    def network(name: str, u: Tensor) -> Tensor:
        return linear(state, f"couple.{name}.outer", silu(linear(state, f"couple.{name}.inner", u)))

    if spec.coupling.kind == "uncoupled":
        delta = state["couple.step"]
        return c_q + delta * network("query_network", c_q), c + delta * network("key_network", c)
    raw, shift = split(network("query_network", c), len(c_q))
    c_q = c_q * torch.exp(spec.coupling.scale_limit * torch.tanh(raw)) + shift
    raw, shift = split(network("key_network", c_q), len(c))
    return c_q, c * torch.exp(spec.coupling.scale_limit * torch.tanh(raw)) + shift


def couple(spec: AttentionSpec, state: State, q: Heads, k: Heads) -> tuple[Heads, Heads]:
    """Each key head evolves with the query heads of its group, apart from all other groups."""
    if spec.coupling is None:
        return q, k
    per_key = len(q) // len(k)
    new_q, new_k = [], []
    for g, key in enumerate(k):
        group = q[g * per_key : (g + 1) * per_key]
        for _ in range(spec.coupling.steps):
            group, key = step(spec, state, g, group, key)
        new_q += group
        new_k.append(key)
    return new_q, new_k


def step(spec: AttentionSpec, state: State, g: int, q: Heads, k: Tensor) -> tuple[Heads, Tensor]:
    """One step of the group of key head g, straight from the table of maps."""
    assert spec.coupling is not None
    kind = spec.coupling.kind
    if kind == "affine":
        return affine(spec, state, g, q, k)
    delta = of_head(state["couple.step"], g, spec.coupling.step_sharing).squeeze()
    if kind == "uncoupled":
        f, f_q = force(spec, state, "couple.key_force", g), force(spec, state, "couple.query_force", g)
        return [query + delta * f_q(query) for query in q], k + delta * f(k)
    if kind == "linear":
        matrix = of_head(state["couple.matrix"], g, spec.coupling.force_sharing)
        k = k + delta * (matrix @ mean(q))
        return [query + delta * k for query in q], k
    f = force(spec, state, "couple.force", g)
    if kind == "euler":
        return [query + delta * k for query in q], k + delta * f(mean(q))
    if kind == "symplectic-euler":
        k = k + delta * f(mean(q))
        return [query + delta * k for query in q], k
    assert kind == "leapfrog"
    k = k + delta / 2 * f(mean(q))
    q = [query + delta * k for query in q]
    return q, k + delta / 2 * f(mean(q))


def affine(spec: AttentionSpec, state: State, g: int, q: Heads, k: Tensor) -> tuple[Heads, Tensor]:
    s1, t1 = scale_and_shift(spec, state, "couple.query", g, k)
    q = [query * torch.exp(s1) + t1 for query in q]
    s2, t2 = scale_and_shift(spec, state, "couple.key", g, mean(q))
    return q, k * torch.exp(s2) + t2


def scale_and_shift(spec: AttentionSpec, state: State, name: str, g: int, u: Tensor) -> tuple[Tensor, Tensor]:
    assert spec.coupling is not None
    hidden = silu(head_linear(spec, state, f"{name}_inner", g)(u))
    raw, shift = split(head_linear(spec, state, f"{name}_outer", g)(hidden), spec.head_width)
    return spec.coupling.scale_limit * torch.tanh(raw), shift


def force(spec: AttentionSpec, state: State, name: str, g: int) -> Map:
    assert spec.coupling is not None
    inner = head_linear(spec, state, f"{name}.inner", g)
    if spec.coupling.force == "mlp":
        outer = head_linear(spec, state, f"{name}.outer", g)
        return lambda u: outer(silu(inner(u)))
    weight = of_head(state[f"{name}.inner.weight"], g, spec.coupling.force_sharing)
    amplitude = of_head(state[f"{name}.amplitude"], g, spec.coupling.force_sharing).flatten()
    return lambda u: -(weight.T @ (amplitude * logistic(inner(u))))  # softplus' is the logistic function


def head_linear(spec: AttentionSpec, state: State, name: str, g: int) -> Map:
    assert spec.coupling is not None
    weight = of_head(state[f"{name}.weight"], g, spec.coupling.force_sharing)
    return lambda u: weight @ u + state.get(f"{name}.bias", 0.0)


def of_head(parameter: Tensor, g: int, sharing: str) -> Tensor:
    return parameter[g] if sharing == "per-head" else parameter


def mean(vectors: Heads) -> Tensor:
    return sum(vectors[1:], vectors[0]) / len(vectors)


def logistic(u: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-u))


def silu(u: Tensor) -> Tensor:
    return u * logistic(u)


# 3. normalise


def rms_norm(u: Tensor, eps: float) -> Tensor:
    return u / torch.sqrt((u * u).sum() / len(u) + eps)


def normalise(spec: AttentionSpec, state: State, q: Heads, k: Heads) -> tuple[Heads, Heads]:
    if spec.norm == "none":
        return q, k
    q = [rms_norm(query, spec.norm_eps) * state["normalise.query_gain"] for query in q]
    k = [rms_norm(key, spec.norm_eps) for key in k]
    if spec.share in ("k=v", "q=k=v") and not spec.value_norm:
        return q, k
    return q, [key * state["normalise.key_gain"] for key in k]


# 4. rotate


def turned(u: Tensor, position: int, width: int, base: float) -> Tensor:
    """R_p u: the pairs (i, i + width/2) of the first `width` entries turn by p · base^(−2i/width)."""
    entries, half = list(u), width // 2
    for i in range(half):
        angle = position * base ** (-2 * i / width)
        entries[i] = math.cos(angle) * u[i] - math.sin(angle) * u[i + half]
        entries[i + half] = math.sin(angle) * u[i] + math.cos(angle) * u[i + half]
    return torch.stack(entries)


def head_turned(spec: AttentionSpec, u: Tensor, position: int) -> Tensor:
    return turned(u, position, round(spec.rope_fraction * spec.head_width), spec.rope_base)


def rotate(spec: AttentionSpec, q: Heads, k: Heads, v: Heads | None, p: int) -> tuple[Heads, Heads, Heads]:
    if spec.position != "rope":
        return q, k, k if v is None else v
    turned_q, turned_k = [head_turned(spec, u, p) for u in q], [head_turned(spec, u, p) for u in k]
    if v is None:
        v = turned_k if spec.kv_rotation == "once" else k
    return turned_q, turned_k, v


def undone(spec: AttentionSpec, o: Tensor, position: int) -> Tensor:
    """Where the rotated key was the value, the rotation leaves the output at the query's position."""
    came_along = spec.share in ("k=v", "q=k=v") and spec.position == "rope" and spec.kv_rotation == "once"
    return head_turned(spec, o, -position) if came_along and not spec.value_norm else o


def sinusoids(row: int, column: int, channels: int = 10) -> list[float]:
    """P_ij: the first half of the channels follows the row, the second half the column."""
    half = channels // 2
    values = []
    for position in (row, column):
        for c in range(half):
            angle = position * 10_000 ** (-2 * (c // 2) / half)
            values.append(math.cos(angle) if c % 2 else math.sin(angle))
    return values


# 5. mix


def score(spec: AttentionSpec, state: State, here: Token, there: Token, h: int, g: int) -> Tensor:
    rope_width = 0 if spec.latent is None else spec.latent.rope_width
    logit = here.q[h] @ there.k[g] / math.sqrt(spec.head_width + rope_width)
    if not spec.asymmetry_2d:
        return logit
    weight = state["rotate.asymmetry.weight"]
    scale = state["rotate.asymmetry.scale"] if spec.asymmetry_free_scale else weight.sum()
    return scale * logit + sum(w * p for w, p in zip(weight, sinusoids(here.position, there.position), strict=True))


def attention(spec: AttentionSpec, state: State, tokens: list[Token], i: int, h: int) -> list[Tensor]:
    """The weight token i gives each token j through query head h: zero outside its run and, if causal, after it."""
    here = tokens[i]
    g = h * len(here.k) // len(here.q)
    seen = [j for j, there in enumerate(tokens) if there.run == here.run and (j <= i or not spec.causal)]
    seen = [j for j in seen if spec.window is None or abs(i - j) < spec.window]
    scores = {j: score(spec, state, here, tokens[j], h, g) for j in seen}
    largest = max(logit.item() for logit in scores.values())  # softmax ignores it, exp does not overflow
    powers = {j: torch.exp(logit - largest) for j, logit in scores.items()}
    total = torch.stack(list(powers.values())).sum()
    if spec.sinks:
        total = total + torch.exp(state["mix.sinks.logits"][h] - largest)
    nothing = torch.zeros_like(total)
    return [powers[j] / total if j in powers else nothing for j in range(len(tokens))]


def weighted(weights: list[Tensor], values: Heads) -> Tensor:
    terms = [weight * value for weight, value in zip(weights, values, strict=True)]
    return sum(terms[1:], terms[0])


def differential(spec: AttentionSpec, state: State, tokens: list[Token], i: int, layer: int) -> Heads:
    """v1. Key heads 2p and 2p+1 are a pair, and so are the r-th query heads of their groups."""
    here, per_key = tokens[i], spec.heads // spec.kv_heads
    lambda_init = 0.8 - 0.6 * math.exp(-0.3 * layer)
    first, second = (q @ k for q, k in zip(state["mix.query_lambdas"], state["mix.key_lambdas"], strict=True))
    lam = torch.exp(first) - torch.exp(second) + lambda_init
    outputs = []
    for p in range(spec.kv_heads // 2):
        for r in range(per_key):
            plus = attention(spec, state, tokens, i, 2 * p * per_key + r)
            minus = attention(spec, state, tokens, i, (2 * p + 1) * per_key + r)
            weights = [a - lam * b for a, b in zip(plus, minus, strict=True)]
            halves = [weighted(weights, [there.v[2 * p + side] for there in tokens]) for side in (0, 1)]
            own = torch.cat([here.v[2 * p], here.v[2 * p + 1]])
            halves = split(excluded(spec, torch.cat(halves), own), spec.head_width)
            o = torch.cat([undone(spec, half, here.position) for half in halves])
            outputs.append((1 - lambda_init) * rms_norm(o, 1e-5) * state.get("mix.gain", 1.0))
    return outputs


def mixed(spec: AttentionSpec, state: State, tokens: list[Token], i: int, layer: int) -> Heads:
    here, per_value = tokens[i], spec.heads // len(tokens[i].v)
    if spec.mix == "differential":
        return differential(spec, state, tokens, i, layer)
    outputs = []
    for h in range(spec.heads):
        values = [there.v[h // per_value] for there in tokens]
        if spec.mix == "differential-v2":
            lam = logistic(state["mix.weight.weight"][h] @ here.x)
            plus, minus = (attention(spec, state, tokens, i, m) for m in (2 * h, 2 * h + 1))
            o = weighted(plus, values) - lam * weighted(minus, values)
        else:
            o = weighted(attention(spec, state, tokens, i, h), values)
        outputs.append(undone(spec, excluded(spec, o, here.v[h // per_value]), here.position))
    return outputs


def excluded(spec: AttentionSpec, o: Tensor, v: Tensor) -> Tensor:
    """XSA: what of the output points along the token's own value leaves."""
    along = spec.exclusive and bool(v.any())  # nothing lies along 0, which a text's first token has of a late value
    return o - (o @ v) / (v @ v) * v if along else o


def written(spec: AttentionSpec, state: State, tokens: list[Token], i: int, layer: int) -> Tensor:
    o = torch.cat(mixed(spec, state, tokens, i, layer))
    if spec.gate != "none":
        gate = [logistic(number) for number in linear(state, "gate.weigh", tokens[i].x)]
        repeat = 1 if spec.gate == "element" else spec.head_width
        o = torch.stack([gate[e // repeat] * entry for e, entry in enumerate(o)])
    return linear(state, "output", o)
