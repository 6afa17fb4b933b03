"""Many models of one shape as one model: parameters [S, …] under the names they have in each, rows S·B in between.

Only what holds parameters knows of members. A leaf of torch becomes its stacked form here; a module of ours that says
`members: int | None = None` takes parameters with one more axis in front once it is told how many there are; a coupling
or norm that does not is mapped over its parameters. All else works on rows, whosever they are.
"""

from collections.abc import Sequence
from copy import deepcopy
from typing import Any, NoReturn, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from qklab.attention.couple import Coupling
from qklab.attention.layer import Attention
from qklab.attention.look_back import LookbackCoupling
from qklab.attention.norm import Normalisation
from qklab.attention.past import Past
from qklab.model.decoder import Decoder, RMSNorm
from qklab.model.dropout import Dropout
from qklab.ops.members import spread_members

Model = TypeVar("Model", bound=nn.Module)


class StackError(ValueError):
    """These models cannot be stacked."""


class StackedLinear(nn.Linear):
    """y = W_s x + b_s on the rows of member s: weight [S, out, in], bias [S, out]."""

    def forward(self, input: Tensor) -> Tensor:
        x = input.reshape(len(self.weight), -1, input.shape[-1])
        weight = self.weight.mT
        y = torch.bmm(x, weight) if self.bias is None else torch.baddbmm(self.bias[:, None], x, weight)
        return y.reshape(*input.shape[:-1], y.shape[-1])


class StackedEmbedding(nn.Embedding):
    """Row i of member s's table [S, vocab, width]."""

    def forward(self, input: Tensor) -> Tensor:
        members, vocab = self.weight.shape[:2]
        first = torch.arange(members, device=input.device) * vocab
        return F.embedding(input + spread_members(first, members, len(input), 1), self.weight.flatten(0, 1))


class StackedRMSNorm(RMSNorm):
    """RMSNorm with a gain [S, width]."""

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(self.weight.dtype)
        gain = spread_members(self.weight, len(self.weight), len(x), 1)
        return (F.rms_norm(wide, self.normalized_shape, None, self.eps) * gain).to(x.dtype)


class StackedLayerNorm(nn.LayerNorm):
    """LayerNorm with gain and bias [S, width]."""

    def forward(self, input: Tensor) -> Tensor:
        y = F.layer_norm(input.to(self.weight.dtype), self.normalized_shape, None, None, self.eps)
        y = y * spread_members(self.weight, len(self.weight), len(input), 1)
        return y if self.bias is None else y + spread_members(self.bias, len(self.weight), len(input), 1)


class MappedModule(nn.Module):
    """Couplings and norms of other packages, which know nothing of members: torch's vmap over their parameters."""

    plain: list[nn.Module]  # one member's module, for its code; in a list, so that it is no part of this one

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        parameters: dict[str, Tensor] = dict(self.named_parameters())
        members = len(next(iter(parameters.values())))

        def call(own: dict[str, Tensor], *given: Tensor) -> tuple[Tensor, Tensor]:
            return functional_call(self.plain[0], own, given)

        rows = (x.unflatten(0, (members, -1)) for x in (q, k))
        q, k = torch.vmap(call)(parameters, *rows)
        return q.flatten(0, 1), k.flatten(0, 1)


class MappedLookback(MappedModule):
    """Couplings of other packages that look back: all given is mapped along, and there is no cache."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor | None, past: Past) -> tuple[Tensor, Tensor, Tensor | None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        parameters: dict[str, Tensor] = dict(self.named_parameters())
        members = len(next(iter(parameters.values())))
        places = past.positions.expand(len(q), -1)

        def call(own: dict[str, Tensor], places: Tensor, q: Tensor, k: Tensor, v: Tensor | None) -> list[Tensor]:
            given = functional_call(self.plain[0], own, (q, k, v, Past(places)))
            return [each for each in given if each is not None]

        rows: list[Any] = [x if x is None else x.unflatten(0, (members, -1)) for x in (places, q, k, v)]
        called = torch.vmap(call, (0, 0, 0, 0, None if v is None else 0))(parameters, *rows)
        new = [x.flatten(0, 1) for x in called]
        return new[0], new[1], None if v is None else new[2]


class StackedAttention(Attention):
    """x [S, B, T, width] → [S, B, T, width], each member on its own rows."""

    def forward(self, x: Tensor, *, segments: Tensor | None = None, **other: Any) -> Tensor:
        refuse_others(other)
        check_members(x, 4, "x", "[members, batch, tokens, width]", count_members(self))
        y = super().forward(x.flatten(0, 1), segments=None if segments is None else segments.flatten(0, 1))
        return y.unflatten(0, x.shape[:2])


class StackedDecoder(Decoder):
    """ids [S, B, T] → logits [S, B, T, vocab], each member on its own rows."""

    def forward(self, ids: Tensor, *, segments: Tensor | None = None, **other: Any) -> Tensor:
        features = self.features(ids, segments=segments, **other)
        return self.head(features.flatten(0, 1)).unflatten(0, ids.shape[:2])

    def features(self, ids: Tensor, *, segments: Tensor | None = None, **other: Any) -> Tensor:
        """ids [S, B, T] → what the output matrices see [S, B, T, width]."""
        refuse_others(other)
        check_members(ids, 3, "ids", "[members, batch, tokens]", count_members(self))
        x = super().features(ids.flatten(0, 1), segments=None if segments is None else segments.flatten(0, 1))
        return x.unflatten(0, ids.shape[:2])

    def new_cache(self, *given: Any, **options: Any) -> NoReturn:
        raise StackError("a stacked model has no cache; take a member with unstack and generate with it.")

    def generate(self, *given: Any, **options: Any) -> NoReturn:
        self.new_cache()

    def fold(self) -> NoReturn:
        raise StackError("a stacked model does not fold; take its members with unstack and fold those.")


LEAVES: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: StackedLinear,
    nn.Embedding: StackedEmbedding,
    RMSNorm: StackedRMSNorm,
    nn.LayerNorm: StackedLayerNorm,
}
MODELS: dict[type[nn.Module], type[nn.Module]] = {Decoder: StackedDecoder, Attention: StackedAttention}
PLAIN = {stacked: plain for plain, stacked in (LEAVES | MODELS).items()}


def stack(models: Sequence[Model]) -> Model:
    """One model of all `models`, which must be Decoders (or Attentions) of one spec: it takes ids [S, B, T] (or
    x [S, B, T, width]) and gives for member s what models[s] gives for ids[s].

    Its parameters are copies, [S, …] each, under the names they have in every member.
    """
    models = list(models)
    check_models(models)
    stacked = deepcopy(models[0])
    owners = [dict(model.named_parameters(remove_duplicate=False)) for model in models]
    tied: dict[int, nn.Parameter] = {}
    for name, parameter in list(stacked.named_parameters(remove_duplicate=False)):
        if id(parameter) not in tied:
            together = torch.stack([owner[name].detach() for owner in owners])
            tied[id(parameter)] = nn.Parameter(together, parameter.requires_grad)
        replace_parameter(stacked, name, tied[id(parameter)])
    stack_modules(stacked, dict(models[0].named_modules()), len(models))
    stacked.__class__ = MODELS[type(stacked)]  # pyright: ignore[reportAttributeAccessIssue]
    return stacked


def stack_modules(stacked: nn.Module, plain: dict[str, nn.Module], members: int) -> None:
    """Give every module that holds parameters the form that knows members."""
    mapped = [name for name, module in plain.items() if is_mapped(module)]
    for name, module in stacked.named_modules():
        if name in mapped:
            form = MappedLookback if isinstance(module, LookbackCoupling) else MappedModule
            module.__class__ = type(module.__class__.__name__, (form, module.__class__), {})
            module.__dict__["plain"] = [deepcopy(plain[name])]
        elif any(name.startswith(f"{outer}.") for outer in mapped):
            continue
        elif type(module) in LEAVES:
            module.__class__ = LEAVES[type(module)]
        elif hasattr(module, "members"):
            module.__dict__["members"] = members


def is_mapped(module: nn.Module) -> bool:
    """Whether a module takes q and k and nothing else, holds parameters, and does not know members."""
    if not any(True for _ in module.parameters()):
        return False
    if isinstance(module, Coupling):
        return not (module.fuses or module.takes_members)
    return isinstance(module, Normalisation) and not hasattr(module, "members")


def unstack(stacked: Model) -> list[Model]:
    """The members of a stacked model, each a model of its own again."""
    return [deepcopy(view_member(stacked, member)) for member in range(count_members(stacked))]


def view_member(stacked: Model, member: int) -> Model:
    """One member as a model of its own whose parameters lie in the stacked ones: they change together."""
    memo: dict[int, Any] = {id(parameter): parameter for parameter in stacked.parameters()}
    plain = deepcopy(stacked, memo)  # all but the parameters
    tied: dict[int, nn.Parameter] = {}
    for name, parameter in list(plain.named_parameters(remove_duplicate=False)):
        if id(parameter) not in tied:
            tied[id(parameter)] = nn.Parameter(parameter.detach()[member], parameter.requires_grad)
        replace_parameter(plain, name, tied[id(parameter)])
    for module in list(plain.modules()):
        if isinstance(module, MappedModule):
            module.__class__ = module.__class__.__bases__[1]
            del module.__dict__["plain"]
        elif type(module) in PLAIN:
            module.__class__ = PLAIN[type(module)]
        if hasattr(module, "members"):
            module.__dict__["members"] = None
        if isinstance(module, Dropout):
            module.key = None  # it was that of all members
    return plain


def count_members(stacked: nn.Module) -> int:
    """S of a stacked model."""
    if type(stacked) not in PLAIN:
        raise StackError(f"a stacked model is expected, as `stack` makes it, but a {type(stacked).__name__} came.")
    return len(next(stacked.parameters()))


def check_models(models: Sequence[nn.Module]) -> None:
    if not models:
        raise StackError("a stacked model needs at least one member, but none came.")
    first: Any = models[0]
    model: Any
    for model in models:
        if type(model) not in MODELS:
            known = " or ".join(kind.__name__ for kind in MODELS)
            raise StackError(f"models to be stacked must each be a {known}, but a {type(model).__name__} came.")
        if model.spec != first.spec or getattr(model, "layer", None) != getattr(first, "layer", None):
            raise StackError(
                f"models to be stacked must have one spec and layer, but {first.spec.name} and {model.spec.name} came "
                "and differ; stack those that agree."
            )
        if any(True for _ in model.buffers()):
            raise StackError(f"a model with buffers cannot be stacked, and {model.spec.name} has some.")
    if reasons := list_unstackable(first):
        raise StackError(f"{first.spec.name} cannot be stacked: {'; '.join(reasons)}.")


def list_unstackable(model: nn.Module) -> list[str]:
    """What keeps a model from being stacked: torch's own dropout, and modules of which no stacked form is known."""
    reasons = []
    mapped = [name for name, module in model.named_modules() if is_mapped(module)]
    for name, module in model.named_modules():
        if any(name == outer or name.startswith(f"{outer}.") for outer in mapped):
            continue
        if isinstance(module, nn.Dropout) and module.p:
            reasons.append("members with torch's dropout would draw other masks than alone")
        if not list(module.parameters(recurse=False)) or type(module) in LEAVES:
            continue
        if not hasattr(module, "members"):
            reasons.append(f"{type(module).__name__} does not say how its parameters take members")
    return sorted(set(reasons))


def replace_parameter(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    owner, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(owner), attribute, parameter)


def refuse_others(given: dict[str, Any]) -> None:
    for name, value in given.items():
        if value is not None:
            raise StackError(f"a stacked model takes no {name}; take a member with unstack.")


def check_members(tensor: Tensor, dim: int, name: str, shape: str, members: int) -> None:
    if not isinstance(tensor, Tensor) or tensor.dim() != dim or len(tensor) != members:
        came = list(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
        raise StackError(f"{name} must have shape {shape} with {members} members, but {came} came.")
