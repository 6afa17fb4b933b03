"""The closed-form fits of a conversion, on second moments alone."""

import pytest
import torch
from torch import Tensor

from qklab.hf.convert.solve import (
    NOISE,
    Fit,
    Moments,
    average_heads,
    fit_shared_maps,
    measure_error,
    merge_heads,
    share_key_value,
)

pytestmark = pytest.mark.newest
D = 8
HALVES = torch.arange(D // 2), torch.arange(D // 2, D)


def data(groups: int = 3, members: int = 1, tokens: int = 4000, bias: bool = False) -> Tensor:
    """y [tokens, N, 2mD]: keys and values of one text, with spectra that fall and directions in common."""
    torch.manual_seed(0)
    x = torch.randn(tokens, 24, dtype=torch.float64) * torch.logspace(0, -1.5, 24, dtype=torch.float64)
    y = x @ torch.randn(24, groups * 2 * members * D, dtype=torch.float64)
    y = y.unflatten(1, (groups, -1))
    return y + torch.randn(groups, 2 * members * D, dtype=torch.float64) if bias else y


def moments_of(y: Tensor) -> Moments:
    return Moments(torch.einsum("tni,tnj->nij", y, y) / len(y), y.mean(0))


def read(fit: Fit, y: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values [tokens, N, mD] as the converted layer has them."""
    key = torch.einsum("nij,tnj->tni", fit.key, y) + fit.key_offset
    value = key if fit.value is None else torch.einsum("nij,tnj->tni", fit.value, y)
    keys = torch.einsum("nmij,tnj->tnmi", fit.queries, key)
    values = torch.einsum("nmij,tnj->tnmi", fit.values, value) + fit.offsets
    return keys.flatten(2), values.flatten(2)


def relative(got: Tensor, wanted: Tensor) -> float:
    return float((got - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("members", [1, 4])
@pytest.mark.parametrize("shared", [False, True])
def test_errors_are_those_of_the_data(bias: bool, members: int, shared: bool) -> None:
    y = data(members=members, bias=bias)
    moments = moments_of(y)
    fit = merge_heads(moments, members, least_squares=True, pairs=HALVES)
    if shared:
        fit = share_key_value(fit, moments, weight=0.5, centre=bias)
    keys, values = read(fit, y)
    half = members * D
    wanted = relative(keys, y[..., :half]), relative(values, y[..., half:])
    assert fit.errors(moments) == pytest.approx(wanted, rel=1e-6, abs=1e-7)


def test_moments_of_weights_are_those_of_white_inputs() -> None:
    torch.manual_seed(0)
    weight, bias = torch.randn(2, 6, 5), torch.randn(2, 6)
    moments = Moments.of_weights(weight, bias)
    x = torch.randn(200_000, 5)
    seen = moments_of(torch.einsum("nij,tj->tni", weight, x) + bias)
    torch.testing.assert_close(moments.second.float(), seen.second, rtol=0.05, atol=0.05)
    torch.testing.assert_close(moments.mean.float(), seen.mean, rtol=0.05, atol=0.05)


def cost(fit: Fit, moments: Moments, weight: float = 0.5) -> float:
    keys, values = fit.errors(moments)
    return weight * keys**2 + (1 - weight) * values**2


def projected(moments: Moments, encode: Tensor) -> Fit:
    """s = encode (key, value), with the best M for it."""
    fit = average_heads(len(moments.mean), 1, D, moments.second)
    shared = encode @ moments.second @ encode.mT
    decode = torch.linalg.solve(shared, (moments.second[:, D:] @ encode.mT).mT).mT
    return Fit(encode, fit.key_offset, None, fit.queries, decode[:, None], fit.offsets)


def test_sharing_beats_the_mean_the_key_and_chance() -> None:
    moments = moments_of(data())
    plain = average_heads(3, 1, D, moments.second)
    best = cost(share_key_value(plain, moments, weight=0.5, centre=False), moments)
    unit = torch.eye(D, dtype=torch.float64).expand(3, D, D)
    torch.manual_seed(1)
    others = {
        "mean": torch.cat([unit / 2, unit / 2], 2),
        "key": torch.cat([unit, 0 * unit], 2),
        "value": torch.cat([0 * unit, unit], 2),
        "chance": torch.randn(3, D, 2 * D, dtype=torch.float64) / D**0.5,
    }
    for name, encode in others.items():
        assert best < 0.7 * cost(projected(moments, encode), moments), name


def test_sharing_is_close_to_the_principal_components() -> None:
    """No D numbers carry (key, value) better than its D leading components; the fit pays a little for robustness."""
    moments = moments_of(data(groups=1))
    key, value = moments.second[0, :D, :D].trace(), moments.second[0, D:, D:].trace()
    scale = torch.cat([(0.5 / key).sqrt().expand(D), (0.5 / value).sqrt().expand(D)])
    bound = float(torch.linalg.eigvalsh(scale[:, None] * moments.second[0] * scale)[:-D].sum())
    found = cost(share_key_value(average_heads(1, 1, D, moments.second), moments, weight=0.5, centre=False), moments)
    assert bound <= found < 1.15 * bound


def test_weight_trades_keys_for_values() -> None:
    moments = moments_of(data())
    fits = [
        share_key_value(average_heads(3, 1, D, moments.second), moments, weight=w, centre=False)
        for w in (0.1, 0.5, 0.9)
    ]
    keys, values = zip(*(fit.errors(moments) for fit in fits), strict=True)
    assert keys[0] > keys[1] > keys[2]
    assert values[0] < values[1] < values[2]


def test_a_fit_survives_a_rounded_cache() -> None:
    """Keys of rank 2 and values of rank 3 with nothing in common: s has room for both, but the value must not hide in
    directions of s so faint that rounding destroys it."""
    torch.manual_seed(0)
    x = torch.randn(4000, 5, dtype=torch.float64)
    maps = torch.randn(5, D, dtype=torch.float64)
    y = torch.cat([x[:, :2] @ maps[:2], x[:, 2:] @ maps[2:]], 1)[:, None]
    moments = moments_of(y)
    fit = share_key_value(average_heads(1, 1, D, moments.second), moments, weight=0.5, centre=False)
    s = torch.einsum("nij,tnj->tni", fit.key, y)
    exact = torch.einsum("nij,tnj->tni", fit.values[:, 0], s)
    rounded = torch.einsum("nij,tnj->tni", fit.values[:, 0], s.bfloat16().double())
    assert relative(exact, y[..., D:]) < 0.02
    assert relative(rounded, y[..., D:]) < 0.05
    assert relative(s, y[..., :D]) < 0.15


def test_constants_cost_nothing_where_there_are_biases() -> None:
    y = data(bias=False)
    far = y + 50 * torch.randn(3, 2 * D, dtype=torch.float64)
    plain = share_key_value(average_heads(3, 1, D, y), moments_of(y - y.mean(0)), weight=0.5, centre=True)
    moved = share_key_value(average_heads(3, 1, D, y), moments_of(far), weight=0.5, centre=True)
    for ours, theirs, source in zip(read(moved, far), read(plain, y - y.mean(0)), (far, y), strict=True):
        part = slice(None, D) if source is far else slice(D, None)
        error = (ours - far[..., part]).norm()
        assert float(error) == pytest.approx(float((theirs - (y - y.mean(0))[..., part]).norm()), rel=1e-3)


def test_both_maps_are_stationary() -> None:
    """Neither another s nor another M alone does better."""
    spread = moments_of(data(groups=1)).second
    encode, decode = fit_shared_maps(spread, 0.5)
    key, value = spread[0, :D, :D].trace(), spread[0, D:, D:].trace()
    ridge = NOISE**2 * key / D

    def objective(encode: Tensor, decode: Tensor) -> Tensor:
        unit = torch.eye(2 * D, dtype=torch.float64)
        left, right = unit[:D] - encode[0], unit[D:] - decode[0] @ encode[0]
        miss = (left @ spread[0] @ left.mT).trace() / key
        return 0.5 * (miss + ((right @ spread[0] @ right.mT).trace() + ridge * decode.square().sum()) / value)

    start = objective(encode, decode)
    torch.manual_seed(0)
    for size in (1e-2, 1e-3):
        for _ in range(20):
            assert objective(encode + size * torch.randn_like(encode), decode) > start * (1 - 1e-6)
            assert objective(encode, decode + size * torch.randn_like(decode)) > start * (1 - 1e-3)


def turn(u: Tensor, angle: Tensor) -> Tensor:
    """RoPE's rotation of pairs (u_i, u_{i+D/2})."""
    low, high = u[..., : D // 2], u[..., D // 2 :]
    return torch.cat([low * angle.cos() - high * angle.sin(), high * angle.cos() + low * angle.sin()], -1)


def test_merged_keys_commute_with_the_rotation() -> None:
    y = data(members=2)
    fit = merge_heads(moments_of(y), 2, least_squares=True, pairs=HALVES)
    torch.manual_seed(0)
    angle = torch.randn(D // 2, dtype=torch.float64)
    k = torch.randn(5, D, dtype=torch.float64)
    for read_key in fit.queries.flatten(0, 1):
        torch.testing.assert_close(turn(k, angle) @ read_key.mT, turn(k @ read_key.mT, angle))


def test_heads_that_are_turned_copies_merge_without_loss() -> None:
    """k_j = c_j k with complex c_j and v_j = A_j v: least squares finds both, the mean does not."""
    torch.manual_seed(0)
    k, v = torch.randn(2, 500, 1, D, dtype=torch.float64)
    size = torch.rand(3, D // 2, dtype=torch.float64).repeat(1, 2) + 0.5
    keys = [size[j] * turn(k, torch.randn(D // 2, dtype=torch.float64)) for j in range(3)]
    values = [v @ torch.randn(D, D, dtype=torch.float64) for _ in range(3)]
    moments = moments_of(torch.cat([*keys, *values], -1))
    assert max(merge_heads(moments, 3, least_squares=True, pairs=HALVES).errors(moments)) < 1e-6
    assert min(merge_heads(moments, 3, least_squares=False, pairs=HALVES).errors(moments)) > 0.2
    kept = merge_heads(moments, 3, least_squares=True).errors(moments)
    assert kept[0] == pytest.approx(merge_heads(moments, 3, least_squares=False).errors(moments)[0])


def test_distance_of_nothing_is_nothing() -> None:
    moments = moments_of(data(groups=1))
    unit = torch.eye(2 * D, dtype=torch.float64)[:D]
    assert measure_error(moments, 0 * unit[None], torch.zeros(1, D, dtype=torch.float64), unit) == 0.0
    assert measure_error(moments, unit[None], torch.zeros(1, D, dtype=torch.float64), unit) == pytest.approx(1.0)
