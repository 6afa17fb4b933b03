"""RunSpec: everything that decides what a run computes, and ExecutionSpec: how this machine carries it out."""

import hashlib
import json
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from qklab.attention.spec import AttentionSpec
from qklab.data.glue import GLUE
from qklab.data.order import PACKINGS
from qklab.data.spec import DataSpec
from qklab.data.tasks import Task, parse_task
from qklab.model.decoder import RECOMPUTE, Recompute
from qklab.model.spec import DecoderSpec
from qklab.optim.spec import LogitControlSpec, OptimiserSpec, ScheduleSpec
from qklab.runs.sinks import SINKS
from qklab.schema import Rule, Spec, checked_field, choice_field, integer_field, number_field, spec_field, suggest_name

DEFAULT_TOKENS = 4_000_000
FINAL_SHARE = 8  # the final evaluation of a split reads a token for so many of training: 4 % of the steps' time
FINAL_PER_SECOND = 2048  # and where the budget is in seconds so many for each, whatever the machine
LEAST_FINAL = 32_768


@dataclass(frozen=True, kw_only=True)
class BatchSpec(Spec):
    """A step sees `sequences` windows of the model's context, over all ranks and micro-batches together.

    `packed` keeps documents that share a window apart; `contiguous` lets attention cross from one to the next.
    """

    sequences: int = integer_field(32)
    packing: Literal["packed", "contiguous"] = choice_field("packed", PACKINGS)


@dataclass(frozen=True, kw_only=True)
class BudgetSpec(Spec):
    """How long to train: `tokens`, `seconds` of training steps, or `flops` (training FLOPs of the matrix products)."""

    tokens: int = integer_field(None, at_most=2**62)
    seconds: float = number_field(None, above=0.0)
    flops: float = number_field(None, above=0.0)

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "tokens",
            lambda s: sum(v is not None for v in (s.tokens, s.seconds, s.flops)) > 1,
            lambda s: "a budget is one of tokens, seconds and flops",
            lambda s: {"seconds": None, "flops": None},
        ),
    )

    def defaults(self) -> dict[str, Any]:
        return {"tokens": DEFAULT_TOKENS if self.seconds is None and self.flops is None else None}


@dataclass(frozen=True, kw_only=True)
class EvaluationSpec(Spec):
    """Validation `times` times over the run on about `tokens` tokens, the same for every model, and at the end on about
    `final_tokens` of validation and of test: 0 for all of them, by default what `RunSpec.final_tokens` says. Probes
    `probes` times, by default once every 80 steps but at most 10 times, which keeps their cost under 2 %; on
    `probe_rows` validation windows cut to `probe_tokens`."""

    times: int = integer_field(10, at_least=0)
    tokens: int = integer_field(16_384)
    final_tokens: int | None = integer_field(None, at_least=0, at_most=2**62)
    probes: int | None = integer_field(None, at_least=0)
    probe_rows: int = integer_field(2)
    probe_tokens: int = integer_field(256)


def check_benchmark_names(value: Any) -> Any:
    if value is None:
        return None
    names = value.split(",") if isinstance(value, str) else value
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) and name.strip() for name in names):
        raise ValueError("must be names, separated by commas")
    names = [name.strip() for name in names]
    if len(set(names)) < len(names):
        raise ValueError("must be different names")
    return ",".join(names) or None


def check_fine_tuning_rates(value: Any) -> Any:
    numbers = tuple(value) if isinstance(value, list | tuple) else ()
    fine = all(isinstance(x, int | float) and not isinstance(x, bool) and 0 < x < 1 for x in numbers)
    if not numbers or not fine or len(set(numbers)) < len(numbers):
        raise ValueError("must be a list of different numbers between 0 and 1")
    return tuple(float(x) for x in numbers)


@dataclass(frozen=True, kw_only=True)
class BenchmarkSpec(Spec):
    """What a model is scored on at the end of its run, from local files and with the extra `eval`: `names` of sets of
    questions such as blimp and lambada, scored by lm-evaluation-harness on `questions` of each (by default all), and of
    tasks of GLUE such as rte, on which it is fine-tuned for `epochs` on `examples` (by default all) at each of `lrs`;
    the rate is chosen on held-out training examples."""

    names: str = checked_field(check_benchmark_names, None)
    questions: int = integer_field(None)
    lrs: tuple[float, ...] = checked_field(check_fine_tuning_rates, (1e-5, 3e-5, 1e-4))
    epochs: int = integer_field(3)
    examples: int = integer_field(None)

    @property
    def listed(self) -> list[str]:
        return self.names.split(",") if self.names else []

    @property
    def questioned(self) -> list[str]:
        """Those that are sets of questions."""
        return [name for name in self.listed if name not in GLUE]


def check_sink_names(value: Any) -> Any:
    for name in [] if value is None else value.split(",") if isinstance(value, str) else [value]:
        if not isinstance(name, str) or name.strip() not in SINKS:
            raise ValueError(f"must be names among {', '.join(SINKS)}, separated by commas{suggest_name(name, SINKS)}")
    return value


def check_population_size(value: Any) -> Any:
    if isinstance(value, str) and value.isdecimal():
        value = int(value)
    whole = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    if value not in ("auto", "off") and not whole:
        raise ValueError("must be auto, off, or a whole number of at least 1")
    return value


@dataclass(frozen=True, kw_only=True)
class ExecutionSpec(Spec):
    """How to run, without changing what is computed beyond rounding; may differ when a run is resumed.

    `device` auto: a GPU if there is one. `compile` auto: on a GPU (of a study where its plan is long enough to gain by
    it). `rows`: windows per forward pass and rank, by default all of the rank's. `recompute`: what backward passes
    compute again instead of keeping it (see `Decoder.recompute`). `parallel`: how several ranks share the model.
    `threads`: by default the machine's cores shared by its ranks. A checkpoint is due every `checkpoint_minutes`, or
    every `checkpoint_steps` if given, at every evaluation that is the best so far, and at the end; the last `keep` and
    the best stay. With `keep` 0 they are there only to go on from, and gone once the run has ended.

    `population`: how many runs of a study that differ in seed and learning rate alone are trained as one model: as many
    as it says, none together ("off"), or on a GPU as many as there are and as fit ("auto"), where that is faster.
    """

    device: Literal["auto", "cpu", "cuda"] = choice_field("auto", ("auto", "cpu", "cuda"))
    compile: Literal["auto", "yes", "no"] = choice_field("auto", ("auto", "yes", "no"))
    rows: int = integer_field(None)
    recompute: Recompute = choice_field("none", RECOMPUTE)
    parallel: Literal["ddp", "fsdp"] = choice_field("ddp", ("ddp", "fsdp"))
    threads: int = integer_field(None, at_most=1024)
    checkpoint_minutes: float = number_field(5.0, above=0.0)
    checkpoint_steps: int = integer_field(None)
    keep: int = integer_field(2, at_least=0)
    sinks: str = checked_field(check_sink_names, None)
    population: str | int = checked_field(check_population_size, "auto")

    def is_checkpoint_due(self, step: int, seconds: float) -> bool:
        """After this step, so many seconds after the last checkpoint."""
        if self.checkpoint_steps is not None:
            return step % self.checkpoint_steps == 0
        return seconds > 60 * self.checkpoint_minutes


@dataclass(frozen=True, kw_only=True)
class RunSpec(Spec):
    """One training run. Two runs with the same spec, corpus and software compute the same."""

    seed: int = integer_field(0, at_least=0)
    model: DecoderSpec = spec_field(DecoderSpec)
    corpus: DataSpec = spec_field(DataSpec, DataSpec())
    batch: BatchSpec = spec_field(BatchSpec, BatchSpec())
    optimiser: OptimiserSpec = spec_field(OptimiserSpec, OptimiserSpec())
    logit_control: LogitControlSpec = spec_field(LogitControlSpec, LogitControlSpec())
    schedule: ScheduleSpec = spec_field(ScheduleSpec, ScheduleSpec())
    budget: BudgetSpec = spec_field(BudgetSpec, BudgetSpec())
    evaluation: EvaluationSpec = spec_field(EvaluationSpec, EvaluationSpec())
    benchmarks: BenchmarkSpec = spec_field(BenchmarkSpec, BenchmarkSpec())
    precision: Literal["auto", "fp32", "bf16"] = choice_field("auto", ("auto", "fp32", "bf16"))
    z_loss: float = number_field(0.0, at_least=0.0)
    max_skips: int = integer_field(10, at_least=0)

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "model",
            lambda s: explain_sight(s) is not None,
            lambda s: f"{s.corpus.source} {explain_sight(s)}",
            lambda s: {
                "model": s.model.replace(attention=[a.replace(causal=not s.model.causal) for a in s.model.pattern])
            },
        ),
        Rule(
            "model",
            lambda s: s.task is not None and s.model.context != s.task.length,
            lambda s: (
                f"{s.corpus.source} has sequences of {s.task.length} tokens and the model context={s.model.context}"
            ),
            lambda s: {"model": s.model.replace(context=s.task.length)},
        ),
        Rule(
            "model",
            lambda s: s.model.vocab < count_token_ids(s.corpus),
            lambda s: f"the tokenizer has {count_token_ids(s.corpus)} tokens and the model vocab={s.model.vocab}",
            lambda s: {"model": s.model.replace(vocab=pad_vocab(count_token_ids(s.corpus)))},
        ),
        Rule(
            "benchmarks",
            lambda s: explain_unscorable(s) is not None,
            lambda s: explain_unscorable(s) or "",
            lambda s: {"benchmarks": BenchmarkSpec()},
        ),
        Rule(
            "logit_control",
            lambda s: explain_uncontrollable(s) is not None,
            lambda s: f"method={s.logit_control.method!r} cannot act: {explain_uncontrollable(s)}",
            lambda s: {"logit_control": LogitControlSpec(method="none")},
        ),
    )

    @property
    def task(self) -> Task | None:
        """The task that the corpus is, if it is one."""
        return parse_task(self.corpus.source)

    @property
    def asks(self) -> Literal["next token", "answers", "masked tokens"]:
        """What a model is asked for: of text the next token, or, where it would see that, tokens that were masked."""
        if self.task is not None:
            return "answers"
        return "next token" if self.model.causal else "masked tokens"

    @property
    def tokens_per_step(self) -> int:
        return self.batch.sequences * self.model.context

    @property
    def flops_per_step(self) -> int:
        """Matrix-product FLOPs of forward and backward: three times the forward's."""
        return 3 * self.tokens_per_step * self.model.flops_per_token()

    @property
    def steps(self) -> int | None:
        """Steps of the whole run; None where the budget is in seconds."""
        if self.budget.seconds is not None:
            return None
        if self.budget.flops is not None:
            return max(1, -(-int(self.budget.flops) // self.flops_per_step))
        return max(1, -(-self.budget.tokens // self.tokens_per_step))

    @property
    def probes(self) -> int:
        """How often attention is probed."""
        if self.evaluation.probes is not None:
            return self.evaluation.probes
        return 10 if self.steps is None else min(10, max(1, self.steps // 80))

    @property
    def final_tokens(self) -> int | None:
        """How many tokens of validation and of test are read at the end, evenly spread; None: all of them."""
        if self.evaluation.final_tokens is not None:
            return self.evaluation.final_tokens or None
        if self.budget.seconds is not None:
            return max(LEAST_FINAL, int(FINAL_PER_SECOND * self.budget.seconds))
        assert self.steps is not None
        return max(LEAST_FINAL, self.steps * self.tokens_per_step // FINAL_SHARE)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the spec in canonical JSON."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()


def explain_sight(run: RunSpec) -> str | None:
    """Why a task cannot be asked of a model that sees so far."""
    if run.task is None:
        return None
    if run.task.sees_ahead and run.model.causal:
        return "asks for tokens that come later, which a causal model cannot see: attention.causal must be False"
    if run.task.shows_answers and not run.model.causal:
        return "has its answers follow, which a model must not see: attention.causal must be True"
    return None


def explain_unscorable(run: RunSpec) -> str | None:
    """Why a model cannot be scored on its benchmarks."""
    if run.benchmarks.listed and run.task is not None:
        return f"benchmarks are of text, and {run.corpus.source} has none"
    if run.benchmarks.questioned and not run.model.causal:
        asked = ", ".join(run.benchmarks.questioned)
        return f"{asked} ask how likely a text is, which only a causal model says; GLUE's tasks take any"
    return None


def explain_uncontrollable(run: RunSpec) -> str | None:
    """Why the run's logit control does not go with its attention."""
    reasons = (why_uncontrollable(spec, run.logit_control.method) for spec in run.model.pattern)
    return next(filter(None, reasons), None)


def why_uncontrollable(attention: AttentionSpec, method: str) -> str | None:
    if method in ("quack", "qk-clip") and attention.sets_lengths:
        what = f"attention.norm={attention.norm!r}" if attention.norm != "none" else attention.name
        return f"{what} already decides how large logits are"
    if method == "qk-clip" and attention.coupling is not None and attention.latent is None:
        if attention.coupling.kind != "linear":
            return "under a coupling that is not linear, smaller W_q and W_k do not shrink logits in proportion"
        if attention.key_is_value:
            return "under a linear coupling the keys would have to shrink, which are also the values"
    return None


def count_token_ids(corpus: DataSpec) -> int:
    """How many ids the corpus's tokenizer has at most."""
    if (task := parse_task(corpus.source)) is not None:
        return len(task.alphabet) + 1
    kind = corpus.tokenizer.split(":")[0]
    return {"bytes": 257, "gpt2": 50_257}.get(kind, corpus.vocab)


def pad_vocab(vocab: int) -> int:
    """The next multiple of 64, which matrix units like."""
    return -(-vocab // 64) * 64
