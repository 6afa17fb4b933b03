"""Closed-form fits: fewer key/value heads, and one tensor for keys and values.

A group is what becomes one key/value head: m heads, y = [k_1 … k_m, v_1 … v_m] (2mD numbers per token). Everything is
decided from the second moments of y, so a pass over the calibration text that sums them is all the data needed.
The fit says what is stored, key = E_k y + e_k and value = E_v y (or only the key, shared), and how the old heads are
read from it: k_j ≈ Q_j key, v_j ≈ V_j value + c_j. Q_jᵀ goes into the query's weights, V_j and c_j into the output's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

NOISE = 2.0**-8  # relative rounding of a cached number that a fit has to survive: bfloat16's
ROUNDS = 40
TRIAL = 8  # after so many rounds only the best start of each head goes on


@dataclass
class Moments:
    """E[y yᵀ] [N, n, n] and E[y] [N, n] of N groups in float64, summed over tokens."""

    second: Tensor
    mean: Tensor

    @classmethod
    def of_weights(cls, weight: Tensor, bias: Tensor | None) -> Moments:
        """Of y = W x + b for E[x] = 0, E[x xᵀ] = I: weight [N, n, width], bias [N, n]."""
        weight = weight.double()
        mean = weight.new_zeros(weight.shape[:2]) if bias is None else bias.double()
        return cls(weight @ weight.mT + mean[:, :, None] * mean[:, None], mean)

    def transform(self, encode: Tensor) -> Moments:
        """Of E y."""
        return Moments(encode @ self.second @ encode.mT, (encode @ self.mean[..., None])[..., 0])

    def covariance(self) -> Tensor:
        return self.second - self.mean[:, :, None] * self.mean[:, None]


@dataclass
class Fit:
    """What N groups of m old heads store and how they are read; `value` is None where the key is also the value."""

    key: Tensor  # E_k [N, D, 2mD]
    key_offset: Tensor  # e_k [N, D]
    value: Tensor | None  # E_v [N, D, 2mD]
    queries: Tensor  # Q_j [N, m, D, D]
    values: Tensor  # V_j [N, m, D, D]
    offsets: Tensor  # c_j [N, m, D]

    @property
    def members(self) -> int:
        return self.queries.shape[1]

    def errors(self, moments: Moments) -> tuple[float, float]:
        """Relative errors of the old keys and values: √(E‖ŷ − y‖² / E‖y‖²)."""
        stored, stored_offset = self.key, self.key_offset
        if self.value is not None:
            stored, stored_offset = self.value, torch.zeros_like(self.key_offset)
        keys = torch.einsum("nmij,njk->nmik", self.queries, self.key).flatten(1, 2)
        key_offset = torch.einsum("nmij,nj->nmi", self.queries, self.key_offset).flatten(1)
        values = torch.einsum("nmij,njk->nmik", self.values, stored).flatten(1, 2)
        offset = torch.einsum("nmij,nj->nmi", self.values, stored_offset) + self.offsets
        half = keys.shape[1]
        unit = torch.eye(2 * half, dtype=keys.dtype, device=keys.device)
        return (
            measure_error(moments, unit[:half] - keys, key_offset, unit[:half]),
            measure_error(moments, unit[half:] - values, offset.flatten(1), unit[half:]),
        )


def measure_error(moments: Moments, left: Tensor, offset: Tensor, whole: Tensor) -> float:
    """√(E‖L y − offset‖² / E‖W y‖²) over all groups."""
    missed = torch.einsum("nij,njk,nik->", left, moments.second, left)
    missed = missed - 2 * (offset * (left @ moments.mean[..., None])[..., 0]).sum() + offset.square().sum()
    size = torch.einsum("ij,njk,ik->", whole, moments.second, whole)
    return float((missed.clamp(min=0) / size.clamp(min=torch.finfo(size.dtype).tiny)).sqrt())


def average_heads(groups: int, members: int, width: int, like: Tensor) -> Fit:
    """The mean of each group's keys and of its values; with one member a group, those themselves."""
    unit = torch.eye(width, dtype=torch.float64, device=like.device)
    mean = unit.repeat(1, members) / members  # [D, mD]
    none = torch.zeros_like(mean)
    each = unit.expand(groups, members, width, width).clone()
    zero = unit.new_zeros(groups, width)
    return Fit(
        key=torch.cat([mean, none], 1).expand(groups, -1, -1).clone(),
        key_offset=zero,
        value=torch.cat([none, mean], 1).expand(groups, -1, -1).clone(),
        queries=each,
        values=each.clone(),
        offsets=unit.new_zeros(groups, members, width),
    )


def merge_heads(
    moments: Moments, members: int, *, least_squares: bool, pairs: tuple[Tensor, Tensor] | None = None
) -> Fit:
    """m key/value heads become one: by their mean, or by least squares.

    Values: v_j ≈ V_j v' with v' = Uᵀ v, U the D leading eigenvectors of the values' second moment: no other D numbers
    carry the values better. Keys under RoPE: what is done to a query must commute with the rotation, so each pair of
    entries that turns together, `pairs` ([D/2] twice), is one complex number z_j of head j and z_j ≈ c_j z', the
    leading eigenvector of E[z zᴴ]; without pairs (norms stand between) the mean.
    """
    groups, size = moments.mean.shape
    width = size // (2 * members)
    fit = average_heads(groups, members, width, moments.second)
    if not least_squares or members == 1:
        return fit
    half = size // 2
    lead = torch.linalg.eigh(moments.second[:, half:, half:]).eigenvectors[..., -width:]  # [N, mD, D]
    scale = members**-0.5  # the stored value has the size of one head's
    fit.value = torch.cat([torch.zeros_like(lead), lead], 1).mT * scale
    fit.values = lead.unflatten(1, (members, width)) / scale
    if pairs is not None:
        fit.key, fit.queries = merge_rotated_keys(moments.second[:, :half, :half], members, pairs)
    return fit


def merge_rotated_keys(second: Tensor, members: int, pairs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """E_k [N, D, 2mD] and Q_j [N, m, D, D] of z_j ≈ c_j z', z = k_low + i k_high, for each of the D/2 pairs."""
    groups = second.shape[0]
    width = second.shape[1] // members
    low, high = (entries.to(second.device) for entries in pairs)
    blocks = second.unflatten(2, (members, width)).unflatten(1, (members, width))  # [N, m, D, m, D]

    def cross(a: Tensor, b: Tensor) -> Tensor:
        """E[k_a k_b] of the entries a, b [D/2] of all pairs of heads: [N, m, m, D/2]."""
        return blocks[:, :, a][..., b].diagonal(dim1=2, dim2=4)

    real = cross(low, low) + cross(high, high)
    imaginary = cross(high, low) - cross(low, high)
    hermitian = torch.complex(real, imaginary).permute(0, 3, 1, 2)  # E[z_a conj(z_b)] [N, D/2, m, m]
    lead = torch.linalg.eigh(hermitian).eigenvectors[..., -1]  # [N, D/2, m]
    total = lead.sum(-1, keepdim=True)
    lead = lead * torch.where(total.abs() > 0, total.conj() / total.abs(), torch.ones_like(total))
    c = lead * members**0.5
    encode = torch.zeros(groups, width, 2 * members * width, dtype=second.dtype, device=second.device)
    queries = torch.zeros(groups, members, width, width, dtype=second.dtype, device=second.device)
    for j in range(members):
        for block, number, at in ((encode, c[..., j].conj() / members, j * width), (queries[:, j], c[..., j], 0)):
            block[:, low, at + low] = number.real
            block[:, low, at + high] = -number.imag
            block[:, high, at + low] = number.imag
            block[:, high, at + high] = number.real
    return encode, queries


def share_key_value(fit: Fit, moments: Moments, *, weight: float, centre: bool) -> Fit:
    """One tensor s for the fit's key and value: key ≈ s, value ≈ M s + c.

    Minimises w E‖key − s‖²/E‖key‖² + (1 − w) (E‖value − M s − c‖² + λ‖M‖²)/E‖value‖². Given M, s is a linear map of
    (key, value); given s, M is a regression; the two steps alternate from several starts, of which the best goes on.
    Without λ the optimum is the principal components of (key, value), in which s may carry the value in entries so
    small that rounding destroys it; λ = NOISE² E‖key‖²/D is the value's error from that rounding.
    """
    assert fit.value is not None
    width = fit.key.shape[1]
    both = moments.transform(torch.cat([fit.key, fit.value], 1))
    spread = both.covariance() if centre else both.second
    encode, decode = fit_shared_maps(spread, weight)
    if centre:
        offset = both.mean[:, :width] - (encode @ both.mean[..., None])[..., 0]
        constant = both.mean[:, width:] - (decode @ both.mean[:, :width, None])[..., 0]
    else:
        offset, constant = torch.zeros_like(fit.key_offset), torch.zeros_like(fit.key_offset)
    to_key, to_value = encode[..., :width], encode[..., width:]
    return Fit(
        key=to_key @ fit.key + to_value @ fit.value,
        key_offset=offset,
        value=None,
        queries=fit.queries,
        values=fit.values @ decode[:, None],
        offsets=fit.offsets + torch.einsum("nmij,nj->nmi", fit.values, constant),
    )


def fit_shared_maps(spread: Tensor, weight: float) -> tuple[Tensor, Tensor]:
    """s = B (key, value) and value ≈ M s for spread [N, 2D, 2D]: B [N, D, 2D], M [N, D, D]."""
    width = spread.shape[-1] // 2
    tiny = torch.finfo(spread.dtype).tiny
    key_size = spread[:, :width, :width].diagonal(dim1=1, dim2=2).sum(-1).clamp(min=tiny)[:, None, None]
    value_size = spread[:, width:, width:].diagonal(dim1=1, dim2=2).sum(-1).clamp(min=tiny)[:, None, None]
    to_key, to_value = weight / key_size, (1 - weight) / value_size
    ridge = NOISE**2 * key_size / width
    unit = torch.eye(width, dtype=spread.dtype, device=spread.device)

    def encoder(decode: Tensor) -> Tensor:
        keys = (to_key * unit).expand_as(decode)
        return torch.linalg.solve(keys + to_value * decode.mT @ decode, torch.cat([keys, to_value * decode.mT], -1))

    def decoder(encode: Tensor) -> Tensor:
        shared = encode @ spread @ encode.mT + ridge * unit
        return torch.linalg.solve(shared, (spread[:, width:] @ encode.mT).mT).mT

    def cost(encode: Tensor, decode: Tensor) -> Tensor:
        key_miss = torch.cat([unit, 0 * unit], 1) - encode
        value_miss = torch.cat([0 * unit, unit], 1) - decode @ encode
        key, value = (((miss @ spread) * miss).sum((-2, -1), keepdim=True) for miss in (key_miss, value_miss))
        penalty = ridge * decode.square().sum((-2, -1), keepdim=True)
        return (to_key * key + to_value * (value + penalty))[..., 0, 0]

    decode = guess_decoders(spread, to_key, to_value)  # [starts, N, D, D]
    encode = encoder(decode)
    before = cost(encode, decode)
    for step in range(ROUNDS):
        decode = decoder(encode)
        encode = encoder(decode)
        after = cost(encode, decode)
        if step == TRIAL:
            best = after.argmin(0), torch.arange(len(spread), device=spread.device)
            encode, decode, after = encode[best][None], decode[best][None], after[best][None]
        elif step > TRIAL and bool((before - after <= 1e-4 * before).all()):
            break
        before = after
    return encode[0], decode[0]


def guess_decoders(spread: Tensor, to_key: Tensor, to_value: Tensor) -> Tensor:
    """First guesses of M [starts, N, D, D]: 0 (s is the key) and the principal components' U_v U_k⁻¹, with ridges."""
    width = spread.shape[-1] // 2
    scale = torch.cat([to_key.sqrt().expand(-1, width, 1), to_value.sqrt().expand(-1, width, 1)], 1)
    lead = torch.linalg.eigh(scale * spread * scale.mT).eigenvectors[..., -width:] / scale
    key, value = lead[:, :width], lead[:, width:]
    unit = torch.eye(width, dtype=spread.dtype, device=spread.device)
    gram = key @ key.mT
    size = gram.diagonal(dim1=1, dim2=2).mean(-1)[:, None, None]
    ridges = (ridge * size * unit for ridge in (1e-5, 1e-3, 1e-1))
    guesses = [torch.linalg.solve(gram + ridge, (value @ key.mT).mT).mT for ridge in ridges]
    return torch.stack([torch.zeros_like(gram), *guesses])
