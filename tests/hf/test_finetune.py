"""Fine-tuning on GLUE: its metrics are scikit-learn's and scipy's, its loop is Transformers' Trainer's."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import byte_llama, byte_tokenizer
from transformers import Trainer, TrainingArguments

from qklab.cli import main
from qklab.data import glue
from qklab.data.glue import GLUE, find_glue_task, read_glue
from qklab.data.order import make_permutation
from qklab.hf import finetune
from qklab.hf.fit import EncodedExamples, FineTuning, fit_classifier
from qklab.study.downstream import find_models, write_downstream_answer
from qklab.study.spec import StudyError
from qklab.train.launch import train
from qklab.train.settings import resolve_run

WORDS = ("good", "bad")


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.integers(2, 60))
def test_scores_are_those_of_scikit_learn_and_scipy(seed: int, n: int) -> None:
    metrics, stats = pytest.importorskip("sklearn.metrics"), pytest.importorskip("scipy.stats")
    draw = np.random.default_rng(seed)
    said, right = draw.integers(0, 2, n), draw.integers(0, 2, n)
    assert glue.score_accuracy(said, right) == pytest.approx(metrics.accuracy_score(right, said))
    assert glue.score_f1(said, right) == pytest.approx(metrics.f1_score(right, said, zero_division=0.0))
    if len(set(said.tolist())) > 1 and len(set(right.tolist())) > 1:
        assert glue.score_matthews(said, right) == pytest.approx(metrics.matthews_corrcoef(right, said))
    else:
        assert glue.score_matthews(said, right) == 0.0
    guess, wanted = draw.normal(size=n), draw.uniform(0, 5, n)
    assert glue.score_pearson(guess, wanted) == pytest.approx(stats.pearsonr(guess, wanted)[0])
    assert glue.score_spearman(guess, wanted) == pytest.approx(stats.spearmanr(guess, wanted)[0])
    assert glue.score_pearson(np.ones(n), wanted) == 0.0


def write_task(data: Path, name: str, rows: int = 40) -> Path:
    """Files as GLUE's own, on which the first word of the last sentence decides."""
    task = GLUE[name]
    folder = data / "glue" / task.folder
    folder.mkdir(parents=True, exist_ok=True)
    for split in ("train", "dev"):
        lines = ["\t".join(f"column{i}" for i in range(10))] if task.header else []
        for row in range(rows):
            cells = [str(row)] * (1 + max(*task.sentences, task.label))
            for column in task.sentences:
                cells[column] = f"{WORDS[row % 2]} film {row}"
            cells[task.label] = task.words[row % 2] if task.words else f"{5 * (row % 2):.3f}"
            lines.append("\t".join(cells))
        (folder / f"{split}.tsv").write_text(
            "\n".join(lines) + "\n", encoding="utf-8-sig" if name == "mrpc" else "utf-8"
        )
    return data


@pytest.mark.parametrize("name", GLUE)
def test_every_task_is_read_from_files_as_glue_has_them(name: str, tmp_path: Path) -> None:
    data, task = read_glue(name, write_task(tmp_path, name)), GLUE[name]
    assert {split: len(own.texts) for split, own in data.items()} == {"train": 36, "valid": 4, "test": 40}
    assert len(data["test"].texts[0]) == len(task.sentences)
    assert data["test"].texts[3] == ("bad film 3",) * len(task.sentences)
    assert data["test"].labels[:4].tolist() == ([0, 1, 0, 1] if task.words else [0.0, 5.0, 0.0, 5.0])
    together = [*data["train"].texts, *data["valid"].texts]
    assert len(set(together)) == 40
    outputs = np.eye(2)[data["test"].labels] if task.words else data["test"].labels[:, None]
    assert glue.score_answers(task, outputs, data["test"].labels)["glue"] == pytest.approx(1.0)
    assert -0.01 < glue.score_constant(task, data["train"].labels, data["test"].labels) < 0.7


def test_bad_files_and_names_are_told_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no GLUE task 'sst' \(did you mean 'sst2'\?\); there are cola"):
        find_glue_task("sst")
    with pytest.raises(ValueError, match=r"SST-2/train\.tsv cannot be read: No such file.*put GLUE's own SST-2/train"):
        read_glue("sst2", tmp_path)
    path = write_task(tmp_path, "sst2") / "glue/SST-2/dev.tsv"
    path.write_text("sentence\tlabel\nfine\t2\n")
    with pytest.raises(ValueError, match=r"line 2 of .*dev\.tsv has the label '2', but labels of SST-2 are '0' or '1'"):
        read_glue("sst2", tmp_path)
    path.write_text("sentence\tlabel\nfine\n")
    with pytest.raises(ValueError, match="has 1 columns, too few"):
        read_glue("sst2", tmp_path)
    path = write_task(tmp_path, "stsb") / "glue/STS-B/dev.tsv"
    path.write_text("\n" + "\t".join(["x"] * 9 + ["5.5"]))
    with pytest.raises(ValueError, match="numbers from 0 to 5"):
        read_glue("stsb", tmp_path)


def test_lines_end_where_files_end_them_and_quotes_are_text(tmp_path: Path) -> None:
    folder = tmp_path / "SST-2"
    folder.mkdir()
    wild = 'she said " stop', "one\x85two\u2028three\x0cfour", '""', " spaces stay "
    for split in ("train", "dev"):
        rows = "".join(f"{text}\t{label % 2}\r\n" for label, text in enumerate(wild)).removesuffix("\r\n")
        (folder / f"{split}.tsv").write_bytes(f"\ufeffsentence\tlabel\r\n{rows}".encode())
    test = read_glue("sst2", tmp_path)["test"]
    assert ([text for (text,) in test.texts], test.labels.tolist()) == (list(wild), [0, 1, 0, 1])


@pytest.mark.parametrize("name", GLUE)
def test_the_hub_is_asked_where_no_folder_is_named(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub's own columns and labels, as a folder that datasets itself wrote; its answer is that of the files."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.delenv("QKLAB_DATA", raising=False)
    task, files = GLUE[name], read_glue(name, write_task(tmp_path, name, 12))
    columns = ["sentence"] if len(task.sentences) == 1 else ["sentence1", "sentence2"]
    names = {"rte": ["entailment", "not_entailment"]}.get(name, ["no", "yes"])
    label = datasets.ClassLabel(names=names) if task.words else datasets.Value("float32")
    features = datasets.Features(dict.fromkeys(columns, datasets.Value("string")) | {"label": label})
    rows = [
        dict.fromkeys(columns, f"{WORDS[row % 2]} film {row}")
        | {"label": 5.0 * (row % 2) if not task.words else row % 2 if name != "rte" else 1 - row % 2}
        for row in range(12)
    ]
    made = {split: datasets.Dataset.from_list(rows, features=features) for split in ("train", "validation")}
    datasets.DatasetDict(made).save_to_disk(tmp_path / "hub")

    def load(hub: str, config: str) -> Any:
        assert (hub, config) == ("nyu-mll/glue", name)
        return datasets.load_from_disk(tmp_path / "hub")

    monkeypatch.setattr(datasets, "load_dataset", load)
    found = read_glue(name, None)
    for split, own in files.items():
        assert found[split].texts == own.texts
        assert np.array_equal(found[split].labels, own.labels)

    def refuse(hub: str, config: str) -> Any:
        raise ConnectionError("no network\nat all")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    told = rf"^{name} cannot be loaded from the hub \(nyu-mll/glue: no network\): say with --data or QKLAB_DATA which"
    with pytest.raises(ValueError, match=told):
        read_glue(name, None)


@pytest.fixture
def small_model(tmp_path: Path) -> Path:
    """A Llama with a tokenizer of bytes, in a folder."""
    byte_llama().save_pretrained(tmp_path / "llama")
    byte_tokenizer().save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


class Batches(torch.utils.data.Dataset[dict[str, Any]]):
    """Batches as they are, in this order."""

    def __init__(self, batches: list[Any]):
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, place: int) -> dict[str, Any]:
        return dict(zip(("input_ids", "attention_mask", "labels"), self.batches[place], strict=True))


class OrderedTrainer(Trainer):
    def get_train_dataloader(self) -> Any:
        own: Any = self.train_dataset
        return torch.utils.data.DataLoader(own, batch_size=None)


def test_our_loop_is_transformers_trainer_on_the_same_order(small_model: Path, tmp_path: Path) -> None:
    data = read_glue("sst2", write_task(tmp_path, "sst2"))["train"]
    how = FineTuning(1e-3, 3, epochs=2, batch=8, warmup=0.25)
    ours, tokenizer = finetune.load_classifier(small_model, 2, how.seed)
    theirs, _ = finetune.load_classifier(small_model, 2, how.seed)
    encoded = EncodedExamples(data, tokenizer, 32)
    fit_classifier(ours, encoded, how, "cpu")
    orders = [make_permutation(len(encoded), how.seed, epoch, 6).tolist() for epoch in range(2)]
    batches = [encoded.batch(order[i : i + 8]) for order in orders for i in range(0, len(order), 8)]
    arguments = TrainingArguments(
        str(tmp_path / "out"), learning_rate=how.lr, weight_decay=how.weight_decay, num_train_epochs=1, warmup_steps=3,
        use_cpu=True, report_to=[], save_strategy="no", logging_strategy="no", disable_tqdm=True, seed=how.seed,
    )  # fmt: skip
    OrderedTrainer(model=theirs, args=arguments, train_dataset=Batches(batches)).train()
    start, _ = finetune.load_classifier(small_model, 2, how.seed)
    for (name, mine), other, first in zip(
        ours.named_parameters(), theirs.parameters(), start.parameters(), strict=True
    ):
        assert not torch.equal(mine, first), name
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


def test_models_are_compared_paired_by_seed_and_what_is_done_is_not_done_again(
    small_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = write_task(tmp_path, "rte", 16)
    other = tmp_path / "other"
    byte_llama(num_hidden_layers=1).save_pretrained(other)
    byte_tokenizer().save_pretrained(other)
    words = ["finetune", small_model, other, "--task", "rte", "--data", data, "--lrs", "1e-3", "3e-3", "--seeds", "2"]
    command = [*map(str, words), "--epochs", "1", "--out", str(tmp_path / "out"), "--device", "cpu"]
    called = []
    plain = finetune.finetune
    monkeypatch.setattr(finetune, "finetune", lambda *given: called.append(given) or plain(*given))
    answers: list[str] = []
    before: dict[str, Any] = {}
    for _ in range(2):
        with pytest.raises(SystemExit) as end:
            main(command)
        assert not end.value.code
        answers.append(capsys.readouterr().out)
        files = sorted((tmp_path / "out").iterdir())
        found = {path.name: json.loads(path.read_text()) for path in files}
        assert before in ({}, found)
        before = found
        files[1].unlink()  # as where it was killed
    assert len(called) == 8 + 1
    assert answers[0] == answers[1]
    assert "points of 100 of rte (saying the most frequent label: 50.00)" in answers[0]
    assert "other against llama" in answers[0] or "other and llama" in answers[0] or "other is" in answers[0]


def test_a_run_of_ours_and_an_encoder_are_classifiers_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QKLAB_CACHE", str(tmp_path / "cache"))
    text = tmp_path / "text.txt"
    text.write_text("\n<|endoftext|>\n".join(f"good film {i} bad film" for i in range(80)) + "\n")
    data = read_glue("mrpc", write_task(tmp_path, "mrpc", 12))
    for causal in (True, False):
        spec, execution = resolve_run(
            {
                "corpus": {"source": str(text), "tokenizer": "bytes", "valid": 0.2, "test": 0.2},
                "model": {"layers": 1, "width": 32, "context": 24},
                "attention": {"causal": causal},
                "batch": {"sequences": 2},
                "budget": {"tokens": 96},
                "evaluation": {"times": 1, "tokens": 48, "probes": 0},
                "execution": {"device": "cpu", "threads": 1},
            }
        )
        train(spec, tmp_path / f"run{causal}", execution)
        found = finetune.finetune(tmp_path / f"run{causal}", GLUE["mrpc"], data, FineTuning(1e-3, 0, epochs=1, batch=4))
        assert found["steps"] == 3
        assert set(found["scores"]["test"]) == {"accuracy", "f1", "glue"}


def test_a_converted_model_is_not_loaded_as_if_it_were_none(small_model: Path) -> None:
    config = json.loads((small_model / "config.json").read_text())
    (small_model / "config.json").write_text(json.dumps(config | {"qklab": {"norm": "qk"}}))
    with pytest.raises(ValueError, match="llama holds a converted model"):
        finetune.load_classifier(small_model, 2, 0)


def test_scores_are_judged_and_missing_folders_told(tmp_path: Path) -> None:
    scores = {"standard": {0: 80.0, 1: 81.0, 2: 80.5}, "k=v": {0: 70.0, 1: 71.1, 2: 70.4}}
    found = {"task": "sst2", "scores": scores, "lrs": {"standard": 1e-5, "k=v": 3e-5}, "chance": 50.9}
    text = write_downstream_answer(found, 1.0)
    assert "k=v is worse than standard by 10" in text
    assert "(saying the most frequent label: 50.90)" in text
    with pytest.raises(StudyError, match="there is no folder"):
        find_models([tmp_path / "none"], 2)
    (tmp_path / "a" / "x").mkdir(parents=True)
    (tmp_path / "b" / "x").mkdir(parents=True)
    found = find_models([tmp_path / "a/x", tmp_path / "b/x"], 2)
    assert [list(own) for own in found.values()] == [[0, 1], [0, 1]]
