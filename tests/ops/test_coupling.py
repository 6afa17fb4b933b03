"""The coupling operation where every machine runs it: dispatch, refusals, precision, compilation."""

from typing import Any

import pytest
import torch
from torch import Tensor

from qklab import Attention, AttentionSpec, CouplingSpec
from qklab.ops.coupling import Network, Norm, api, couple
from qklab.testing.numerics import close, within_budget

B, T, H, G, D, h = 2, 5, 4, 2, 6, 7


def network(outputs: int = D, dtype: torch.dtype = torch.float64) -> Network:
    torch.manual_seed(1)
    shapes = ((h, D), (h,), (outputs, h), (outputs,))
    return Network(*(torch.randn(shape, dtype=dtype).requires_grad_() for shape in shapes))


def example(dtype: torch.dtype = torch.float64, **changes: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    angle = torch.randn(1, T, 1, D // 2, dtype=torch.promote_types(dtype, torch.float32))
    given: dict[str, Any] = {
        "q": torch.randn(B, T, H, D, dtype=dtype).requires_grad_(),
        "k": torch.randn(B, T, G, D, dtype=dtype).requires_grad_(),
        "kind": "leapfrog",
        "networks": (network(dtype=dtype),),
        "step": torch.tensor(0.3, dtype=dtype, requires_grad=True),
        "norm": Norm(1e-6, torch.ones(D, dtype=dtype), None),
        "angles": (angle.cos(), angle.sin()),
    }
    return given | changes


def test_gradcheck() -> None:
    given = example()
    tensors = [given["q"], given["k"], given["step"], *given["networks"][0][:4]]

    def outputs(q: Tensor, k: Tensor, step: Tensor, *weights: Tensor) -> tuple[Tensor, Tensor]:
        return couple(**(given | {"q": q, "k": k, "step": step, "networks": (Network(*weights),)}))

    assert torch.autograd.gradcheck(outputs, tensors, fast_mode=True)


@pytest.mark.parametrize("kind", ["euler", "leapfrog", "affine", "linear", "uncoupled"])
@pytest.mark.parametrize("position", ["rope", "none"])
def test_one_pass_is_the_three_stages(kind: Any, position: Any) -> None:
    """The layer's fused stages equal coupling, norm and rotation one after the other."""
    spec = AttentionSpec(
        width=24, heads=4, kv_heads=2, coupling=CouplingSpec(kind=kind, steps=2), norm="qk", position=position
    )
    attention = Attention(spec).double()
    x = torch.randn(2, 5, 24, dtype=torch.float64)
    positions, _ = attention.locate(x)
    fused = attention.prepare(x, positions)
    attention.recorder = lambda *given: None  # who listens to the stages has them run one by one
    for actual, expected in zip(fused[:2], attention.prepare(x, positions)[:2], strict=True):
        close(actual, expected)


@pytest.mark.parametrize("autocast", [False, True])
def test_states_are_wider_than_the_networks(monkeypatch: pytest.MonkeyPatch, autocast: bool) -> None:
    """Seven steps in bf16 err hardly more than one rounding of the states at the end."""
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    given = example(torch.bfloat16, steps=7, norm=None)
    wide = example(torch.float64, steps=7, norm=None)
    for name in ("q", "k", "step"):
        wide[name] = given[name].double()
    wide["networks"] = (Network(*(w.double() for w in given["networks"][0][:4])),)
    wide["angles"] = tuple(angle.double() for angle in given["angles"])
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        outputs = couple(**given)
    for actual, exact in zip(outputs, couple(**wide), strict=True):
        assert actual.dtype == torch.bfloat16
        within_budget(actual, exact * (1 + 2**-8), exact)


@pytest.mark.parametrize("members", [None, 3])
def test_compiles_as_one_graph(members: int | None) -> None:
    given = example() if members is None else draw_members("leapfrog", False, members)
    torch._dynamo.reset()

    def stage(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        changed: dict[str, Any] = given | {"q": q, "k": k}
        return couple(**changed)

    compiled = torch.compile(stage, fullgraph=True, backend="aot_eager")
    for actual, expected in zip(compiled(given["q"], given["k"]), stage(given["q"], given["k"]), strict=True):
        close(actual, expected)


def draw_members(kind: str, per_head: bool, S: int) -> dict[str, Any]:
    """The arguments of a call for S members: a potential where it is Euler's, no norm where it is linear."""
    source = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> Tensor:
        return (0.5 * torch.randn(shape, generator=source, dtype=torch.float64)).requires_grad_()

    lead, outputs = ((S, G) if per_head else (S,)), (2 * D if kind == "affine" else D)

    def draw_network() -> Network:
        if kind == "linear":
            return Network(draw(*lead, D, D))
        if kind == "euler":
            return Network(draw(*lead, h, D), draw(S, h), amplitude=draw(*lead, *(1,) * per_head, h))
        return Network(draw(*lead, h, D), draw(S, h), draw(*lead, outputs, h), None if per_head else draw(S, outputs))

    angle = draw(S * B, T, 1, 2).detach()
    return {
        "q": draw(S * B, T, H, D), "k": draw(S * B, T, G, D), "kind": kind, "steps": 2, "members": S,
        "networks": tuple(draw_network() for _ in range(2 if kind in ("affine", "uncoupled") else 1)),
        "step": None if kind == "affine" else draw(S, G, 1, 1) if per_head else draw(S),
        "norm": None if kind == "linear" else Norm(1e-3, draw(S, D), draw(S, D)),
        "angles": (angle.cos(), angle.sin()), "turn_key": not per_head,
    }  # fmt: skip


def take_member(given: dict[str, Any], s: int) -> dict[str, Any]:
    """The arguments of member s alone."""

    def take(value: Any, rows: slice | int) -> Any:
        if isinstance(value, tuple):
            parts = [take(part, rows) for part in value]
            return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
        return value[rows] if isinstance(value, Tensor) else value

    by_row = {name: take(given[name], slice(s * B, s * B + B)) for name in ("q", "k", "angles")}
    return {name: take(value, s) for name, value in given.items()} | by_row | {"members": None}


@pytest.mark.parametrize("S", [1, 3])
@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("kind", ["euler", "leapfrog", "affine", "linear", "uncoupled"])
def test_members_are_calls_of_their_own(kind: str, per_head: bool, S: int) -> None:
    """In float64 to 1e-12: outputs, first and second derivatives, by q, k and every weight."""
    given = draw_members(kind, per_head, S)
    weights = [w for network in given["networks"] for w in network] + list(given["norm"] or ())[1:]
    leaves = [x for x in (given["q"], given["k"], given["step"], *weights) if x is not None]
    alone, found = [couple(**take_member(given, s)) for s in range(S)], []
    for q, k in (couple(**given), map(torch.cat, zip(*alone, strict=True))):
        first = torch.autograd.grad((q**3).sum() + (k**2).sum(), leaves, create_graph=True)
        curved = torch.stack([(x**2).sum() for x in first]).sum()
        found.append([q, k, *first, *torch.autograd.grad(curved, leaves)])
    for actual, expected in zip(*found, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def test_the_kernel_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert api.count_bytes(network(2 * D), torch.bfloat16) == (1 + 2) * 16 * 16 * 2
    with pytest.raises(ValueError, match=r"^couple: impl='triton' cannot run: .*; use impl='reference' or 'auto'\.$"):
        couple(**example(), impl="triton")
    for width, sentence in ((130, "takes heads of up to 128 entries, and these have 130"), (128, "bytes of matrices")):
        x = torch.zeros(1, 1, 1, width, dtype=torch.float64)
        wide = example(q=x, k=x, norm=None, angles=None, networks=(Network(torch.zeros(width, width)),), kind="linear")
        with pytest.raises(ValueError, match=sentence):
            couple(**wide, impl="triton")


REFUSED: dict[str, dict[str, Any]] = {
    "kind must be one of euler, linear, symplectic-euler, leapfrog, affine, uncoupled (did you mean": {
        "kind": "leapfrg"
    },
    "q must have shape [batch, tokens, heads, width] and k": {"k": torch.zeros(B, T + 1, G, D)},
    "the key heads must divide the 4 query heads, but 3 came": {"k": torch.zeros(B, T, 3, D)},
    "must be floating-point tensors of one dtype on one device, but torch.float64": {"k": torch.zeros(B, T, G, D)},
    "steps must be at least 1, but 0 came": {"steps": 0},
    "leapfrog has 1 network, but 2 came": {"networks": (network(), network())},
    "step must be a scalar or [2, 1, 1], but none came": {"step": None},
    "step must be a scalar or [2, 1, 1], but shape [2] came": {"step": torch.zeros(2)},
    "step must be a scalar or [2, 1, 1], but shape [1, 1, 1] came": {"step": torch.zeros(1, 1, 1)},
    "both networks must have one set of matrices for all key heads, or both one for each": {
        "kind": "uncoupled",
        "networks": (network(), Network(torch.zeros(G, h, D), None, torch.zeros(G, D, h))),
    },
    "the outer of leapfrog's network must be of shape [6, 7], but shape [12, 7] came": {"networks": (network(12),)},
    "the outer of leapfrog's network must be of shape [6, 7], but none came": {
        "networks": (network()._replace(outer=None),)
    },
    "the inner_bias of leapfrog's network must be of shape [7], but shape [6] came": {
        "networks": (network()._replace(inner_bias=torch.zeros(6)),)
    },
    "the outer of leapfrog's network must be absent, but shape [6, 7] came": {
        "networks": (network()._replace(amplitude=torch.zeros(7)),)
    },
    "the inner of leapfrog's network must be of shape": {"networks": (Network(torch.zeros(h, D + 1)),)},
    "a gain must have shape [6], but [5] came": {"norm": Norm(1e-6, torch.ones(5))},
    "angles must be cos and sin of shape [2 or 1, 5, 1, at most 3]": {"angles": (torch.zeros(1, T, 1, 4),) * 2},
    "angles must be cos and sin of one shape, but [1, 5, 1, 3] and [1, 5, 1, 2] came": {
        "angles": (torch.zeros(1, T, 1, 3), torch.zeros(1, T, 1, 2))
    },
    "impl must be one of 'auto', 'reference', 'triton', but 'cuda' came": {"impl": "cuda"},
    "members must be at least 1 and divide the 2 rows, but 3 came": {"members": 3},
    "members must be at least 1 and divide the 2 rows, but 0 came": {"members": 0},
    "step must be [2] or [2, 2, 1, 1], but shape [] came": {"members": 2},
    "step must be [2] or [2, 2, 1, 1], but shape [2, 1, 1] came": {"members": 2, "step": torch.zeros(2, 1, 1)},
    "the inner of leapfrog's network must be of shape [2, 7, 6], but shape [7, 6] came": {
        "members": 2,
        "step": torch.zeros(2),
    },
    "a gain must have shape [2, 6], but [6] came": {
        "members": 2,
        "kind": "linear",
        "step": torch.zeros(2),
        "networks": (Network(torch.zeros(2, D, D)),),
    },
}


@pytest.mark.parametrize("sentence", REFUSED)
def test_what_does_not_fit_is_refused(sentence: str) -> None:
    with pytest.raises(ValueError) as caught:
        couple(**example(**REFUSED[sentence]))
    assert sentence in str(caught.value)
