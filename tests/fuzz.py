"""Random settings, flags and files for the command line, from a seed: `python tests/fuzz.py 500` tries so many.

Whatever comes in, a command ends with a code of its own: it works (0), refuses in one sentence (2), the run diverges
(3), or it is stopped after two steps (75), which it is here. What is legal is small, and what is large far too large.
"""

import contextlib
import dataclasses
import io
import json
import random
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from qklab.cli import main
from qklab.cli.compare import CompareCommand
from qklab.cli.study import StudyCommand
from qklab.cli.train import TrainCommand
from qklab.study.spec import StudySpec

CODES = {0, 2, 3, 75}
ODD: list[Any] = [
    *(0, -1, 1, 2, 3, 7, 64, 2_000_000_000, 2**31, 2**63, -(2**70), 0.5, -0.1, 1.5, 1e-30, 1e30, 1e308),
    *(float("nan"), float("inf"), True, False, "", "auto", "none", "qk", "k=v", "leapfrog", "bytes", "é\n", "a" * 300),
    *([], [1, 2], ["x"], {}, {"kind": "affine"}, {"a": {"b": 1}}),
]
SMALL = {
    "model": {"layers": 1, "width": 16, "context": 16},
    "attention": {"heads": 2},
    "batch": {"sequences": 2},
    "budget": {"tokens": 32},
    "evaluation": {"times": 1, "tokens": 32, "final_tokens": 32, "probes": 1, "probe_tokens": 8},
    "execution": {"device": "cpu", "threads": 1},
}


def list_flags(command: type, prefix: str = "") -> Iterator[str]:
    """Every flag of a command."""
    for field in dataclasses.fields(command):
        if dataclasses.is_dataclass(field.default):
            yield from list_flags(type(field.default), f"{prefix}{field.name}.")
        elif field.name not in ("file", "texts", "out", "data"):
            yield f"--{prefix}{'continue' if field.name == 'more' else field.name}".replace("_", "-")


def write_toml(values: dict[str, Any], prefix: str = "") -> str:
    """Tables as TOML; what has no spelling there is left out."""
    lines, tables = [], []
    for name, value in values.items():
        if isinstance(value, dict):
            tables.append(f"[{prefix}{json.dumps(name)}]\n{write_toml(value, f'{prefix}{json.dumps(name)}.')}")
        elif value is not None and not (isinstance(value, int) and abs(value) >= 2**63):
            spelt = repr(value) if isinstance(value, float) else json.dumps(value)
            lines.append(f"{json.dumps(name)} = {spelt}\n")
    return "".join(lines + tables)


class Fuzzer:
    """Makes commands, one after another, in a folder with a small text."""

    def __init__(self, seed: int, folder: Path):
        self.chance, self.folder = random.Random(seed), folder
        self.text = folder / "text.txt"
        self.text.write_text("\n<|endoftext|>\n".join(f"text {i} of some words, {i * i}" for i in range(300)))
        self.kinds: list[Callable[[], list[str]]] = [
            self.train_flags,
            self.train_file,
            self.study_file,
            self.compare_flags,
            self.data_flags,
            self.broken_folder,
        ]

    def odd(self) -> Any:
        return self.chance.choice(ODD)

    def some_flags(self, command: type, most: int = 3) -> list[str]:
        flags = self.chance.sample([*list_flags(command)], self.chance.randint(1, most))
        return [word for flag in flags for word in (flag, str(self.odd()))]

    def write(self, name: str, content: str) -> str:
        path = self.folder / name
        path.write_text(content, encoding="utf-8")
        return str(path)

    def scatter(self, values: dict[str, Any], names: list[str]) -> dict[str, Any]:
        """The values with a few odd ones in them."""
        changed = json.loads(json.dumps(values))
        for _ in range(self.chance.randint(1, 3)):
            *path, last = self.chance.choice(names).split(".")
            table = changed
            for part in path:
                table = table.setdefault(part, {}) if isinstance(table.get(part, {}), dict) else {}
            table[last] = self.odd()
        return changed

    def run_names(self) -> list[str]:
        return [flag[2:].replace("-", "_") for flag in list_flags(TrainCommand)] + ["nonsense", "model.nonsense"]

    def small_run(self) -> dict[str, Any]:
        return SMALL | {"corpus": {"source": str(self.text), "tokenizer": "bytes", "valid": 0.1, "test": 0.1}}

    def train_flags(self) -> list[str]:
        file = self.write("run.toml", write_toml(self.small_run()))
        return ["train", file, *self.some_flags(TrainCommand), "--out", str(self.folder / "run")]

    def train_file(self) -> list[str]:
        text = write_toml(self.scatter(self.small_run(), self.run_names()))
        if self.chance.random() < 0.2:
            cut = self.chance.randrange(len(text))
            text = text[:cut] + self.chance.choice(["", "[", "=", "\0", '"']) + text[cut + 3 :]
        return ["train", self.write("run.toml", text), "--out", str(self.folder / "run"), "--quiet"]

    def study_file(self) -> list[str]:
        base = {name: value for name, value in self.small_run().items() if name != "execution"}
        base["corpus"] = {"tokenizer": "bytes"}
        values = {"baseline": "a", "arms": {"a": {}, "b": {"z_loss": 0.1}}, "corpora": [str(self.text)], "base": base}
        names = [*(field.name for field in dataclasses.fields(StudySpec)), "arms.b.model.width", "base.budget.tokens"]
        file = self.write("study.toml", write_toml(self.scatter(values, names)))
        flags = self.some_flags(StudyCommand, 1) if self.chance.random() < 0.3 else []
        return ["study", file, *flags, "--out", str(self.folder / "study")]

    def compare_flags(self) -> list[str]:
        return ["compare", str(self.text), *self.some_flags(CompareCommand), "--out", str(self.folder / "compared")]

    def data_flags(self) -> list[str]:
        suffix = self.chance.choice([".txt", ".jsonl", ".csv", ".json", ".md", ".txt.gz", ".parquet", ".html", ""])
        path = self.folder / f"odd{suffix}"
        path.write_bytes(self.chance.choice([b"", self.chance.randbytes(3000), b'{"text": "x"}\n' * 50, b"a,b\n1,2\n"]))
        settings = [
            "--tokenizer",
            "--vocab",
            "--valid",
            "--test",
            "--limit-bytes",
            "--column",
            "--encoding",
            "--workers",
        ]
        flags = [word for flag in self.chance.sample(settings, 2) for word in (flag, str(self.odd()))]
        return ["data", self.chance.choice(["prepare", "stats"]), str(path), *flags]

    def broken_folder(self) -> list[str]:
        folder = self.folder / "broken"
        folder.mkdir(exist_ok=True)
        name = self.chance.choice(["run.json", "study.json", "summary.json", "manifest.json"])
        (folder / name).write_text(json.dumps({"format": self.chance.choice([1, 2, "1"]), "spec": self.odd()}))
        commands = ["sample", "report", "inspect", "export", *(["train"] if name == "run.json" else [])]
        return [self.chance.choice(commands), *self.place(folder)]

    def place(self, folder: Path) -> list[str]:
        return self.chance.choice([[str(folder)], ["--out", str(folder)], [str(folder), "--tokens", str(self.odd())]])


@contextlib.contextmanager
def shortened() -> Iterator[None]:
    """Studies and comparisons are planned and checked, and not carried out."""

    def check(study: Any, *_: Any) -> int:
        study.spec.refuse_illegal()
        return 0

    with (
        mock.patch("qklab.cli.study.execute_and_report", check),
        mock.patch("qklab.study.sizes.measure_step", return_value=0.01),
        mock.patch("qklab.train.loop.Loop.should_stop", lambda loop, stop: loop.state.step >= 2),
        mock.patch("sys.stdout", io.StringIO()),
    ):
        yield


def find_fault(words: list[str]) -> str | None:
    """What is wrong with how a command ended."""
    said = io.StringIO()
    try:
        with shortened(), contextlib.redirect_stderr(said):
            main(words)
    except SystemExit as end:
        code = end.code or 0
        if code in CODES and "Traceback" not in said.getvalue():
            return None
        return f"code {code}: {said.getvalue()[-2000:]}"
    except BaseException:
        return traceback.format_exc()
    return "it did not end"


def try_commands(count: int, seed: int) -> list[str]:
    """Faults of so many commands."""
    faults: list[str] = []
    for number in range(count):
        with tempfile.TemporaryDirectory() as folder, mock.patch.dict("os.environ", QKLAB_CACHE=f"{folder}/cache"):
            fuzzer = Fuzzer(1000 * seed + number, Path(folder))
            words = fuzzer.kinds[number % len(fuzzer.kinds)]()
            fault = find_fault(words)
            if fault is not None:
                files = [path.read_text() for path in Path(folder).glob("*.toml")]
                faults.append("\n".join([f"case {number} of seed {seed}: qklab {words}", *files, fault]))
    return faults


if __name__ == "__main__":
    found = try_commands(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0)
    print("\n\n".join(found))
    print(f"{len(found)} faults")
    sys.exit(bool(found))
