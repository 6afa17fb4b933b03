"""Whether a run directory holds the run that is asked for."""

from typing import Any

from qklab.data.shards import Corpus
from qklab.runs.directory import RunDirectory, RunError
from qklab.schema import shown
from qklab.train.spec import RunSpec


def other_setting(directory: RunDirectory, name: str, old: Any, new: Any) -> str:
    return (
        f"{directory.path} holds a run with {name}={shown(old)}, but {shown(new)} came; "
        "choose another folder with --run, or leave the setting out to continue this one."
    )


def refuse_other_spec(directory: RunDirectory, old: dict[str, Any], spec: RunSpec) -> None:
    new = flat(spec.to_dict())
    before = flat(old)
    for name in sorted(before.keys() | new.keys()):
        if before.get(name) != new.get(name):
            raise RunError(other_setting(directory, name, before.get(name), new.get(name)))


def refuse_other_data(directory: RunDirectory, old: dict[str, Any], corpus: Corpus) -> None:
    if old["tokenizer"] != corpus.tokenizer.hash:
        raise RunError(
            f"{directory.path} was trained with another tokenizer ({old['tokenizer'][:12]}…) than {corpus.folder} has "
            f"({corpus.tokenizer.hash[:12]}…); restore the corpus it began with or start a new run."
        )
    if old["hash"] != corpus.hash:
        raise RunError(
            f"the corpus changed under {directory.path}: it began with {old['hash'][:12]}… and {corpus.folder} is now "
            f"{corpus.hash[:12]}…; restore the corpus it began with or start a new run."
        )


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by dotted name."""
    result: dict[str, Any] = {}
    for name, value in values.items():
        result |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return result
