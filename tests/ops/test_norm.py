"""The one RMSNorm: a gain for each member of a population."""

import pytest
import torch
from torch import Tensor

from qklab.ops.norm import rms_norm
from qklab.testing.numerics import close


@pytest.mark.parametrize("S", [1, 3])
def test_every_member_has_its_own_gain(S: int) -> None:
    x, gain = (torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in ((2 * S, 5, 4, 6), (S, 6)))

    def norm_alone(x: Tensor, gain: Tensor) -> Tensor:
        return torch.cat([rms_norm(rows, own, 1e-2) for rows, own in zip(x.split(2), gain, strict=True)])

    y, expected = rms_norm(x, gain, 1e-2), norm_alone(x, gain)
    close(y, expected)
    for mine, true in zip(*(torch.autograd.grad((z**3).sum(), (x, gain)) for z in (y, expected)), strict=True):
        close(mine, true)
    low = x.detach().bfloat16()
    assert torch.equal(rms_norm(low, gain, 1e-2), norm_alone(low, gain))  # rounded once, as torch's own


@pytest.mark.parametrize("shape", [(3, 6), (2, 5)])
def test_a_gain_that_does_not_fit_is_refused(shape: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=r"^gain must have shape \[members, 6\], its members dividing the 4 rows of x"):
        rms_norm(torch.zeros(4, 5, 6), torch.ones(shape), 1e-6)
