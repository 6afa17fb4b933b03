"""Sampling from a decoder with a cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from qklab.model.decoder import Decoder


def next_tokens(
    logits: Tensor, temperature: float, top_k: int | None, top_p: float | None, generator: torch.Generator | None
) -> Tensor:
    """Draw one token per row from softmax(logits/temperature): [B, vocab] → [B].

    `top_k` keeps the k likeliest; then `top_p` keeps the smallest set whose probability reaches p. Temperature 0 takes
    the likeliest.
    """
    if temperature == 0:
        return logits.argmax(-1)
    logits = logits.double() / temperature
    if top_k is not None and top_k < logits.shape[-1]:
        least = logits.topk(top_k, -1).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    probabilities = logits.softmax(-1)
    if top_p is not None and top_p < 1:
        ordered, index = probabilities.sort(-1, descending=True)
        before = ordered.cumsum(-1) - ordered  # probability of everything likelier
        ordered = ordered.masked_fill(before >= top_p, 0.0)
        probabilities = torch.zeros_like(probabilities).scatter(-1, index, ordered)
    return torch.multinomial(probabilities, 1, generator=generator).squeeze(-1)


@torch.no_grad()
def generate(
    self: Decoder,
    ids: Tensor,
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    stop_token: int | None = None,
    left_padding: Tensor | None = None,
) -> Tensor:
    """Continue ids [B, T] by up to `max_new_tokens` tokens: [B, T + new].

    `left_padding` [B] says how many leading tokens of each row are padding. A row that has drawn `stop_token` repeats
    it; generation ends when all rows have. The same `seed` gives the same tokens.
    """
    check_request(self, ids, max_new_tokens, temperature, top_k, top_p, left_padding)
    generator = None if seed is None else torch.Generator(ids.device).manual_seed(seed)
    cache = self.new_cache(ids.shape[0], ids.shape[1] + max(max_new_tokens - 1, 0), left_padding=left_padding)
    stopped = torch.zeros(ids.shape[0], dtype=torch.bool, device=ids.device)
    new = ids
    for _ in range(max_new_tokens):
        logits = self.head(self.features(new, cache=cache)[:, -1])
        token = next_tokens(logits, temperature, top_k, top_p, generator)
        if stop_token is not None:
            token = torch.where(stopped, stop_token, token)
            stopped = stopped | (token == stop_token)
        new = token[:, None]
        ids = torch.cat([ids, new], 1)
        if stop_token is not None and bool(stopped.all()):
            break
    return ids


def check_request(
    model: Decoder,
    ids: Tensor,
    max_new_tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    left_padding: Tensor | None,
) -> None:
    """Everything that could go wrong half-way, said before anything is computed."""
    if not model.spec.causal:
        raise ValueError("only a causal model generates, but this one was built with causal=False.")
    check_ids(ids)
    if ids.numel() == 0:
        raise ValueError(f"there must be a token to continue in at least one row, but ids {list(ids.shape)} came.")
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens must be at least 0, but {max_new_tokens} came.")
    if not temperature >= 0:
        raise ValueError(f"temperature must be at least 0, but {temperature} came.")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k must be at least 1, but {top_k} came.")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p must lie in (0, 1], but {top_p} came.")
    if left_padding is not None and left_padding.numel() and int(left_padding.max()) >= ids.shape[1]:
        raise ValueError(
            f"left_padding must leave a token of text in every row of {ids.shape[1]}, but {left_padding.tolist()} came."
        )
    room = model.spec.context - ids.shape[1] + 1  # the last new token is never read
    if model.positions is not None and max_new_tokens > room:
        raise ValueError(
            f"{ids.shape[1]} tokens and {max_new_tokens} new ones exceed the {model.spec.context} learned positions; "
            f"ask for at most {max(0, room)}."
        )


def check_ids(ids: Tensor) -> None:
    whole = isinstance(ids, Tensor) and not ids.is_floating_point() and ids.dtype != torch.bool
    if not whole or ids.dim() != 2:
        came = f"{ids.dtype} {list(ids.shape)}" if isinstance(ids, Tensor) else type(ids).__name__
        raise ValueError(f"ids must be a tensor of whole numbers of shape [batch, tokens], but {came} came.")
