"""What logit control refuses, each in one clear sentence."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from control import KINDS, decoder, draw_gradients
from torch import Tensor, nn

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


def test_a_model_without_attention() -> None:
    message = refusal(lambda: attention_roles(nn.Sequential(nn.Linear(3, 3), nn.ReLU())))
    assert "no attention was recognised in Sequential" in message
    assert "pass a mapping from a layer's name to its query, key and heads" in message


@pytest.mark.parametrize("wrap", [LogitControl, QKClip])
@pytest.mark.parametrize("roles", [{}, None, [1, 2], "layer"])
def test_roles_that_are_no_mapping(wrap: Any, roles: Any) -> None:
    message = refusal(lambda: wrap(sgd(nn.Linear(3, 3)), roles))
    assert "roles must be a mapping from layer names to their query and key" in message
    assert repr(roles) in message


@pytest.mark.parametrize(
    ("layer", "words"),
    [
        ({"heads": 2}, "'key'"),
        ({"key": nn.Linear(4, 4), "heads": 2, "keys": 3}, "'keys'"),
        (5, "must be a mapping"),
        ({"key": 7, "heads": 2}, "a linear layer or a matrix is needed to find rows in, but 7 came"),
    ],
)
def test_a_layers_roles_that_cannot_be_read_name_the_layer(layer: Any, words: str) -> None:
    with pytest.raises(ValueError, match="the roles of layer first cannot be read: ") as caught:
        LogitControl(sgd(nn.Linear(3, 3)), {"first": layer})
    assert words in str(caught.value)


@pytest.mark.parametrize("wrap", [LogitControl, QKClip])
def test_overlapping_roles(wrap: Any) -> None:
    fused = nn.Linear(5, 12)
    q, k = Rows.of(fused, 2, among=(0, 8)), Rows.of(fused, 2, among=(6, 10))
    message = refusal(lambda: wrap(sgd(fused), {"first": layer_roles(query=q, key=k, heads=2)}))
    assert "row 6 of one weight is claimed as W_q of first and as W_k of first; give each row one role" in message


def test_layers_that_share_a_weight_overlap() -> None:
    query, key = nn.Linear(4, 4), nn.Linear(4, 4)
    layer = {"query": query, "key": key, "heads": 2}
    other = {"query": nn.Linear(4, 4), "key": key, "heads": 2}
    message = refusal(lambda: LogitControl(sgd(key), {"first": layer, "second": other}))
    assert "row 0 of one weight is claimed as W_k of first and as W_k of second" in message


def test_one_weight_read_along_both_axes() -> None:
    weight = nn.Parameter(torch.randn(4, 4))
    q, k = Rows(weight, torch.tensor([[0, 1]])), Rows(weight, torch.tensor([[2, 3]]), axis=1)
    message = refusal(lambda: LogitControl(torch.optim.SGD([weight]), {"first": layer_roles(query=q, key=k, heads=1)}))
    assert "one weight was given two roles that read it differently" in message


@pytest.mark.parametrize("rows", [[[0, 6]], [[-1, 0]], [[1, 1]]])
def test_rows_that_the_matrix_has_not_or_twice(rows: list[list[int]]) -> None:
    message = refusal(lambda: Rows(torch.randn(6, 3), torch.tensor(rows)))
    assert "rows must be different ones of the 6 the matrix has" in message
    assert "must be different ones of the 3 the matrix has" in refusal(
        lambda: Rows(torch.randn(6, 3), torch.tensor([[3]]), axis=1)
    )


@pytest.mark.parametrize("rows", [torch.arange(4), torch.zeros(2, 2), torch.zeros(0, 2, dtype=torch.long)])
def test_rows_of_another_shape_or_type(rows: Tensor) -> None:
    message = refusal(lambda: Rows(torch.randn(6, 3), rows))
    assert f"rows must be whole numbers [heads, width], but {rows.dtype} {list(rows.shape)} came" in message


@pytest.mark.parametrize("heads", [4, 0, -1, 2.0, "2", None])
def test_heads_that_do_not_divide_the_rows(heads: Any) -> None:
    message = refusal(lambda: Rows.of(nn.Linear(3, 6), heads))
    assert f"heads must divide the 6 rows of the matrix, but {heads!r} came" in message


@pytest.mark.parametrize("layer", [nn.ReLU(), nn.Conv2d(1, 1, 1), torch.randn(3), 3])
def test_rows_of_what_is_no_matrix(layer: Any) -> None:
    assert "a linear layer or a matrix is needed" in refusal(lambda: Rows.of(layer, 1))


def test_key_heads_that_do_not_divide_the_query_heads() -> None:
    message = refusal(lambda: layer_roles(query=nn.Linear(3, 6), key=nn.Linear(3, 4), heads=3, kv_heads=2))
    assert "the key heads must divide the 3 query heads, but there are 2" in message


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


@pytest.mark.parametrize("choices", [{"tau": 0.0}, {"tau": -1.0}, {"tau": True}, {"tau": "1"}, {"threshold": math.nan}])
def test_numbers_of_the_spec_that_are_not_above_zero(choices: dict[str, Any]) -> None:
    assert "must be a finite number above 0" in refusal(lambda: LogitControlSpec(**choices))


def test_a_misspelt_method_of_the_spec_comes_with_a_suggestion() -> None:
    assert "(did you mean 'qk-clip'?)" in refusal(lambda: LogitControlSpec(method="qkclip"))  # pyright: ignore[reportArgumentType]


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


def test_a_gain_or_bias_of_another_length() -> None:
    weight, rows = torch.ones(4, 3), torch.arange(4)[None]
    assert "each of the matrix's 3 inputs, but [4] came" in refusal(lambda: Rows(weight, rows, gain=torch.ones(4)))
    assert "each of the matrix's 4 outputs, but [3] came" in refusal(lambda: Rows(weight, rows, bias=torch.ones(3)))
    assert "each of the matrix's 4 inputs" in refusal(lambda: Rows(weight, rows[:, :3], axis=1, gain=torch.ones(3)))


def test_a_misspelt_coupling_and_heads_that_contradict_each_other() -> None:
    key: Any = {"key": nn.Linear(4, 4), "heads": 2}
    assert "did you mean 'linear'" in refusal(lambda: layer_roles(**key, coupling="lineer"))  # type: ignore[arg-type]
    assert "heads must divide" in refusal(lambda: layer_roles(**key, kv_heads=0))
    fused = Rows.of(key["key"], 4)
    assert "rows of 4 heads came where 2 are named" in refusal(lambda: layer_roles(key=fused, heads=2))


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
