"""The examples and the notebook run as they stand, in an empty folder."""

import json
import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
SCRIPTS = [
    pytest.param(path, id=path.stem, marks=[pytest.mark.long] if path.stem == "study_from_python" else [])
    for path in sorted(EXAMPLES.glob("*.py"))
]


@pytest.mark.parametrize("script", SCRIPTS)
def test_an_example_runs(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(script), run_name="__main__")
    said = capsys.readouterr().out.splitlines()
    assert said
    losses = [float(line.rpartition(" ")[2]) for line in said if line.startswith("step ")]
    assert losses == sorted(losses, reverse=True)


def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its code, cell by cell in one namespace; no outputs are kept with it, which would be of another machine."""
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "__main__"}
    for i, cell in enumerate(json.loads((EXAMPLES / "tour.ipynb").read_text(encoding="utf-8"))["cells"]):
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            exec(compile("".join(cell["source"]), f"cell {i}", "exec"), names)
