"""StudySpec: what is compared with what, fixed before anything runs."""

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from qklab import register
from qklab.runs.directory import RunError
from qklab.schema import (
    Rule,
    Spec,
    SpecError,
    checked_field,
    choice_field,
    format_value,
    integer_field,
    number_field,
    spec_list_field,
    suggest_name,
    text_field,
)
from qklab.study.claims import Claim
from qklab.study.metrics import find_metric, list_metrics
from qklab.train.settings import merge_settings, read_toml, resolve_run
from qklab.train.spec import RunSpec

DEFAULT_LR = 3e-3
MATCHES = ("tokens", "seconds", "flops", "parameters")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ._=+-]{0,59}")


class StudyError(RunError):
    """A study that cannot be carried out as asked."""


def check_arms(value: Any) -> Any:
    if not isinstance(value, Mapping) or len(value) < 2:
        raise ValueError("must be a table of at least two arms, each with the settings it changes")
    for name, changes in value.items():
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise ValueError(
                "must have names of at most 60 letters, digits, spaces and . _ = + -, a letter or digit first, and "
                f"{format_value(name)} is none"
            )
        if not isinstance(changes, Mapping):
            raise ValueError(f"must be a table of settings for each arm, and {name!r} is {format_value(changes)}")
    if len({name.casefold() for name in value}) < len(value):
        raise ValueError("must have names that differ in more than capitals, since some file systems see no difference")
    return {name: dict(changes) for name, changes in value.items()}


def check_settings(value: Any) -> Any:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ValueError("must be a table of settings")
    return dict(value)


def check_learning_rates(value: Any) -> Any:
    numbers = list(value) if isinstance(value, list | tuple) else []
    fine = all(isinstance(x, int | float) and not isinstance(x, bool) and 0 < x < math.inf for x in numbers)
    if not numbers or not fine or len(set(numbers)) != len(numbers):
        raise ValueError("must be a list of different numbers above 0")
    return sorted(float(x) for x in numbers)


def check_corpora(value: Any) -> Any:
    names = [value] if isinstance(value, str) else list(value) if isinstance(value, list | tuple) else []
    if not names or not all(isinstance(name, str) and name for name in names) or len(set(names)) != len(names):
        raise ValueError("must be a corpus or a list of different corpora")
    return names


def check_sizes(value: Any) -> Any:
    entries = (
        [{"name": one} if isinstance(one, str) else one for one in value] if isinstance(value, list | tuple) else None
    )
    if entries is None or not all(isinstance(one, Mapping) and isinstance(one.get("name"), str) for one in entries):
        raise ValueError("must be a list of sizes, each a name or a table with one")
    names = [one["name"].casefold() for one in entries]
    if len(set(names)) < len(names) or not all(NAME.fullmatch(name) for name in names):
        raise ValueError("must have different names of letters, digits, spaces and . _ = + -")
    return [dict(one) for one in entries]


@dataclass(frozen=True, kw_only=True)
class StudySpec(Spec):
    """Arms × seeds × corpora × learning rates, and how they will be compared.

    Args:
        name: What the study is called.
        baseline: The arm the others are compared with.
        arms: Name → the settings of a run that the arm changes.
        base: Settings of a run that all arms share, the budget among them.
        corpora: Sources as for `corpus.source`.
        lrs: The learning rates every arm tries: equal tuning.
        extend: How many more at each end, by the grid's own ratio and for all arms alike, while an arm's best is there.
        seeds: How many paired seeds, from 0.
        tuning_seeds: How many of them try every learning rate; the others run at the one with the lowest mean
            validation loss, chosen for each arm and corpus.
        match: What all arms get the same of: training `tokens`, `seconds` or `flops`; or `parameters` (and tokens), for
            which the MLP of the other arms is made wider or narrower.
        metric: What is compared, on test text, by a name of the registry: `loss` (nats per token), `bits_per_byte`…
        alpha: The chance of a false "better" or "worse" that is accepted, over all arms together.
        analyses: How often the study may be judged, if seeds are added after an interim analysis; each gets its part of
            `alpha`.
        margin: A difference of the metric that does not matter to you.
        sizes: Where the study is repeated at several sizes: names of the ladder, or tables with a `name`, and what is
            that size's own: `tokens_per_parameter`, `lrs`, `extend`, `arms` (some of these), and settings of a run.
        claims: Published figures that arms stand for, each judged by a word of its own.
    """

    name: str = text_field("study")
    baseline: str = text_field()
    arms: dict[str, dict[str, Any]] = checked_field(check_arms)
    base: dict[str, Any] = checked_field(check_settings, None)
    corpora: list[str] = checked_field(check_corpora, ("stdlib",))
    lrs: list[float] = checked_field(check_learning_rates, (DEFAULT_LR,))
    extend: int = integer_field(0, at_least=0, at_most=10)
    seeds: int = integer_field(3, at_most=1000)
    tuning_seeds: int = integer_field(1, at_most=1000)
    match: Literal["tokens", "seconds", "flops", "parameters"] = choice_field("tokens", MATCHES)
    metric: str = choice_field("loss", register.metric)
    alpha: float = number_field(0.05, above=0.0, at_most=0.5)
    analyses: int = integer_field(1, at_most=100)
    margin: float = number_field(0.01, above=0.0)
    sizes: list[dict[str, Any]] = checked_field(check_sizes, ())
    claims: tuple[Claim, ...] = spec_list_field(Claim)

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "baseline",
            lambda s: s.baseline not in s.arms,
            lambda s: f"there is no such arm{suggest_name(s.baseline, s.arms)}; the arms are {', '.join(s.arms)}",
            lambda s: {"baseline": next(iter(s.arms))},
        ),
        Rule(
            "tuning_seeds",
            lambda s: s.tuning_seeds > s.seeds,
            lambda s: f"there are only seeds={s.seeds}",
            lambda s: {"tuning_seeds": s.seeds},
        ),
        Rule(
            "extend",
            lambda s: s.extend > 0 and len(s.lrs) < 2,
            lambda s: f"lrs={s.lrs} has no ratio to go on by; give it two learning rates or more",
            lambda s: {"extend": 0},
        ),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for claim in self.claims:
            self.refuse_unknown_claim(claim)

    def refuse_unknown_claim(self, claim: Claim) -> None:
        """Raise for a claim about an arm or a corpus that is not compared."""
        for what, name, known in (("arm", claim.arm, [*self.arms]), ("corpus", claim.corpus, self.corpora)):
            if name is not None and name not in known:
                listed = f"{', '.join(known)}{suggest_name(name, known)}"
                raise SpecError(f"claim {claim.id} is about {what} {name}, which is none of {listed}.", "claims")
        if claim.arm == self.baseline:
            raise SpecError(
                f"claim {claim.id} is about arm {claim.arm}, which is the baseline it would be compared with.", "claims"
            )

    @property
    def widest_grid(self) -> list[float]:
        """The learning rates with all that may be added to them."""
        if not self.extend:
            return list(self.lrs)
        ratio = (self.lrs[-1] / self.lrs[0]) ** (1 / (len(self.lrs) - 1))
        steps = range(1, self.extend + 1)
        lower = [float(f"{self.lrs[0] / ratio**k:.3g}") for k in reversed(steps)]
        return [*lower, *self.lrs, *(float(f"{self.lrs[-1] * ratio**k:.3g}") for k in steps)]

    @property
    def fingerprint(self) -> str:
        """SHA-256 of all that decides what a run is; seeds may be added, and claims change none."""
        return hashlib.sha256(json.dumps(canonicalise(self.fixed_settings()), sort_keys=True).encode()).hexdigest()

    def fixed_settings(self) -> dict[str, Any]:
        """What may not change once a run has begun."""
        return {name: value for name, value in self.to_dict().items() if name not in ("seeds", "claims")}

    def refuse_illegal(self) -> None:
        """Raise SpecError for an arm that is no run, or that would not be evaluated on the same text as the others."""
        own = {"corpus": {"source": self.corpora[0]}, "optimiser": {"lr": self.lrs[0]}}
        specs = [(arm, self.resolve_arm(arm, own)) for arm in self.arms]
        for number, (arm, spec) in enumerate(specs):
            twin = next((other for other, same in specs[:number] if same == spec), None)
            if twin is not None:
                raise SpecError(
                    f"arms {twin} and {arm} are the same run: there is nothing to compare; drop one.", "arms"
                )
        for corpus in self.corpora:
            runs = {arm: self.run(arm, corpus, self.lrs[0], 0) for arm in self.arms}
            for arm, run in runs.items():
                own, other = run.corpus, runs[self.baseline].corpus
                if (own.valid, own.test) != (other.valid, other.test):
                    raise SpecError(
                        f"arm {arm}: corpus.valid and corpus.test must be the baseline's; set them in base.",
                        "corpus",
                    )
                if run.benchmarks != runs[self.baseline].benchmarks:
                    raise SpecError(f"arm {arm}: benchmarks must be the baseline's; set them in base.", "benchmarks")
                if run.final_tokens != runs[self.baseline].final_tokens:
                    raise SpecError(
                        f"arm {arm}: evaluation.final_tokens must be the baseline's; set it in base.", "evaluation"
                    )
                metric = find_metric(self.metric)
                if (lacking := metric.find_lacking(run.benchmarks.listed)) is not None:
                    raise SpecError(
                        f"metric={metric.name!r} is scored at the end of each run: base.benchmarks.names must have "
                        f"{lacking}.",
                        "metric",
                    )
                if metric.needs_one_tokenizer and (own.tokenizer, own.vocab) != (other.tokenizer, other.vocab):
                    free = [each for each in list_metrics() if not each.needs_one_tokenizer and not each.benchmark]
                    others = " or ".join(repr(each.name) for each in free)
                    raise SpecError(
                        f"arm {arm} has another tokenizer than {self.baseline}, and {metric.unit} compare under one "
                        f"only; set metric={others}.",
                        "metric",
                    )

    @property
    def first_run(self) -> RunSpec:
        """One of the baseline's, off which is read what all runs have in common."""
        return self.run(self.baseline, self.corpora[0], self.lrs[0], 0)

    def run(self, arm: str, corpus: str, lr: float, seed: int) -> RunSpec:
        """One run of the study."""
        own = {"corpus": {"source": corpus}, "optimiser": {"lr": lr}, "seed": seed}
        spec = self.resolve_arm(arm, own)
        if arm == self.baseline or self.match in ("tokens", "seconds"):
            return spec
        base = self.resolve_arm(self.baseline, own)
        if self.match == "flops":
            final = spec.evaluation.replace(
                final_tokens=base.final_tokens or 0
            )  # the same text, after more or fewer steps
            budget = spec.budget.replace(tokens=None, seconds=None, flops=count_run_flops(base))
            return spec.replace(budget=budget, evaluation=final)
        try:
            return spec.replace(model=match_parameters(spec.model, base.model.parameters()))
        except SpecError as error:
            raise SpecError(f"arm {arm}: {error}", error.field, error.nearest) from None

    def resolve_arm(self, arm: str, own: Mapping[str, Any]) -> RunSpec:
        """The run of an arm before it is matched with the baseline."""
        for where, table in (("base", self.base), (f"arm {arm}", self.arms[arm])):
            refuse_settings_of_study(where, table)
        if "budget" in self.arms[arm]:
            raise SpecError(f"arm {arm}: the budget is what arms are matched on; set it in base.", "budget")
        if self.match == "parameters" and "mlp_ratio" in self.arms[arm].get("model", {}):
            raise SpecError(f"arm {arm}: match='parameters' sets model.mlp_ratio itself; leave it out.", "mlp_ratio")
        try:
            spec, _ = resolve_run(merge_settings(merge_settings(self.base, self.arms[arm]), own))
        except SpecError as error:
            raise SpecError(f"arm {arm}: {error}", error.field, error.nearest) from None
        wanted = "seconds" if self.match == "seconds" else "tokens"
        if getattr(spec.budget, wanted) is None and not (self.match == "flops" and spec.budget.flops is not None):
            raise SpecError(f"match={self.match!r} needs base.budget.{wanted}.", "base")
        return spec


def refuse_settings_of_study(where: str, table: Mapping[str, Any]) -> None:
    """Raise for settings in the base or an arm that the study itself makes, and for tables that are none."""
    for name in ("model", "attention", "corpus", "optimiser"):
        if name in table and not isinstance(table[name], Mapping):
            raise SpecError(f"{where}: {name} must be a table of settings, but {format_value(table[name])} came.", name)
    for name, word, instead in (("corpus", "source", "corpora"), ("optimiser", "lr", "lrs")):
        if word in table.get(name, {}):
            raise SpecError(f"{where}: {name}.{word} is set by the study; write it in {instead}.", name)
    for name, why in (("seed", "seeds says how many"), ("execution", "the command line says how runs are carried out")):
        if name in table:
            raise SpecError(f"{where}: {name} is set by the study; {why}.", name)


def canonicalise(value: Any) -> Any:
    """The value with whole numbers written one way, so that 1 and 1.0 are the same setting."""
    if isinstance(value, Mapping):
        return {name: canonicalise(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [canonicalise(inner) for inner in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def count_run_flops(spec: RunSpec) -> float:
    """What the run will have computed at its end."""
    assert spec.steps is not None
    exact = spec.steps * spec.flops_per_step
    nearest = float(exact)
    return nearest if nearest <= exact else math.nextafter(nearest, 0.0)  # rounded up it would be a step more


def match_parameters(model: Any, parameters: int) -> Any:
    """The model with its MLP's hidden width changed so that it has as nearly as possible this many parameters."""
    each = model.replace(mlp_ratio=2 / model.width).parameters() - model.replace(mlp_ratio=1 / model.width).parameters()
    hidden = model.hidden + round((parameters - model.parameters()) / each)
    if hidden < 1:
        raise SpecError(
            f"match='parameters': even with an MLP of one hidden unit {model.name} has more than the baseline's "
            f"{parameters:,} parameters.",
            "match",
        )
    return model.replace(mlp_ratio=hidden / model.width)


def read_study(path: Path) -> StudySpec:
    """A study from its TOML file."""
    if not path.exists():
        raise StudyError(f"there is no study file {path}.")
    try:
        return StudySpec.from_dict(read_toml(path))
    except SpecError as error:
        raise SpecError(f"{path}: {error}", error.field, error.nearest) from None
