"""The first pass over a source: what its documents are, which split each belongs to, and the tokenizer."""

import contextlib
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from qklab.data.documents import Tally, TokenizerSample, count_repeats, needs_positions, refuse_empty, select_documents
from qklab.data.shards import TOKENIZER, UNFINISHED
from qklab.data.sources import SPLITS, Source, list_data_folders
from qklab.data.spec import DataError, DataSpec
from qklab.data.tokenizer import GPT2_FILES, Tokenizer
from qklab.data.workers import train_in_worker
from qklab.runs.files import replace_file, write_json

PLAN = "plan.json"
ReportProgress = Callable[[str, int, int], None]  # what is done, bytes done, bytes in all; a sentence, 0, 0
HASH, POSITION = "hash", "position"  # what decides over the split of a document


def select_deciding_settings(spec: dict[str, Any]) -> dict[str, Any]:
    """What of a spec decides over the corpus: not how its source is spelt, nor a vocabulary that is not trained."""
    kept = {name: value for name, value in spec.items() if name != "source"}
    if kept["tokenizer"] != "bpe":
        kept.pop("vocab")
    if kept["tokenizer"].startswith("gpt2:"):
        kept["tokenizer"] = "gpt2"
    for name in ("column", "encoding", "skip_bad"):  # which older corpora do not name
        if kept.get(name) == getattr(DataSpec(), name):
            del kept[name]
    return kept


def refuse_changed(folder: Path, before: str, now: str) -> None:
    if before != now:
        raise DataError(
            f"the source has changed since {folder} was begun from it; choose another folder (--out), or delete this "
            "one to prepare it anew."
        )


def digest_source(source: Source, spec: DataSpec, report: ReportProgress, by_position: bool) -> str:
    tally = Tally()
    for document in select_documents(source, spec, Counter(), by_position):
        tally.add(document)
        report("reading", document.position, source.size)
    return tally.digest.hexdigest()


def scan_or_resume(
    folder: Path, spec: DataSpec, source: Source, data: Path | None, report: ReportProgress
) -> dict[str, Any]:
    """What the first pass found, and beside it the tokenizer: from an earlier attempt, or by reading everything now."""
    path, contents = folder / UNFINISHED / PLAN, source.list_contents()
    try:
        plan = json.loads(path.read_bytes())
        if Tokenizer.load(folder / TOKENIZER).hash != plan["tokenizer"]:
            plan = None
    except (FileNotFoundError, ValueError):
        plan = None
    if plan is None:
        for record in path.parent.glob("*-*.json"):
            record.unlink()  # of shards whose plan is lost
        plan = scan_source(folder, spec, source, data, report)
        write_json(path, {**plan, "files": contents, "spec": spec.to_dict()})
    elif select_deciding_settings(plan["spec"]) != select_deciding_settings(spec.to_dict()):
        raise DataError(f"{folder} holds an unfinished corpus of another spec; choose another folder or delete it.")
    elif plan["files"] != contents:
        now = digest_source(source, spec, report, plan.get("split_by") == POSITION)
        refuse_changed(folder, plan["sha256"], now)
    return {**plan, "files": contents, "name": source.name}


def scan_source(
    folder: Path, spec: DataSpec, source: Source, data: Path | None, report: ReportProgress
) -> dict[str, Any]:
    """Read every document once: counts, duplicates, a digest of it all, and the tokenizer, written to `folder`."""
    if source.alphabet is not None:
        tokenizer = Tokenizer({"kind": "symbols", "tokens": [*source.alphabet, "."]})
    else:  # missing, if so, before hours of reading
        tokenizer = None if spec.tokenizer == "bpe" else find_tokenizer(spec, data)
    paths = {split: folder / UNFINISHED / f"{split}.digests" for split in SPLITS}
    for split_by in (HASH, POSITION):
        tally, sample, dropped, position = Tally(), TokenizerSample(), Counter[str](), 0
        with contextlib.ExitStack() as files:
            digests = {split: files.enter_context(replace_file(path)) for split, path in paths.items()}
            for document in select_documents(source, spec, dropped, split_by == POSITION):
                tally.add(document)
                position = document.position
                digests[document.split].write(document.digest[:8])
                if document.split == "train" and tokenizer is None:
                    sample.add(document)
                report("reading", document.position, source.size)
        if not needs_positions(tally, spec, source.splits):
            break
    refuse_empty(source.name, tally, spec, source.splits)
    for note in [*source.notes, *([describe_cutting(source.name, spec)] if split_by == POSITION else ())]:
        report(note, 0, 0)
    if tokenizer is None:
        report(f"training a BPE of {spec.vocab} tokens on {sample.bytes / 1e6:.1f} MB", 0, 0)
        tokenizer = Tokenizer(train_in_worker(sample.batches(), spec.vocab))
    tokenizer.save(folder / TOKENIZER)
    splits = {
        split: {
            "documents": tally.documents[split],
            "bytes": tally.bytes[split],
            "duplicates_removed": dropped[split],
            "repeats_kept": count_repeats(paths[split]),
        }
        for split in SPLITS
    }
    return {
        "sha256": tally.digest.hexdigest(),
        "split_by": split_by,
        "tokenizer": tokenizer.hash,
        "empty_documents_skipped": dropped["empty"],
        # estimated where spec.limit_bytes ended the reading
        "text_bytes": round((tally.bytes.total() + dropped["cut"]) * max(1.0, source.size / max(1, position))),
        "splits": splits,
    }


def describe_cutting(name: str, spec: DataSpec) -> str:
    return (
        f"{name} has too few documents to hold some out: the last {100 * spec.valid:g} % and {100 * spec.test:g} % of "
        "each long one are for validation and test."
    )


def find_tokenizer(spec: DataSpec, data: Path | None) -> Tokenizer:
    """The tokenizer that needs no training: bytes, or GPT-2's from where it is found."""
    if spec.tokenizer == "bytes":
        return Tokenizer.bytes()
    _, _, given = spec.tokenizer.partition(":")
    folders = [Path(given).expanduser()] if given else [folder / "gpt2" for folder in list_data_folders(data)]
    found = next((folder for folder in folders if all((folder / name).is_file() for name in GPT2_FILES)), None)
    if found is None:
        where = " and ".join(map(str, folders)) or "no folder, because --data and QKLAB_DATA are not set"
        raise DataError(
            f"GPT-2's {' and '.join(GPT2_FILES)} were looked for in {where}; put them into gpt2/ in the folder of "
            "corpora, or write tokenizer='gpt2:FOLDER'."
        )
    return Tokenizer.gpt2(found)
