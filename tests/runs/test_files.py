"""Files are written in one place, and are the old version or the new one whatever happens meanwhile."""

import ast
import errno
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import qklab
from qklab.runs import files

SOURCE = Path(qklab.__file__).parent
WRITING_METHODS = {"write_text", "write_bytes", "touch", "hardlink_to", "symlink_to", "tofile", "rename", "save_file"}
WRITING_FUNCTIONS = {
    *("os.replace", "os.rename", "os.link", "os.symlink", "json.dump", "np.save", "np.savez"),
    *("shutil.copy", "shutil.copy2", "shutil.copyfile", "shutil.copytree", "shutil.move"),
    *("tempfile.NamedTemporaryFile", "tempfile.mkstemp"),
}
WRITING_FLAGS = {"O_WRONLY", "O_RDWR", "O_CREAT", "O_APPEND", "O_TRUNC"}


def writes_a_file(node: ast.AST) -> bool:
    """Whether this part of another module than runs/files.py writes a file past it."""
    if isinstance(node, ast.Attribute):
        return ast.unparse(node) in WRITING_FUNCTIONS
    if not isinstance(node, ast.Call):
        return False
    name, arguments = ast.unparse(node.func), node.args
    last, modes = name.split(".")[-1], [*arguments[:2], *(k.value for k in node.keywords if k.arg == "mode")]
    if last in ("open", "fdopen"):
        to_nowhere = bool(arguments) and ast.unparse(arguments[0]) == "os.devnull"
        flags = {part.attr for given in arguments for part in ast.walk(given) if isinstance(part, ast.Attribute)}
        texts = [mode.value for mode in modes if isinstance(mode, ast.Constant) and isinstance(mode.value, str)]
        return not to_nowhere and (bool(flags & WRITING_FLAGS) or any(set(m) <= set("wax+bt") for m in texts))
    if last == "replace":  # of a path: text has two arguments, a spec named ones
        return len(arguments) == 1 and not node.keywords
    return last in WRITING_METHODS and "." in name and not name.startswith("files.")


def file_writers(source: str) -> Iterator[int]:
    return (node.lineno for node in ast.walk(ast.parse(source)) if writes_a_file(node))  # pyright: ignore[reportAttributeAccessIssue]


def test_only_runs_files_writes_files() -> None:
    found = [
        f"{path.relative_to(SOURCE)}:{line}"
        for path in SOURCE.rglob("*.py")
        if path != Path(files.__file__)
        for line in file_writers(path.read_text())
    ]
    assert found == [], "write files through qklab.runs.files"


@pytest.mark.parametrize(
    ("code", "writes"),
    [
        ("open(path, 'ab')", True),
        ("path.open('w')", True),
        ("open(path, mode='x')", True),
        ("os.open(path, os.O_WRONLY | os.O_CREAT)", True),
        ("path.write_text(content)", True),
        ("aside.replace(path)", True),
        ("aside.rename(path)", True),
        ("json.dump(value, file)", True),
        ("(shutil.copyfile if copy else link)(source, target)", True),
        ("safetensors.torch.save_file(tensors, path)", True),
        ("open(path, 'rb')", False),
        ("path.open()", False),
        ("os.open(os.devnull, os.O_WRONLY)", False),
        ("text.replace('a', 'b')", False),
        ("spec.replace(width=3)", False),
        ("files.write_text(path, content)", False),
        ("write_bytes(path, content)", False),
    ],
)
def test_the_lint_knows_a_writer_when_it_sees_one(code: str, writes: bool) -> None:
    assert bool(list(file_writers(code))) == writes


WRITERS: list[Callable[[Path, int], None]] = [
    lambda path, number: files.write_text(path, f"{number}"),
    lambda path, number: files.write_json(path, {"a": number}),
    lambda path, number: files.write_tensors(path, {"a": torch.full((3,), number)}),
]


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize("refused", ["fsync", "replace"])
def test_a_file_is_old_or_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[Path, int], None], refused: str
) -> None:
    path = tmp_path / "file"
    write(path, 1)
    old = path.read_bytes()

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, refused, refuse)
        with pytest.raises(OSError, match="No space left"):
            write(path, 2)
    assert path.read_bytes() == old
    assert list(tmp_path.iterdir()) == [path]
    write(path, 2)
    assert path.read_bytes() != old
    assert path.stat().st_mode & 0o777 == 0o644


def test_json_has_no_nan_and_tensors_come_back(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON"):
        files.write_json(tmp_path / "a.json", {"a": float("nan")})
    files.write_json(tmp_path / "a.json", {"ä": [1]})
    assert json.loads((tmp_path / "a.json").read_text(encoding="utf-8")) == {"ä": [1]}
    files.write_tensors(tmp_path / "a.safetensors", {"a": torch.arange(3)}, {"step": "1"})
    assert load_file(tmp_path / "a.safetensors")["a"].tolist() == [0, 1, 2]


def test_what_the_disk_says_to_safetensors_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        files.write_tensors(tmp_path / "none" / "a", {"a": torch.zeros(1)})


def test_a_killed_writer_leaves_nothing_for_long(tmp_path: Path) -> None:
    def kill(*_: Any) -> None:
        os._exit(9)

    if (child := os.fork()) == 0:
        setattr(os, "replace", kill)  # noqa: B010
        files.write_text(tmp_path / "file", "half")
    os.waitpid(child, 0)
    assert [path.name for path in tmp_path.iterdir()] == [f".file.{child}.tmp"]
    files.remove_temporaries(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_lines_are_appended_whole(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("cut sho")
    for line in ("a", "b"):
        file = files.AppendedFile(path)
        file.append_line(line)
        file.flush()
        file.close()
    assert path.read_text() == "cut sho\na\nb\n"


def test_a_link_is_a_copy_where_links_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    (tmp_path / "a").write_text("a")
    monkeypatch.setattr(os, "link", refuse)
    files.link_file(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b").read_text() == "a"
    files.move_file(tmp_path / "b", tmp_path / "a")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
