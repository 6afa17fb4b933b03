"""Coupling, QK-norm and RoPE as one operation on the queries and keys of a token (README.md derives its backward)."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from qklab.ops.coupling import reference
from qklab.ops.dispatch import Impl, choose_impl
from qklab.ops.heads import check_heads, find_precision, object_to_wide
from qklab.schema import suggest_name

WIDEST = 128  # head of the kernel
MOST_BYTES = 100 * 2**10  # of matrices, which lie in a multiprocessor's shared memory beside operands of as many


class Network(NamedTuple):
    """What moves a state u [·, D]: f(u) = W2 silu(W1 u + b1) + b2; or −W1ᵀ(a ⊙ σ(W1 u + b1)); or W1 u.

    Every matrix may have a leading G, one for each key head, which share the biases; with members, every field has S
    before that. The outer layer of an affine map's network has 2D rows, first those of the scale and then those of the
    shift.
    """

    inner: Tensor  # W1 [h, D]
    inner_bias: Tensor | None = None  # b1 [h]
    outer: Tensor | None = None  # W2 [D, h] or [2D, h]
    outer_bias: Tensor | None = None  # b2 [D] or [2D]
    amplitude: Tensor | None = None  # a [h] or [G, 1, h]: the force is minus the gradient of a potential


class Norm(NamedTuple):
    """u ↦ g ⊙ u / √(mean u² + eps) over D, on queries and keys."""

    eps: float
    query_gain: Tensor | None = None  # [D]
    key_gain: Tensor | None = None


def couple(
    q: Tensor,
    k: Tensor,
    kind: str,
    networks: tuple[Network, ...],
    *,
    step: Tensor | None = None,
    steps: int = 1,
    scale_limit: float = 2.0,
    norm: Norm | None = None,
    angles: tuple[Tensor, Tensor] | None = None,
    turn_key: bool = True,
    members: int | None = None,
    impl: Impl = "auto",
) -> tuple[Tensor, Tensor]:
    """rotate(normalise(couple(q, k))): q [B, T, H, D], k [B, T, G, D] → the same shapes and dtype.

    `steps` times the map `kind`, with f, g the networks' forces, δ = `step` (a scalar, or [G, 1, 1]), and q̄ the mean
    over the query heads of a key head's group:

        euler              q⁺ = q + δ k ; k⁺ = k + δ f(q̄)
        symplectic-euler   k⁺ = k + δ f(q̄) ; q⁺ = q + δ k⁺
        linear             the same with f(q̄) = A q̄
        leapfrog           k½ = k + δ/2 f(q̄) ; q⁺ = q + δ k½ ; k⁺ = k½ + δ/2 f(q̄⁺)
        affine             q⁺ = q ⊙ exp(s1(k)) + t1(k) ; k⁺ = k ⊙ exp(s2(q̄⁺)) + t2(q̄⁺), s = scale_limit · tanh(raw)
        uncoupled          q⁺ = q + δ g(q) ; k⁺ = k + δ f(k)

    Affine and uncoupled have two networks, the query's first. Then `norm`, where given, and RoPE by `angles` (cos, sin
    [B or 1, T, 1, r/2] turn the pairs (i, i + r/2) of the first r entries), of the key only if `turn_key`.

    With `members` = S, every weight (of the networks, the step, the gains) has a leading axis of S, and q, k have S·B
    rows, of which member s owns B from s·B on: S calls in one.

    States are float32 (float64 for float64 inputs), networks compute in autocast's dtype or q's own, and results are
    rounded once. The kernel keeps q, k and the weights for the backward and nothing else.
    """
    check_coupling(q, k, kind, networks, step, steps, norm, angles, members)
    precision = find_precision(q)
    obstacle = find_coupling_obstacle(q, networks, precision)
    if choose_impl("couple", impl, q.device, obstacle, object_to_wide(precision)) == "reference":
        return reference.couple(
            q, k, kind, networks, step, steps, scale_limit, norm, angles, turn_key and angles is not None, precision,
            members,
        )  # fmt: skip
    weights = name_weights(networks, step, norm)
    return _couple(
        q,
        k,
        list(angles or ()),
        list(weights.values()),
        ",".join(weights),
        kind,
        steps,
        float(scale_limit),
        None if norm is None else norm.eps,
        turn_key and angles is not None,
        precision,
        members,
    )


def name_weights(networks: tuple[Network, ...], step: Tensor | None, norm: Norm | None) -> dict[str, Tensor]:
    """All weights of a call that exist, in the order in which their gradients lie."""
    named = {"step": step}
    for i, network in enumerate(networks):
        named |= {f"{field}{i}": tensor for field, tensor in zip(Network._fields, network, strict=True)}
    if norm is not None:
        named |= {"query_gain": norm.query_gain, "key_gain": norm.key_gain}
    return {name: tensor for name, tensor in named.items() if tensor is not None}


def find_coupling_obstacle(q: Tensor, networks: tuple[Network, ...], precision: torch.dtype) -> str | None:
    """What about these tensors keeps the kernel from taking them."""
    if q.dtype == torch.float64 and q.is_cuda:
        return "the kernel does not compute in float64"
    if q.shape[-1] > WIDEST:
        return f"the kernel takes heads of up to {WIDEST} entries, and these have {q.shape[-1]}"
    size = sum(count_bytes(network, precision) for network in networks)
    if size > MOST_BYTES:
        return f"the kernel holds up to {MOST_BYTES} bytes of matrices, and these are {size}"
    return None


def count_bytes(network: Network, precision: torch.dtype) -> int:
    """What one key head's matrices take, their sides padded to powers of two."""
    rows, columns = (max(16, 1 << (side - 1).bit_length()) for side in network.inner.shape[-2:])
    outer = 0 if network.outer is None else network.outer.shape[-2] // network.inner.shape[-1]
    return (1 + outer) * rows * columns * precision.itemsize


def check_coupling(
    q: Tensor,
    k: Tensor,
    kind: str,
    networks: tuple[Network, ...],
    step: Tensor | None,
    steps: int,
    norm: Norm | None,
    angles: tuple[Tensor, Tensor] | None,
    members: int | None,
) -> None:
    if kind not in reference.MAPS:
        known = ", ".join(reference.MAPS)
        raise ValueError(f"kind must be one of {known}{suggest_name(kind, reference.MAPS)}, but {kind!r} came.")
    check_heads(q, k, members)
    B, T, _, D = q.shape
    G = k.shape[2]
    if q.dtype != k.dtype or q.device != k.device or not q.is_floating_point():
        raise ValueError(
            "q and k must be floating-point tensors of one dtype on one device, "
            f"but {q.dtype} on {q.device} and {k.dtype} on {k.device} came."
        )
    lead = () if members is None else (members,)
    if steps < 1:
        raise ValueError(f"steps must be at least 1, but {steps} came.")
    wanted, stepped = reference.MAPS[kind].networks, reference.MAPS[kind].stepped
    if len(networks) != wanted:
        raise ValueError(f"{kind} has {wanted} network{'s' * (wanted > 1)}, but {len(networks)} came.")
    scalar = step is not None and (step.shape == lead if lead else step.numel() == 1 and step.dim() < 3)
    if (step is None) == stepped or (step is not None and not scalar and step.shape != (*lead, G, 1, 1)):
        came = "none" if step is None else f"shape {list(step.shape)}"
        wanted = f"{list(lead) if lead else 'a scalar'} or {[*lead, G, 1, 1]}"
        raise ValueError(f"step must be {wanted if stepped else f'absent for {kind}'}, but {came} came.")
    for network in networks:
        check_network(network, kind, D, G, lead)
    if len({network.inner.dim() for network in networks}) > 1:
        raise ValueError("both networks must have one set of matrices for all key heads, or both one for each.")
    gains = () if norm is None else (norm.query_gain, norm.key_gain)
    for gain in gains:
        if gain is not None and gain.shape != (*lead, D):
            raise ValueError(f"a gain must have shape {[*lead, D]}, but {list(gain.shape)} came.")
    for angle in angles or ():
        if angle.dim() != 4 or angle.shape[0] not in (1, B) or angle.shape[1:3] != (T, 1) or 2 * angle.shape[3] > D:
            raise ValueError(
                f"angles must be cos and sin of shape [{B} or 1, {T}, 1, at most {D // 2}], "
                f"but {list(angle.shape)} came."
            )
    if angles is not None and angles[0].shape != angles[1].shape:
        came = " and ".join(str(list(angle.shape)) for angle in angles)
        raise ValueError(f"angles must be cos and sin of one shape, but {came} came.")


def check_network(network: Network, kind: str, D: int, G: int, lead: tuple[int, ...]) -> None:
    inner = network.inner
    heads = (G,) if inner.dim() == 3 + len(lead) else ()
    h = D if kind == "linear" or inner.dim() < 2 else inner.shape[-2]
    outputs = 2 * D if kind == "affine" else D
    layered = kind != "linear" and network.amplitude is None
    expected: dict[str, tuple[int, ...] | None] = {
        "inner": (*lead, *heads, h, D),
        "outer": (*lead, *heads, outputs, h) if layered else None,
        "inner_bias": (*lead, h) if kind != "linear" else None,
        "outer_bias": (*lead, outputs) if layered else None,
        "amplitude": (*lead, *heads, *(1,) * len(heads), h) if kind not in ("linear", "affine") else None,
    }
    for name, shape in expected.items():
        tensor = getattr(network, name)
        if tensor is None and (shape is None or name not in ("inner", "outer")):
            continue
        if tensor is None or shape is None or tuple(tensor.shape) != shape:
            came = "none" if tensor is None else f"shape {list(tensor.shape)}"
            wanted = "absent" if shape is None else f"of shape {list(shape)}"
            raise ValueError(f"the {name} of {kind}'s network must be {wanted}, but {came} came.")


# what both operators take: `launch.Call` says what it is
GIVEN = (
    "Tensor q, Tensor k, Tensor[] angles, Tensor[] weights, str names, str kind, SymInt steps, float scale_limit, "
    "float? eps, bool turn_key, ScalarType precision, SymInt? members"
)


@torch.library.custom_op("qklab::couple", mutates_args=(), schema=f"({GIVEN}) -> (Tensor, Tensor)")
def _couple(*given: Any) -> tuple[Tensor, Tensor]:
    from qklab.ops.coupling.launch import forward

    return forward(*given)


@_couple.register_fake
def _(q: Tensor, k: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape)


BACKWARD = f"(Tensor dq, Tensor dk, {GIVEN}) -> (Tensor, Tensor, Tensor)"


@torch.library.custom_op("qklab::couple_backward", mutates_args=(), schema=BACKWARD)
def _couple_backward(*given: Any) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, and the gradients of all weights in a row: [S · (G or 1), total], S being 1 without members."""
    from qklab.ops.coupling.launch import backward

    return backward(*given)


@_couple_backward.register_fake
def _(
    dq: Tensor, dk: Tensor, q: Tensor, k: Tensor, angles: list[Tensor], weights: list[Tensor], *choices: Any
) -> tuple[Tensor, Tensor, Tensor]:
    rows, spans = lay_out_gradients(weights, k.shape[2], choices[-1])
    total = max((stop for _, stop in spans), default=0)
    wide = torch.promote_types(q.dtype, torch.float32)
    return q.new_empty(q.shape), k.new_empty(k.shape), q.new_empty((rows, total), dtype=wide)


def is_per_head(weight: Tensor, members: int | None) -> bool:
    """Whether every key head has its own: then, and only then, a weight has three axes beside the members'."""
    return weight.dim() == 3 + (members is not None)


def lay_out_gradients(weights: list[Tensor], G: int, members: int | None) -> tuple[int, list[tuple[int, int]]]:
    """How the gradients of the weights lie in a row, and how many rows there are: one, or one for each key head; of
    every member."""
    spans, start, own, S = [], 0, False, members or 1
    for weight in weights:
        per_head = is_per_head(weight, members)
        own |= per_head
        stop = start + weight.numel() // (G * S if per_head else S)
        spans.append((start, stop))
        start = stop
    return (G * S if own else S), spans


def keep_inputs(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, angles, weights, *ctx.choices = inputs
    ctx.turns = len(angles)
    ctx.save_for_backward(q, k, *angles, *weights)


def give_gradients(ctx: Any, dq: Tensor, dk: Tensor) -> tuple[Any, ...]:
    q, k, *rest = ctx.saved_tensors
    angles, weights = rest[: ctx.turns], rest[ctx.turns :]
    dq, dk, flat = _couple_backward(dq, dk, q, k, angles, weights, *ctx.choices)
    members = ctx.choices[-1]
    _, spans = lay_out_gradients(weights, k.shape[2], members)
    flat = flat.unflatten(0, (members or 1, -1))  # [S, G or 1, total]
    gradients = []
    for weight, (start, stop) in zip(weights, spans, strict=True):
        part = flat[..., start:stop]
        part = part if is_per_head(weight, members) or part.shape[1] == 1 else part.sum(1)
        gradients.append(part.reshape(weight.shape).to(weight.dtype))
    return dq, dk, [None] * ctx.turns, gradients, *[None] * len(ctx.choices)


_couple.register_autograd(give_gradients, setup_context=keep_inputs)
