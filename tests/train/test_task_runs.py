"""Models that answer: tasks and masked text through training, evaluation, interruption and populations."""

from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from tiny import TINY, Settings, comparable, losses, train_in_two

from qklab.data import Corpus
from qklab.data.batches import IGNORED
from qklab.data.targets import MASKED, MaskedOrder, MaskedWindows
from qklab.runs import RunDirectory
from qklab.train.launch import train, train_population
from qklab.train.load import load_model
from qklab.train.settings import merge_settings, resolve_run
from qklab.train.spec import ExecutionSpec, RunSpec
from qklab.train.trainer import split_windows

SMALL = "train=400&valid=40&test=60"
BOTH_WAYS = {"attention": {"causal": False, "position": "learned", "share": "q=k", "asymmetry_2d": True}}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QKLAB_CACHE", str(tmp_path / "cache"))


def task(source: str, **changes: Any) -> tuple[RunSpec, ExecutionSpec]:
    plain = TINY | {"corpus": {"source": source}, "budget": {"tokens": 8 * 12 * 8}}
    plain["model"] = {name: value for name, value in TINY["model"].items() if name != "context"}
    plain["evaluation"] = {"times": 2, "tokens": 240, "probes": 1, "final_tokens": 0}
    return resolve_run(merge_settings(plain, changes))


def test_populations_of_an_arm_on_tasks_of_one_shape_are_compiled_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One after another in a process, as a study does them on a GPU."""
    graphs: list[int] = []
    plain = torch.compile

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(len(list(graph.parameters())))
        return graph.forward

    monkeypatch.setattr(torch, "compile", lambda module, **options: plain(module, backend=backend, **options))
    torch._dynamo.reset()

    def train_two(name: str, compiling: Literal["yes", "no"]) -> list[Any]:
        spec, execution = task(f"task:{name}?length=12&{SMALL}", **BOTH_WAYS, model={"dropout": 0.1})
        folders = [tmp_path / compiling / name / str(seed) for seed in range(2)]
        train_population([spec.replace(seed=seed) for seed in range(2)], folders, execution.replace(compile=compiling))
        return [losses(folder) for folder in folders]

    for name in ("reverse", "sort"):
        train_two(name, "yes")
        assert len(graphs) == 1, name
    compiled = train_two("copy", "yes")
    assert len(graphs) == 1
    for one, other in zip(compiled, train_two("copy", "no"), strict=True):
        assert one == pytest.approx(other, rel=1e-4)


@pytest.mark.parametrize(
    ("source", "changes"),
    [
        (f"task:sort?length=12&{SMALL}", BOTH_WAYS),
        (f"task:mqar?pairs=3&length=12&keys=6&values=4&{SMALL}", {}),
    ],
    ids=["encoder", "decoder"],
)
def test_accuracy_is_what_the_model_gets_right_where_it_is_asked(
    source: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    spec, execution = task(source, **changes)
    outcome = train(spec, tmp_path / "run", execution)
    assert outcome.summary is not None
    found = outcome.summary["evaluation"]["test"]
    model, _ = load_model(tmp_path / "run")
    corpus = Corpus.open(RunDirectory(tmp_path / "run").read()["data"]["folder"])
    windows = split_windows(spec, corpus)["test"]
    ids, targets, _ = windows.batch(np.arange(60))
    with torch.no_grad():
        said = model.eval()(ids).argmax(-1)
    asked = targets != IGNORED
    right = (said == targets) & asked
    assert found["accuracy"] == pytest.approx(right.sum().item() / asked.sum().item())
    assert found["sequence_accuracy"] == pytest.approx((right == asked).all(1).float().mean().item())
    assert (found["tokens"], found["sequences"], found["split_sequences"]) == (int(asked.sum()), 60, 60)
    assert 0 < found["chance"] < 1
    assert "bits_per_byte" not in found
    assert outcome.summary["corpus"] == {"train_tokens": 4800, "sequences": 400}
    curve = [line["accuracy"] for line in RunDirectory(tmp_path / "run").metrics("evaluation")]
    assert len(curve) == 2


def test_a_models_vocabulary_has_the_end_of_text_beside_the_tasks_symbols() -> None:
    """Where both together just pass the multiple of 64 that it is rounded up to."""
    vocabularies = [task(f"task:mqar?pairs=3&length=12&keys=40&values={values}")[0].model.vocab for values in (22, 23)]
    assert vocabularies == [64, 128]  # of 63 and 64 symbols


@pytest.mark.parametrize("masked", [False, True], ids=["task", "masked text"])
def test_members_of_a_population_and_interrupted_runs_are_the_run_alone(
    masked: bool, settings: Settings, tmp_path: Path
) -> None:
    if masked:
        spec, execution = settings(attention={"causal": False}, budget={"tokens": 8 * 48 * 6})
    else:
        shape = {"dropout": 0.1, "norm_place": "post", "norm": "layer", "mlp": "gelu", "bias": True}
        spec, execution = task(f"task:reverse?length=12&{SMALL}", **BOTH_WAYS, model=shape)
    specs = [spec.replace(seed=seed) for seed in (0, 1)]
    folders = [tmp_path / f"together{seed}" for seed in (0, 1)]
    train_population(specs, folders, execution)
    for one, folder in zip(specs, folders, strict=True):
        alone = train(one, tmp_path / f"alone-{folder.name}", execution)
        own = RunDirectory(folder).summary()
        assert own is not None
        assert alone.summary is not None
        assert losses(folder) == pytest.approx(losses(alone.folder), rel=1e-4)
        for name in ("loss", "accuracy", "sequence_accuracy"):
            assert own["evaluation"]["test"][name] == pytest.approx(
                alone.summary["evaluation"]["test"][name], rel=1e-4, abs=0.01
            )
    train_in_two(4, specs[0], execution, tmp_path / "stopped")
    assert comparable(tmp_path / "stopped") == comparable(tmp_path / "alone-together0")


def test_masked_tokens_are_chosen_by_seed_and_window_and_ends_of_text_never(corpus_folder: Path) -> None:
    corpus = Corpus.open(corpus_folder)
    split, eot = corpus.splits["train"], corpus.tokenizer.eot
    order = MaskedOrder(split, 3, 8, 48, "packed", eot)
    rows, again = order.rows(2), MaskedOrder(split, 3, 8, 48, "packed", eot).rows(2)
    plain = super(MaskedOrder, order).windows(order.samples(2)).ids[:, :-1]
    assert rows.targets is not None
    assert np.array_equal(rows.ids, again.ids)
    assert (order.rows(2, 1, 2).ids == rows.ids[4:]).all()
    asked = rows.targets != IGNORED
    assert (asked.sum(1) == round(MASKED * 48)).all()
    assert (rows.targets[asked] == plain[asked]).all()
    assert (rows.ids[~asked] == plain[~asked]).all()
    assert not (plain[asked] == eot).any()
    hidden = (rows.ids[asked] == eot).mean()
    assert 0.5 < hidden < 1.0
    assert order.rows(3).ids.shape == (8, 48)
    other = MaskedOrder(split, 4, 8, 48, "packed", eot).rows(2).targets
    assert other is not None
    assert ((other != IGNORED) & asked).sum() < 0.5 * asked.sum()  # another seed, other places
    windows = MaskedWindows(corpus.splits["valid"], 48, eot, True)
    most = MaskedWindows(split, 48, eot, True)
    assert not (most.batch(most.select_windows(None)).targets == eot).any()
    one, two = windows.batch(np.array([0, 1])), windows.batch(np.array([1]))
    assert torch.equal(one.ids[1], two.ids[0])
    assert torch.equal(one.targets[1], two.targets[0])


def test_a_small_encoder_learns_to_subtract(tmp_path: Path) -> None:
    """The larger truths are benchmarks/known_truths.py's."""
    spec, execution = task(
        "task:sub?length=8&train=1000&valid=20&test=200",
        attention={"causal": False, "position": "learned"},
        model={"layers": 1, "tied": False},
        optimiser={"lr": 1e-2},
        budget={"tokens": 100 * 64},
        evaluation={"times": 0, "probes": 0},
    )
    summary = train(spec, tmp_path / "run", execution).summary
    assert summary is not None
    found = summary["evaluation"]["test"]
    assert found["accuracy"] > 0.999
    assert found["sequence_accuracy"] > 0.99
    assert 0.05 < found["chance"] < 0.15
