"""The wheel is all that a user has: it works where there is no repository."""

import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TINY = "--model.layers 1 --model.width 16 --model.context 16 --attention.heads 2 --batch.sequences 2 --budget.tokens 64"


def run(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["XDG_CACHE_HOME"] = str(cwd / "cache")
    return subprocess.run([*map(str, command)], cwd=cwd, env=environment, capture_output=True, text=True, check=False)


def build_wheel(folder: Path) -> Path:
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, ROOT]
    built = run(*pip, cwd=folder)
    if built.returncode != 0 and "hatchling" in built.stderr:
        pytest.skip("pip could not get hatchling, which builds the wheel")
    assert built.returncode == 0, built.stderr
    return next(folder.glob("qklab-*.whl"))


def check_contents(wheel: Path) -> None:
    """Everything that is not Python is there too."""
    inside = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("qklab/")}
    source = ROOT / "src/qklab"
    files = {f"qklab/{path.relative_to(source).as_posix()}" for path in source.rglob("*") if path.is_file()}
    assert inside == {name for name in files if "__pycache__" not in name}
    assert {Path(name).suffix for name in inside} >= {".py", ".js", ".css", ".html", ".typed"}


# one process for all commands: each would import torch anew
COMMANDS = f"""
import qklab
from qklab.cli import main
print(qklab.__file__)
for words in (
    "mechanisms",
    "describe --share k=v --heads 8",
    "train --corpus.source texts --corpus.tokenizer bytes {TINY} --out run",
    "report run --out report.html",
):
    try:
        main(words.split())
    except SystemExit as stop:
        assert not stop.code, words
"""


@pytest.mark.long
def test_it_works_in_a_fresh_environment(tmp_path: Path) -> None:
    """Fresh but for torch and the other dependencies, which are those of this environment."""
    wheel = build_wheel(tmp_path)
    check_contents(wheel)
    venv.create(tmp_path / "env", with_pip=False, symlinks=True)
    programs = tmp_path / "env/bin"
    pip = [sys.executable, "-m", "pip", "--python", programs / "python", "install", "--quiet", "--no-deps", wheel]
    installed = run(*pip, cwd=tmp_path)
    assert installed.returncode == 0, installed.stderr
    packages = next((tmp_path / "env/lib").glob("python*/site-packages"))
    # only the folders: .pth files in them, which would lead back to the repository, are not read
    (packages / "dependencies.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    (tmp_path / "texts").mkdir()
    for split in ("train", "valid"):
        (tmp_path / f"texts/{split}.txt").write_text(f"It was a {split} and stormy night. " * 100, encoding="utf-8")

    assert "mechanisms" in run(programs / "qklab", "--help", cwd=tmp_path).stdout
    done = run(programs / "python", "-c", COMMANDS, cwd=tmp_path)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert done.stdout.startswith(str(packages))
    assert (tmp_path / "report.html").stat().st_size > 10_000
