"""What the tokens right before a token left behind, for choices that look back a few tokens."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from qklab.ops.shift import shift_tokens


class Past:
    """The tokens before each of T new ones. A text sees nothing of the one packed before it, nor of its padding.

    What is looked back on is noted in `seen`, in the order of the calls, so that a cache can keep the last of it;
    `kept` is what a cache kept so: [B, tokens, entries] each.
    """

    def __init__(self, positions: Tensor, kept: Sequence[Tensor] = ()):
        self.positions, self.kept = positions, list(kept)  # [B or 1, T]: the new tokens' places in their own texts
        self.seen: list[Tensor] = []

    def before(self, u: Tensor, tokens: int) -> list[Tensor]:
        """u [B, T, …] of one to `tokens` tokens earlier, in this order; 0 where a text has not begun."""
        return shift_tokens(u, self.positions, tokens, self.recall(u, tokens))

    def recall(self, u: Tensor, tokens: int) -> Tensor | None:
        """Note that u [B, T, …] is looked back on, and give what a cache kept of the tokens before: [B, tokens, …]."""
        i = len(self.seen)
        self.seen.append(u)
        return self.kept[i].to(u.dtype).view(u.shape[0], tokens, *u.shape[2:]) if self.kept else None
