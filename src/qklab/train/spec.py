"""RunSpec: everything that decides what a run computes, and ExecutionSpec: how this machine carries it out."""

import hashlib
import json
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

from qklab.attention.spec import AttentionSpec
from qklab.data.order import PACKINGS
from qklab.data.shards import MANIFEST, Corpus
from qklab.data.spec import DataSpec
from qklab.model.decoder import RECOMPUTE, Recompute
from qklab.model.recipes import recipe
from qklab.model.spec import DecoderSpec
from qklab.optim.spec import LogitControlSpec, OptimiserSpec, ScheduleSpec
from qklab.runs.directory import RunError
from qklab.runs.sinks import SINKS
from qklab.schema import (
    Rule,
    Spec,
    SpecError,
    checked_field,
    choice_field,
    format_value,
    integer_field,
    number_field,
    spec_field,
    suggest_name,
)

DEFAULT_TOKENS = 4_000_000
Made = TypeVar("Made")


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
    """Validation `times` times over the run on about `tokens` tokens, the same for every model, and at the end on the
    whole of validation and test. Probes `probes` times, by default once every 80 steps but at most 10 times, which
    keeps their cost under 2 %; on `probe_rows` validation windows cut to `probe_tokens`."""

    times: int = integer_field(10, at_least=0)
    tokens: int = integer_field(16_384)
    probes: int | None = integer_field(None, at_least=0)
    probe_rows: int = integer_field(2)
    probe_tokens: int = integer_field(256)


def sink_names(value: Any) -> Any:
    for name in [] if value is None else value.split(",") if isinstance(value, str) else [value]:
        if not isinstance(name, str) or name.strip() not in SINKS:
            raise ValueError(f"must be names among {', '.join(SINKS)}, separated by commas{suggest_name(name, SINKS)}")
    return value


@dataclass(frozen=True, kw_only=True)
class ExecutionSpec(Spec):
    """How to run, without changing what is computed beyond rounding; may differ when a run is resumed.

    `device` auto: a GPU if there is one. `compile` auto: on a GPU. `rows`: windows per forward pass and rank, by
    default all of the rank's. `recompute`: what backward passes compute again instead of keeping it (see
    `Decoder.recompute`). `parallel`: how several ranks share the model. `threads`: by default the machine's cores
    shared by its ranks. A checkpoint is due every `checkpoint_minutes`, or every `checkpoint_steps` if given, at every
    evaluation that is the best so far, and at the end; the last `keep` and the best stay.
    """

    device: Literal["auto", "cpu", "cuda"] = choice_field("auto", ("auto", "cpu", "cuda"))
    compile: Literal["auto", "yes", "no"] = choice_field("auto", ("auto", "yes", "no"))
    rows: int = integer_field(None)
    recompute: Recompute = choice_field("none", RECOMPUTE)
    parallel: Literal["ddp", "fsdp"] = choice_field("ddp", ("ddp", "fsdp"))
    threads: int = integer_field(None)
    checkpoint_minutes: float = number_field(5.0, above=0.0)
    checkpoint_steps: int = integer_field(None)
    keep: int = integer_field(2)
    sinks: str = checked_field(sink_names, None)


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
    precision: Literal["auto", "fp32", "bf16"] = choice_field("auto", ("auto", "fp32", "bf16"))
    z_loss: float = number_field(0.0, at_least=0.0)
    max_skips: int = integer_field(10, at_least=0)

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "model",
            lambda s: not s.model.causal,
            lambda s: "a language model that predicts the next token must not see it: attention.causal must be True",
            lambda s: {"model": s.model.replace(attention=[a.replace(causal=True) for a in s.model.pattern])},
        ),
        Rule(
            "model",
            lambda s: s.model.vocab < token_ids(s.corpus),
            lambda s: f"the tokenizer has {token_ids(s.corpus)} tokens and the model vocab={s.model.vocab}",
            lambda s: {"model": s.model.replace(vocab=padded(token_ids(s.corpus)))},
        ),
        Rule(
            "logit_control",
            lambda s: uncontrollable(s) is not None,
            lambda s: f"method={s.logit_control.method!r} cannot act: {uncontrollable(s)}",
            lambda s: {"logit_control": LogitControlSpec(method="none")},
        ),
    )

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
    def fingerprint(self) -> str:
        """SHA-256 of the spec in canonical JSON."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()


def uncontrollable(run: RunSpec) -> str | None:
    """Why the run's logit control does not go with its attention."""
    reasons = (why_uncontrollable(spec, run.logit_control.method) for spec in run.model.pattern)
    return next(filter(None, reasons), None)


def why_uncontrollable(attention: AttentionSpec, method: str) -> str | None:
    if method in ("quack", "qk-clip") and attention.norm == "qk":
        return "attention.norm='qk' already decides how large logits are"
    if method == "qk-clip" and attention.coupling is not None:
        if attention.coupling.kind != "linear":
            return "under a coupling that is not linear, smaller W_q and W_k do not shrink logits in proportion"
        if attention.key_is_value:
            return "under a linear coupling the keys would have to shrink, which are also the values"
    return None


def token_ids(corpus: DataSpec) -> int:
    """How many ids the corpus's tokenizer has at most."""
    kind = corpus.tokenizer.split(":")[0]
    return {"bytes": 257, "gpt2": 50_257}.get(kind, corpus.vocab)


def padded(vocab: int) -> int:
    """The next multiple of 64, which matrix units like."""
    return -(-vocab // 64) * 64


MODEL_KEYS = ("recipe", *(name for name in DecoderSpec.__dataclass_fields__ if name != "attention"))


def resolve(values: Mapping[str, Any]) -> tuple[RunSpec, ExecutionSpec]:
    """A run from plain values: RunSpec's fields, with `model` as a recipe's name and changes to it, `attention` as
    changes to its attention, and `execution`."""
    values = dict(values)
    execution = within("execution", lambda: ExecutionSpec.from_dict(table(values, "execution")))
    model, attention = dict(table(values, "model")), dict(table(values, "attention"))
    for name in model:
        if name == "attention":
            raise SpecError("attention is a table of its own: write [attention], not [model.attention].", name)
        if name not in MODEL_KEYS:
            DecoderSpec.refuse_unknown([name])
    values["corpus"] = corpus = within("corpus", lambda: DataSpec.from_dict(adopted(table(values, "corpus"))))
    spec = within("model", lambda: model_spec(model, attention, padded(token_ids(corpus))))
    RunSpec.refuse_unknown(values)
    return RunSpec.from_dict(values | {"model": spec}), execution


def within(name: str, make: Callable[[], Made]) -> Made:
    """What `make` gives; an error about a field says in which table."""
    try:
        return make()
    except SpecError as error:
        if error.field.split(".")[0] in (name, "attention"):
            raise
        raise SpecError(f"{name}: {error}", f"{name}.{error.field}", error.nearest) from None


def adopted(corpus: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a corpus; those of one that is already prepared are its own, and others are refused."""
    source = corpus.get("source")
    if not isinstance(source, str) or not (Path(source) / MANIFEST).is_file():
        return dict(corpus)
    own = {name: value for name, value in Corpus.open(source).manifest["spec"].items() if name != "source"}
    for name, value in corpus.items():
        if name in own and own[name] != value and not (name == "vocab" and own["tokenizer"] != "bpe"):
            raise SpecError(
                f"{source} was prepared with {name}={format_value(own[name])}, but {format_value(value)} came; leave "
                "the setting out or prepare another.",
                name,
            )
    return own | {"source": source}


def table(values: dict[str, Any], name: str) -> Mapping[str, Any]:
    found = values.pop(name, {})
    if not isinstance(found, Mapping):
        raise SpecError(f"{name} must be a table of settings, but {format_value(found)} came.", name)
    return found


def model_spec(model: dict[str, Any], attention: dict[str, Any], vocab: int) -> DecoderSpec:
    """The recipe's model with these changes; its vocabulary is the tokenizer's unless given."""
    base = recipe(model.pop("recipe", "nano")).to_dict()
    if isinstance(coupling := attention.get("coupling"), Mapping):
        if "kind" not in coupling:
            raise SpecError("attention.coupling needs its kind, e.g. leapfrog.", "attention.coupling.kind")
        if coupling["kind"] == "none":
            attention = attention | {"coupling": None}
    if isinstance(width := model.get("width"), int):  # anything else is refused below
        attention = {"width": width, "heads": max(1, width // base["attention"]["head_width"])} | attention
    mixer = {key: value for key, value in base["attention"].items() if key not in derived(attention)}
    changed = base | {"vocab": vocab} | model | {"attention": mixer | attention}
    return DecoderSpec.from_dict(changed)


def derived(attention: Mapping[str, Any]) -> set[str]:
    """Attention fields that follow from others and so must follow again when any of those change."""
    return {"kv_heads", "head_width"} - attention.keys() if attention else set()


def read_toml(path: Path) -> dict[str, Any]:
    """The values of a run's TOML file."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RunError(f"there is no run file {path}.") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise RunError(f"{path} cannot be read as TOML: {error}.") from None


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with `changes` laid over it, table by table."""
    result = dict(base)
    for name, value in changes.items():
        both = isinstance(value, Mapping) and isinstance(result.get(name), Mapping)
        result[name] = merged(result[name], value) if both else value
    return result
