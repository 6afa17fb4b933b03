"""What must be equal for a run to go on: whether a run directory holds the run that is asked for."""

from pathlib import Path
from typing import Any

from qklab.data.shards import Corpus
from qklab.runs.directory import RunDirectory, RunError
from qklab.schema import format_value
from qklab.train.settings import merge_settings, read_toml, resolve_run
from qklab.train.spec import ExecutionSpec, RunSpec


def resolve_request(values: dict[str, Any], file: Path | None, folder: Path | None) -> tuple[RunSpec, ExecutionSpec]:
    """The run that flags `values` over `file` describe; a directory that holds a run says the rest itself."""
    base = read_toml(file) if file is not None else {}
    if "budget" in values:  # one of three: a flag replaces the file's
        base.pop("budget", None)
    directory = RunDirectory(folder) if folder is not None else None
    if directory is None or not directory.exists() or file is not None:
        return resolve_run(merge_settings(base, values))
    values = dict(values)
    execution = ExecutionSpec.from_dict(values.pop("execution", {}))
    spec = RunSpec.from_dict(directory.read()["spec"])
    # the command line has attention beside the model, a resolved run within it
    new = {f"model.{n}" if n.startswith("attention.") else n: value for n, value in flatten_settings(values).items()}
    old = {"model.attention.coupling.kind": "none"} | flatten_settings(spec.to_dict())
    if "model.recipe" in new:  # stands for every field of the model
        model = flatten_settings({"model": resolve_run(values)[0].model.to_dict()})
        new = {name: value for name, value in (model | new).items() if name not in ("model.recipe", "model.vocab")}
    for name, value in new.items():
        if name not in old or old[name] != value:
            raise RunError(describe_difference(directory, name, old.get(name, select_part(old, name)), value))
    return spec, execution


def describe_difference(directory: RunDirectory, name: str, old: Any, new: Any) -> str:
    return (
        f"{directory.path} holds a run with {name}={format_value(old)}, but {format_value(new)} came; "
        "choose another folder with --out, or leave the setting out to continue this one."
    )


def read_begun_run(directory: RunDirectory) -> dict[str, Any] | None:
    """run.json, or None where no run has begun."""
    if directory.exists():
        return directory.read()
    if directory.checkpoints_path.exists() or directory.metrics_path.exists():
        raise RunError(
            f"{directory.path} holds what a run left but no run.json; restore that from a copy or choose another --out."
        )
    return None


def refuse_other_spec(directory: RunDirectory, old: dict[str, Any], spec: RunSpec) -> None:
    new, before = (
        flatten_settings(spec.to_dict()),
        flatten_settings(RunSpec.from_dict(old).to_dict()),
    )  # settings it did not know yet: defaults
    for part in ("model.attention.coupling", "model.attention.latent"):  # a part that only one of them has
        if (part in before) != (part in new):
            raise RunError(describe_difference(directory, part, select_part(before, part), select_part(new, part)))
    for name in sorted(before.keys() | new.keys()):
        if before.get(name) != new.get(name):
            raise RunError(describe_difference(directory, name, before.get(name), new.get(name)))


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


def select_part(values: dict[str, Any], part: str) -> dict[str, Any] | None:
    """The settings of a part out of flat ones; None where it is left out."""
    return {name.removeprefix(f"{part}."): v for name, v in values.items() if name.startswith(f"{part}.")} or None


def flatten_settings(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by dotted name."""
    result: dict[str, Any] = {}
    for name, value in values.items():
        result |= flatten_settings(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return result
