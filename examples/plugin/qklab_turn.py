"""One thing of every kind that qklab takes from other packages, each by the decorator that qklab's own use.

Installed (`pip install examples/plugin`), they are there by name: `qklab describe --coupling.kind turn --mix gated`,
`qklab train --corpus.source counting`, `qklab compare --arms trail unit-norm`, `metric = "token_probability"` and
`attention.layers = "alternating"` in a study's file. `pytest --pyargs qklab.testing --mechanism trail` checks all that
a mechanism promises, together with every other choice that it allows.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn, sigmoid
from torch.nn.functional import normalize

from qklab import register
from qklab.attention.couple import Coupling
from qklab.attention.look_back import LookbackCoupling
from qklab.attention.mix import KeyValue, Mix
from qklab.attention.norm import Normalisation
from qklab.attention.past import Past
from qklab.attention.visibility import Visibility
from qklab.data.sources import Document, Source
from qklab.ops.coupling import group_mean
from qklab.study.metrics import Metric


@register.coupling("turn")
class Turn(Coupling):
    """q and k turn into each other by a learned angle; there is no kernel, and none is needed."""

    formula = "q⁺ = q cos δ + k sin δ ; k⁺ = k cos δ − q̄ sin δ"

    def flow(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:  # q [B, T, G, R, D], k [B, T, G, 1, D]
        cos, sin = self.step.cos().to(q.dtype), self.step.sin().to(q.dtype)
        for _ in range(self.steps):
            q, k = q * cos + k * sin, k * cos - group_mean(q) * sin
        return q, k

    @classmethod
    def map_parameters(cls, spec: Any, coupling: Any) -> int:
        return 0  # the angle is the step size, which is counted already

    @classmethod
    def map_products(cls, spec: Any, coupling: Any) -> int:
        return 0  # no matrix products


@register.coupling("trail")
class Trail(LookbackCoupling):
    """A key carries some of the key before it: a coupling that looks back, of which the cache keeps a token more."""

    formula = "k_t⁺ = k_t + δ k_{t−1}"
    repeats = False  # so that `steps` is refused; and there is no force that heads could share
    shares_force = False

    def forward(self, q: Tensor, k: Tensor, v: Tensor | None, past: Past) -> tuple[Tensor, Tensor, Tensor | None]:
        (before,) = past.before(k, 1)  # k [B, T, G, D] one token earlier; 0 at the beginning of a text
        return q, (k + self.step.reshape(-1, 1) * before).to(k.dtype), v

    @classmethod
    def remembers(cls, spec: Any) -> tuple[tuple[int, int], ...]:
        return ((1, spec.kv_heads * spec.head_width),)  # tokens and entries of every `past.before`

    @classmethod
    def map_parameters(cls, spec: Any, coupling: Any) -> int:
        return 0

    @classmethod
    def map_products(cls, spec: Any, coupling: Any) -> int:
        return 0


@register.norm("unit")
class Unit(Normalisation):
    """Queries and keys of length √D, without gains."""

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        scale = math.sqrt(q.shape[-1])
        return scale * normalize(q, dim=-1), scale * normalize(k, dim=-1)

    @classmethod
    def formula_of(cls, spec: Any) -> str:
        return "q ← √D q/‖q‖ ; k ← √D k/‖k‖"


@register.pattern("alternating")
def list_layers() -> list[dict[str, Any]]:
    """Layers by turns: what `attention.layers` says in a run's file."""
    return [{"coupling": {"kind": "trail"}}, {"norm": "unit"}]


@register.mix("gated")
class Gated(Mix):
    """Every head's output times a gate of its own, read from the token."""

    formula = "o_h = σ(w_h·x) softmax(q_h kᵀ/√D) v"

    def __init__(self, spec: Any, layer: int):
        super().__init__(spec, layer)
        self.gate = nn.Linear(spec.width, spec.heads, bias=False)

    def forward(self, q: Tensor, stored: KeyValue, x: Tensor, visibility: Visibility, bias: Tensor | None) -> Tensor:
        return super().forward(q, stored, x, visibility, bias) * sigmoid(self.gate(x)).unsqueeze(-1)

    @classmethod
    def parameters_of(cls, spec: Any) -> int:
        return spec.width * spec.heads

    @classmethod
    def flops(cls, spec: Any, context: int) -> int:
        return super().flops(spec, context) + 2 * spec.width * spec.heads


@register.metric("token_probability")
class TokenProbability(Metric):
    """The probability that the model gives to the right token, as a geometric mean."""

    label, unit, difference_unit = "token probability", "probability", "probability"
    lower_is_better = False
    needs_one_tokenizer = True

    def read(self, evaluation: Mapping[str, Any]) -> float:
        return math.exp(-evaluation["loss"])


@register.source("counting")
class Counting(Source):
    """Texts that count: each begins at another number."""

    size = 400

    def list_contents(self) -> list[list[Any]]:
        return [["counting", self.size, 0]]

    def read_documents(self) -> Iterator[Document]:
        for first in range(self.size):
            text = " ".join(str(number) for number in range(first, first + 30))
            yield Document(text.encode(), None, first + 1)
