"""Another package adds to qklab by decorators and an entry point, and everything works with what it adds."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from qklab import register

ROOT = Path(__file__).parent.parent
PLUGIN = ROOT / "examples/plugin"


@pytest.fixture
def installed(tmp_path: Path) -> dict[str, str]:
    """The environment of a process that finds the package installed: its module, and its metadata as pip writes it."""
    project = tomllib.loads((PLUGIN / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    metadata = tmp_path / "installed" / f"qklab_turn-{project['version']}.dist-info"
    metadata.mkdir(parents=True)
    header = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    (metadata / "METADATA").write_text(header, encoding="utf-8")
    lines = []
    for group, points in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {module}" for name, module in points.items())]
    (metadata / "entry_points.txt").write_text("\n".join(lines), encoding="utf-8")
    path = [str(metadata.parent), str(PLUGIN), str(ROOT / "src")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path)}


@pytest.mark.long
def test_what_a_package_adds_is_there_by_name(installed: dict[str, str], tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error", ROOT / "tests/plugin_tour.py"]
    done = subprocess.run(command, env=installed, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"


def test_a_package_that_cannot_be_imported_is_named_every_time(
    installed: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(installed["PYTHONPATH"].split(os.pathsep)[0])  # its metadata without its module
    monkeypatch.setattr(register, "_imported_groups", set())
    for _ in range(2):
        with pytest.raises(register.RegistryError, match=r"package qklab-turn .* cannot be imported: .*uninstall it"):
            register.coupling["turn"]


def test_a_name_is_given_once_and_unknown_ones_get_a_suggestion() -> None:
    registry = register.Registry("colour")
    red = registry("red")(type("Red", (), {}))
    assert registry["red"] is red
    assert registry("red")(red) is red
    with pytest.raises(
        register.RegistryError, match=r"the colour 'red' is registered already, by .*Red; choose another"
    ):
        registry("red")(type("Crimson", (), {}))
    with pytest.raises(register.RegistryError, match=r"there is no colour 'rad'.*'red'.*; registered are red"):
        registry["rad"]
    with pytest.raises(register.RegistryError, match="under a name, but 3 came"):
        registry(3)  # pyright: ignore[reportArgumentType]
