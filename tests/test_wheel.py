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


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, ROOT]
    built = run(*pip, cwd=folder)
    if built.returncode != 0 and "hatchling" in built.stderr:
        pytest.skip("pip could not get hatchling, which builds the wheel")
    assert built.returncode == 0, built.stderr
    return next(folder.glob("qklab-*.whl"))


def test_it_holds_everything_that_is_not_python_too(wheel: Path) -> None:
    inside = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("qklab/")}
    source = ROOT / "src/qklab"
    files = {f"qklab/{path.relative_to(source).as_posix()}" for path in source.rglob("*") if path.is_file()}
    assert inside == {name for name in files if "__pycache__" not in name}
    assert {Path(name).suffix for name in inside} >= {".py", ".js", ".css", ".html", ".typed"}


@pytest.mark.long
def test_it_works_in_a_fresh_environment(wheel: Path, tmp_path: Path) -> None:
    """Fresh but for torch and the other dependencies, which are those of this environment."""
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

    where = run(programs / "python", "-c", "import qklab; print(qklab.__file__)", cwd=tmp_path)
    assert str(packages) in where.stdout, where.stderr
    for words in (
        "mechanisms",
        "describe --share k=v --heads 8",
        f"train --corpus.source texts --corpus.tokenizer bytes {TINY} --out run",
        "report run --out report.html",
    ):
        done = run(programs / "qklab", *words.split(), cwd=tmp_path)
        assert done.returncode == 0, f"qklab {words}\n{done.stdout}\n{done.stderr}"
    assert (tmp_path / "report.html").stat().st_size > 10_000
