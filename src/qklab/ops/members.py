"""What belongs to the members of a stacked model (`qklab.stack`), for the rows of a tensor.

A stacked parameter has a leading axis of S members, and an activation S·B rows: member s owns rows s·B … (s+1)·B − 1.
"""

from torch import Tensor


def spread_members(value: Tensor, members: int | None, rows: int, axes: int) -> Tensor:
    """Each member's value for each of its rows: [S, …] → [rows, 1 × axes, …]; as it is where there are no members."""
    if members is None:
        return value
    lead = value[:, None].expand(members, rows // members, *value.shape[1:]).flatten(0, 1)
    return lead.reshape(rows, *(1,) * axes, *value.shape[1:])
