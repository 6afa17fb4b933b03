"""RoPE: the rotation of pairs as complex numbers turn, and every form of it the same."""

import pytest
import torch

from qklab.ops.rope import apply_rope, apply_rope_tables, apply_rope_without_gradient, rope_angles, rope_tables

POSITIONS = torch.tensor([[0, 1, 5, 300], [2, 0, 9, 7]])


def example(width: int, rotated: int, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, tuple]:
    x = torch.randn(2, 4, 3, width, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return x.to(dtype), rope_angles(POSITIONS, rotated, 100.0, dtype)


@pytest.mark.parametrize("rotated", [8, 6])
def test_pairs_turn_as_complex_numbers_do(rotated: int) -> None:
    x, angles = example(8, rotated)
    half = rotated // 2
    pairs = torch.complex(x[..., :half], x[..., half:rotated])
    turn = POSITIONS[..., None, None] * 100.0 ** (-2 * torch.arange(half, dtype=torch.float64) / rotated)
    expected = pairs * torch.exp(1j * turn)
    y = apply_rope(x, angles)
    torch.testing.assert_close(y, torch.cat([expected.real, expected.imag, x[..., rotated:]], -1))
    torch.testing.assert_close(apply_rope(y, angles, inverse=True), x)


@pytest.mark.parametrize("inverse", [False, True])
def test_tables_turn_alike(inverse: bool) -> None:
    x, angles = example(8, 8)
    torch.testing.assert_close(apply_rope_tables(x, rope_tables(angles), inverse), apply_rope(x, angles, inverse))


@pytest.mark.parametrize("rotated", [8, 6])
def test_without_gradients_it_turns_alike(rotated: int) -> None:
    x, angles = example(8, rotated)
    torch.testing.assert_close(apply_rope_without_gradient(x, angles), apply_rope(x, angles))


def test_16_bit_numbers_turn_in_the_precision_of_the_angles() -> None:
    x, angles = example(8, 6, torch.float32)
    short = x.bfloat16()
    y = apply_rope(short, angles)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, apply_rope(short.float(), angles).bfloat16())


def test_angles_are_one_operator_to_a_compiler() -> None:
    torch.library.opcheck(rope_angles, (POSITIONS, 6, 10_000.0, torch.float32))
