"""Transformers' masks and positions as this package knows them: padding before the text, or several texts in a row."""

import torch
from torch import Tensor

from qklab.hf.cache import QKLabCacheLayer


def count_left_padding(mask: Tensor) -> Tensor:
    """How many zeros each row of a mask [B, S] starts with: [B]."""
    return (mask.cumsum(-1) == 0).sum(-1)


def ends_in_padding(mask: Tensor) -> bool:
    """Whether padding follows text in some row of a mask [B, S]."""
    return bool(((mask[:, -1] == 0) & (mask != 0).any(-1)).any())


def check_mask_shape(mask: Tensor, batch: int, tokens: int) -> None:
    """Raise for what is no [batch, tokens] mask."""
    if mask.dim() != 2 or mask.shape != (batch, tokens):
        kind = "a 4-D mask, e.g. of packed texts, is not taken; restart position_ids at 0 for each text instead"
        what = kind if mask.dim() > 2 else "it counts the tokens of the cache, too"
        raise ValueError(
            f"attention_mask must be of shape [{batch}, {tokens}], 1 for text and 0 for padding, but "
            f"{list(mask.shape)} came; {what}."
        )


def check_one_piece(mask: Tensor) -> None:
    """Raise for a mask [B, S] with a row whose text is not in one piece. Waits for a GPU to see that."""
    text = mask != 0
    last = mask.shape[1] - (text.flip(-1).cumsum(-1) == 0).sum(-1)  # one past the last token of text
    if bool((text.sum(-1) != (last - count_left_padding(text)).clamp(min=0)).any()):
        raise ValueError(
            "attention_mask has zeros between ones, and only padding before or after the text is understood; pad on "
            "one side, or restart position_ids at 0 for each text of a row."
        )


def find_packed_texts(positions: Tensor, mask: Tensor | None, batch: int, tokens: int) -> Tensor | None:
    """The texts of each row [B, T], numbered, where positions [B or 1, T] restart; None where they do not.

    Raises for positions that do not count up from 0 within each text.
    """
    positions = positions.expand(batch, tokens)
    starts = torch.ones_like(positions, dtype=torch.bool)
    starts[:, 1:] = positions[:, 1:] != positions[:, :-1] + 1
    if torch.compiler.is_compiling():
        return starts.cumsum(-1)
    if mask is not None and not bool((mask != 0).all()):
        check_positions(positions, 0, count_left_padding(mask), int(count_left_padding(mask.flip(-1)).max()))
        return None
    if bool((positions[starts] != 0).any()):
        raise ValueError(
            "position_ids must count up from 0 within each text, but a row of them starts with "
            f"{positions[(starts & (positions != 0)).any(-1)][0, :8].tolist()}; leave them out where it is one text."
        )
    return starts.cumsum(-1) if bool(starts[:, 1:].any()) else None


def check_positions(positions: Tensor, before: int, padding: Tensor | None, ignored: int = 0) -> None:
    """Raise where positions [B or 1, T] of tokens behind `before` others are not those the padding [B] leaves them.

    What padding itself is given is of no meaning, nor are the last `ignored` tokens.
    """
    tokens = positions.shape[-1]
    slots = before + torch.arange(tokens, device=positions.device)
    expected = slots[None] if padding is None else slots - padding.to(positions.device)[:, None]
    wrong = (positions != expected) & (expected >= 0)
    if bool(wrong[:, : tokens - ignored].any()):
        raise ValueError(
            "position_ids do not continue the text that attention_mask and the cache describe; leave them out, and "
            "they are counted."
        )


def continues_mask(seen: Tensor | None, mask: Tensor) -> bool:
    """Whether a mask [B, S] is the one `seen` before, and text all the rest. Waits for a GPU only once."""
    if seen is None or seen.device != mask.device or seen.shape[0] != mask.shape[0] or seen.shape[1] > mask.shape[1]:
        return False
    before, new = mask.split([seen.shape[1], mask.shape[1] - seen.shape[1]], 1)
    return bool((before == seen).all() & (new != 0).all())


def update_padding(layers: list[QKLabCacheLayer], mask: Tensor) -> None:
    """See that the mask [B, S] leaves the tokens in the cache as they were, and take over how rows begin that were all
    padding until now. Where the mask only went on, which is every step of `generate`, a single look is enough."""
    first = layers[0]
    if continues_mask(first.seen, mask):
        return
    check_one_piece(mask)
    before, padding = int(first.get_seq_length()), count_left_padding(mask)
    old = torch.zeros_like(padding) if first.left_padding is None else first.left_padding.to(padding.device)
    if not bool(torch.where(old >= before, padding >= before, padding == old).all()):
        raise ValueError(
            f"attention_mask now begins the rows at {padding.tolist()}, but the cache was filled with {old.tolist()} "
            "leading tokens of padding; keep the mask and add ones for the new tokens."
        )
    if bool((padding != old).any()):
        for layer in layers:
            layer.pad(padding)
    first.seen = mask.clone()
