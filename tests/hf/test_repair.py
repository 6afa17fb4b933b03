"""`qklab convert`: conversion from folder to folder, the repair that follows it, and what both tell."""

import json
import math
import os
import random
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from small_models import byte_llama, byte_tokenizer, tiny
from transformers import AutoModelForCausalLM

import qklab.hf
from qklab import Decoder, recipe
from qklab.cli import main
from qklab.hf.convert import text as convert_text
from qklab.hf.convert.repair import Repair, RepairSettings
from qklab.hf.convert.text import TokenWindows, measure_loss, read_windows
from qklab.hf.export import wrap_decoder
from qklab.hf.llama import rewrite_as_llama

SMALL = ("--context", "32", "--batch", "4", "--device", "cpu")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model whose keys and values differ, and forty short texts; commands run in it."""
    byte_llama(max_position_embeddings=64).save_pretrained(tmp_path / "llama")
    byte_tokenizer().save_pretrained(tmp_path / "llama")
    draw = random.Random(0)
    texts = [" ".join(draw.choices(("one", "two", "three", "é"), k=60)) for _ in range(40)]
    (tmp_path / "text.txt").write_text("\n<|endoftext|>\n".join(texts), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def command(words: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stopped:
        main(["convert", *words.split(), *SMALL])
    out, err = capsys.readouterr()
    return int(stopped.value.code or 0), out, err


def read_record(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "conversion.json").read_text(encoding="utf-8"))


def ask_text(place: Path) -> tuple[TokenWindows, TokenWindows]:
    return read_windows(str(place / "text.txt"), byte_tokenizer(), 257, 32)


def test_a_repair_brings_back_what_the_conversion_cost(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "llama --share k=v --repair text.txt --tokens 8000 --calibration-tokens 0 --out shared"
    code, out, _ = command(words, capsys)
    assert code == 0
    record = read_record(place / "shared")
    nats, perplexity = record["held_out"]["nats_per_token"], record["held_out"]["perplexity"]
    assert nats.keys() == {"before", "converted", "repaired"}
    assert perplexity == {name: pytest.approx(math.exp(value)) for name, value in nats.items()}
    assert "token of the model's own tokenizer, which knows 257" in out
    assert all(f"{value:.4g}" in out for value in perplexity.values())
    assert record["cache_bytes_per_token"] == {
        "before": {"states": 2 * 2 * 2 * 8 * 4, "bookkeeping": 0},
        "after": {"states": 2 * 2 * 8 * 4, "bookkeeping": 2 * 4},
    }
    assert record["repair"]["tokens"] == record["repair"]["steps"] * 4 * 32 == 7936
    assert {"commit", "command", "environment"} <= record.keys()
    loaded, held_out = AutoModelForCausalLM.from_pretrained(place / "shared"), ask_text(place)[1]
    assert measure_loss(loaded, held_out) == nats["repaired"]
    repair, ids = make_repair(place), held_out.read(range(len(held_out)))
    lost, repair.model = repair.compute_loss(ids).item(), loaded
    assert repair.compute_loss(ids).item() < lost / 2
    assert sorted(os.listdir(place)) == ["llama", "shared", "text.txt"]


def test_held_out_text_is_never_trained_on(place: Path) -> None:
    train, held_out = ask_text(place)
    texts = (place / "text.txt").read_text(encoding="utf-8").split("\n<|endoftext|>\n")
    documents = byte_tokenizer()(texts)["input_ids"]
    streams = [",".join(map(str, windows.ids.tolist())) for windows in (train, held_out)]
    inside = [[",".join(map(str, document)) in stream for document in documents] for stream in streams]
    assert [a != b for a, b in zip(*inside, strict=True)] == [True] * len(documents)
    assert 1 <= sum(inside[1]) <= 10
    drawn = [tuple(row.tolist()) for step in range(len(train)) for row in train.draw(step, 1, seed=3)]
    assert len(set(drawn)) == len(train)
    assert drawn != [tuple(row.tolist()) for step in range(len(train)) for row in train.draw(step, 1, seed=4)]


def test_the_loss_counts_every_held_out_token_once(place: Path) -> None:
    model, windows = byte_llama().eval(), TokenWindows(torch.randint(0, 256, (81,)), 32)
    total = 0.0
    with torch.no_grad():
        for token in range(1, 81):
            seen = windows.ids[(token - 1) // 32 * 32 : token]
            total -= float(model(seen[None]).logits[0, -1].log_softmax(-1)[windows.ids[token]])
    assert measure_loss(model, windows) == pytest.approx(total / 80, rel=1e-5)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_equals_uninterrupted(
    place: Path, number: signal.Signals, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = "llama --share k=v --repair text.txt --tokens 900"
    assert command(f"{words} --out whole", capsys)[0] == 0
    plain = Repair.step

    def step(self: Repair, steps: int) -> float:
        if self.done == 2:
            signal.raise_signal(number)
        return plain(self, steps)

    with monkeypatch.context() as patch:
        patch.setattr(Repair, "step", step)
        code, out, err = command(f"{words} --out parts", capsys)
    assert code == 75
    assert "the same command goes on" in out
    assert f"stopped by {number.name} at step 3 of 7, everything is saved." in err
    assert not (place / "parts").exists()
    code, _, err = command(f"{words} --out parts --lr 1e-3", capsys)
    assert (code, err.count("\n")) == (2, 1)
    assert "holds an unfinished repair with another repair" in err
    code, _, err = command(f"{words} --out parts", capsys)
    assert code == 0
    assert "going on at step 3 of 7." in err
    whole, parts = (load_file(place / name / "model.safetensors") for name in ("whole", "parts"))
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    records = [read_record(place / name) for name in ("whole", "parts")]
    assert records[0]["held_out"] == records[1]["held_out"]
    assert not (place / "parts.unfinished").exists()


def test_minutes_become_steps_when_a_repair_begins(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Repair, "time_step", lambda self: 0.5)
    assert command("llama --kv-heads 1 --repair text.txt --minutes 0.05 --out merged", capsys)[0] == 0
    assert read_record(place / "merged")["repair"]["steps"] == 6


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("nothing --share k=v", "nothing is neither a run directory .* nor a Transformers model"),
        ("llama", "nothing was asked for"),
        ("llama --share k=v --repair short.txt", "short.txt is too short: it has 6 tokens"),
        ("llama --share k=v --repair none.txt", "none.txt"),
        ("llama --share k=v --repair text.txt --minutes 0", "--minutes must be more than 0, but 0 came"),
        ("llama --share k=v --repair text.txt --tokens -3", "--tokens must be more than 0, but -3 came"),
        ("llama --share k=v --repair text.txt --lr 0", "lr must be"),
        ("llama --share k=v --repair text.txt --minutes 1 --tokens 9", "give one of them"),
        ("llama --share k=v --minutes 1", "--minutes is for the repair"),
        ("llama --coupling leapfrog --repair text.txt", "there is nothing to --repair"),
        ("llama --coupling leapfog", "did you mean 'leapfrog'"),
        ("llama --share k=v --out full", "full is not empty"),
        ("llama --share k=v --repair text.txt --tokens 400 --lr 1e30", "the repair has diverged at step 2: .* smaller"),
        ("cwm --share k=v", "models of type 'cwm' cannot be converted"),
    ],
)
def test_bad_input_ends_in_one_sentence(
    place: Path, words: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if words.startswith("cwm"):
        tiny("llama").save_pretrained(place / "cwm")
        config = place / "cwm/config.json"
        config.write_text(config.read_text().replace('"llama"', '"cwm"').replace("LlamaFor", "CwmFor"))
        byte_tokenizer().save_pretrained(place / "cwm")
    (place / "short.txt").write_text("short")
    (place / "full").mkdir()
    (place / "full" / "mine.txt").write_text("mine")
    before = sorted(path for path in place.rglob("*"))
    code, out, err = command(f"{words} --quiet", capsys)
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert re.search(sentence, err), err
    assert sorted(path for path in place.rglob("*")) == before


@pytest.mark.parametrize(
    "choice", ["--kv-heads 1", "--coupling leapfrog", "--norm qk-norm", "--share k=v --kv-heads 1"]
)
def test_every_conversion_goes_through_without_a_repair(
    place: Path, choice: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = command(f"llama {choice} --calibration text.txt", capsys)
    assert code == 0
    assert out.splitlines()[-1] == "llama-converted"
    record, loaded = read_record(place / "llama-converted"), AutoModelForCausalLM.from_pretrained("llama-converted")
    train, held_out = ask_text(place)
    assert record["held_out"]["nats_per_token"]["converted"] == measure_loss(loaded, held_out)
    assert record["held_out"]["nats_per_token"].keys() == {"before", "converted"}
    fitted = AutoModelForCausalLM.from_pretrained("llama")
    words = dict(zip(*[iter(choice.replace("--", "").replace("-heads", "_heads").split())] * 2, strict=True))
    calibration = None if "coupling" in words else train.read(range(len(train)))[:, :-1]
    asked: dict[str, Any] = {name: int(word) if word.isdigit() else word for name, word in words.items()}
    qklab.hf.convert(fitted, **asked, calibration=calibration)
    ids = held_out.read([0])
    with torch.no_grad():
        assert torch.equal(fitted(ids).logits, loaded(ids).logits)


def make_repair(place: Path, **how: Any) -> Repair:
    before, model = byte_llama(), byte_llama()
    qklab.hf.convert(model, share="k=v")
    return Repair(model, before, ask_text(place)[0], RepairSettings(lr=1e-2, batch=4, **how))


def test_the_loss_is_divergence_and_next_token(place: Path) -> None:
    ids = ask_text(place)[0].read(range(4))
    both = [make_repair(place, next_token=a) for a in (0.0, 1.0, 0.25)]
    kl, plain, mixed = (repair.compute_loss(ids).item() for repair in both)
    with torch.no_grad():
        now, was = (model(ids[:, :-1]).logits.double().log_softmax(-1) for model in (both[0].model, both[0].before))
    assert kl == pytest.approx(float((was.exp() * (was - now)).sum(-1).mean()), rel=1e-4)
    assert plain == pytest.approx(float(F.cross_entropy(now.flatten(0, 1), ids[:, 1:].flatten())), rel=1e-4)
    assert mixed == pytest.approx(0.75 * kl + 0.25 * plain, rel=1e-4)


def test_what_is_trained_and_in_how_many_passes(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, attention = make_repair(place, train="all"), make_repair(place)
    start = {name: value.clone() for name, value in whole.model.state_dict().items()}
    loss = whole.step(3)
    monkeypatch.setattr(convert_text, "LOGITS", 257 * 32)  # one row at a time
    rows = make_repair(place, train="all")
    assert rows.rows == 1
    assert rows.step(3) == pytest.approx(loss, rel=1e-4)
    attention.step(3)
    changed = {name for name, value in attention.model.state_dict().items() if not torch.equal(value, start[name])}
    assert changed == {name for name in start if ".self_attn." in name}
    assert all(not torch.equal(value, start[name]) for name, value in whole.model.state_dict().items())
    first = max(
        float((a - b).abs().max()) for a, b in zip(whole.tensors().values(), rows.tensors().values(), strict=True)
    )
    assert first < 1e-4


def test_precision_and_dropout_of_the_model_stay(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny("gpt2", vocab_size=257, resid_pdrop=0.5).bfloat16().save_pretrained(place / "gpt2")
    byte_tokenizer().save_pretrained(place / "gpt2")
    for out in ("a", "b"):
        assert command(f"gpt2 --share k=v --repair text.txt --tokens 400 --out {out}", capsys)[0] == 0
    a, b = (load_file(place / name / "model.safetensors") for name in "ab")
    assert {value.dtype for value in a.values()} == {torch.bfloat16}
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert AutoModelForCausalLM.from_pretrained(place / "a").config.resid_pdrop == 0.5


def test_models_of_ours_are_converted_as_llamas(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = recipe("nano", vocab=257, layers=2, context=48, kv_heads=2, rope_base=100.0, tied=False)
    model = wrap_decoder(Decoder(spec, seed=0), bos_token_id=256, eos_token_id=256, pad_token_id=256)
    ids = torch.randint(0, 256, (2, 40))
    with torch.no_grad():
        assert torch.equal(rewrite_as_llama(model)(ids).logits, model(ids).logits)
    model.save_pretrained(place / "ours")
    byte_tokenizer().save_pretrained(place / "ours")
    assert command("ours --share k=v --repair text.txt --tokens 300 --out llama-of-ours", capsys)[0] == 0
    assert AutoModelForCausalLM.from_pretrained(place / "llama-of-ours").config.num_key_value_heads == 2
    for changes in ({"share": "k=v"}, {"attention": [{}, {"window": 8}]}, {"mlp": "gelu"}):
        other = wrap_decoder(Decoder(recipe("nano", vocab=257, layers=2, **changes), seed=0))
        with pytest.raises(ValueError, match="of models trained here those can that are a Llama"):
            rewrite_as_llama(other)
