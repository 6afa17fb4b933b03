"""One run from settings to summary: what it records, how it ends, what it refuses."""

import functools
import json
import math
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import Settings, comparable, losses, train_in_two, train_until

from qklab.data import DataSpec, prepare_corpus
from qklab.model.decoder import Decoder
from qklab.runs import RunDirectory, RunError
from qklab.runs.progress import format_duration
from qklab.schema import SpecError
from qklab.testing.processes import finish_process, start_process
from qklab.train.evaluate import estimate_error
from qklab.train.launch import describe_outcome, train
from qklab.train.load import load_model
from qklab.train.loop import Loop
from qklab.train.objective import Objective
from qklab.train.resume import resolve_request
from qklab.train.settings import resolve_run
from qklab.train.spec import ExecutionSpec, RunSpec
from qklab.train.summary import measure_unigram_loss
from qklab.train.trainer import State, Trainer, build_compiled


def test_a_run_leaves_everything_it_promises(settings: Settings, tiny_run: Path) -> None:
    spec, execution = settings()
    outcome = train(spec, tiny_run, execution)
    directory = RunDirectory(tiny_run)
    record, summary = directory.read(), directory.summary()
    assert summary is not None
    assert outcome.summary == summary
    assert record["spec"] == spec.replace(precision="fp32").to_dict()
    assert record["fingerprint"] == spec.replace(precision="fp32").fingerprint
    assert len(record["data"]["hash"]) == 64
    assert torch.__version__.startswith(record["environment"]["packages"]["torch"].split("+")[0])
    steps = directory.metrics("train")
    assert [r["step"] for r in steps] == list(range(1, 13))
    assert [r["tokens"] for r in steps] == [384 * step for step in range(1, 13)]
    assert steps[-1]["lr"] == pytest.approx(3e-4)
    assert [r["step"] for r in directory.metrics("evaluation")] == [4, 8, 12]
    assert sorted(p.name for p in directory.probes_path.iterdir()) == ["step-0000000006.json", "step-0000000012.json"]
    probe = json.loads((directory.probes_path / "step-0000000012.json").read_text())
    assert len(probe["layers"]["entropy"]) == 2
    assert summary["status"] == "finished"
    assert summary["parameters"] == spec.model.parameters()
    assert summary["training_flops"] == 12 * 3 * 384 * spec.model.flops_per_token()
    assert set(summary["evaluation"]) == {"valid", "test"}
    assert summary["best"]["validation_loss"] == min(r["loss"] for r in directory.metrics("evaluation"))
    assert "bits per byte" in describe_outcome(outcome)


def test_the_best_is_where_validation_was_lowest_not_last(settings: Settings, tmp_path: Path) -> None:
    spec, execution = settings(optimiser={"lr": 3.0}, schedule={"warmup": 1.0}, evaluation={"times": 12})
    summary = train(spec, tmp_path / "run", execution).summary
    found = {r["step"]: r["loss"] for r in RunDirectory(tmp_path / "run").metrics("evaluation")}
    best = min(found, key=found.__getitem__)
    assert best < max(found)
    assert summary is not None
    assert summary["best"] == {"step": best, "validation_loss": found[best]}


def test_perplexity_and_bits_per_byte_are_those_of_the_whole_split(settings: Settings, tmp_path: Path) -> None:
    """Against one forward pass per document, by hand."""
    spec, execution = settings(model={"context": 2048}, batch={"sequences": 1}, budget={"tokens": 3 * 2048})
    summary = train(spec, tmp_path / "run", execution).summary
    assert summary is not None
    model, tokenizer = load_model(tmp_path / "run")
    corpus = prepare_corpus(spec.corpus)
    split = corpus.splits["valid"]
    nats, tokens = 0.0, 0
    with torch.no_grad():
        for start, stop in zip(split.starts[:-1], split.starts[1:], strict=True):
            ids = torch.tensor([[*split.read(int(start), int(stop)).tolist(), tokenizer.eot]])
            logits = model.double()(ids[:, :-1])
            nats += float(torch.nn.functional.cross_entropy(logits[0], ids[0, 1:], reduction="sum"))
            tokens += ids.shape[1] - 1
    result = summary["evaluation"]["valid"]
    assert split.tokens < 2048, "the split must fit one window for this comparison"
    assert result["tokens"] == tokens
    assert result["bytes"] == split.bytes
    assert result["loss"] == pytest.approx(nats / tokens, rel=1e-5)
    assert result["perplexity"] == pytest.approx(math.exp(nats / tokens), rel=1e-4)
    assert result["bits_per_byte"] == pytest.approx(nats / math.log(2) / split.bytes, rel=1e-5)


@pytest.mark.parametrize(("asked", "tokens"), [({}, 32_768), ({"final_tokens": 96}, 96), ({"final_tokens": 0}, None)])
def test_how_much_the_final_evaluation_reads(settings: Settings, asked: dict[str, int], tokens: int | None) -> None:
    assert settings(evaluation=asked)[0].final_tokens == tokens
    long = settings(evaluation=asked, budget={"tokens": 8 * 384 * 1000})[0].final_tokens
    assert long == (tokens if asked else 384 * 1000)
    by_clock = settings(evaluation=asked, budget={"tokens": None, "seconds": 60.0})[0].final_tokens
    assert by_clock == (tokens if asked else 60 * 2048)


def test_the_sampled_evaluation_states_its_error_and_goes_on_where_it_was_stopped(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = {"evaluation": {"final_tokens": 480, "times": 0}, "execution": {"rows": 2}}
    seen: list[str] = []
    plain = Objective.forward

    def forward(self: Objective, *arguments: Any, per_token: bool = False, **options: Any) -> Any:
        if per_token:
            seen.append("batch")
            if len(seen) == 3 and not (tmp_path / "stopped" / "evaluating.json").exists():
                signal.raise_signal(signal.SIGTERM)
        return plain(self, *arguments, per_token=per_token, **options)

    spec, execution = settings(**changed)
    whole = train(spec, tmp_path / "whole", execution).summary
    monkeypatch.setattr(Objective, "forward", forward)
    assert train(spec, tmp_path / "stopped", execution).status == "interrupted"
    assert len(seen) == 3
    resumed = train(spec, tmp_path / "stopped", execution).summary
    assert resumed is not None
    assert whole is not None
    assert resumed["evaluation"] == whole["evaluation"]  # to the bit
    test, windows = resumed["evaluation"]["test"], 480 // 48
    assert len(seen) == 2 * windows // 2  # each window once
    assert 432 < test["tokens"] <= 480 < test["split_tokens"]
    assert 0.001 < test["standard_error"] < 1
    several = [1.0, 2.0, 4.0]
    expected = math.sqrt(torch.tensor(several).var().item() / 3 * (1 - 3 / 6))
    assert estimate_error(7.0, 21.0, 3, 6) == pytest.approx(expected)
    assert not (tmp_path / "stopped" / "evaluating.json").exists()


def test_the_unigram_loss_is_the_cross_entropy_of_the_training_frequencies(corpus_folder: Path) -> None:
    corpus = prepare_corpus(DataSpec(source=str(corpus_folder)))
    train_ids = corpus.splits["train"].read(0, corpus.splits["train"].tokens).tolist()
    valid_ids = corpus.splits["valid"].read(0, corpus.splits["valid"].tokens).tolist()
    total = len(train_ids) + corpus.tokenizer.vocab
    expected = -sum(math.log((train_ids.count(t) + 1) / total) for t in valid_ids) / len(valid_ids)
    assert measure_unigram_loss(corpus, "valid") == pytest.approx(expected, rel=1e-12)


def test_a_duration_is_told_in_its_two_largest_units() -> None:
    assert [format_duration(s) for s in (0.2, 42, 200, 18_420)] == ["0 s", "42 s", "3 min 20 s", "5 h 7 min"]


def test_the_time_left_is_that_of_the_steps_left_or_of_the_budget(settings: Settings) -> None:
    loop = Loop.__new__(Loop)
    members: Any = [None, None]
    loop.members, loop.state = members, State(step=4, seconds=6.0, timed_steps=3)
    loop.spec, _ = settings()
    assert loop.spec.steps == 12
    assert loop.estimate_seconds_left() == 8 * 2 * 6.0 / 3
    loop.spec, _ = settings(budget={"tokens": None, "seconds": 10.0})
    assert loop.estimate_seconds_left() == 4.0
    loop.state.timed_steps = 0
    assert loop.estimate_seconds_left() is None


def test_budgets_in_flops_and_seconds(settings: Settings, tmp_path: Path) -> None:
    spec, _ = settings()
    flops = spec.flops_per_step * 4.5
    by_flops, execution = settings(budget={"tokens": None, "flops": flops})
    assert train(by_flops, tmp_path / "flops", execution).summary["steps"] == 5  # pyright: ignore[reportOptionalSubscript]
    by_seconds, execution = settings(budget={"tokens": None, "seconds": 1.5})
    summary = train(by_seconds, tmp_path / "seconds", execution).summary
    assert summary is not None
    assert 1.5 <= summary["seconds"] < 30
    assert len(RunDirectory(tmp_path / "seconds").metrics("evaluation")) == 3
    lr = [record["lr"] for record in RunDirectory(tmp_path / "seconds").metrics("train")]
    assert len(lr) < 20 or lr[-1] < 0.5 * max(lr)  # a machine that manages few steps sees little of the schedule


@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_steps_that_are_not_finite_are_skipped_and_then_end_the_run(
    what: str, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, execution = settings(max_skips=2)
    plain, before = Trainer.average_over_ranks, {}

    def broken(bad: set[int]) -> Callable[..., torch.Tensor]:
        def shared(self: Trainer, nats: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
            before[self.states[0].step + 1] = self.decoder.embed.weight.detach().clone()
            if self.states[0].step + 1 in bad:
                nats, norm = (nats * math.nan, norm) if what == "loss" else (nats, norm * math.inf)
            return plain(self, nats, norm)

        return shared

    monkeypatch.setattr(Trainer, "average_over_ranks", broken({3, 6}))
    outcome = train(spec, tmp_path / "some", execution)
    assert outcome.status == "finished"
    assert outcome.summary is not None
    assert outcome.summary["skipped_steps"] == 2
    records = RunDirectory(tmp_path / "some").metrics("train")
    assert [r["step"] for r in records if r.get("skipped")] == [3, 6]
    assert torch.equal(before[3], before[4])  # a skipped step changes nothing
    assert not torch.equal(before[4], before[5])

    monkeypatch.setattr(Trainer, "average_over_ranks", broken(set(range(3, 13))))
    outcome = train(spec, tmp_path / "all", execution)
    assert outcome.status == "diverged"
    summary = RunDirectory(tmp_path / "all").summary()
    assert summary is not None
    assert summary["status"] == "diverged"
    assert summary["steps"] == 5
    assert train(spec, tmp_path / "all", execution).status == "diverged"  # a result, not to be tried again


@pytest.mark.parametrize(
    "changes",
    [
        {"model": {"dropout": 0.2}},
        {"z_loss": 1e-2},
        {"batch": {"packing": "contiguous"}},
        {"optimiser": {"clip": 0.0}},
        {"attention": {"position": "learned"}},
        {"model": {"tied": False}},
    ],
    ids=str,
)
def test_options_train_and_resume_bit_equal(
    changes: dict[str, Any], settings: Settings, tiny_run: Path, tmp_path: Path
) -> None:
    spec, execution = settings(**changes)
    train(spec, tmp_path / "whole", execution)
    train_in_two(7, spec, execution, tmp_path / "parts")
    assert comparable(tmp_path / "parts") == comparable(tmp_path / "whole")
    assert losses(tmp_path / "whole") != losses(tiny_run)  # the option does something


def test_recomputing_changes_nothing_and_may_change_when_a_run_resumes(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked_for: list[str] = []
    plain = Decoder.recompute
    monkeypatch.setattr(Decoder, "recompute", lambda self, what: asked_for.append(what) or plain(self, what))
    spec, execution = settings(model={"dropout": 0.2}, attention={"coupling": {"kind": "leapfrog"}})
    train(spec, tmp_path / "kept", execution)
    train_until(7, spec, execution.replace(recompute="coupling"), tmp_path / "recomputed")
    train(spec, tmp_path / "recomputed", execution.replace(recompute="layers"))
    assert losses(tmp_path / "recomputed") == losses(tmp_path / "kept")
    assert asked_for == ["none", "coupling", "layers"]


def test_compiled_training_follows_the_eager_one(
    settings: Settings, tiny_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without inductor, which has its own tests and takes ten times as long."""
    compiled, plain = [], functools.partial(torch.compile, backend="aot_eager")
    monkeypatch.setattr(torch, "compile", lambda *given, **options: compiled.append(given) or plain(*given, **options))
    train_until(None, *settings(execution={"compile": "yes"}), tmp_path / "compiled")
    assert losses(tmp_path / "compiled") == pytest.approx(losses(tiny_run), abs=2e-4)
    assert compiled


# ---- what is refused


def test_unknown_settings_are_refused_with_a_suggestion() -> None:
    for values, message in [
        ({"modell": {}}, r"did you mean 'model'"),
        ({"model": {"layer": 3}}, r"did you mean 'layers'"),
        ({"optimiser": {"weight_decey": 3}}, r"did you mean 'weight_decay'"),
        ({"execution": {"device": "gpu"}}, r"device must be one of 'auto', 'cpu', 'cuda'"),
        ({"corpus": 3}, "corpus must be a table of settings, but 3 came"),
        ({"budget": {"tokens": 10, "seconds": 1.0}}, "a budget is one of tokens, seconds and flops"),
        ({"corpus": {"source": "task:sort"}}, "a causal model cannot see: attention.causal must be False"),
        ({"corpus": {"source": "task:induction"}, "attention": {"causal": False}}, "must not see: .*must be True"),
        ({"corpus": {"source": "task:copy"}, "model": {"context": 128}}, r"sequences of 64.*model\.context=64"),
        ({"model": {"attention": {"share": "k=v"}}}, r"write \[attention\], not \[model\.attention\]"),
        ({"model": {"recipe": ["nano"]}}, "recipe must be one of"),
        ({"model": {"width": "128"}}, "width must be a whole number"),
        ({"attention": {"coupling": {"steps": 2}}}, "attention.coupling needs its kind"),
        ({"execution": {"sinks": "tensorbord"}}, r"execution: sinks must be .* \(did you mean 'tensorboard'\?\)"),
        ({"model": {"vocab": 100}, "corpus": {"tokenizer": "gpt2"}}, r"nearest legal: model\.vocab=50304"),
    ]:
        with pytest.raises(ValueError, match=message):
            resolve_run(values)


def test_a_run_directory_of_another_run_is_refused(settings: Settings, tiny_run: Path) -> None:
    spec, execution = settings()
    other, _ = settings(optimiser={"lr": 1e-3})
    with pytest.raises(
        RunError, match=r"holds a run with optimiser\.lr=0\.003, but 0\.001 came; choose another folder"
    ):
        train(other, tiny_run, execution)
    with pytest.raises(RunError, match=r"holds a run with model\.attention\.share='none', but 'k=v' came"):
        resolve_request({"attention": {"share": "k=v"}}, None, tiny_run)
    for values in ({"attention": {"coupling": {"kind": "leapfrog"}}}, {"model": {"recipe": "51m"}}):
        with pytest.raises(RunError, match=r"holds a run with model\."):
            resolve_request(values, None, tiny_run)
    same, _ = resolve_request({"optimiser": {"lr": 3e-3}}, None, tiny_run)
    assert same == spec.replace(precision="fp32")


def test_a_corpus_that_changed_under_a_run_is_refused(settings: Settings, tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.mkdir()
    for name in "abcdefgh":
        (text / f"{name}.txt").write_text(f"{name} sat on the mat. " * 60)
    changes = {"corpus": {"source": str(text), "valid": 0.2, "test": 0.1}, "budget": {"tokens": 8 * 48 * 2}}
    spec, execution = settings(**changes)
    assert train_until(1, spec, execution, tmp_path / "run") == "interrupted"
    (text / "a.txt").write_text("something else entirely. " * 60)
    with pytest.raises(RunError, match=r"the corpus changed under .*run: it began with"):
        train(spec, tmp_path / "run", execution)
    (text / "a.txt").write_text("a sat on the mat. " * 60)
    assert train(spec, tmp_path / "run", execution).status == "finished"


def test_another_tokenizer_is_refused(settings: Settings, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("\n<|endoftext|>\n".join(f"{word} and more of it, " * 40 for word in "abcdefghijklmnop"))
    prepared = [
        prepare_corpus(DataSpec(source=str(text), tokenizer=t, vocab=300, valid=0.2), out=tmp_path / t)
        for t in ("bytes", "bpe")
    ]
    spec, execution = settings(corpus={"source": str(tmp_path / "link")}, model={"vocab": 320})
    (tmp_path / "link").symlink_to(prepared[0].folder)
    small, _ = settings(corpus={"source": str(tmp_path / "link")}, model={"vocab": 257})
    train_until(1, spec, execution, tmp_path / "run")
    (tmp_path / "link").unlink()
    (tmp_path / "link").symlink_to(prepared[1].folder)
    with pytest.raises(RunError, match="was trained with another tokenizer"):
        train(spec, tmp_path / "run", execution)
    with pytest.raises(SpecError, match="was prepared with tokenizer='bpe', but 'bytes' came"):
        settings(corpus={"source": str(tmp_path / "link")})
    adopted, _ = resolve_run({"corpus": {"source": str(tmp_path / "link")}})
    assert adopted.corpus.tokenizer == "bpe"
    assert adopted.corpus.vocab == 300
    assert adopted.model.vocab == 320
    with pytest.raises(RunError, match=r"a tokenizer of \d+ tokens, but the model has vocab=257"):
        train(small, tmp_path / "other", execution)


def test_a_run_goes_on_without_its_source(settings: Settings, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("\n<|endoftext|>\n".join(f"{word} and more of it, " * 40 for word in "abcdefghijklmnop"))
    spec, execution = settings(corpus={"source": str(text), "valid": 0.2}, budget={"tokens": 8 * 48 * 3})
    assert train_until(1, spec, execution, tmp_path / "run") == "interrupted"
    text.unlink()
    assert train(spec, tmp_path / "run", execution).status == "finished"


def test_a_lost_record_is_refused_before_anything_is_written(settings: Settings, tmp_path: Path) -> None:
    train_until(1, *settings(), tmp_path / "run")
    (tmp_path / "run" / "run.json").unlink()
    with pytest.raises(RunError, match=r"what a run left but no run\.json"):
        train_until(None, *settings(), tmp_path / "run")
    assert not (tmp_path / "run" / "run.json").exists()


def test_two_processes_in_one_directory(settings: Settings, tmp_path: Path) -> None:
    spec, execution = settings()
    with RunDirectory(tmp_path / "run").lock(), pytest.raises(RunError, match="in use by another process"):
        train(spec, tmp_path / "run", execution)


def train_with_small_files(spec: RunSpec, execution: ExecutionSpec, folder: Path, size: int, message: Path) -> None:
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        train(spec, folder, execution)
    except ValueError as error:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        message.write_text(str(error))


@pytest.mark.parametrize("size", [0, 1500, 40_000])
def test_a_full_disk_is_one_sentence_and_loses_nothing(
    size: int, settings: Settings, tiny_run: Path, tmp_path: Path
) -> None:
    """Files may not grow past a limit: run.json, then metrics, then checkpoints cannot be written."""
    said = tmp_path / "said"
    process = start_process(train_with_small_files, *settings(), tmp_path / "run", size, said)
    assert finish_process(process) == 0
    assert "file too large" in said.read_text().lower()
    assert "\n" not in said.read_text()
    assert train_until(None, *settings(), tmp_path / "run") == "finished"
    assert comparable(tmp_path / "run") == comparable(tiny_run)


def test_a_second_run_of_a_shape_takes_over_what_was_compiled(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[Objective] = []
    monkeypatch.setattr(torch, "compile", lambda module, dynamic: compiled.append(module) or module)
    build_compiled.cache_clear()
    for seed in (0, 1):
        spec, execution = settings(seed=seed, execution={"compile": "yes"})
        train(spec, tmp_path / f"shared{seed}", execution)
    build_compiled.cache_clear()
    assert len(compiled) == 1
    spec, execution = settings(seed=1)
    train(spec, tmp_path / "alone", execution)
    assert comparable(tmp_path / "shared1") == comparable(tmp_path / "alone")
