"""From text to a prepared corpus: read once to know the documents, train the tokenizer, then tokenise shard by shard.

Killed at any moment and run again, it goes on after the last finished shard and ends with the same bytes.
"""

import contextlib
import errno
import os
import re
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from qklab.data.documents import SelectedDocument, Tally, needs_positions, refuse_empty, select_documents
from qklab.data.scan import (
    PLAN,
    POSITION,
    ReportProgress,
    digest_source,
    refuse_changed,
    scan_or_resume,
    select_deciding_settings,
)
from qklab.data.shards import FORMAT, MANIFEST, TOKENIZER, UNFINISHED, Corpus, ShardWriter, hash_content
from qklab.data.sources import SPLITS, Source, find_source, find_source_path
from qklab.data.spec import DataError, DataSpec
from qklab.data.tokenizer import Tokenizer
from qklab.data.workers import EncoderPool
from qklab.runs.environment import count_cores, find_cache_root
from qklab.runs.files import lock_file, remove_temporaries, write_json

BATCH_BYTES = 2**19
MOST_WORKERS = 256
FEW_BYTES = 2**21  # below this, starting processes takes longer than tokenising


def prepare_corpus(
    spec: DataSpec,
    *,
    data: str | os.PathLike[str] | None = None,
    out: str | os.PathLike[str] | None = None,
    workers: int | None = None,
    progress: ReportProgress | None = None,
) -> Corpus:
    """The prepared corpus of `spec`, from the folder `out` (default: one in the cache) or made there now.

    `data` is a folder of corpora to look for the source and for GPT-2's tokenizer in; `workers` processes tokenise
    (default: one per processor) and never change the result; `progress` is a function of (what is done, bytes done,
    bytes in all). A `spec.source` that is a prepared corpus is opened as it is.
    """
    if workers is not None and not 1 <= workers <= MOST_WORKERS:
        raise DataError(f"workers must be a number from 1 to {MOST_WORKERS}, but {workers} came.")
    data = Path(data) if data is not None else None
    path = find_source_path(spec.source, data)
    if path is not None and (path / MANIFEST).is_file():
        return Corpus.open(path)
    source = find_source(spec.source, data, spec)
    folder = Path(out) if out is not None else find_corpus_folder(spec, source)
    report = progress or (lambda *_: None)
    if (folder / MANIFEST).exists():
        return open_finished(folder, spec, source, report)
    try:
        if folder.exists() and any(folder.iterdir()) and not (folder / UNFINISHED).exists():
            raise DataError(f"{folder} is not empty and holds no corpus; choose another folder (--out).")
        (folder / UNFINISHED).mkdir(parents=True, exist_ok=True)
        with lock_folder(folder, report):
            if (folder / MANIFEST).exists():
                return open_finished(folder, spec, source, report)
            try:
                build_corpus(folder, spec, source, data, workers or count_cores(), report)
            except DataError:
                if not (folder / UNFINISHED / PLAN).exists():  # there is nothing to keep
                    shutil.rmtree(folder / UNFINISHED, ignore_errors=True)
                    with contextlib.suppress(OSError):
                        folder.rmdir()
                raise
            shutil.rmtree(folder / UNFINISHED, ignore_errors=True)
    except OSError as error:
        raise DataError(
            f"{folder} cannot be written: {error.strerror or error}; finished shards are kept, run again when it can."
        ) from error
    return Corpus.open(folder)


def refuse_unusable(spec: DataSpec, data: Path | None) -> None:
    """Raise DataError where no corpus can be made of the source, having read as much as `spec.limit_bytes` allows and
    written nothing."""
    path = find_source_path(spec.source, data)
    if path is not None and (path / MANIFEST).is_file():
        return
    source = find_source(spec.source, data, spec)
    for by_position in (False, True):
        tally = Tally()
        for document in select_documents(source, spec, Counter(), by_position):
            tally.add(document)
        if not needs_positions(tally, spec, source.splits):
            return
    refuse_empty(source.name, tally, spec, source.splits)


def find_corpus_folder(spec: DataSpec, source: Source) -> Path:
    """Where a corpus is kept unless told otherwise; a changed source or spec gets another folder."""
    settings = {**select_deciding_settings(spec.to_dict()), "format": FORMAT, "source": source.list_contents()}
    name = re.sub(r"[^A-Za-z0-9]+", "-", spec.source).strip("-")[-40:] or "corpus"
    return find_cache_root() / "corpora" / f"{name}-{hash_content(settings)[:12]}"


@contextlib.contextmanager
def lock_folder(folder: Path, report: ReportProgress) -> Iterator[None]:
    """Only one process prepares a folder; others wait. The lock goes with its holder, even one that is killed."""
    path, waiting = folder / UNFINISHED / "lock", False
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            lock = lock_file(path)
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
                raise
            yield  # a file system without locks
            return
        if lock is None:
            if not waiting:
                report(f"another process is preparing {folder}; waiting for it.", 0, 0)
                waiting = True
            time.sleep(0.1)
            continue
        try:
            if path.exists() and path.stat().st_ino == os.fstat(lock).st_ino:  # else its holder has finished
                yield
                return
        finally:
            os.close(lock)


def open_finished(folder: Path, spec: DataSpec, source: Source, report: ReportProgress) -> Corpus:
    """The corpus in `folder`, if it is the one that `spec` and `source` would make."""
    corpus = Corpus.open(folder)
    there, wanted = select_deciding_settings(corpus.manifest["spec"]), select_deciding_settings(spec.to_dict())
    differing = [name for name in wanted if there.get(name) != wanted[name]]
    if differing:
        name = differing[0]
        raise DataError(
            f"{folder} holds a corpus prepared with {name}={there.get(name)!r}, but {name}={wanted[name]!r} is asked "
            "for; choose another folder (--out) or delete it."
        )
    if corpus.manifest["source"]["files"] != source.list_contents():
        before = corpus.manifest["source"]
        refuse_changed(
            folder, before["sha256"], digest_source(source, spec, report, before.get("split_by") == POSITION)
        )
    shutil.rmtree(folder / UNFINISHED, ignore_errors=True)  # left where a kill came after the manifest
    return corpus


def build_corpus(
    folder: Path, spec: DataSpec, source: Source, data: Path | None, workers: int, report: ReportProgress
) -> None:
    for left in (folder, folder / UNFINISHED):
        remove_temporaries(left)
    plan = scan_or_resume(folder, spec, source, data, report)
    tokenizer = Tokenizer.load(folder / TOKENIZER)
    writers = {split: ShardWriter(folder, split, tokenizer.dtype, tokenizer.eot) for split in SPLITS}
    total = sum(counts["bytes"] for counts in plan["splits"].values())
    tally = Tally()
    batches = batch_unfinished(source, spec, writers, tally, plan.get("split_by") == POSITION)
    count = workers if total > FEW_BYTES else 1
    with EncoderPool(folder / TOKENIZER, count) as pool:
        for (documents, done), tokens in pool.map(batches):
            for (split, size), ids in zip(documents, tokens, strict=True):
                writers[split].add(ids, size)
            report("tokenising", done, total)
    refuse_changed(folder, plan["sha256"], tally.digest.hexdigest())
    write_manifest(folder, spec, tokenizer, plan, {split: writer.finish() for split, writer in writers.items()})


LabelledTexts = tuple[tuple[list[tuple[str, int]], int], list[bytes]]


def batch_unfinished(
    source: Source, spec: DataSpec, writers: dict[str, ShardWriter], tally: Tally, by_position: bool
) -> Iterator[LabelledTexts]:
    """Batches (((split, bytes) of each document, bytes so far), texts) of what is not in a finished shard yet."""
    ready = {split: writer.documents for split, writer in writers.items()}
    waiting: list[SelectedDocument] = []

    def batch() -> LabelledTexts:
        labels = [(document.split, len(document.raw)) for document in waiting]
        return (labels, tally.bytes.total()), [document.raw for document in waiting]

    size = 0
    for document in select_documents(source, spec, Counter(), by_position):
        tally.add(document)
        if tally.documents[document.split] <= ready[document.split]:
            continue
        waiting.append(document)
        size += len(document.raw)
        if size >= BATCH_BYTES:
            yield batch()
            waiting, size = [], 0
    if waiting:
        yield batch()


def write_manifest(
    folder: Path, spec: DataSpec, tokenizer: Tokenizer, plan: dict[str, Any], splits: dict[str, dict[str, Any]]
) -> None:
    """The last file to be written: where it is, the corpus is whole."""
    counted = ("duplicates_removed", "repeats_kept")
    content = {
        "tokenizer": {
            "kind": tokenizer.definition["kind"],
            "vocab": tokenizer.vocab,
            "eot": tokenizer.eot,
            "hash": tokenizer.hash,
        },
        "dtype": tokenizer.dtype.name,
        "splits": {
            name: {**part, **{key: plan["splits"][name][key] for key in counted}} for name, part in splits.items()
        },
    }
    source = {
        key: plan.get(key) for key in ("name", "sha256", "split_by", "empty_documents_skipped", "text_bytes", "files")
    }
    manifest = {
        "format": FORMAT,
        "hash": hash_content(content),
        "content": content,
        "source": source,
        "spec": spec.to_dict(),
    }
    write_json(folder / MANIFEST, manifest)
