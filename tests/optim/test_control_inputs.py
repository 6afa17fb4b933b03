"""What logit control refuses, each in one clear sentence."""

import copy
import math
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from control import KINDS, decoder, draw_gradients
from torch import nn

from qklab import Attention, AttentionSpec, CouplingSpec, LatentSpec
from qklab.optim import (
    LayerRoles,
    LogitControl,
    LogitControlSpec,
    QKClip,
    Rows,
    attention_roles,
    layer_roles,
)
from qklab.schema import SpecError
from qklab.train.spec import why_uncontrollable


def refusal(action: Callable[[], Any]) -> str:
    """The message of the ValueError that `action` raises: one sentence, on one line."""
    with pytest.raises(ValueError) as caught:
        action()
    message = str(caught.value)
    assert "\n" not in message
    assert message.endswith(".")
    assert len(message) < 400
    return message


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def control(**choices: Any) -> LogitControl:
    model = decoder(layers=1)
    return LogitControl(sgd(model), attention_roles(model), **choices)


# roles

FUSED, KEY = nn.Linear(5, 12), nn.Linear(4, 4)
WEIGHT, ROWS = torch.ones(4, 3), torch.arange(4)[None]
SQUARE = nn.Parameter(torch.ones(4, 4))
OVERLAPPING = layer_roles(query=Rows.of(FUSED, 2, among=(0, 8)), key=Rows.of(FUSED, 2, among=(6, 10)), heads=2)
BOTH_AXES = layer_roles(query=Rows(SQUARE, ROWS[:, :2]), key=Rows(SQUARE, ROWS[:, 2:], axis=1), heads=1)
TWICE = {name: {"query": nn.Linear(4, 4), "key": KEY, "heads": 2} for name in ("first", "second")}
DIFFERENT = "rows must be different ones of the 6 the matrix has"
UNREAD = "the roles of layer first cannot be read: "


def wrap(roles: Any) -> Callable[[], Any]:
    weights = [*KEY.parameters(), *FUSED.parameters(), SQUARE]
    return lambda: LogitControl(torch.optim.SGD(weights, lr=0.1), roles)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "no attention": (
        lambda: attention_roles(nn.Sequential(nn.Linear(3, 3), nn.ReLU())),
        "no attention was recognised in Sequential: known are qklab's own layers",
    ),
    "no layers": (wrap({}), "roles must be a mapping from layer names to their query and key, but {} came"),
    "no mapping": (wrap([1, 2]), "roles must be a mapping from layer names to their query and key, but [1, 2] came"),
    "no key": (wrap({"first": {"heads": 2}}), UNREAD + "'key' is missing"),
    "a misspelt key": (wrap({"first": {"key": KEY, "heads": 2, "keys": 3}}), UNREAD + "there is no 'keys'"),
    "a layer that is no mapping": (wrap({"first": 5}), UNREAD + "they must be a mapping"),
    "a key that is no matrix": (wrap({"first": {"key": 7, "heads": 2}}), "a linear layer or a matrix is needed"),
    "overlap in a layer": (
        wrap({"first": OVERLAPPING}),
        "row 6 of one weight is claimed as W_q of first and as W_k of first; give each row one role",
    ),
    "overlap of layers": (wrap(TWICE), "row 0 of one weight is claimed as W_k of first and as W_k of second"),
    "both axes": (wrap({"first": BOTH_AXES}), "one weight was given two roles that read it differently"),
    "a row too many": (lambda: Rows(torch.randn(6, 3), torch.tensor([[0, 6]])), DIFFERENT),
    "a row below zero": (lambda: Rows(torch.randn(6, 3), torch.tensor([[-1, 0]])), DIFFERENT),
    "a row twice": (lambda: Rows(torch.randn(6, 3), torch.tensor([[1, 1]])), DIFFERENT),
    "a column too many": (lambda: Rows(torch.randn(3, 6), torch.tensor([[0, 6]]), axis=1), DIFFERENT),
    "rows of one axis": (lambda: Rows(WEIGHT, torch.arange(4)), "[heads, width], but torch.int64 [4] came"),
    "rows that are no numbers": (lambda: Rows(WEIGHT, torch.zeros(2, 2)), "but torch.float32 [2, 2] came"),
    "no rows": (lambda: Rows(WEIGHT, ROWS[:0]), "rows must be whole numbers [heads, width]"),
    "a ReLU": (lambda: Rows.of(nn.ReLU(), 1), "a linear layer or a matrix is needed"),
    "a vector": (lambda: Rows.of(torch.randn(3), 1), "a linear layer or a matrix is needed"),
    "key heads": (
        lambda: layer_roles(query=nn.Linear(3, 6), key=nn.Linear(3, 4), heads=3, kv_heads=2),
        "the key heads must divide the 3 query heads, but there are 2",
    ),
    "no key heads": (lambda: layer_roles(key=KEY, heads=2, kv_heads=0), "heads must divide"),
    "other heads": (lambda: layer_roles(key=Rows.of(KEY, 4), heads=2), "rows of 4 heads came where 2 are named"),
    "a coupling": (lambda: layer_roles(key=KEY, heads=2, coupling=cast(Any, "lineer")), "did you mean 'linear'"),
    "a gain": (lambda: Rows(WEIGHT, ROWS, gain=torch.ones(4)), "each of the matrix's 3 inputs, but [4] came"),
    "a bias": (lambda: Rows(WEIGHT, ROWS, bias=torch.ones(3)), "each of the matrix's 4 outputs, but [3] came"),
    "a gain, inputs first": (lambda: Rows(WEIGHT, ROWS[:, :3], axis=1, gain=torch.ones(3)), "the matrix's 4 inputs"),
} | {
    f"heads={heads!r}": (
        lambda heads=heads: Rows.of(nn.Linear(3, 6), heads),
        f"heads must divide the 6 rows of the matrix, but {heads!r} came",
    )
    for heads in cast(list[Any], [4, 0, -1, 2.0, "2", None])
}


@pytest.mark.parametrize("name", REFUSED)
def test_roles_that_cannot_be_are_refused(name: str) -> None:
    action, words = REFUSED[name]
    assert words in refusal(action)


# weights


@pytest.mark.parametrize(("value", "layer"), [(0.0, 0), (math.nan, 1), (math.inf, 1)])
@pytest.mark.parametrize("kind", ["GQA", "MLA", "q=k"])
def test_a_matrix_that_is_zero_or_not_finite_is_named(value: float, layer: int, kind: str) -> None:
    model = decoder(**KINDS[kind])
    roles = attention_roles(model)
    symbol, words = {"GQA": ("k", "W_k"), "MLA": ("uk", "W_uk"), "q=k": ("qk", "the matrix of q and k")}[kind]
    part = roles[f"blocks.{layer}.attention"].projections[symbol]
    with torch.no_grad():
        for tensor in part.tensors:
            tensor[part.rows[1]] = value
    message = refusal(lambda: LogitControl(sgd(model), roles))
    assert f"{words} of blocks.{layer}.attention, head 1, is zero or not finite" in message
    assert "initialise it first, or use method='fixed'" in message
    LogitControl(sgd(model), roles, method="fixed")
    LogitControl(sgd(model), roles, method="none")


def test_weights_that_are_not_in_the_optimiser() -> None:
    model, other = decoder(layers=1), decoder(layers=1)
    for wrap in (LogitControl, QKClip):
        message = refusal(lambda wrap=wrap: wrap(sgd(other), attention_roles(model)))
        assert "none of the attention weights is in the optimiser" in message
        assert "masters={weight: master}" in message


def test_weights_without_values() -> None:
    with torch.device("meta"):
        model = nn.Linear(4, 4)
    message = refusal(lambda: LogitControl(sgd(model), {"first": {"key": model, "heads": 2}}))
    assert "have no values yet (device meta)" in message


# settings


@pytest.mark.parametrize("tau", [0, 0.0, -1, math.nan, math.inf, "1", True, None])
def test_a_tau_that_is_no_finite_number_above_zero(tau: Any) -> None:
    assert refusal(lambda: control(tau=tau)) == f"tau must be a finite number above 0, but {tau!r} came."


@pytest.mark.parametrize("threshold", [0, -1, math.nan, "100", True])
def test_a_threshold_that_is_no_finite_number_above_zero(threshold: Any) -> None:
    model = decoder(layers=1)
    message = refusal(lambda: QKClip(sgd(model), attention_roles(model), threshold))
    assert message == f"threshold must be a finite number above 0, but {threshold!r} came."


def test_an_unknown_norm_or_method_comes_with_a_suggestion() -> None:
    assert refusal(lambda: control(norm="spektral")) == (
        "norm must be one of 'frobenius', 'spectral' (did you mean 'spectral'?), but 'spektral' came."
    )
    assert refusal(lambda: control(method="quak")) == (
        "method must be one of 'quack', 'fixed', 'none' (did you mean 'quack'?), but 'quak' came."
    )
    assert "but None came" in refusal(lambda: control(norm=None))


@pytest.mark.parametrize("base", [None, [], 3, [nn.Linear(2, 2)], "AdamW"])
@pytest.mark.parametrize("wrap", [LogitControl, QKClip])
def test_something_that_is_no_optimiser(base: Any, wrap: Any) -> None:
    model = decoder(layers=1)
    message = refusal(lambda: wrap(base, attention_roles(model)))
    assert f"{wrap.__name__} wraps a torch optimiser or several" in message


def test_a_group_added_to_several_optimisers() -> None:
    model = decoder(layers=1)
    parameters = [*model.parameters()]
    both = LogitControl(
        [torch.optim.SGD(parameters[:3], lr=0.1), torch.optim.SGD(parameters[3:], lr=0.1)], attention_roles(model)
    )
    extra = {"params": [nn.Parameter(torch.ones(2))]}
    assert "must be added to one of the wrapped optimisers" in refusal(lambda: both.add_param_group(extra))


# kinds of attention


def test_normalised_queries_and_keys() -> None:
    model = decoder(layers=1, norm="qk")
    roles = attention_roles(model)
    for wrap in (LogitControl, QKClip):
        message = refusal(lambda wrap=wrap: wrap(sgd(model), roles))
        assert f"{wrap.__name__} refuses layer blocks.0.attention: its q and k are normalised, so the norm" in message
    for method in ("fixed", "none"):
        LogitControl(sgd(model), roles, method=method)


@pytest.mark.parametrize("kind", ["leapfrog", "leapfrog, k=v"])
def test_qk_clip_with_a_coupling_that_is_not_linear(kind: str) -> None:
    model = decoder(layers=1, **KINDS[kind])
    message = refusal(lambda: QKClip(sgd(model), attention_roles(model)))
    assert "QKClip refuses layer blocks.0.attention: its coupling is not linear" in message
    LogitControl(sgd(model), attention_roles(model))


def test_qk_clip_with_a_linear_coupling_of_keys_that_are_values() -> None:
    model = decoder(layers=1, share="k=v", coupling=KINDS["linear coupling"]["coupling"])
    assert "and with it the values, which are the keys" in refusal(lambda: QKClip(sgd(model), attention_roles(model)))


@pytest.mark.parametrize(("layer", "shape"), [("second", (2,)), ("first", (3,)), ("first", (2, 1)), ("first", ())])
def test_observed_logits_of_another_layer_or_shape(layer: str, shape: tuple[int, ...]) -> None:
    key = nn.Linear(4, 4)
    clip = QKClip(sgd(key), {"first": {"key": key, "heads": 2}})
    message = refusal(lambda: clip.observe(layer, torch.ones(shape)))
    assert "one per head" in message
    assert f"{list(shape)} came for {layer!r}" in message


# weight decay


class Lion(torch.optim.Optimizer):
    """An optimiser of somebody else's, with decay on the weight itself."""

    def __init__(self, parameters: Any, lr: float, weight_decay: float):
        super().__init__(parameters, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.mul_(1 - group["lr"] * group["weight_decay"]).add_(p.grad.sign(), alpha=-group["lr"])


def test_decay_of_a_kind_that_cannot_be_known() -> None:
    model = decoder(layers=1)
    roles = attention_roles(model)
    message = refusal(lambda: LogitControl(Lion(model.parameters(), 0.1, 0.2), roles))
    assert message == (
        "Lion has weight_decay=0.2, and LogitControl, which does not scale decay, cannot tell whether that acts on the "
        "weight or on the gradient; say decoupled_decay=True or False."
    )
    LogitControl(Lion(model.parameters(), 0.1, 0.0), roles)
    frozen = next(model.parameters())  # decay of weights that are not controlled is nobody's business
    LogitControl([Lion([frozen], 0.1, 0.2), torch.optim.SGD([*model.parameters()][1:], lr=0.1)], roles)


@pytest.mark.parametrize("decoupled", [True, False])
def test_decay_is_what_one_says_it_is(decoupled: bool) -> None:
    model = decoder(layers=1)
    name = "blocks.0.attention.project.query.weight"
    wrapped = LogitControl(
        Lion(model.parameters(), 0.1, 0.2), attention_roles(model), tau=0.5, decoupled_decay=decoupled
    )
    before = model.get_parameter(name).detach().clone()
    draw_gradients(model, seed=0)
    wrapped.step()
    weight = model.get_parameter(name)
    assert weight.grad is not None
    decay = 0.1 * 0.2 * before
    scaled = 0.5 * 0.1 * weight.grad.sign() + (decay if decoupled else 0.5 * decay)
    torch.testing.assert_close(weight.detach(), before - scaled, rtol=1e-14, atol=1e-14)


# states


def test_the_state_of_another_model_is_named_by_where_it_differs() -> None:
    small = control()
    for other in (decoder(layers=1, kv_heads=2), decoder(layers=2), decoder(layers=1, **KINDS["MLA"])):
        state = LogitControl(sgd(other), attention_roles(other)).state_dict()
        message = refusal(lambda state=state: small.load_state_dict(state))
        assert "the state is of another model: they differ in " in message
        assert ".attention." in message


def test_the_state_of_another_method_norm_or_optimiser() -> None:
    ours = control()
    assert "the state is of norm='spectral', but here norm='frobenius'" in refusal(
        lambda: ours.load_state_dict(control(norm="spectral").state_dict())
    )
    assert "the state is of method='fixed', but here method='quack'" in refusal(
        lambda: ours.load_state_dict(control(method="fixed").state_dict())
    )
    assert "the state has no 'logit_control', so it is not that of a LogitControl" in refusal(
        lambda: ours.load_state_dict(ours.bases[0].state_dict())
    )
    assert ours.factors().keys() == {"blocks.0.attention"}


# the spec


def test_a_tau_alone_means_quack_and_nothing_means_none() -> None:
    assert LogitControlSpec().method == "none"
    assert LogitControlSpec(tau=0.5).method == "quack"
    assert LogitControlSpec(method="fixed").tau == 1.0
    assert LogitControlSpec(method="qk-clip").threshold == 100.0
    assert LogitControlSpec(method="qk-clip").tau is None
    spec = LogitControlSpec(tau=0.5, norm="spectral")
    assert LogitControlSpec.from_dict(spec.to_dict()) == spec


@pytest.mark.parametrize(
    ("choices", "field", "words", "nearest"),
    [
        ({"method": "none", "tau": 0.5}, "tau", "method='none' has no τ", {"method": "quack"}),
        ({"method": "qk-clip", "tau": 0.5}, "tau", "method='qk-clip' has no τ", {"method": "quack", "threshold": None}),
        ({"method": "quack", "threshold": 5.0}, "threshold", "only qk-clip has", {"threshold": None}),
        ({"threshold": 5.0}, "threshold", "only qk-clip has", {"threshold": None}),
        ({"method": "fixed", "norm": "spectral"}, "norm", "only quack does", {"norm": "frobenius"}),
        ({"method": "qk-clip", "norm": "spectral"}, "norm", "only quack does", {"norm": "frobenius"}),
    ],
)
def test_settings_that_do_not_go_together(
    choices: dict[str, Any], field: str, words: str, nearest: dict[str, Any]
) -> None:
    with pytest.raises(SpecError) as caught:
        LogitControlSpec(**choices)
    assert words in str(caught.value)
    assert caught.value.field == field
    assert caught.value.nearest is not None
    assert nearest.items() <= caught.value.nearest.items()
    LogitControlSpec(**choices | caught.value.nearest)


def test_a_spec_wraps_as_it_says() -> None:
    model = decoder(layers=1)
    assert LogitControlSpec().wrap(sgd(model), model) is None
    wrapped = LogitControlSpec(tau=0.5, norm="spectral").wrap(sgd(model), model)
    assert isinstance(wrapped, LogitControl)
    assert (wrapped.tau, wrapped.norm, wrapped.method) == (0.5, "spectral", "quack")
    fixed = LogitControlSpec(method="fixed", tau=0.2).wrap([sgd(model)], model)
    assert isinstance(fixed, LogitControl)
    assert (fixed.tau, fixed.method) == (0.2, "fixed")
    clip = LogitControlSpec(method="qk-clip", threshold=7.0).wrap(sgd(model), model)
    assert isinstance(clip, QKClip)
    assert clip.threshold == 7.0
    assert all(isinstance(layer, LayerRoles) for layer in clip.roles.values())


# what would go wrong without a word


def test_a_weight_that_roles_name_cannot_be_added_later() -> None:
    model = decoder(layers=1)
    late = next(p for name, p in model.named_parameters() if name.endswith("query.weight"))
    wrapped = LogitControl(
        torch.optim.SGD([p for p in model.parameters() if p is not late], lr=0.1), attention_roles(model)
    )
    for given in (late, [late]):
        assert "before it is wrapped" in refusal(lambda given=given: wrapped.add_param_group({"params": given}))
    wrapped.add_param_group({"params": (nn.Parameter(torch.ones(n)) for n in (1, 2))})
    assert [len(p) for p in wrapped.param_groups[1]["params"]] == [1, 2]


def test_qk_clip_with_a_bias_of_the_logits() -> None:
    model = decoder(layers=1, share="q=k", asymmetry_2d=True, causal=False, position="none")
    assert "a bias of their own" in refusal(lambda: QKClip(sgd(model), attention_roles(model)))


def test_a_control_cannot_be_copied_but_its_state_can() -> None:
    with pytest.raises(TypeError, match=r"a LogitControl cannot be copied or pickled; .*\.$"):
        copy.deepcopy(control())


def test_a_state_with_other_parameter_groups() -> None:
    model = decoder(layers=1)
    wrapped = LogitControl(sgd(model), attention_roles(model))
    state = wrapped.state_dict()
    state["param_groups"].append(state["param_groups"][0])
    assert "the state has 2 parameter groups, but the wrapped optimisers have 1" in refusal(
        lambda: wrapped.load_state_dict(state)
    )


def test_qk_clip_leaves_weights_that_no_optimiser_has() -> None:
    model = decoder(layers=1)
    roles = attention_roles(model)
    frozen, free = (roles["blocks.0.attention"].projections[symbol].weight for symbol in "kq")
    clip = QKClip(torch.optim.SGD([free], lr=0.1), roles, threshold=1e-6)
    before = frozen.detach().clone(), free.detach().clone()
    clip.observe("blocks.0.attention", torch.full((roles["blocks.0.attention"].query.heads,), 1.0))
    clip.step()
    assert torch.equal(frozen, before[0])
    assert torch.allclose(free, before[1] * 1e-3)


def test_a_coupling_that_sets_lengths_is_refused_and_coupled_latents_are_not() -> None:
    """CCA ends in a norm; of MLA's latents the coupling comes before the matrices that are controlled."""
    size: dict[str, Any] = {"width": 8, "heads": 2}
    latent = {"latent": LatentSpec(query_rank=4, kv_rank=4, rope_width=2), "coupling": CouplingSpec(kind="affine")}
    refused, controlled = AttentionSpec(**size, coupling=CouplingSpec(kind="cca")), AttentionSpec(**size, **latent)
    for method in ("quack", "qk-clip"):
        assert "already decides how large logits are" in str(why_uncontrollable(refused, method))
        assert why_uncontrollable(controlled, method) is None
    assert attention_roles(Attention(refused))["attention"].qk_norm
    assert attention_roles(Attention(controlled))["attention"].coupling == "none"
