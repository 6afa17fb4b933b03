"""Small models for the tests of logit control, and §3 of the mechanisms written out with plain loops."""

import math
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn

from qklab import AttentionSpec, CouplingSpec, LatentSpec
from qklab.attention.layer import Attention
from qklab.attention.mix import LatentSoftmax
from qklab.attention.project import Latent, Projection
from qklab.model import Decoder, DecoderSpec, diagnose

VOCAB = 24
FLOOR = 0.3

KINDS: dict[str, dict[str, Any]] = {
    "MHA": {},
    "MHA with biases": {"bias": True},
    "GQA": {"kv_heads": 2},
    "GQA with biases": {"kv_heads": 2, "bias": True},
    "MQA": {"kv_heads": 1},
    "q=k": {"share": "q=k", "bias": True},
    "q=k=v": {"share": "q=k=v"},
    "k=v": {"share": "k=v", "kv_heads": 2},
    "linear coupling": {"coupling": CouplingSpec(kind="linear"), "bias": True},
    "linear coupling in groups": {"coupling": CouplingSpec(kind="linear"), "kv_heads": 2},
    "linear coupling, q=k": {"coupling": CouplingSpec(kind="linear"), "share": "q=k"},
    "leapfrog": {"coupling": CouplingSpec(kind="leapfrog"), "kv_heads": 2},
    "leapfrog, k=v": {"coupling": CouplingSpec(kind="leapfrog"), "share": "k=v"},
    "differential": {"mix": "differential", "kv_heads": 2},
    "differential-v2": {"mix": "differential-v2", "kv_heads": 2},
    "MLA": {"latent": LatentSpec(query_rank=6, kv_rank=5, rope_width=2, norm=True)},
    "MLA with biases": {"latent": LatentSpec(query_rank=6, kv_rank=5, rope_width=2, norm=True), "bias": True},
    "MLA without latent norm": {"latent": LatentSpec(query_rank=6, kv_rank=5, rope_width=2, norm=False), "bias": True},
    "MLA without rotary part": {
        "latent": LatentSpec(query_rank=6, kv_rank=5, rope_width=0, norm=False),
        "position": "none",
    },
}


def decoder(layers: int = 2, seed: int = 0, **attention: Any) -> Decoder:
    """A tiny float64 decoder with noise on every parameter, so that biases are not 0 and gains not 1."""
    chosen: dict[str, Any] = {"width": 8, "heads": 4, "head_width": 4} | attention
    spec = AttentionSpec(**chosen)
    model = Decoder(DecoderSpec(vocab=VOCAB, width=8, layers=layers, attention=spec, mlp_ratio=1.0, context=16), seed=0)
    generator = torch.Generator().manual_seed(seed)
    model = model.double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return model


def tokens(seed: int = 0, rows: int = 2, length: int = 9) -> Tensor:
    return torch.randint(VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


def loss_of(model: Decoder, ids: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def draw_gradients(model: nn.Module, seed: int) -> None:
    """Random gradients for every parameter: the same for models of one shape."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.grad = drawn.to(parameter.device, parameter.dtype)


@torch.no_grad()
def grow(model: Decoder, seed: int) -> None:
    """Every head of every part times its own random size between 0.1 and 10, gains too."""
    generator = torch.Generator().manual_seed(seed)
    for layer in range(model.spec.layers):
        attention = model.attention(layer)
        for _, piece in pieces(attention):
            for head in piece:
                head.mul_(10 ** (2 * torch.rand((), generator=generator, dtype=torch.float64) - 1))
        if isinstance(attention.project, Latent) and attention.project.query_gain is not None:
            for gain in (attention.project.query_gain, attention.project.key_value_gain):
                assert gain is not None
                gain.mul_(10 ** (torch.rand(gain.shape, generator=generator, dtype=torch.float64) - 0.5))


def linears(attention: Attention) -> dict[str, tuple[nn.Linear, int, Tensor | None]]:
    """Symbol → the linear map, its heads, and the gain in front of it."""
    project, mix, spec = attention.project, attention.mix, attention.spec
    if isinstance(project, Projection):
        found = {"k": (project.key, spec.kv_heads, None)}
        if project.query is None:
            return {"qk": found["k"]}
        queries = spec.heads * 2 if spec.mix == "differential-v2" else spec.heads
        return {"q": (project.query, queries, None)} | found
    assert isinstance(project, Latent)
    assert isinstance(mix, LatentSoftmax)
    found: dict[str, tuple[nn.Linear, int, Tensor | None]] = {
        "dq": (project.down_query, 1, None),
        "uq": (project.up_query, spec.heads, project.query_gain),
        "dkv": (project.down_key_value, 1, None),
        "uk": (mix.up_key, spec.heads, project.key_value_gain),
    }
    if project.rope_query is not None and project.rope_key is not None:
        found |= {"qr": (project.rope_query, spec.heads, project.query_gain), "kr": (project.rope_key, 1, None)}
    return found


def pieces(attention: Attention) -> Iterator[tuple[str, list[Tensor]]]:
    """(symbol, the rows of each head as views), once for the weight and once more for a bias."""
    for symbol, (linear, heads, _) in linears(attention).items():
        for tensor in (linear.weight, linear.bias):
            if tensor is not None:
                yield symbol, list(tensor.detach().chunk(heads))


def matrices(attention: Attention) -> dict[str, list[Tensor]]:
    """Symbol → the matrix of each head: gain multiplied in, bias as one more column."""
    found = {}
    for symbol, (linear, heads, gain) in linears(attention).items():
        matrix = linear.weight.detach() if gain is None else linear.weight.detach() * gain.detach()
        if linear.bias is not None:
            matrix = torch.cat([matrix, linear.bias.detach()[:, None]], 1)
        width = len(matrix) // heads
        found[symbol] = [matrix[head * width : (head + 1) * width].clone() for head in range(heads)]
    return found


Norms = dict[str, list[float]]


def norms(attention: Attention, norm: Literal["frobenius", "spectral"] = "frobenius") -> Norms:
    order: Any = "fro" if norm == "frobenius" else 2
    return {
        symbol: [float(torch.linalg.matrix_norm(matrix, ord=order)) for matrix in heads]
        for symbol, heads in matrices(attention).items()
    }


def expected_factors(spec: AttentionSpec, now: Norms, initial: Norms) -> Norms:
    """§3 of the mechanisms, line by line."""
    held = {s: [max(n, FLOOR * n0) for n, n0 in zip(now[s], initial[s], strict=True)] for s in now}
    if spec.latent is not None:
        return expected_latent_factors(spec.latent, held, initial)
    if "qk" in now:  # one matrix, its own norm
        return {"qk": [n0 / n for n, n0 in zip(held["qk"], initial["qk"], strict=True)]}
    queries, keys = len(now["q"]), len(now["k"])
    group = queries // keys
    found: Norms = {"q": [], "k": []}
    for h in range(queries):
        g = h // group
        if spec.coupling is None:
            found["q"].append(initial["k"][g] / held["k"][g])
        else:
            found["q"].append(
                math.sqrt(initial["q"][h] ** 2 + initial["k"][g] ** 2)
                / math.sqrt(held["q"][h] ** 2 + held["k"][g] ** 2)
            )
    for g in range(keys):
        largest0 = max(initial["q"][g * group + i] for i in range(group))
        largest = max(held["q"][g * group + i] for i in range(group))
        if spec.coupling is None:
            found["k"].append(largest0 / largest)
        else:
            found["k"].append(math.sqrt(largest0**2 + initial["k"][g] ** 2) / math.sqrt(largest**2 + held["k"][g] ** 2))
    return found


def expected_latent_factors(latent: LatentSpec, held: Norms, initial: Norms) -> Norms:
    heads = range(len(held["uq"]))

    def allowed(n: Norms) -> Norms:
        dq, dkv = n["dq"][0], n["dkv"][0]
        seen_dq, seen_dkv = (1.0, 1.0) if latent.norm else (dq, dkv)
        speeds = {
            "uq": [1 / (seen_dq * n["uk"][h] * seen_dkv) for h in heads],
            "uk": [1 / (n["uq"][h] * seen_dq * seen_dkv) for h in heads],
            "dq": [1 / max(n["uq"][h] * n["uk"][h] * dkv for h in heads)],
            "dkv": [1 / max(n["uq"][h] * dq * n["uk"][h] for h in heads)],
        }
        if latent.rope_width:
            kr = n["kr"][0]
            speeds["qr"] = [1 / (seen_dq * kr) for _ in heads]
            speeds["dq"] = [min(speeds["dq"][0], 1 / max(n["qr"][h] * kr for h in heads))]
            speeds["kr"] = [1 / max(n["qr"][h] * seen_dq for h in heads)]
        return speeds

    now, then = allowed(held), allowed(initial)
    found = {s: [a / b for a, b in zip(now[s], then[s], strict=True)] for s in now}
    if latent.norm:
        for symbol in ("dq", "dkv"):
            found[symbol][0] *= min(1.0, held[symbol][0] / initial[symbol][0])
    return found


def expected_clips(spec: AttentionSpec, largest: list[float], threshold: float) -> Norms:
    """What QK-clip multiplies the parts with, from the largest logit of every softmax."""
    gamma = [min(1.0, threshold / s) if s > threshold else 1.0 for s in largest]
    roots = [math.sqrt(value) for value in gamma]
    if spec.latent is not None:
        found = {"uq": roots, "uk": roots, "dq": [1.0], "dkv": [1.0]}
        return found | ({"qr": gamma, "kr": [1.0]} if spec.latent.rope_width else {})
    if spec.share in ("q=k", "q=k=v"):
        return {"qk": roots}
    group = len(gamma) // spec.kv_heads
    smallest = [min(gamma[g * group + i] for i in range(group)) for g in range(spec.kv_heads)]
    if spec.share == "k=v":
        return {"q": gamma, "k": [1.0] * spec.kv_heads}
    keys = [math.sqrt(value) for value in smallest]
    if spec.coupling is not None:  # queries and keys are mixed, so both must shrink alike
        return {"q": [keys[h // group] for h in range(len(gamma))], "k": keys}
    return {"q": [gamma[h] / keys[h // group] for h in range(len(gamma))], "k": keys}


def largest_logits(model: Decoder, ids: Tensor) -> list[list[float]]:
    """For every layer and softmax the largest logit of a visible pair, with its sign."""
    found = diagnose(model, ids)
    return [
        found.logits.of_layer(layer).masked_fill(~found.visible[layer], -torch.inf).amax((0, 2, 3)).tolist()
        for layer in range(model.spec.layers)
    ]


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def put(model: nn.Module, weights: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])


def controlled_names(model: Decoder) -> dict[str, tuple[int, str, int]]:
    """Parameter name → (layer, symbol, heads), for every weight and bias that logit control acts on."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = {}
    for layer in range(model.spec.layers):
        for symbol, (linear, heads, _) in linears(model.attention(layer)).items():
            for tensor in (linear.weight, linear.bias):
                if tensor is not None:
                    found[names[id(tensor)]] = (layer, symbol, heads)
    return found


def per_row(factors: list[float], like: Tensor) -> Tensor:
    """A number per head → shaped to multiply the rows of a weight or bias."""
    rows = torch.tensor(factors, dtype=torch.float64).repeat_interleave(len(like) // len(factors))
    return rows if like.dim() == 1 else rows[:, None]


Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
