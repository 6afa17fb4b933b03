"""The first pass over a source: what its documents are, which split each belongs to, and the tokenizer."""

import contextlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

from qklab.data.progress import Progress
from qklab.data.selection import Sample, Tally, refuse_empty, repeats, selected
from qklab.data.shards import TOKENIZER
from qklab.data.sources import SPLITS, Source, data_folders
from qklab.data.spec import DataError, DataSpec
from qklab.data.tokenizer import GPT2_FILES, Tokenizer
from qklab.data.workers import trained_definition
from qklab.data.writing import UNFINISHED
from qklab.runs.files import replace_file, write_bytes, write_json


def comparable(spec: dict[str, Any]) -> dict[str, Any]:
    """What of a spec decides over the corpus: not how its source is spelt, nor a vocabulary that is not trained."""
    kept = {name: value for name, value in spec.items() if name != "source"}
    if kept["tokenizer"] != "bpe":
        kept.pop("vocab")
    if kept["tokenizer"].startswith("gpt2:"):
        kept["tokenizer"] = "gpt2"
    return kept


def refuse_changed(folder: Path, before: str, now: str) -> None:
    if before != now:
        raise DataError(
            f"the source has changed since {folder} was begun from it; choose another folder (--out), or delete this "
            "one to prepare it anew."
        )


def content_digest(source: Source, spec: DataSpec, report: Progress) -> str:
    tally = Tally()
    for document in selected(source, spec, Counter()):
        tally.add(document)
        report.update("reading", document.position, source.size)
    return tally.digest.hexdigest()


def planned(folder: Path, spec: DataSpec, source: Source, data: Path | None, report: Progress) -> dict[str, Any]:
    """What the first pass found, and beside it the tokenizer: from an earlier attempt, or by reading everything now."""
    path, listing = folder / UNFINISHED / "plan.json", source.listing()
    try:
        plan = json.loads(path.read_bytes())
        if Tokenizer.load(folder / TOKENIZER).hash != plan["tokenizer"]:
            plan = None
    except (FileNotFoundError, ValueError):
        plan = None
    if plan is None:
        for record in path.parent.glob("*-*.json"):
            record.unlink()  # of shards whose plan is lost
        plan = scanned(folder, spec, source, data, report)
        write_json(path, {**plan, "files": listing, "spec": spec.to_dict()})
    elif comparable(plan["spec"]) != comparable(spec.to_dict()):
        raise DataError(f"{folder} holds an unfinished corpus of another spec; choose another folder or delete it.")
    elif plan["files"] != listing:
        refuse_changed(folder, plan["sha256"], content_digest(source, spec, report))
    return {**plan, "files": listing, "name": source.name}


def scanned(folder: Path, spec: DataSpec, source: Source, data: Path | None, report: Progress) -> dict[str, Any]:
    """Read every document once: counts, duplicates, a digest of it all, and the tokenizer, written to `folder`."""
    tally, sample, dropped = Tally(), Sample(), Counter[str]()
    if spec.tokenizer != "bpe":
        ready_tokenizer(spec, data).save(folder / UNFINISHED / TOKENIZER)  # before hours of reading, if it is missing
    with contextlib.ExitStack() as files:
        paths = {split: folder / UNFINISHED / f"{split}.digests" for split in SPLITS}
        digests = {split: files.enter_context(replace_file(path)) for split, path in paths.items()}
        for document in selected(source, spec, dropped):
            tally.add(document)
            digests[document.split].write(document.digest[:8])
            if document.split == "train" and spec.tokenizer == "bpe":
                sample.add(document)
            report.update("reading", document.position, source.size)
    refuse_empty(source.name, tally, spec, source.splits)
    if spec.tokenizer == "bpe":
        report.say(f"training a BPE of {spec.vocab} tokens on {sample.bytes / 1e6:.1f} MB")
        Tokenizer(trained_definition(sample.batches(), spec.vocab)).save(folder / UNFINISHED / TOKENIZER)
    write_bytes(folder / TOKENIZER, (folder / UNFINISHED / TOKENIZER).read_bytes())
    tokenizer = Tokenizer.load(folder / TOKENIZER)
    splits = {
        split: {
            "documents": tally.documents[split],
            "bytes": tally.bytes[split],
            "duplicates_removed": dropped[split],
            "repeats_kept": repeats(paths[split]),
        }
        for split in SPLITS
    }
    return {
        "sha256": tally.digest.hexdigest(),
        "tokenizer": tokenizer.hash,
        "empty_documents_skipped": dropped["empty"],
        "splits": splits,
    }


def ready_tokenizer(spec: DataSpec, data: Path | None) -> Tokenizer:
    """The tokenizer that needs no training: bytes, or GPT-2's from where it is found."""
    if spec.tokenizer == "bytes":
        return Tokenizer.bytes()
    _, _, given = spec.tokenizer.partition(":")
    folders = [Path(given).expanduser()] if given else [folder / "gpt2" for folder in data_folders(data)]
    found = next((folder for folder in folders if all((folder / name).is_file() for name in GPT2_FILES)), None)
    if found is None:
        where = " and ".join(map(str, folders)) or "no folder, because --data and QKLAB_DATA are not set"
        raise DataError(
            f"GPT-2's {' and '.join(GPT2_FILES)} were looked for in {where}; put them into gpt2/ in the folder of "
            "corpora, or write tokenizer='gpt2:FOLDER'."
        )
    return Tokenizer.gpt2(found)
