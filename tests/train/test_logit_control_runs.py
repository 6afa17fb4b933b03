"""Logit control in whole runs: from the command line to checkpoints and probes, interrupted, resumed, on ranks."""

import json
import math
import os
import re
import signal
import socket
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_distributed import rank_of
from test_interruption import comparable
from tiny import Settings
from torch import Tensor

from qklab.cli import main
from qklab.data.shards import Corpus
from qklab.optim import LogitControlSpec
from qklab.runs import MetricsFile, RunDirectory
from qklab.train.checkpoint import Checkpoints
from qklab.train.launch import train
from qklab.train.load import load_model
from qklab.train.loop import Loop
from qklab.train.machine import Machine
from qklab.train.spec import ExecutionSpec, RunSpec
from qklab.train.trainer import Trainer

LATENT = {"heads": 2, "latent": {"query_rank": 12, "kv_rank": 8, "rope_width": 4}}
# a threshold that logits of a new model pass, and a learning rate at which norms move
METHODS: dict[str, dict[str, Any]] = {
    "quack": {"logit_control": {"tau": 1.0}},
    "spectral": {"logit_control": {"tau": 0.5, "norm": "spectral"}},
    "quack for mla": {"logit_control": {"tau": 1.0}, "attention": LATENT},
    "fixed": {"logit_control": {"method": "fixed", "tau": 0.25}},
    "qk-clip": {"logit_control": {"method": "qk-clip", "threshold": 0.02}},
}


def changed(name: str) -> dict[str, Any]:
    return {"optimiser": {"lr": 0.03}} | METHODS[name]


def probes(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(RunDirectory(folder).probes_path.iterdir())]


def saved(folder: Path, prefix: str = "optimiser.logit_control.") -> dict[str, Tensor]:
    last = sorted((folder / "checkpoints").glob("step-*"))[-1]
    tensors = {name: tensor for path in last.glob("*.safetensors") for name, tensor in load_file(path).items()}
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def resumptions(folder: Path) -> list[int]:
    """The steps at which a run was taken up again."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [record["step"] for record in records if record["kind"] == "resume"]


@pytest.mark.parametrize("name", METHODS)
def test_interrupted_and_resumed_is_bit_equal_and_factors_are_in_the_probes(
    name: str, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, execution = settings(**changed(name))
    whole = train(spec, tmp_path / "whole", execution)
    plain = Loop.stopping
    with monkeypatch.context() as patch:
        patch.setattr(Loop, "stopping", lambda self, request: plain(self, request) or self.state.step == 7)
        assert train(spec, tmp_path / "parted", execution).status == "interrupted"
    parted = train(spec, tmp_path / "parted", execution)
    assert (whole.status, parted.status) == ("finished", "finished")
    assert resumptions(tmp_path / "parted") == [7]
    assert comparable(tmp_path / "parted") == comparable(tmp_path / "whole")
    state = saved(tmp_path / "whole")
    parts = {"q", "k"} if "attention" not in METHODS[name] else {"dq", "uq", "dkv", "uk", "qr", "kr"}
    kinds = {"factors"} if name == "qk-clip" else {"factors", "initial"}
    assert state.keys() == {f"{k}.blocks.{i}.attention.{p}" for k in kinds for i in (0, 1) for p in parts}
    moved = [tensor.log().abs().amax() for key, tensor in state.items() if key.startswith("factors.")]
    assert (max(moved) > 0.01) == (name != "fixed"), "without an effect this would prove nothing"
    shown = probes(tmp_path / "parted")[-1]
    assert shown["step"] == 12
    assert shown["factors"].keys() == {"blocks.0.attention", "blocks.1.attention"}
    for layer, found in shown["factors"].items():
        assert found.keys() == parts
        for symbol, values in found.items():
            assert values == [float(f"{value:.6g}") for value in state[f"factors.{layer}.{symbol}"].tolist()]
            assert len(values) == (1 if symbol in ("dq", "dkv", "kr") else 2)


def test_a_run_that_began_before_the_setting_existed_goes_on(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, execution = settings()
    plain = Loop.stopping
    with monkeypatch.context() as patch:
        patch.setattr(Loop, "stopping", lambda self, request: plain(self, request) or self.state.step == 7)
        assert train(spec, tmp_path / "run", execution).status == "interrupted"
    path = tmp_path / "run" / "run.json"
    record = json.loads(path.read_text())
    assert record["spec"].pop("logit_control")["method"] == "none"
    path.write_text(json.dumps(record))
    assert train(spec, tmp_path / "run", execution).status == "finished"
    assert resumptions(tmp_path / "run") == [7]


def test_a_checkpoints_initial_norms_replace_those_of_the_new_model(settings: Settings, tmp_path: Path) -> None:
    spec, execution = settings(**changed("quack"))
    train(spec, tmp_path / "run", execution)
    other = spec.replace(seed=9, precision="fp32")
    trainer = Trainer(other, execution, Corpus.open(spec.corpus.source), Machine.open(execution))
    own = {name: tensor.clone() for name, tensor in trainer.optimiser.tensors().items()}
    found = Checkpoints(tmp_path / "run" / "checkpoints").find_newest()
    assert found is not None
    trainer.restore(found)
    for name, tensor in saved(tmp_path / "run").items():
        assert torch.equal(trainer.optimiser.tensors()[f"logit_control.{name}"], tensor)
        assert not torch.equal(own[f"logit_control.{name}"], tensor)


def test_without_control_there_are_no_factors(settings: Settings, tmp_path: Path) -> None:
    spec, execution = settings()
    train(spec, tmp_path / "run", execution)
    assert all("factors" not in record for record in probes(tmp_path / "run"))
    assert not saved(tmp_path / "run")


def weights(folder: Path) -> list[Tensor]:
    return [parameter.detach() for parameter in load_model(folder)[0].parameters()]


def test_methods_train_differently_and_none_is_the_bare_optimiser(settings: Settings, tmp_path: Path) -> None:
    results = {}
    variants = {name: METHODS[name] for name in ("quack", "fixed", "qk-clip")}
    variants |= {"default": {}, "none": {"logit_control": {"method": "none"}}}
    variants["fixed at 1"] = {"logit_control": {"method": "fixed", "tau": 1.0}}
    for name, change in variants.items():
        spec, execution = settings(optimiser={"lr": 0.03}, budget={"tokens": 8 * 48 * 4}, **change)
        train(spec, tmp_path / name, execution)
        results[name] = weights(tmp_path / name)
    for name, result in results.items():
        equal = all(torch.equal(a, b) for a, b in zip(result, results["default"], strict=True))
        assert equal == (name in ("default", "none", "fixed at 1"))


def test_only_training_passes_count_for_qk_clip(settings: Settings, tmp_path: Path) -> None:
    """Evaluations and probes see other text, whose logits must not clip anything."""
    for name, evaluation in {"many": {"times": 12, "probes": 12}, "none": {"times": 0, "probes": 0}}.items():
        spec, execution = settings(evaluation=evaluation, **changed("qk-clip"))
        train(spec, tmp_path / name, execution)
    for a, b in zip(weights(tmp_path / "many"), weights(tmp_path / "none"), strict=True):
        assert torch.equal(a, b)


def test_what_a_skipped_step_saw_is_forgotten_by_qk_clip(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a run stopped right after it continues as one that never stopped."""
    spec, execution = settings(**changed("qk-clip"))
    plain_shared, plain_stopping = Trainer.shared, Loop.stopping

    def shared(self: Trainer, nats: Tensor, norm: Tensor) -> Tensor:
        return plain_shared(self, nats * math.nan if self.state.step == 6 else nats, norm)

    monkeypatch.setattr(Trainer, "shared", shared)
    train(spec, tmp_path / "whole", execution)
    with monkeypatch.context() as patch:
        patch.setattr(Loop, "stopping", lambda self, request: plain_stopping(self, request) or self.state.step == 7)
        train(spec, tmp_path / "parted", execution)
    train(spec, tmp_path / "parted", execution)
    assert [r["step"] for r in RunDirectory(tmp_path / "whole").metrics("train") if r.get("skipped")] == [7]
    for a, b in zip(weights(tmp_path / "whole"), weights(tmp_path / "parted"), strict=True):
        assert torch.equal(a, b)


Together = Callable[..., None]


@pytest.fixture
def together(spawn: Callable[..., Any]) -> Together:
    """Train on `world` gloo ranks; with `stop` only up to that step."""

    def run(world: int, spec: RunSpec, execution: ExecutionSpec, folder: Path, stop: int = 0) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        ranks = [spawn(rank_of, rank, world, port, spec, execution, folder, stop) for rank in range(world)]
        for process in ranks:
            process.join()
        assert [process.exitcode for process in ranks] == [0] * world

    return run


@pytest.mark.parametrize(("name", "then"), [("quack for mla", "fsdp"), ("qk-clip", "ddp")])
def test_a_sharded_run_saves_and_continues(
    name: str, then: str, together: Together, settings: Settings, tmp_path: Path
) -> None:
    spec, execution = settings(**changed(name))
    train(spec, tmp_path / "alone", execution)
    together(2, spec, execution.replace(parallel="fsdp"), tmp_path / "ranks", 5)
    together(2, spec, execution.replace(parallel=then), tmp_path / "ranks")
    assert resumptions(tmp_path / "ranks") == [5]
    alone, ranks = (
        {f"{layer}.{symbol}": values for layer, parts in factors.items() for symbol, values in parts.items()}
        for factors in (probes(tmp_path / folder)[-1]["factors"] for folder in ("alone", "ranks"))
    )
    assert alone.keys() == ranks.keys()
    for key, values in alone.items():
        # losses of such runs agree within 2e-5 (test_distributed.py) and weights within 1e-4 of steps of 0.03
        assert ranks[key] == pytest.approx(values, rel=1e-3), key
    for a, b in zip(weights(tmp_path / "ranks"), weights(tmp_path / "alone"), strict=True):
        assert (a - b).abs().max() < 1e-3


def muon(spec: RunSpec, execution: ExecutionSpec, folder: Path) -> None:
    """One run without a stop and one with, where the processor's own bf16 instructions are not used."""
    os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE"
    train(spec, folder / "whole", execution)
    plain = Loop.stopping
    Loop.stopping = lambda self, request: plain(self, request) or self.state.step == 5  # pyright: ignore[reportAttributeAccessIssue]
    train(spec, folder / "parted", execution)
    Loop.stopping = plain
    train(spec, folder / "parted", execution)


def test_muon_under_control_trains_and_resumes_bit_equal(
    spawn: Callable[..., Any], settings: Settings, tmp_path: Path
) -> None:
    spec, execution = settings(optimiser={"kind": "muon", "lr": 0.03}, logit_control={"tau": 0.5})
    process = spawn(muon, spec, execution, tmp_path)
    process.join()
    assert process.exitcode == 0
    assert resumptions(tmp_path / "parted") == [5]
    assert comparable(tmp_path / "parted") == comparable(tmp_path / "whole")
    factors = [tensor for name, tensor in saved(tmp_path / "whole").items() if name.startswith("factors.")]
    assert all(tensor.log().abs().amax() > 1e-3 for tensor in factors)


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return int(stop.value.code or 0), out, err


@pytest.fixture
def file(corpus_folder: Path, tmp_path: Path) -> Path:
    """A run file of four small steps."""
    path = tmp_path / "run.toml"
    path.write_text(
        f"""
        corpus = {{ source = {json.dumps(str(corpus_folder))}, tokenizer = "bytes" }}
        model = {{ layers = 1, width = 32, context = 48, mlp_ratio = 2.0 }}
        attention = {{ heads = 2 }}
        batch = {{ sequences = 4 }}
        budget = {{ tokens = {4 * 4 * 48} }}
        evaluation = {{ times = 1, tokens = 240, probes = 1 }}
        execution = {{ device = "cpu", threads = 1 }}
        """,
        encoding="utf-8",
    )
    return path


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        ("", {"method": "none", "tau": None, "norm": "frobenius", "threshold": None}),
        ("--logit-control.tau 1", {"method": "quack", "tau": 1.0, "norm": "frobenius", "threshold": None}),
        ("--logit-control.norm spectral --logit-control.tau 2", {"method": "quack", "tau": 2.0, "norm": "spectral"}),
        ("--logit-control.method fixed", {"method": "fixed", "tau": 1.0, "threshold": None}),
        ("--logit-control.method qk-clip", {"method": "qk-clip", "tau": None, "threshold": 100.0}),
        (
            "--logit-control.method qk-clip --logit-control.threshold 30",
            {"method": "qk-clip", "tau": None, "threshold": 30.0},
        ),
        ("--logit-control.method fixed --attention.norm qk", {"method": "fixed", "tau": 1.0}),
    ],
)
def test_the_command_line_chooses_the_method(
    flags: str, wanted: dict[str, Any], file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, "train", file, *flags.split(), "--out", tmp_path / "run", "--quiet")
    assert code == 0, err
    assert "finished after 4 steps" in out
    spec = RunDirectory(tmp_path / "run").read()["spec"]["logit_control"]
    assert {name: spec[name] for name in wanted} == wanted
    assert bool(saved(tmp_path / "run")) == (wanted["method"] != "none")
    code, _, err = run(capsys, "train", *flags.split(), "--out", tmp_path / "run")  # the directory knows the rest
    assert (code, "already finished" in err) == (0, True)


def test_the_file_chooses_the_method_and_flags_lie_over_it(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with file.open("a") as end:
        end.write('logit_control = { method = "quack", tau = 0.5 }\n')
    assert tomllib.loads(file.read_text())["logit_control"]["tau"] == 0.5
    for flags, tau in (([], 0.5), (["--logit-control.tau", "0.2"], 0.2)):
        folder = tmp_path / f"run-{tau}"
        assert run(capsys, "train", file, *flags, "--out", folder, "--quiet")[0] == 0
        assert RunDirectory(folder).read()["spec"]["logit_control"] == LogitControlSpec(tau=tau).to_dict()
    code, _, err = run(capsys, "train", file, "--logit-control.tau", "0.3", "--out", tmp_path / "run-0.5")
    assert code == 2
    assert "holds a run with logit_control.tau=0.5, but 0.3 came" in err


def test_an_interrupted_command_continues_under_control(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = MetricsFile.append

    def append(self: MetricsFile, record: dict[str, Any]) -> None:
        plain(self, record)
        if record["kind"] == "train" and record["step"] == 2:
            signal.raise_signal(signal.SIGINT)

    command = ["train", file, "--logit-control.tau", "1", "--optimiser.lr", "0.03"]
    with monkeypatch.context() as patch:
        patch.setattr(MetricsFile, "append", append)
        assert run(capsys, *command, "--out", tmp_path / "parted")[0] == 75
    assert run(capsys, *command, "--out", tmp_path / "parted")[0] == 0
    assert run(capsys, *command, "--out", tmp_path / "whole")[0] == 0
    ours, theirs = (saved(tmp_path / name, "") for name in ("parted", "whole"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--logit-control.tau 1 --attention.norm qk", r"method='quack' cannot act: attention\.norm='qk' already"),
        ("--logit-control.method qk-clip --attention.norm qk", r"method='qk-clip' cannot act: attention\.norm='qk'"),
        (
            "--logit-control.method qk-clip --attention.coupling.kind leapfrog",
            "'qk-clip' cannot act: under a coupling that is not linear",
        ),
        (
            "--logit-control.method qk-clip --attention.coupling.kind linear --attention.share k=v",
            "'qk-clip' cannot act: under a linear coupling the keys would have to shrink",
        ),
        ("--logit-control.tau 0", r"tau must be a finite number above 0, but 0\.0 came"),
        ("--logit-control.tau -1", r"tau must be a finite number above 0, but -1\.0 came"),
        ("--logit-control.tau nan", "tau must be a finite number above 0, but nan came"),
        ("--logit-control.method qk-clip --logit-control.tau 1", "method='qk-clip' has no τ"),
        ("--logit-control.method none --logit-control.tau 1", "method='none' has no τ"),
        ("--logit-control.tau 1 --logit-control.threshold 50", "method='quack' has no threshold, only qk-clip has"),
        ("--logit-control.norm spectral", "method='none' measures no norm, only quack does"),
        ("--logit-control.method qk-clip --logit-control.threshold 0", "threshold must be a finite number above 0"),
    ],
)
def test_bad_input_ends_in_one_sentence(
    flags: str, sentence: str, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, "train", file, *flags.split(), "--out", tmp_path / "run")
    assert (code, out) == (2, "")
    assert err.startswith("qklab: ")
    assert err.count("\n") == 1
    assert re.search(sentence, err), err
    assert "Traceback" not in err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        ("logit_control = { tua = 1 }", r"no field 'tua' \(did you mean 'tau'\?\)"),
        ('logit_control = { method = "quak" }', r"must be one of .*\(did you mean 'quack'\?\)"),
        ('logit_control = { tau = 1, norm = "spektral" }', r"did you mean 'spectral'"),
        ('logit_control = { tau = "1" }', r"tau must be a finite number above 0, but '1' came"),
        ("logit_control = 1", "logit_control must be .*, but 1 came"),
        ("logit_controll = { tau = 1 }", "did you mean 'logit_control'"),
    ],
)
def test_a_mistyped_table_is_answered_with_what_was_meant(
    table: str, sentence: str, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with file.open("a") as end:
        end.write(table + "\n")
    code, out, err = run(capsys, "train", file, "--out", tmp_path / "run")
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert re.search(sentence, err), err


def test_a_mistyped_flag_comes_with_a_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "train", "--logit-controll.tau", "1")
    assert code == 2
    assert "--logit-control.tau" in err
