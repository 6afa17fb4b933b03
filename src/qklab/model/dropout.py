"""Dropout whose choices are a pure function of a key, so that a run drops the same alone, in a population, compiled and
after an interruption."""

import torch
from torch import Tensor, nn

WORD = 2**32 - 1


class Dropout(nn.Module):
    """In training, a share `rate` of x becomes 0 and the rest is divided by 1 − rate.

    What is dropped follows from `key`, one number or one for each of the members whose rows x has, from the `site`
    that tells apart the places of a model, and from where a number stands. Without a key each call draws one.
    """

    def __init__(self, rate: float, site: int):
        super().__init__()
        self.rate, self.site = rate, site
        self.key: Tensor | None = None  # [1] or [members], changed in place from step to step

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or not self.rate:
            return x
        key = torch.randint(2**62, (1,), device=x.device) if self.key is None else self.key
        kept = scatter_words(key, self.site, x.numel() // len(key)) >= round(self.rate * 2**32)
        return x * (kept.view(x.shape).to(x.dtype) / (1 - self.rate))

    def extra_repr(self) -> str:
        return f"rate={self.rate:g}, site={self.site}"


def scatter_words(keys: Tensor, site: int, count: int) -> Tensor:
    """For each key `count` numbers below 2³², each as likely as any other: [keys, count]."""
    start = mix_words((mix_words(mix_words(keys & WORD) ^ ((keys >> 32) & WORD)) + site) & WORD)
    place = torch.arange(count, device=keys.device)
    return mix_words((place * 0x9E3779B1 + start[:, None]) & WORD)


def mix_words(x: Tensor) -> Tensor:
    """A bijection of 32-bit words, kept in int64, that scatters neighbours (the constants are Wellons' lowbias32)."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & WORD
    x = ((x ^ (x >> 15)) * 0x846CA68B) & WORD
    return x ^ (x >> 16)


def set_dropout_key(model: nn.Module, key: Tensor) -> None:
    """Let every dropout of a model follow `key`, which may be changed in place from then on."""
    for module in model.modules():
        if isinstance(module, Dropout):
            module.key = key
