"""Differential attention composed from plain attention, against its definition."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from qklab.ops.differential import differential, differential_v2, reference
from qklab.testing.numerics import close

SCALE = 0.4


def example(T: int, H: int, G: int, D: int = 6, S: int | None = None) -> list[Tensor]:
    source = torch.Generator().manual_seed(2)
    shapes = ((2, T, H, D), (2, S or T, G, D), (2, S or T, G, D))
    return [torch.randn(shape, generator=source, dtype=torch.float64).requires_grad_() for shape in shapes]


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    o = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        is_causal=True,
        scale=SCALE,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return o.transpose(1, 2)


def with_gradients(o: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    return [o.detach(), *torch.autograd.grad(o.square().sum(), inputs)]


@pytest.mark.parametrize(("H", "G"), [(2, 2), (4, 4), (8, 2), (12, 4)])
def test_v1_is_its_definition(H: int, G: int) -> None:
    q, k, v = example(7, H, G)
    weight = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    mask = torch.ones(7, 7, dtype=torch.bool).tril()
    expected = reference.differential(q, k, v, weight, SCALE, mask)
    actual = differential(q, k, v, weight, causal)
    assert actual.shape == (2, 7, H // 2, 12)
    for mine, true in zip(*(with_gradients(o, [q, k, v, weight]) for o in (actual, expected)), strict=True):
        close(mine, true)


def test_members_have_weights_of_their_own() -> None:
    q, k, v = (torch.cat([x, 2 * x]).detach().requires_grad_() for x in example(5, 4, 2))
    weight = torch.tensor([0.3, -0.7], dtype=torch.float64, requires_grad=True)
    parts = zip(q.split(2), k.split(2), v.split(2), weight, strict=True)
    alone = [differential(*own, causal) for own in parts]
    together = differential(q, k, v, weight, causal)
    for mine, true in zip(*(with_gradients(o, [q, k, v, weight]) for o in (together, torch.cat(alone))), strict=True):
        close(mine, true)


@pytest.mark.parametrize(("H", "G"), [(1, 1), (4, 2), (3, 1)])
def test_v2_is_its_definition(H: int, G: int) -> None:
    q, k, v = example(7, 2 * H, G)
    weight = torch.rand(2, 7, H, dtype=torch.float64, requires_grad=True)
    mask = torch.ones(7, 7, dtype=torch.bool).tril()
    expected = reference.differential_v2(q, k, v, weight, SCALE, mask)
    actual = differential_v2(q, k, v, weight, causal)
    assert actual.shape == (2, 7, H, 6)
    for mine, true in zip(*(with_gradients(o, [q, k, v, weight]) for o in (actual, expected)), strict=True):
        close(mine, true)


def test_keys_and_values_are_never_copied() -> None:
    q, k, v = (tensor.detach() for tensor in example(1, 4, 2, S=9))
    seen: list[Tensor] = []

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        seen.extend((k, v))
        return q.new_zeros(*q.shape[:3], v.shape[3])

    differential(q, k, v, torch.tensor(0.3), plain)
    own = {tensor.untyped_storage().data_ptr() for tensor in (k, v)}
    assert {tensor.untyped_storage().data_ptr() for tensor in seen} == own


def test_wrong_shapes_are_refused() -> None:
    q, k, v = example(3, 4, 2)
    weight = torch.tensor(0.3)
    with pytest.raises(ValueError, match=r"even number G of key heads .* k \[2, 3, 1, 6\]"):
        differential(q, k[:, :, :1], v[:, :, :1], weight, causal)
    with pytest.raises(ValueError, match=r"values like keys"):
        differential(q, k, v[..., :3], weight, causal)
    with pytest.raises(ValueError, match=r"^λ must be a number, or \[members\] dividing the 2 rows .* but \[3\] came"):
        differential(q, k, v, torch.zeros(3), causal)
    with pytest.raises(ValueError, match=r"a weight per token and head, .* weight \[\]"):
        differential_v2(q, k, v, weight, causal)
