"""Logit control in whole runs: from the command line to checkpoints and probes, interrupted, resumed, on ranks."""

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny import Command, Settings, comparable, losses, train_in_two, train_until
from torch import Tensor

from qklab.data.shards import Corpus
from qklab.runs import RunDirectory
from qklab.testing.processes import finish_process, run_on_ranks, start_process
from qklab.train.checkpoint import Checkpoints
from qklab.train.launch import train
from qklab.train.load import load_model
from qklab.train.machine import Machine
from qklab.train.settings import resolve_run
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


def change_run(name: str) -> dict[str, Any]:
    return {"optimiser": {"lr": 0.03}} | METHODS[name]


def read_probes(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(RunDirectory(folder).probes_path.iterdir())]


def read_control(folder: Path, prefix: str = "optimiser.logit_control.") -> dict[str, Tensor]:
    last = sorted((folder / "checkpoints").glob("step-*"))[-1]
    tensors = {name: tensor for path in last.glob("*.safetensors") for name, tensor in load_file(path).items()}
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


@pytest.mark.parametrize("name", METHODS)
def test_interrupted_and_resumed_is_bit_equal_and_factors_are_in_the_probes(
    name: str, settings: Settings, tmp_path: Path
) -> None:
    spec, execution = settings(**change_run(name))
    train(spec, tmp_path / "whole", execution)
    train_in_two(7, spec, execution, tmp_path / "parted")
    assert comparable(tmp_path / "parted") == comparable(tmp_path / "whole")
    state = read_control(tmp_path / "whole")
    parts = {"q", "k"} if "attention" not in METHODS[name] else {"dq", "uq", "dkv", "uk", "qr", "kr"}
    kinds = {"factors"} if name == "qk-clip" else {"factors", "initial"}
    assert state.keys() == {f"{k}.blocks.{i}.attention.{p}" for k in kinds for i in (0, 1) for p in parts}
    moved = [tensor.log().abs().amax() for key, tensor in state.items() if key.startswith("factors.")]
    assert (max(moved) > 0.01) == (name != "fixed"), "without an effect this would prove nothing"
    shown = read_probes(tmp_path / "parted")[-1]
    assert shown["step"] == 12
    assert shown["factors"].keys() == {"blocks.0.attention", "blocks.1.attention"}
    for layer, found in shown["factors"].items():
        assert found.keys() == parts
        for symbol, values in found.items():
            assert values == [float(f"{value:.6g}") for value in state[f"factors.{layer}.{symbol}"].tolist()]
            assert len(values) == (1 if symbol in ("dq", "dkv", "kr") else 2)


def test_a_run_that_began_before_the_setting_existed_goes_on(settings: Settings, tmp_path: Path) -> None:
    spec, execution = settings()
    assert train_until(7, spec, execution, tmp_path / "run") == "interrupted"
    path = tmp_path / "run" / "run.json"
    record = json.loads(path.read_text())
    assert record["spec"].pop("logit_control")["method"] == "none"
    path.write_text(json.dumps(record))
    assert train_until(None, spec, execution, tmp_path / "run") == "finished"


def test_a_checkpoints_initial_norms_replace_those_of_the_new_model(settings: Settings, tmp_path: Path) -> None:
    spec, execution = settings(**change_run("quack"))
    train(spec, tmp_path / "run", execution)
    other = spec.replace(seed=9, precision="fp32")
    trainer = Trainer(other, execution, Corpus.open(spec.corpus.source), Machine.open(execution))
    own = {name: tensor.clone() for name, tensor in trainer.optimiser.tensors().items()}
    found = Checkpoints(tmp_path / "run" / "checkpoints").find_newest()
    assert found is not None
    trainer.restore([found])
    for name, tensor in read_control(tmp_path / "run").items():
        assert torch.equal(trainer.optimiser.tensors()[f"logit_control.{name}"], tensor)
        assert not torch.equal(own[f"logit_control.{name}"], tensor)


def test_without_control_there_are_no_factors(tiny_run: Path) -> None:
    assert all("factors" not in record for record in read_probes(tiny_run))
    assert not read_control(tiny_run)


def read_weights(folder: Path) -> list[Tensor]:
    return [parameter.detach() for parameter in load_model(folder)[0].parameters()]


def equal_weights(one: Path, other: Path) -> bool:
    return all(torch.equal(a, b) for a, b in zip(read_weights(one), read_weights(other), strict=True))


def test_only_training_passes_count_for_qk_clip(settings: Settings, tmp_path: Path) -> None:
    """Evaluations and probes see other text, whose logits must not clip anything."""
    for name, evaluation in {"many": {"times": 12, "probes": 12}, "none": {"times": 0, "probes": 0}}.items():
        train_until(None, *settings(evaluation=evaluation, **change_run("qk-clip")), tmp_path / name)
    assert equal_weights(tmp_path / "many", tmp_path / "none")


def test_what_a_skipped_step_saw_is_forgotten_by_qk_clip(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a run stopped right after it continues as one that never stopped."""
    plain = Trainer.average_over_ranks

    def average(self: Trainer, nats: Tensor, norm: Tensor) -> Tensor:
        return plain(self, nats * math.nan if self.states[0].step == 6 else nats, norm)

    monkeypatch.setattr(Trainer, "average_over_ranks", average)
    spec, execution = settings(**change_run("qk-clip"))
    train(spec, tmp_path / "whole", execution)
    train_in_two(7, spec, execution, tmp_path / "parted")
    assert [r["step"] for r in RunDirectory(tmp_path / "whole").metrics("train") if r.get("skipped")] == [7]
    assert equal_weights(tmp_path / "whole", tmp_path / "parted")


@pytest.mark.parametrize(("name", "then"), [("quack for mla", "fsdp"), ("qk-clip", "ddp")])
def test_a_sharded_run_saves_and_continues(name: str, then: str, settings: Settings, tmp_path: Path) -> None:
    spec, execution = settings(**change_run(name))
    train(spec, tmp_path / "alone", execution)
    run_on_ranks(2, train_until, 5, spec, execution.replace(parallel="fsdp"), tmp_path / "ranks")
    run_on_ranks(2, train_until, None, spec, execution.replace(parallel=then), tmp_path / "ranks")
    alone, ranks = (
        {f"{layer}.{symbol}": values for layer, parts in factors.items() for symbol, values in parts.items()}
        for factors in (read_probes(tmp_path / folder)[-1]["factors"] for folder in ("alone", "ranks"))
    )
    assert alone.keys() == ranks.keys()
    for key, values in alone.items():
        # losses of such runs agree within 2e-5 (test_distributed.py) and weights within 1e-4 of steps of 0.03
        assert ranks[key] == pytest.approx(values, rel=1e-3), key
    for a, b in zip(read_weights(tmp_path / "ranks"), read_weights(tmp_path / "alone"), strict=True):
        assert (a - b).abs().max() < 1e-3


def train_muon(spec: RunSpec, execution: ExecutionSpec, folder: Path) -> None:
    """One run without a stop and one with, where the processor's own bf16 instructions are not used."""
    os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE"
    train(spec, folder / "whole", execution)
    train_in_two(5, spec, execution, folder / "parted")


@pytest.mark.parametrize("tau", [None, 0.5])
def test_muon_trains_and_resumes_bit_equal(tau: float | None, settings: Settings, tmp_path: Path) -> None:
    spec, execution = settings(optimiser={"kind": "muon", "lr": 0.03}, logit_control={"tau": tau} if tau else {})
    assert finish_process(start_process(train_muon, spec, execution, tmp_path)) == 0
    assert comparable(tmp_path / "parted") == comparable(tmp_path / "whole")
    assert losses(tmp_path / "whole")[-1] < losses(tmp_path / "whole")[0] - 0.5
    factors = [tensor for name, tensor in read_control(tmp_path / "whole").items() if name.startswith("factors.")]
    assert bool(factors) == (tau is not None)
    assert all(tensor.log().abs().amax() > 1e-3 for tensor in factors)


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        ("--logit-control.norm spectral --logit-control.tau 2", {"method": "quack", "tau": 2.0, "norm": "spectral"}),
        (
            "--logit-control.method qk-clip --logit-control.threshold 30",
            {"method": "qk-clip", "tau": None, "threshold": 30.0},
        ),
    ],
)
def test_flags_lie_over_the_file_and_the_directory_knows_the_rest(
    flags: str, wanted: dict[str, Any], run_file: Path, tmp_path: Path, qklab: Command
) -> None:
    with run_file.open("a") as end:
        end.write('logit_control = { norm = "frobenius" }\n')
    assert qklab("train", run_file, *flags.split(), "--out", tmp_path / "run", "--quiet")[0] == 0
    spec = RunDirectory(tmp_path / "run").read()["spec"]["logit_control"]
    assert {name: spec[name] for name in wanted} == wanted
    assert read_control(tmp_path / "run")
    code, _, err = qklab("train", *flags.split(), "--out", tmp_path / "run")
    assert (code, "already finished" in err) == (0, True)
    code, _, err = qklab("train", "--logit-control.tau", "0.3", "--out", tmp_path / "run")
    assert (code, "holds a run with logit_control." in err) == (2, True)


@pytest.mark.parametrize(
    ("control", "attention", "sentence"),
    [
        ({"tau": 1}, {"norm": "qk"}, r"method='quack' cannot act: attention\.norm='qk' already"),
        ({"method": "qk-clip"}, {"norm": "qk"}, r"method='qk-clip' cannot act: attention\.norm='qk'"),
        ({"method": "qk-clip"}, {"coupling": {"kind": "leapfrog"}}, "cannot act: under a coupling that is not linear"),
        (
            {"method": "qk-clip"},
            {"coupling": {"kind": "linear"}, "share": "k=v"},
            "cannot act: under a linear coupling the keys would have to shrink",
        ),
        ({"tua": 1}, {}, r"no field 'tua' \(did you mean 'tau'\?\)"),
        (1, {}, "logit_control must be .*, but 1 came"),
    ],
)
def test_bad_input_ends_in_one_sentence(control: Any, attention: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence) as caught:
        resolve_run({"logit_control": control, "attention": attention})
    assert "\n" not in str(caught.value)
