"""The documentation is held to the code: drawings and tables are current, snippets and commands run, links resolve."""

import importlib
import re
import runpy
import shutil
import sys
import sysconfig
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest

from qklab import cli, register
from qklab.attention.forces import FORCES
from qklab.attention.project import PROJECTIONS
from qklab.attention.rotate import KV_ROTATIONS, POSITIONS
from qklab.cli import main
from qklab.data import sources

ROOT = Path(__file__).parent.parent
PAGES = sorted((ROOT / "docs/mechanisms").glob("*.md"))
TEXT = {page: page.read_text(encoding="utf-8") for page in PAGES}
ALL = "\n".join(TEXT.values())
OTHERS = [ROOT / "README.md", ROOT / "docs/data.md", ROOT / "docs/in-production.md", ROOT / "docs/logit-control.md"]
SNIPPETS = [
    pytest.param(snippet, id=f"{page.stem}-{i}")
    for page, text in [*TEXT.items(), *((page, page.read_text(encoding="utf-8")) for page in OTHERS)]
    for i, snippet in enumerate(re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
]
COMMANDS = sorted(set(re.findall(r"^qklab (describe.*)$", ALL, re.MULTILINE)))
REGISTRIES = {
    "share": PROJECTIONS,
    "kind": register.coupling,
    "force": FORCES,
    "norm": register.norm,
    "position": POSITIONS,
    "kv_rotation": KV_ROTATIONS,
    "mix": register.mix,
}


def build_check(docs: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """Exit code of `python docs/build.py --check`, without paying for another process."""
    monkeypatch.syspath_prepend(docs)
    monkeypatch.setattr(sys, "argv", ["build.py", "--check"])
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(str(docs / "build.py"), run_name="__main__")
    assert isinstance(stopped.value.code, int)
    return stopped.value.code


def test_drawings_and_tables_are_current(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    code = build_check(ROOT / "docs", monkeypatch)
    assert code == 0, f"run `python docs/build.py`:\n{capsys.readouterr().out}"


def test_the_check_names_what_is_stale_and_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    docs = tmp_path / "docs"
    shutil.copytree(ROOT / "docs", docs)
    for results in ("benchmarks", "evidence", "studies"):
        (tmp_path / results).symlink_to(ROOT / results)
    page, drawing = docs / "mechanisms/leapfrog.md", docs / "mechanisms/leapfrog.svg"
    altered = page.read_text(encoding="utf-8").replace("1,056,897", "1,056,898")
    page.write_text(altered, encoding="utf-8")
    drawing.unlink()
    assert build_check(docs, monkeypatch) == 1
    said = capsys.readouterr().out
    assert "leapfrog.md" in said
    assert "leapfrog.svg" in said
    assert len(said.splitlines()) == 2
    assert page.read_text(encoding="utf-8") == altered
    assert not drawing.exists()


def test_charts_say_what_the_result_files_say(monkeypatch: pytest.MonkeyPatch):
    """Drawn anew, every text in them is the one that is kept; where matplotlib puts it is its own affair."""
    monkeypatch.syspath_prepend(ROOT / "docs")
    for name, chart in importlib.import_module("drawings").CHARTS.items():
        drawn, kept = (
            [element.text for element in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]
            for svg in (chart.svg(), (ROOT / "docs" / name).read_text(encoding="utf-8"))
        )
        assert drawn == kept
        assert len(drawn) > 10


@pytest.mark.parametrize("snippet", SNIPPETS)
def test_snippets_run(snippet: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A snippet that trains on Python's library gets one package of it."""
    package = Path(sysconfig.get_path("stdlib"), "importlib")
    monkeypatch.setattr(sources, "sysconfig", SimpleNamespace(get_path=lambda name: str(package)))
    monkeypatch.chdir(tmp_path)
    exec(compile(snippet, "snippet", "exec"), {})


def test_the_readme_shows_what_describe_prints(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["describe", "--share", "k=v", "--heads", "16", "--kv-heads", "4"])
    assert capsys.readouterr().out in (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("command", COMMANDS)
def test_describe_commands_run(command: str):
    with pytest.raises(SystemExit) as stopped:
        cli.main(command.split())
    assert not stopped.value.code


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))], ids=lambda page: str(page.relative_to(ROOT))
)
def test_links_and_images_resolve(page: Path):
    targets = re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))
    paths = [target.split("#")[0] for target in targets if not re.match(r"[a-z]+:", target)]
    assert not [path for path in paths if path and not (page.parent / path).exists()]


@pytest.mark.parametrize(("field", "name"), [(field, name) for field, names in REGISTRIES.items() for name in names])
def test_every_choice_is_on_some_page(field: str, name: str):
    assert f'{field}="{name}"' in ALL


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "README.md"], ids=lambda page: page.stem)
def test_every_page_is_indexed_and_complete(page: Path):
    text = TEXT[page]
    assert f"({page.name})" in TEXT[page.with_name("README.md")]
    assert f"({page.stem}.svg)" in text
    marks = ["```", "![", "```python", "## What it costs", "## Goes with, and refuses", "## What is known"]
    places = [text.index(mark) for mark in marks]
    assert places == sorted(places)
    assert "Q-K" not in text  # readers take the dash for a minus sign
