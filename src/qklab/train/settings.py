"""A run from plain values, as TOML files and flags give them: recipes, changes to them, and what follows from both."""

import re
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from qklab import register
from qklab.data.shards import MANIFEST, Corpus
from qklab.data.spec import DataSpec
from qklab.data.tasks import parse_task
from qklab.model.recipes import recipe
from qklab.model.spec import DecoderSpec
from qklab.runs.directory import RunError
from qklab.schema import SpecError, format_value
from qklab.train.spec import ExecutionSpec, RunSpec, count_token_ids, pad_vocab


def resolve_run(values: Mapping[str, Any]) -> tuple[RunSpec, ExecutionSpec]:
    """A run from plain values: RunSpec's fields, with `model` as a recipe's name and changes to it, `attention` as
    changes to its attention, and `execution`."""
    values = dict(values)
    with name_table_in_errors("execution"):
        execution = ExecutionSpec.from_dict(take_table(values, "execution"))
    model, attention = dict(take_table(values, "model")), dict(take_table(values, "attention"))
    for name in model:
        if name == "attention":
            raise SpecError("attention is a table of its own: write [attention], not [model.attention].", name)
        if name != "recipe":
            DecoderSpec.refuse_unknown([name])
    with name_table_in_errors("corpus"):
        values["corpus"] = corpus = DataSpec.from_dict(adopt_prepared(take_table(values, "corpus")))
    with name_table_in_errors("model"):
        task = parse_task(corpus.source)
        if task is not None:
            model = {"context": task.length} | model
        spec = resolve_model(model, attention, pad_vocab(count_token_ids(corpus)))
    RunSpec.refuse_unknown(values)
    return RunSpec.from_dict(values | {"model": spec}), execution


@contextmanager
def name_table_in_errors(name: str) -> Iterator[None]:
    """An error about a field says in which table."""
    try:
        yield
    except SpecError as error:
        if re.split(r"[.\[]", error.field)[0] in (name, "attention"):
            raise
        raise SpecError(f"{name}: {error}", f"{name}.{error.field}", error.nearest) from None


def adopt_prepared(corpus: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a corpus; those of one that is already prepared are its own, and others are refused."""
    source = corpus.get("source")
    if not isinstance(source, str) or not (Path(source) / MANIFEST).is_file():
        return dict(corpus)
    own = Corpus.open(source).manifest["spec"]
    if parse_task(own["source"]) is not None:  # whose name says all of it
        return dict(own)
    own = {name: value for name, value in own.items() if name != "source"}
    for name, value in corpus.items():
        if name in own and own[name] != value and not (name == "vocab" and own["tokenizer"] != "bpe"):
            raise SpecError(
                f"{source} was prepared with {name}={format_value(own[name])}, but {format_value(value)} came; leave "
                "the setting out or prepare another.",
                name,
            )
    return own | {"source": source}


def take_table(values: dict[str, Any], name: str) -> Mapping[str, Any]:
    found = values.pop(name, {})
    if not isinstance(found, Mapping):
        raise SpecError(f"{name} must be a table of settings, but {format_value(found)} came.", name)
    return found


def resolve_model(model: dict[str, Any], attention: dict[str, Any], vocab: int) -> DecoderSpec:
    """The recipe's model with these changes; its vocabulary is the tokenizer's unless given."""
    base = recipe(model.pop("recipe", "nano")).to_dict()
    pattern = attention.pop("layers", [{}])
    pattern = register.pattern[pattern]() if isinstance(pattern, str) else pattern
    if not isinstance(pattern, list) or not pattern or not all(isinstance(layer, Mapping) for layer in pattern):
        raise SpecError(
            "attention.layers is a list of tables, [[attention.layers]], or the name of a registered pattern, but "
            f"{format_value(pattern)} came.",
            "attention.layers",
        )
    layers = [resolve_layer(base["attention"], merge_settings(attention, layer), model) for layer in pattern]
    changed = base | {"vocab": vocab} | model | {"attention": layers if len(layers) > 1 else layers[0]}
    return DecoderSpec.from_dict(changed)


def resolve_layer(base: Mapping[str, Any], attention: dict[str, Any], model: Mapping[str, Any]) -> dict[str, Any]:
    """The attention of one layer: the recipe's with these changes."""
    if isinstance(coupling := attention.get("coupling"), Mapping):
        if "kind" not in coupling:
            raise SpecError("attention.coupling needs its kind, e.g. leapfrog.", "attention.coupling.kind")
        if coupling["kind"] == "none":
            attention = attention | {"coupling": None}
    if isinstance(width := model.get("width"), int):  # anything else is refused below
        attention = {"width": width, "heads": max(1, width // base["head_width"])} | attention
    return {key: value for key, value in base.items() if key not in list_derived(attention)} | attention


def list_derived(attention: Mapping[str, Any]) -> set[str]:
    """Attention fields that follow from others and so must follow again when any of those change."""
    return {"kv_heads", "head_width"} - attention.keys() if attention else set()


def read_toml(path: Path) -> dict[str, Any]:
    """The values of a run's TOML file."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RunError(f"there is no run file {path}.") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise RunError(f"{path} cannot be read as TOML: {error}.") from None


def merge_settings(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with `changes` laid over it, table by table."""
    result = dict(base)
    for name, value in changes.items():
        both = isinstance(value, Mapping) and isinstance(result.get(name), Mapping)
        result[name] = merge_settings(result[name], value) if both else value
    return result
