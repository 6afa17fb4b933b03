"""qklab export: the folder Transformers loads is the run, and says where it comes from."""

import errno
import json
import os
import re
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import compute_logits, tiny, token_ids
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoTokenizer

from qklab.cli import main
from qklab.data import DataSpec, Tokenizer, prepare_corpus
from qklab.data.tokenizer import train_bpe
from qklab.hf import QKLabForCausalLM, QKLabForSequenceClassification, convert, to_transformers
from qklab.hf.export import export_run, make_fast_tokenizer
from qklab.runs import RunDirectory
from qklab.train.launch import train
from qklab.train.load import load_model
from qklab.train.settings import merge_settings, resolve_run

ROOT = Path(__file__).parents[2]
TINY: dict[str, Any] = {
    "corpus": {"tokenizer": "bytes"},
    "model": {"layers": 2, "width": 32, "context": 48, "mlp_ratio": 2.0},
    "attention": {"heads": 2},
    "batch": {"sequences": 8},
    "budget": {"tokens": 8 * 48 * 6},
    "evaluation": {"times": 3, "tokens": 480, "probes": 0},
    "execution": {"device": "cpu", "threads": 1, "checkpoint_steps": 2},
}
# the arms whose loss curves are kept in tests/golden
ARMS: dict[str, dict[str, Any]] = {
    "standard": {},
    "leapfrog": {"coupling": {"kind": "leapfrog"}},
    "k=v": {"share": "k=v"},
    "differential": {"mix": "differential"},
    "mla": {"latent": {"query_rank": 16, "kv_rank": 8, "rope_width": 4}},
}
TEXTS = ["Licence é\n\n  <|endoftext|> x", "", "日本 \x00 tab\t", "don't  stop"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    paragraphs = (ROOT / "LICENSE").read_text(encoding="utf-8").split("\n\n")
    text = folder / "licence.txt"
    text.write_text("\n<|endoftext|>\n".join(p[:60] for p in paragraphs) + "\n<|endoftext|>\n", encoding="utf-8")
    spec = DataSpec(source=str(text), tokenizer="bytes", valid=0.3, test=0.1)
    return prepare_corpus(spec, out=folder / "it", workers=1).folder


def trained(corpus: Path, folder: Path, **changes: Any) -> Path:
    spec, execution = resolve_run(merge_settings(merge_settings(TINY, {"corpus": {"source": str(corpus)}}), changes))
    assert train(spec, folder, execution).status == "finished"
    return folder


def test_every_golden_model_is_in_its_export_bit_for_bit(corpus: Path, tmp_path: Path) -> None:
    assert {path.stem for path in (ROOT / "tests" / "golden").glob("nano-*.json")} == {f"nano-{arm}" for arm in ARMS}
    ids = torch.randint(0, 257, (2, 40), generator=torch.Generator().manual_seed(0))
    for arm, attention in ARMS.items():
        run = trained(corpus, tmp_path / arm, attention={"heads": 2} | attention)
        model: Any = AutoModelForCausalLM.from_pretrained(export_run(run, tmp_path / f"{arm}-out"))
        plain, _ = load_model(run)
        with torch.no_grad():
            assert torch.equal(model(ids).logits, plain(ids)), arm
        way: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None}
        drawn = model.generate(ids, attention_mask=torch.ones_like(ids), **way)
        assert torch.equal(drawn, plain.generate(ids, 5, temperature=0)), arm


FRESH = """
import sys, torch, transformers
Auto = transformers.AutoModelForCausalLM
class NotInstalled:
    def find_spec(name, *_):
        if name == "qklab":
            raise ModuleNotFoundError("No module named 'qklab'", name=name)
sys.meta_path.insert(0, NotInstalled)
for folder in ({out!r}, {converted!r}):
    try:
        Auto.from_pretrained(folder, trust_remote_code=True)
    except ImportError as error:
        assert "pip install qklab" in str(error), error
    else:
        raise AssertionError("loaded without qklab")
sys.meta_path.remove(NotInstalled)
model = Auto.from_pretrained({out!r}, trust_remote_code=True)
tokenizer = transformers.AutoTokenizer.from_pretrained({out!r})
ids = tokenizer("Licence", return_tensors="pt")
print(ids.input_ids.tolist(), model(**ids).logits.double().sum().item(), model.generation_config.eos_token_id)
print(Auto.from_pretrained({converted!r}, trust_remote_code=True)(torch.tensor({ids})).logits.double().sum().item())
"""


def no_space(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_fresh_process_loads_the_folder_and_its_card_says_where_it_comes_from(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    late: dict[str, Any] = {"schedule": {"kind": "constant", "warmup": 1.0}, "budget": {"tokens": 8 * 48 * 12}}
    run = trained(corpus, tmp_path / "run", optimiser={"lr": 3.0, "clip": 0.0}, **late)  # too fast to stay good
    out = tmp_path / "deep" / "out"
    with pytest.raises(SystemExit) as ended:
        main(["export", str(run), str(out), "--best"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.strip() == str(out)
    assert [path.name for path in out.parent.iterdir()] == ["out"]
    record, summary = RunDirectory(run).read(), RunDirectory(run).summary()
    assert summary is not None
    best = summary["best"]
    assert best["step"] < summary["steps"]
    card = (out / "README.md").read_text(encoding="utf-8")
    told = [record["id"], record["commit"] or "commit unknown", record["data"]["hash"], f"best, step {best['step']}"]
    told += [f"{best['step'] * 8 * 48:,}", f"{best['validation_loss']:.4f}", "2×32 swiglu · (Q,K,V)", "it, SHA-256"]
    assert not [fact for fact in told if fact not in card]
    assert str(corpus) not in card
    converted = tiny("llama")
    convert(converted, coupling="leapfrog", share="k=v")
    converted.save_pretrained(tmp_path / "converted")
    code = FRESH.format(out=str(out), converted=str(tmp_path / "converted"), ids=token_ids().tolist())
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | {"HF_HOME": str(tmp_path / "hf")}
    )
    assert process.returncode == 0, process.stderr
    said, sums = process.stdout.splitlines()
    assert float(sums) == pytest.approx(compute_logits(converted).double().sum().item(), rel=1e-5)
    plain, tokenizer = load_model(run, "best")
    ids = [tokenizer.eot, *tokenizer.encode(["Licence"])[0].tolist()]
    total = plain(torch.tensor([ids])).double().sum().item()
    assert said.strip() == f"{[ids]} {total} {tokenizer.eot}"
    memory, _ = to_transformers(run, "best")
    assert memory(torch.tensor([ids])).logits.double().sum().item() == total
    for folder, sentence in ((out, "is not empty; choose a new folder"), (out / "README.md", "is a file")):
        with pytest.raises(ValueError, match=sentence):
            export_run(run, folder)
    assert (out / "README.md").read_text(encoding="utf-8") == card
    with pytest.raises(ValueError, match="is not a run directory"):
        export_run(tmp_path, tmp_path / "other")
    with monkeypatch.context() as broken:
        broken.setattr(QKLabForCausalLM, "save_pretrained", no_space)
        with pytest.raises(ValueError, match="could not be written: no space left on device"):
            export_run(run, tmp_path / "other")
    which: Any = "last"
    with pytest.raises(ValueError, match="'newest' or 'best', but 'last' came"):
        export_run(run, tmp_path / "other", which)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["converted", "deep", "hf", "run"]


def test_a_missing_or_old_transformers_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = r"qklab: qklab\.hf needs Transformers 5\.17 or newer \(.*{}.*\); install it with: pip install [^\n]*\n"
    old = types.ModuleType("transformers")
    monkeypatch.setattr(old, "__version__", "5.3.0", raising=False)
    for found, told in ((None, "transformers"), (old, r"5\.3\.0 is installed")):
        for name in [name for name in sys.modules if name.startswith("qklab.hf")]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, "transformers", found)
        with pytest.raises(SystemExit) as ended:
            main(["export", str(tmp_path), str(tmp_path / "out")])
        assert ended.value.code == 2
        assert re.fullmatch(wanted.format(told), capsys.readouterr().err)


def definitions() -> dict[str, Tokenizer]:
    texts = iter(["don't stop don't stop the licence " * 4, "日本日本"])
    return {"bytes": Tokenizer.bytes(), "bpe": Tokenizer(train_bpe(texts, 300))}


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_the_tokenizer_gives_the_runs_numbers(kind: str, tmp_path: Path) -> None:
    own = definitions()[kind]
    make_fast_tokenizer(own, 48).save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    for text, ids in zip(TEXTS, own.encode(TEXTS), strict=True):
        assert tokenizer(text).input_ids == [own.eot, *ids.tolist()]
        assert tokenizer(text, add_special_tokens=False).input_ids == ids.tolist()
        assert tokenizer.decode(ids.tolist()) == text
    assert len(tokenizer) == own.vocab
    ends = tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id
    assert ends == (own.eot, own.eot, own.eot)
    assert tokenizer.decode([own.eot]) == "<|endoftext|>"
    assert tokenizer.decode([own.eot, *own.encode(["a"])[0].tolist()], skip_special_tokens=True) == "a"
    batch = tokenizer(["a", "a longer text"], padding=True, return_tensors="pt")
    assert batch.attention_mask[0, 0] == 0
    assert batch.attention_mask[:, -1].all()
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["model_max_length"] == 48


@pytest.mark.parametrize("source", [None, "task:sort?length=12&train=60&valid=20&test=20"], ids=["masked", "task"])
def test_a_model_that_sees_both_ways_is_exported_with_its_logits(
    source: str | None, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QKLAB_CACHE", str(tmp_path / "cache"))
    plain = TINY | {"attention": {"heads": 2, "causal": False, "position": "learned"}, "budget": {"tokens": 96}}
    if source is not None:
        plain |= {"corpus": {"source": source}, "model": {"layers": 1, "width": 32, "norm_place": "post"}}
        spec, execution = resolve_run(plain)
    else:
        spec, execution = resolve_run(merge_settings(plain, {"corpus": {"source": str(corpus)}}))
    train(spec, tmp_path / "run", execution)
    export_run(tmp_path / "run", tmp_path / "out")
    model = AutoModelForMaskedLM.from_pretrained(tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    decoder, own = load_model(tmp_path / "run")
    ids = torch.arange(12)[None] % 10
    assert torch.equal(compute_logits(model, ids), decoder.eval()(ids))
    labels = torch.where(ids > 6, ids, -100)
    expected = torch.nn.functional.cross_entropy(model(ids).logits[labels >= 0], labels[labels >= 0])
    torch.testing.assert_close(model(ids, labels=labels).loss, expected)
    assert "AutoModelForMaskedLM" in (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    if source is not None:
        assert tokenizer("3 1 4")["input_ids"] == own.encode(["3 1 4"])[0].tolist()
        assert tokenizer.decode([3, 1, 4]) == "3 1 4"
    pooled = QKLabForSequenceClassification(model.config)
    rows, mask = torch.randn(2, 4, 32), torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    torch.testing.assert_close(pooled.pool(rows, None, mask)[0], rows[0, 2:].mean(0))
    with pytest.raises(ValueError, match="QKLabForMaskedLM"):
        QKLabForCausalLM(model.config)
