"""Files of documents: formats, compression, and what is said about files that are broken."""

import gzip
import json
import lzma
import sys
from pathlib import Path

import pytest

from qklab.data import DataError, DataSpec, formats
from qklab.data.formats import detect_format, read_documents


def documents(path: Path) -> list[str]:
    return [raw.decode() for raw, _ in read_documents(path)]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("a\nb\n<|endoftext|>\nc\n<|endoftext|>\n", ["a\nb", "c"]),
        ("a\n<|endoftext|>\nlast, unended\n", ["a", "last, unended\n"]),
        ("a\r\n<|endoftext|>\r\nb\r\n<|endoftext|>", ["a", "b"]),
        ("one\n\ndocument\n", ["one\n\ndocument\n"]),
        ("in <|endoftext|> a line\n<|endoftext|> \nx", ["in <|endoftext|> a line\n<|endoftext|> \nx"]),
        ("\ufeffmarked\n", ["marked\n"]),
        ("", []),
    ],
)
def test_text_documents_end_at_their_mark(tmp_path: Path, content: str, expected: list[str]) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(content.encode())
    assert documents(path) == expected


@pytest.mark.parametrize("suffix", ["", ".gz", ".xz"])
@pytest.mark.parametrize("kind", [".txt", ".jsonl"])
def test_compressed_files_read_like_plain_ones(tmp_path: Path, kind: str, suffix: str) -> None:
    texts = [f"document {i} ü\nline" for i in range(500)]
    lines = [json.dumps({"text": t, "id": 1}) if kind == ".jsonl" else f"{t}\n<|endoftext|>" for t in texts]
    raw = ("\n".join(lines) + "\n").encode()
    path = tmp_path / f"a{kind}{suffix}"
    path.write_bytes({"": bytes, ".gz": gzip.compress, ".xz": lzma.compress}[suffix](raw))
    assert documents(path) == texts
    assert [position for _, position in read_documents(path)][-1] == path.stat().st_size


def test_a_long_document_goes_on_as_a_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "LONGEST", 100)
    text = "".join(f"line {i} – ü世\n" for i in range(40)) + "界" * 150 + "\n😀tail"
    for name, content in (("a.txt", text), ("a.jsonl", json.dumps({"text": text}))):
        (tmp_path / name).write_text(content, encoding="utf-8")
        found = documents(tmp_path / name)
        assert "".join(found) == text
        assert max(len(part.encode()) for part in found) <= 100 + 3
        assert found[0].endswith("\n")


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").mkdir()
    with pytest.raises(DataError, match=r"a\.txt cannot be read: Is a directory\."):
        documents(tmp_path / "a.txt")


def test_bad_utf8_is_named_with_its_offset(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbffine\n<|endoftext|>\nabc\xffdef\n")
    with pytest.raises(DataError, match=r"a\.txt is not UTF-8 at byte 25; say which encoding it has"):
        documents(path)
    assert path.read_bytes()[25] == 0xFF


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"text": 3}', "line 3 of .* must have a string 'text', but int came"),
        ('{"txt": "a"}', "line 3 of .* but the fields txt came"),
        ("[1]", "line 3 of .* but list came"),
        ("{", "line 3 of .* is no JSON"),
        ('{"text": "\xff"}', "line 3 of .* is not UTF-8 at byte 10"),
        (r'{"text": "ab\ud800"}', "line 3 of .* half a surrogate pair at character 2"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, said: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "fine"}\n\n' + line.encode("latin-1") + b"\n")
    with pytest.raises(DataError, match=said):
        documents(tmp_path / "a.jsonl")


@pytest.mark.parametrize("suffix", [".gz", ".xz"])
def test_damaged_compression_is_one_sentence(tmp_path: Path, suffix: str) -> None:
    raw = {".gz": gzip.compress, ".xz": lzma.compress}[suffix](b"text " * 10000)
    path = tmp_path / f"a.txt{suffix}"
    for broken in (raw[: len(raw) // 2], b"not compressed", raw[:20] + bytes(b ^ 255 for b in raw[20:30]) + raw[30:]):
        path.write_bytes(broken)
        with pytest.raises(DataError, match="is damaged or cut short"):
            documents(path)


@pytest.mark.parametrize(("name", "module"), [("a.parquet", "pyarrow"), ("a.txt.zst", "zstandard")])
def test_a_missing_package_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, module: str
) -> None:
    for missing in (module, "compression.zstd"):
        monkeypatch.setitem(sys.modules, missing, None)
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(DataError, match=f"through {module}, which is missing; pip install {module}"):
        documents(tmp_path / name)


def test_zstandard(tmp_path: Path) -> None:
    zstandard = pytest.importorskip("zstandard")
    path = tmp_path / "a.txt.zst"
    path.write_bytes(zstandard.compress(b"a\n<|endoftext|>\n") + zstandard.compress(b"b"))
    assert documents(path) == ["a", "b"]


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_parquet(tmp_path: Path, suffix: str) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    texts = [f"document {i}" for i in range(1000)]
    plain, path = tmp_path / "plain.parquet", tmp_path / f"a.parquet{suffix}"
    parquet.write_table(pyarrow.table({"id": list(range(1000)), "text": texts}), plain)
    path.write_bytes(gzip.compress(plain.read_bytes()) if suffix else plain.read_bytes())
    assert documents(path) == texts
    parquet.write_table(pyarrow.table({"body": texts}), plain)
    with pytest.raises(DataError, match="must have a column 'text', but it has body"):
        documents(plain)
    plain.write_bytes(b"PAR1 no PAR1")
    with pytest.raises(DataError, match="no parquet file"):
        documents(plain)


def test_tables_and_other_texts(tmp_path: Path) -> None:
    def read(name: str, content: str, column: str = "text", encoding: str = "utf-8") -> list[str]:
        (tmp_path / name).write_text(content, encoding=encoding)
        spec = DataSpec(column=column, encoding=encoding)
        return [raw.decode() for raw, _ in read_documents(tmp_path / name, spec)]

    table = 'id,text,body\n1,"one, ""two""\nthree",b1\n2,four,b2\n3\n'
    assert read("a.csv", table) == ['one, "two"\nthree', "four"]
    assert read("a.csv", table, "body", "utf-16") == ["b1", "b2"]
    assert read("b.csv", "\ufeffonly\nx\ny\n") == ["x", "y"]
    assert read("a.tsv", "n\ttext\n1\tone\n") == ["one"]
    assert read("a.md", "# Title\n\ntext") == ["# Title\n\ntext"]
    assert read("a.json", '["one", {"text": "two"}]') == ["one", "two"]
    assert read("b.json", '{"body": "two"}', "body") == ["two"]
    for name, content, told in (
        ("c.csv", "id,body\n1,x\n", r"c\.csv has the columns 'id', 'body'; say which is the text \(--column\)"),
        ("d.csv", 'text\n"open', r"d\.csv is no \.csv that can be read"),
        ("c.json", "[1]", r"entry 1 of .*c\.json must be an object with a string field 'text', but int came"),
        ("d.json", "[", r"d\.json is no JSON"),
        ("e.jsonl", '{"body": "x"}', r"the fields body came; say which field is the text \(--column\)"),
    ):
        with pytest.raises(DataError, match=told):
            read(name, content)


def test_kinds_of_files() -> None:
    known = {"a.txt": (".txt", ""), "a.b.JSONL.GZ": (".jsonl", ".gz"), "x.csv.zst": (".csv", ".zst")}
    for name, kind in known.items():
        assert detect_format(Path(name)) == kind
    for name in ("a.html", "txt", "a.gz", "README", "a.txt.bz2"):
        assert detect_format(Path(name)) is None
