"""Whether a run directory holds the run that is asked for."""

from typing import Any

from qklab.data.shards import Corpus
from qklab.runs.directory import RunDirectory, RunError
from qklab.schema import format_value
from qklab.train.spec import RunSpec


def other_setting(directory: RunDirectory, name: str, old: Any, new: Any) -> str:
    return (
        f"{directory.path} holds a run with {name}={format_value(old)}, but {format_value(new)} came; "
        "choose another folder with --out, or leave the setting out to continue this one."
    )


def recorded(directory: RunDirectory) -> dict[str, Any] | None:
    """run.json, or None where no run has begun."""
    if directory.exists():
        return directory.read()
    if directory.checkpoints_path.exists() or directory.metrics_path.exists():
        raise RunError(
            f"{directory.path} holds what a run left but no run.json; restore that from a copy or choose another --out."
        )
    return None


def refuse_other_spec(directory: RunDirectory, old: dict[str, Any], spec: RunSpec) -> None:
    new, before = flat(spec.to_dict()), flat(RunSpec.from_dict(old).to_dict())  # settings it did not know yet: defaults
    for part in ("model.attention.coupling", "model.attention.latent"):  # a part that only one of them has
        if (part in before) != (part in new):
            raise RunError(other_setting(directory, part, part_of(before, part), part_of(new, part)))
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


def part_of(values: dict[str, Any], part: str) -> dict[str, Any] | None:
    """The settings of a part out of flat ones; None where it is left out."""
    return {name.removeprefix(f"{part}."): v for name, v in values.items() if name.startswith(f"{part}.")} or None


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by dotted name."""
    result: dict[str, Any] = {}
    for name, value in values.items():
        result |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return result
