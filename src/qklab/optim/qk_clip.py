"""QKClip: queries and keys shrunk wherever a logit has grown too large (arXiv 2507.20534)."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from qklab.optim.control import Control, GivenRoles, Optimisers, check_positive, refuse_layers, why_normalised
from qklab.optim.norms import LayerGroup, Table, repeat_keys
from qklab.optim.roles import LayerRoles, Roles
from qklab.optim.rows import AllRows


class QKClip(Control):
    """An optimiser that shrinks W_q and W_k after a step wherever a logit has grown too large (arXiv 2507.20534).

    Per layer and head, with S the largest scaled logit since the last step and t the threshold: γ = min(1, t/S), and
    the logits are multiplied with γ through the weights, W_q and W_k by √γ each; docs/logit-control.md has the other
    kinds of attention. S is measured in the forward passes in training mode, for which the layers are watched from now
    on, or told by `observe`.

    Args:
        optimizer: The optimiser, or several that share the model.
        roles: `attention_roles(model)`, or a mapping from names to keywords of `layer_roles`.
        threshold: t.
        masters: Where the optimiser holds float32 copies of the weights in `roles`: weight → master.
    """

    key = "qk_clip"

    def __init__(
        self,
        optimizer: Optimisers,
        roles: GivenRoles,
        threshold: float = 100.0,
        *,
        masters: Mapping[Any, Tensor] | None = None,
    ):
        self.threshold = check_positive("threshold", threshold)
        super().__init__(optimizer, roles, masters)
        refuse_layers(QKClip, self.roles, why_normalised)
        refuse_layers(QKClip, self.roles, why_not_clippable)
        self.watch = LogitWatch(self.roles, self.rows)
        self.latest = [
            {symbol: torch.ones_like(value) for symbol, value in self.clips(group).items()} for group in self.groups
        ]

    def forget(self) -> None:
        self.watch.reset()

    def observe(self, layer: str, largest: Tensor) -> None:
        """Say that the logits of a layer reached `largest` [heads], for layers that cannot be watched."""
        self.watch.observe(layer, largest)

    def clips(self, group: LayerGroup) -> Table:
        return clip_factors(group.layer, self.watch.of_group(group), self.threshold)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of the wrapped optimisers, then the weights of heads whose logits were too large shrunk."""
        loss = self.step_bases(closure)
        skips = [skip for base in self.bases if (skip := getattr(base, "found_inf", None)) is not None]
        self.watch.reduce()
        for group, latest in zip(self.groups, self.latest, strict=True):
            for symbol, value in self.clips(group).items():
                for skip in skips:  # 1 where the device skipped the step
                    value = torch.where(skip > 0, 1.0, value)
                latest[symbol].copy_(value)
        self.watch.reset()
        self.rows.multiply(self.row_values.spread(self.latest))
        return loss


class LogitWatch:
    """Layer name → the largest scaled logit [heads] that a query in training had with a key it may see; of a population
    [members, heads]."""

    def __init__(self, roles: Roles, rows: AllRows, *members: int):
        self.largest = {
            name: torch.full((*members, layer.query.heads), -torch.inf, dtype=rows.precision, device=rows.device)
            for name, layer in roles.items()
        }
        for name, layer in roles.items():
            if layer.watch is not None:
                layer.watch(self.largest[name])

    def of_group(self, group: LayerGroup) -> Tensor:
        """[..., layers, heads]."""
        return torch.stack([self.largest[name] for name in group.names], -2)

    def observe(self, layer: str, largest: Tensor) -> None:
        if layer not in self.largest or largest.shape != self.largest[layer].shape:
            raise ValueError(
                f"the largest logits of a layer are one per head, {[*self.largest]} being the layers, but "
                f"{list(largest.shape)} came for {layer!r}."
            )
        own = self.largest[layer]
        own.copy_(torch.maximum(own, largest.detach().to(own)))

    def reduce(self) -> None:
        """The largest over all ranks, on all ranks."""
        if dist.is_available() and dist.is_initialized():
            together = torch.cat(list(self.largest.values()))
            dist.all_reduce(together, op=dist.ReduceOp.MAX)
            split = together.split([len(own) for own in self.largest.values()])
            torch._foreach_copy_(list(self.largest.values()), list(split))  # pyright: ignore[reportPrivateImportUsage]

    def reset(self) -> None:
        for own in self.largest.values():
            own.fill_(-torch.inf)


def clip_factors(layer: LayerRoles, largest: Tensor, threshold: float | Tensor) -> Table:
    """What QK-clip multiplies every projection with, so that a head's largest logit S [..., H] comes down to the
    threshold t: γ = t/S where S > t, else 1.

    MHA: √γ on both. GQA: √γ_g on the key, γ_h/√γ_g on a query, γ_g the group's smallest. (Q,K=V): γ on the query, as
    the key is also the value. One matrix: √γ. MLA: √γ on uq and uk, γ on qr; the shared rotary key is left alone.
    Under a linear coupling queries and keys must shrink alike: √γ_g on both.
    """
    gamma = torch.where(largest.isfinite() & (largest > threshold), threshold / largest, 1.0)
    root = gamma.sqrt()
    if layer.kind == "shared":
        return {"qk": root}
    if layer.kind == "latent":
        return {"uq": root, "uk": root} | ({"qr": gamma} if "qr" in layer.projections else {})
    grouped = gamma.unflatten(-1, (layer.projections["k"].heads, -1))
    smallest = grouped.amin(-1)
    if layer.key_is_value:
        return {"q": gamma}
    if layer.coupling != "none":
        return {"q": repeat_keys(smallest.sqrt(), gamma), "k": smallest.sqrt()}
    return {"q": (grouped / smallest.sqrt()[..., None]).flatten(-2), "k": smallest.sqrt()}


def why_not_clippable(layer: LayerRoles) -> str | None:
    if layer.biased:
        return "its logits have a bias of their own (asymmetry_2d), which smaller W_q and W_k do not shrink."
    if layer.coupling == "nonlinear":
        return "its coupling is not linear, so smaller W_q and W_k do not make its logits smaller in proportion."
    if layer.coupling == "linear" and layer.key_is_value:
        return "under a linear coupling W_k would have to shrink, and with it the values, which are the keys."
    return None
