"""The largest logit of every head since the last step, measured in the forward passes themselves."""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from qklab.attention.layer import Attention


class Watch:
    """Layer name → the largest scaled logit [heads] that a query in training had with a key it may see."""

    def __init__(self, heads: Mapping[str, int], modules: Mapping[str, nn.Module | None], device: torch.device):
        self.largest = {name: torch.full((count,), -torch.inf, device=device) for name, count in heads.items()}
        for name, module in modules.items():
            if isinstance(module, Attention):
                module.watched = self.largest[name]
            elif module is not None:
                from qklab.optim.watch_transformers import watch

                watch(module, self.largest[name])

    def observe(self, layer: str, largest: Tensor) -> None:
        if layer not in self.largest or largest.shape != self.largest[layer].shape:
            raise ValueError(
                f"the largest logits of a layer are one per head, {[*self.largest]} being the layers, but "
                f"{list(largest.shape)} came for {layer!r}."
            )
        own = self.largest[layer]
        own.copy_(torch.maximum(own, largest.detach().to(own)))

    def agree(self) -> None:
        """The largest over all ranks, on all ranks."""
        if dist.is_available() and dist.is_initialized():
            together = torch.cat(list(self.largest.values()))
            dist.all_reduce(together, op=dist.ReduceOp.MAX)
            parts = together.split([len(own) for own in self.largest.values()])
            torch._foreach_copy_(list(self.largest.values()), list(parts))  # pyright: ignore[reportPrivateImportUsage]

    def reset(self) -> None:
        for own in self.largest.values():
            own.fill_(-torch.inf)
