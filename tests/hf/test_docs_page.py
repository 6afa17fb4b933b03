"""docs/transformers.md as a reader would follow it: every snippet runs as it stands, and its claims hold."""

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import byte_llama, byte_tokenizer

from qklab.cli import main
from qklab.data.questions import TASKS

pytestmark = pytest.mark.newest
ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/transformers.md").read_text(encoding="utf-8")
COUPLED, SHARED, WRAPPED, EXPORTED = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def save_llama(folder: Path, text: str) -> None:
    """A tiny Llama that has learned a little of the text, and a tokenizer of bytes."""
    tokenizer = byte_tokenizer()
    model = byte_llama(max_position_embeddings=4096, initializer_range=0.02)
    ids = torch.tensor(tokenizer(text)["input_ids"])
    rows = ids[: len(ids) // 64 * 64].view(-1, 64)[:-16]
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(60):
        batch = rows[torch.randint(len(rows), (8,))]
        loss: Any = model(batch, labels=batch).loss
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with my-llama, my-text.txt and a trained run of ours, as the page supposes; everything runs in it."""
    folder = tmp_path_factory.mktemp("reader")
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    (folder / "my-text.txt").write_text(text, encoding="utf-8")
    save_llama(folder / "my-llama", text)
    (folder / "my-texts").mkdir()
    for part, split in enumerate(("train", "valid", "test")):
        paragraphs = text.split("\n\n")[part::3]
        (folder / "my-texts" / f"{split}.txt").write_text("\n<|endoftext|>\n".join(paragraphs), encoding="utf-8")
    with contextlib.chdir(folder):
        yield folder


def run(code: str) -> dict[str, Any]:
    torch.manual_seed(0)
    names: dict[str, Any] = {}
    exec(compile(code, "docs/transformers.md", "exec"), names)
    return names


def command(words: str) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(words.split())
    assert not stopped.value.code


def test_the_coupling_is_inserted_fine_tuned_and_saved(place: Path):
    lines = [line for line in COUPLED.splitlines() if line.strip()]
    assert len(lines) < 40
    names = run(COUPLED)
    assert float(names["after"].loss) < float(names["before"].loss)
    coupled = {name for name, value in names["model"].named_parameters() if value.requires_grad}
    assert coupled
    assert all(".couple." in name for name in coupled)
    saved = sum(file.stat().st_size for file in (place / "my-coupling").iterdir())
    assert saved < (place / "my-llama/model.safetensors").stat().st_size
    assert {"my-coupling", "my-coupled-llama"} <= set(os.listdir(place))


def test_the_shared_model_has_half_the_cache(place: Path):
    report = run(SHARED)["report"]
    assert report.cache_share == 0.5
    assert all(layer.output is not None for layer in report.layers)
    assert (place / "my-shared-llama/model.safetensors").exists()


def test_an_adapter_lies_on_the_coupled_model(place: Path):
    names = run(WRAPPED)
    assert any(".couple." in name for name, value in names["model"].named_parameters() if value.requires_grad)
    assert names["again"].peft_config["default"].base_model_name_or_path == "my-coupled-llama"


def test_our_models_are_trained_exported_and_loaded(place: Path, capsys: pytest.CaptureFixture[str]):
    training, export = re.findall(r"^qklab ((?:train|export)[^#\n]*)", PAGE, re.MULTILINE)
    small = "--corpus.tokenizer bytes --model.layers 1 --model.context 64 --batch.sequences 4 --budget.tokens 512"
    command(f"{training} {small} --execution.device cpu --quiet")
    command(export)
    model = run(EXPORTED)["model"]
    assert model.config.decoder_spec.attention.share == "k=v"
    assert capsys.readouterr().out.strip()


def test_the_table_of_local_tasks_is_whole():
    named = re.findall(r"^\| ((?:`\w+` ?)+)", PAGE[PAGE.index("| local tasks |") :], re.MULTILINE)
    assert {name for row in named for name in re.findall(r"`(\w+)`", row)} == TASKS.keys()
