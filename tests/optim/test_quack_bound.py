"""The bound on how far one step moves a logit, for AdamW and Muon, and that bare optimisers do not keep it."""

import dataclasses
import math
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from qklab.optim import LogitControl, layer_roles

EPS = torch.finfo(torch.float64).eps
Bare = Callable[[list[nn.Parameter], "Case"], torch.optim.Optimizer]


@dataclass(frozen=True)
class Case:
    """Matrices of some heads [heads·D, d], their sizes when control begins and how they grow before each step."""

    heads: int
    head_width: int
    inputs: int
    size: tuple[float, float]  # powers of ten of the entries of W_q and W_k
    growth: tuple[tuple[float, float], ...]  # largest powers of ten, before each step; each head takes a share of it
    tau: float
    lr: float
    betas: tuple[float, float]
    gradient: float  # power of ten of its entries
    steady: bool  # whether gradients keep their signs, which gives Adam's largest updates
    seed: int


sizes = st.tuples(st.floats(-2, 2), st.floats(-2, 2))
cases = st.builds(
    Case,
    heads=st.integers(1, 3),
    head_width=st.integers(1, 8),
    inputs=st.integers(1, 12),
    size=sizes,
    growth=st.lists(sizes, min_size=1, max_size=5).map(tuple),
    tau=st.floats(0.05, 4),
    lr=st.floats(1e-4, 0.3),
    betas=st.sampled_from([(0.9, 0.95), (0.9, 0.999), (0.5, 0.9), (0.0, 0.99), (0.95, 0.95)]),
    gradient=st.floats(-3, 3),
    steady=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)


class Attention:
    """W_q and W_k of a case, and logits of given inputs."""

    def __init__(self, case: Case):
        self.case = case
        self.generator = torch.Generator().manual_seed(case.seed)
        shape = case.heads * case.head_width, case.inputs
        self.query, self.key = (nn.Parameter(self.draw(shape) * 10.0**size) for size in case.size)
        self.weights = [self.query, self.key]

    def draw(self, shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)

    def heads(self) -> tuple[Tensor, Tensor]:
        """W_q and W_k as [heads, D, d], as they are now."""
        q, k = (w.detach().clone().unflatten(0, (self.case.heads, -1)) for w in self.weights)
        return q, k

    def norms(self) -> tuple[Tensor, Tensor]:
        q, k = (torch.linalg.matrix_norm(w) for w in self.heads())
        return q, k

    def control(self, base: torch.optim.Optimizer) -> LogitControl:
        roles = {"layer": layer_roles(query=self.query, key=self.key, heads=self.case.heads)}
        return LogitControl(base, roles, tau=self.case.tau)


def moved(before: tuple[Tensor, Tensor], after: tuple[Tensor, Tensor], inputs: Tensor) -> tuple[Tensor, Tensor]:
    """The largest change of a logit x W_qᵀ W_k yᵀ/√D per head, over the given unit inputs and the worst unit ones there
    are, and how much of it may be rounding: [heads] each."""
    width = before[0].shape[1]
    (q, k), (q_new, k_new) = before, after
    change = q_new.mT @ (k_new - k) + (q_new - q).mT @ k
    worst = torch.linalg.svd(change)
    logits = []
    for queries, keys in ((q, k), (q_new, k_new)):
        x = torch.cat([worst.U[..., :1].mT, inputs.expand(len(q), -1, -1)], 1)
        y = torch.cat([worst.Vh[..., :1, :], inputs.expand(len(q), -1, -1)], 1)
        logits.append((x @ queries.mT) @ (y @ keys.mT).mT / math.sqrt(width))
    size = torch.stack([torch.linalg.matrix_norm(q) * torch.linalg.matrix_norm(k) for q, k in (before, after)]).amax(0)
    rounding = 4 * (width + q.shape[2] + 2) * EPS * size / math.sqrt(width)
    return (logits[1] - logits[0]).abs().amax((1, 2)), rounding


def bound(case: Case, initial: tuple[Tensor, Tensor], u: Tensor | float) -> Tensor:
    """[u τη(‖W_q‖₀+‖W_k‖₀) + (u τη/0.3)²]/√D per head."""
    reach = u * case.tau * case.lr
    return (reach * (initial[0] + initial[1]) + (reach / 0.3) ** 2) / math.sqrt(case.head_width)


def adam_reach(case: Case) -> float:
    """u = C√(Dd), C = (1−β1)/√((1−β2)(1−β1²/β2))."""
    beta1, beta2 = case.betas
    return (1 - beta1) / math.sqrt((1 - beta2) * (1 - beta1**2 / beta2)) * math.sqrt(case.head_width * case.inputs)


def adamw(parameters: list[nn.Parameter], case: Case) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=case.lr, betas=case.betas, weight_decay=0.0)


def muon(parameters: list[nn.Parameter], case: Case) -> torch.optim.Optimizer:
    """Both ways of adjusting its learning rate."""
    adjust = "match_rms_adamw" if case.seed % 2 else "original"
    return torch.optim.Muon(parameters, lr=case.lr, weight_decay=0.0, adjust_lr_fn=adjust)


def reach_of(case: Case, before: tuple[Tensor, Tensor], after: tuple[Tensor, Tensor]) -> Tensor:
    """u as a bare step shows it: ‖rows of the update‖/lr per head, the larger of W_q's and W_k's, rounded up."""
    reaches = []
    for old, new in zip(before, after, strict=True):
        rounding = 4 * EPS * torch.linalg.matrix_norm(old)
        reaches.append((torch.linalg.matrix_norm(new - old) + rounding) / case.lr)
    return torch.stack(reaches).amax(0)


Reach = Callable[[Case], float] | None  # u, or None to measure it on a bare twin: Muon's update ignores the weights


def keeps_the_bound(case: Case, make: Bare, known: Reach) -> None:
    """Several steps from weights that grow and shrink at will between them."""
    ours, twin = Attention(case), Attention(case)
    initial = ours.norms()
    control, bare = ours.control(make(ours.weights, case)), make(twin.weights, case)
    inputs = nn.functional.normalize(ours.draw((6, case.inputs)), dim=-1)
    steady = [ours.draw(tuple(w.shape)) for w in ours.weights]
    for step, growth in enumerate(case.growth):
        for i, (w, other) in enumerate(zip(ours.weights, twin.weights, strict=True)):
            share = torch.rand(case.heads, generator=ours.generator, dtype=torch.float64)
            with torch.no_grad():
                w.mul_((10.0 ** (growth[i] * share)).repeat_interleave(case.head_width)[:, None])
            # a steady gradient that grows is what Adam makes the largest updates of
            gradient = steady[i] * 3**step if case.steady else ours.draw(tuple(w.shape))
            w.grad = other.grad = gradient * 10.0**case.gradient
        before, unmoved = ours.heads(), twin.heads()
        control.step()
        bare.step()
        u = reach_of(case, unmoved, twin.heads()) if known is None else known(case)
        change, rounding = moved(before, ours.heads(), inputs)
        limit = bound(case, initial, u)
        assert (change <= limit + rounding).all(), (change, limit)
        assert (change > 0).all()


def breaks_the_bound_when_bare(case: Case, make: Bare, known: Reach, growth: float | None = None) -> None:
    """A step of W_q alone, W_k grown by a factor: bare it moves a logit beyond the bound, under control it does not.

    The bare step moves logits by σ₁(ΔW_qᵀ W_k)/√D, so by default the factor is what makes that twice the bound.
    """
    trial = Attention(case)
    gradient = trial.draw(tuple(trial.query.shape)) * 10.0**case.gradient

    def step(layer: Attention, optimiser: torch.optim.Optimizer) -> tuple[tuple[Tensor, Tensor], Tensor, Tensor]:
        before = layer.heads()
        layer.query.grad, layer.key.grad = gradient.clone(), torch.zeros_like(layer.key)
        optimiser.step()
        inputs = nn.functional.normalize(layer.draw((6, case.inputs)), dim=-1)
        return before, *moved(before, layer.heads(), inputs)

    initial = trial.norms()
    before, change, _ = step(trial, make(trial.weights, case))
    limit = bound(case, initial, reach_of(case, before, trial.heads()) if known is None else known(case))
    factor = float(2 * (limit / change).amax()) if growth is None else growth
    for controlled in (True, False):
        layer = Attention(case)
        base = make(layer.weights, case)
        control = layer.control(base)
        with torch.no_grad():
            layer.key.mul_(factor)
        _, change, rounding = step(layer, control if controlled else base)
        if controlled:
            assert (change <= limit + rounding).all(), (change, limit)
        else:
            assert (change > limit).all(), (change, limit)


USUAL = Case(
    heads=2,
    head_width=8,
    inputs=12,
    size=(-1.0, -1.0),
    growth=(),
    tau=1.0,
    lr=1e-3,
    betas=(0.9, 0.95),
    gradient=0.0,
    steady=False,
    seed=0,
)
SHRUNK = dataclasses.replace(USUAL, lr=0.1, growth=((-4.0, -4.0), (0.0, 0.0)))
GROWN = dataclasses.replace(USUAL, growth=((4.0, 4.0), (0.0, -2.0)), steady=True)


@settings(max_examples=120, deadline=None, derandomize=True)
@example(SHRUNK)
@example(GROWN)
@given(cases)
def test_a_controlled_step_of_adamw_moves_no_logit_beyond_the_bound(case: Case) -> None:
    keeps_the_bound(case, adamw, adam_reach)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(cases)
def test_a_bare_step_of_adamw_with_grown_weights_moves_logits_beyond_the_bound(case: Case) -> None:
    breaks_the_bound_when_bare(case, adamw, adam_reach)


def test_keys_that_grew_twentyfold_suffice_to_break_it() -> None:
    breaks_the_bound_when_bare(USUAL, adamw, adam_reach, growth=20.0)


def test_adams_constant_bounds_its_updates_and_is_nearly_reached() -> None:
    """Gradients in proportion to (β1/β2)^age, for which Cauchy and Schwarz's inequality is an equality."""
    for beta1, beta2 in ((0.9, 0.95), (0.8, 0.98), (0.0, 0.99)):
        constant = adam_reach(dataclasses.replace(USUAL, betas=(beta1, beta2), head_width=1, inputs=1))
        weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        base = torch.optim.AdamW([weight], lr=1.0, betas=(beta1, beta2), eps=0.0, weight_decay=0.0, foreach=False)
        largest = 0.0
        for age in reversed(range(600)):
            weight.grad = torch.full_like(weight, max((beta1 / beta2) ** age, 1e-100))
            before = float(weight.detach())
            base.step()
            largest = max(largest, abs(float(weight.detach()) - before))
        # what is missing are the corrections of the moments after 600 steps
        missing = math.sqrt((1 - beta2**600) * (1 - (beta1**2 / beta2) ** 600))
        assert missing * constant * (1 - 1e-9) <= largest <= constant * (1 + 1e-9)


@settings(max_examples=40, deadline=None, derandomize=True)
@example(SHRUNK)
@example(GROWN)
@given(cases)
def muon_keeps_the_bound(case: Case) -> None:
    keeps_the_bound(case, muon, None)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(cases)
def bare_muon_breaks_the_bound(case: Case) -> None:
    breaks_the_bound_when_bare(case, muon, None)


def under_muon() -> None:
    """What is tested of Muon, in a process of its own."""
    torch.set_num_threads(1)
    muon_keeps_the_bound()
    bare_muon_breaks_the_bound()
    breaks_the_bound_when_bare(USUAL, muon, None, growth=20.0)
    print("done")


def test_muon_keeps_and_breaks_the_bound_as_adamw_does(tmp_path: Path) -> None:
    # some virtual machines announce bf16 instructions that they refuse
    environment = os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"}
    code = "import sys; sys.path.insert(0, sys.argv[1]); import test_quack_bound as bound; bound.under_muon()"
    command = [sys.executable, "-W", "error", "-c", code, str(Path(__file__).parent)]
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "done\n"
