"""Sources: what a name stands for, and the order and splits of what comes out."""

import os
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from corpora import write_files

from qklab import register
from qklab.data import DataError, DataSpec, Document, Source, prepare_corpus
from qklab.data.sources import Stdlib, find_source, parse_split_name
from qklab.runs.progress import Terminal
from qklab.schema import SpecError


def write(folder: Path, **files: str) -> Path:
    return write_files(folder, {name.replace("__", "/").replace("_", "."): text for name, text in files.items()})


def texts(source: Any) -> list[tuple[str | None, str]]:
    return [(split, raw.decode()) for raw, split, _ in source.read_documents()]


def test_a_folder_is_read_by_name_with_everything_under_it(tmp_path: Path) -> None:
    folder = write(
        tmp_path, b_txt="B", a__z_txt="Z", a__c_jsonl='{"text": "C"}', _hidden_txt="no", _git__x_txt="no", note_md="no"
    )
    source = find_source(str(folder))
    assert texts(source) == [(None, "C"), (None, "Z"), (None, "B")]
    assert [row[0] for row in source.list_contents()] == ["a/c.jsonl", "a/z.txt", "b.txt"]
    assert source.size == sum(row[1] for row in source.list_contents())


def test_files_named_for_splits_keep_them_and_held_out_text_comes_first(tmp_path: Path) -> None:
    folder = write(tmp_path, train_1_txt="T1", train_0_txt="T0", val_txt="V", test__x_txt="E")
    source = find_source(str(folder))
    assert texts(source) == [("test", "E"), ("valid", "V"), ("train", "T0"), ("train", "T1")]
    assert source.splits == {"train", "valid", "test"}


def test_a_stray_file_among_split_files_is_not_ignored_and_files_of_one_split_are_no_splits(tmp_path: Path) -> None:
    folder = write(tmp_path / "stray", train_txt="T", valid_txt="V", extra_txt="X")
    with pytest.raises(DataError, match=r"also extra\.txt; name it train…"):
        find_source(str(folder))
    for split in ("test", "train"):
        folder = write_files(tmp_path / split, {f"{split}.a.txt": "A", "other.txt": "O"})
        assert texts(find_source(str(folder))) == [(None, "O"), (None, "A")]


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("train.0.txt", "train"),
        ("training-01.jsonl", "train"),
        ("val_3.txt", "valid"),
        ("Validation.txt", "valid"),
        ("dev.txt", "valid"),
        ("test/1.txt", "test"),
        ("testimony.txt", None),
        ("values.txt", None),
        ("my-train.txt", None),
    ],
)
def test_names_of_splits(name: str, split: str | None) -> None:
    assert parse_split_name(name) == split


def test_corpora_are_found_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, poems__a_txt="A", news__b_txt="B")
    assert texts(find_source("poems", tmp_path)) == [(None, "A")]
    monkeypatch.setenv("QKLAB_DATA", str(tmp_path))
    assert texts(find_source("news")) == [(None, "B")]
    with pytest.raises(DataError, match=r"no source 'peoms' \(did you mean 'poems'\?\)"):
        find_source("peoms")
    monkeypatch.setenv("QKLAB_DATA", str(tmp_path / "gone"))
    with pytest.raises(DataError, match=r"folder of corpora .*gone does not exist"):
        find_source("poems")
    monkeypatch.delenv("QKLAB_DATA")
    with pytest.raises(DataError, match=r"no source 'stdlb' \(did you mean 'stdlib'\?\)"):
        find_source("stdlb")


def test_what_cannot_be_read_is_told(tmp_path: Path) -> None:
    write(tmp_path, dangling__a_txt="A")
    (tmp_path / "dangling" / "b.txt").symlink_to(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"b\.txt cannot be read: No such file"):
        find_source(str(tmp_path / "dangling"))
    for name in ("x" * 5000, "a\0b"):
        with pytest.raises(DataError, match="there is no source"):
            find_source(name)
    write(tmp_path, empty__note_html="x", a_html="x")
    with pytest.raises(DataError, match=r"empty holds none of \.txt, .*, \.json \(each also with \.gz"):
        find_source(str(tmp_path / "empty"))
    with pytest.raises(DataError, match=r"a\.html is none of"):
        find_source(str(tmp_path / "a.html"))
    with pytest.raises(DataError, match="column is for files and folders, but the source is stdlib"):
        find_source("stdlib", spec=DataSpec(column="body"))


def test_what_is_left_out_of_a_folder_is_named(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", x_txt="X", readme_md="no", page_html="no", _hidden_txt="no")
    source = find_source(str(folder))
    assert texts(source) == [(None, "X")]
    assert source.notes == (
        f"left out of {folder}, since they are none of .txt, .jsonl, .parquet: page.html, readme.md.",
    )
    folder = write(
        tmp_path / "b",
        **{f"n{i}_md": "a longer note" for i in range(3)},
        meta_json="{}",
        **{f"p{i}_pdf": "" for i in range(7)},
    )
    source = find_source(str(folder))  # of what stands beside a corpus more often than for one, what there is most of
    assert len(texts(source)) == 3
    assert source.notes[0].endswith(".parquet and .md: meta.json, p0.pdf, p1.pdf, p2.pdf, p3.pdf and 3 others.")


def test_files_that_cannot_be_read_are_named_all_at_once_or_left_out(tmp_path: Path) -> None:
    write(tmp_path, a_txt="A", d_txt="D")
    for name, raw in (("b.txt", b"caf\xe9"), ("c.txt", b"\xff"), ("e.jsonl", b'{"body": 1}')):
        (tmp_path / name).write_bytes(raw)
    told = (
        r"b\.txt is not UTF-8 at byte 3; .*--encoding.*--skip-bad.*; 3 of 5 files cannot be read; the others are c.txt"
    )
    with pytest.raises(DataError, match=told):
        texts(find_source(str(tmp_path)))
    source = find_source(str(tmp_path), spec=DataSpec(skip_bad=True))
    assert texts(source) == [(None, "A"), (None, "D")]
    assert source.notes[0].endswith("cannot be read (--skip-bad): b.txt, c.txt, e.jsonl.")
    (tmp_path / "e.jsonl").unlink()
    source = find_source(str(tmp_path), spec=DataSpec(encoding="latin-1"))
    assert [text for _, text in texts(source)] == ["A", "café", "ÿ", "D"]
    with pytest.raises(DataError, match=r"none of the 1 files of .* can be read"):
        find_source(str(tmp_path / "b.txt"), spec=DataSpec(skip_bad=True))
    with pytest.raises(DataError, match=r"b\.txt is not ascii"):
        texts(find_source(str(tmp_path / "b.txt"), spec=DataSpec(encoding="ascii")))


def test_names_that_are_no_utf8_are_shown_safely(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = os.fsencode(tmp_path / "source")
    os.mkdir(folder)
    for name in (b"caf\xe9.txt", b"caf\xe9.html"):
        Path(os.fsdecode(os.path.join(folder, name))).write_text("text " * 9000)
    spec = DataSpec(source=str(tmp_path / "source"), tokenizer="bytes")
    corpus = prepare_corpus(spec, out=tmp_path / "out", progress=Terminal().report_bytes)
    assert [row[0] for row in corpus.manifest["source"]["files"]] == ["caf\\xe9.txt"]
    assert "caf\\xe9.html" in capfd.readouterr().err
    with pytest.raises(SpecError, match="source must be UTF-8, since it is written down"):
        DataSpec(source=os.fsdecode(b"caf\xe9.txt"))


def test_the_python_that_runs_this_is_a_corpus() -> None:
    source = Stdlib()
    found = list(source.read_documents())
    assert found == list(Stdlib().read_documents())
    size = sum(len(raw) for raw, _, _ in found)
    assert 4e6 < size < 4e7
    assert len(found) > 300
    names = [row[0] for row in source.list_contents()]
    assert "argparse.py" in names
    assert not [name for name in names if "site-packages" in name or name.startswith("test/")]
    assert any(b'The "if" statement' in raw.replace(b"\n", b" ") for raw, _, _ in found[-200:])


def test_a_python_without_sources_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    with pytest.raises(DataError, match="keeps no library source"):
        Stdlib()
    (tmp_path / "a.py").write_bytes(b"# latin \xe9\n")
    (tmp_path / "b.py").write_bytes(b"# fine\n")
    assert next(Stdlib().read_documents()).raw == b"# fine\n"


class Rows(list[dict[str, Any]]):
    column_names = ("text",)
    _fingerprint = "f1"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """A stand-in for `datasets` that knows two datasets; the list records what was asked for."""
    asked: list[tuple[str, ...]] = []
    rows = {key: Rows([{"text": f"{key} {i}"} for i in range(2)]) for key in ("train", "validation", "test")}

    def load_dataset(*name: str) -> dict[str, Rows]:
        asked.append(name)
        if name in (("wiki", "small"), ("owner/wiki", "small")):
            return rows
        if name == ("owner/plain",):
            return {"train": rows["train"]}
        raise FileNotFoundError(f"no dataset {name}\nmore")

    fake = types.ModuleType("datasets")
    fake.__dict__["load_dataset"] = load_dataset
    monkeypatch.setitem(sys.modules, "datasets", fake)
    return asked


def test_datasets_of_the_hub(hub: list[tuple[str, ...]]) -> None:
    source = find_source("hf:wiki/small")
    assert texts(source)[::2] == [("test", "test 0"), ("valid", "validation 0"), ("train", "train 0")]
    assert source.splits == {"train", "valid", "test"}
    assert texts(find_source("hf:owner/wiki/small")) == texts(source)
    assert texts(find_source("hf:owner/plain")) == [(None, "train 0"), (None, "train 1")]
    assert hub == [("wiki", "small"), ("owner/wiki", "small"), ("owner", "plain"), ("owner/plain",)]
    with pytest.raises(DataError, match=r"hf:a/b cannot be loaded: no dataset \('a', 'b'\); no dataset \('a/b',\)\."):
        find_source("hf:a/b")
    with pytest.raises(DataError, match="is written hf:NAME/CONFIG"):
        find_source("hf:")


def test_a_source_registers_from_outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(register.source, "entries", dict(register.source.entries))

    @register.source("numbers")
    class Numbers(Source):
        splits = frozenset({"train", "valid"})

        def __init__(self, name: str):
            super().__init__(name)
            self.size = int(name.partition(":")[2])

        def list_contents(self) -> list[list[Any]]:
            return [["numbers", self.size, 0]]

        def read_documents(self) -> Iterator[Document]:
            yield Document(b"held out", "valid", 0)
            yield from (Document(f"number {i}".encode(), "train", i) for i in range(self.size))

    corpus = prepare_corpus(DataSpec(source="numbers:9", tokenizer="bytes", test=0), out=tmp_path)
    assert [split.documents for split in corpus.splits.values()] == [9, 1, 0]
    assert corpus.manifest["source"]["name"] == "numbers:9"
    with pytest.raises(DataError, match=r"no source 'numberz:9' \(did you mean 'numbers'\?\)"):
        find_source("numberz:9")
    with pytest.raises(DataError, match="stdlib takes nothing after its name, but stdlib:9 came"):
        find_source("stdlib:9")


def test_a_dataset_without_text_or_without_its_package_is_told(
    hub: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Rows, "column_names", ("body",))
    with pytest.raises(DataError, match=r"must have a column 'text', but its split .* has body"):
        find_source("hf:wiki/small")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match="through datasets, which is missing; pip install datasets"):
        find_source("hf:wiki/small")


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"tokenizer": "bep"}, r"tokenizer must be 'bytes', 'bpe', 'gpt2' or 'gpt2:FOLDER' \(did you mean 'bpe'\?\)"),
        ({"vocab": 256}, "vocab must be a whole number from 257"),
        ({"valid": 0.6}, "valid must be a finite number at least 0 and at most 0.5"),
        ({"test": float("nan")}, "test must be a finite number at least 0 and at most 0.5"),
        ({"source": ""}, "source must be a text that is not empty"),
        ({"limit_bytes": 0}, "limit_bytes must be a whole number from 1"),
    ],
)
def test_a_wrong_spec_is_one_sentence(values: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        DataSpec(**values)


def test_a_spec_survives_json() -> None:
    spec = DataSpec(source="a", tokenizer="gpt2:x", limit_bytes=5)
    assert DataSpec.from_dict(spec.to_dict()) == spec
    assert isinstance(DataSpec(valid=0).valid, float)
    assert isinstance(find_source("stdlib"), Stdlib)
