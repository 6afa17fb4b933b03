"""A run as a folder that Transformers loads: configuration, weights, tokenizer and a model card."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast

from qklab.data.tokenizer import END_OF_TEXT, Tokenizer, build_bpe, byte_of_character
from qklab.hf.config import QKLabConfig
from qklab.hf.heads import QKLabForCausalLM, QKLabForMaskedLM
from qklab.model.decoder import Decoder
from qklab.runs.directory import RunDirectory, RunError
from qklab.runs.files import describe_os_error, rename_folder, write_text
from qklab.train.checkpoint import Checkpoint
from qklab.train.load import Which, find_checkpoint_of_run
from qklab.train.spec import RunSpec

ExportedModel = QKLabForCausalLM | QKLabForMaskedLM


def export_run(run: Path | str, folder: Path | str, which: Which = "newest") -> Path:
    """Write the model of a run's newest or best checkpoint into `folder`, which must be new or empty.

    It is written aside and renamed, so that what is there is whole. Logits of the export are the run's, bit for bit.
    """
    out = Path(folder)
    refuse_occupied(out)
    directory, spec, found = find_checkpoint_of_run(run, which)
    model, tokenizer = build_model_and_tokenizer(directory, spec, found)
    with new_folder(out) as aside:
        model.save_pretrained(aside)
        tokenizer.save_pretrained(aside)
        write_text(aside / "README.md", format_model_card(directory, spec, found, which))
    return out


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A folder to write to, which becomes `out` when the block ends, or vanishes if it fails."""
    aside = out.with_name(f".{out.name}.tmp")
    try:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        yield aside
        rename_folder(aside, out)
    except OSError as error:
        raise RunError(
            f"the export to {out} could not be written: {describe_os_error(error)}; choose another folder."
        ) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def to_transformers(run: Path | str, which: Which = "newest") -> tuple[ExportedModel, PreTrainedTokenizerFast]:
    """The model of a run's newest or best checkpoint, in evaluation mode, and its tokenizer, as Transformers' own."""
    return build_model_and_tokenizer(*find_checkpoint_of_run(run, which))


def build_model_and_tokenizer(
    directory: RunDirectory, spec: RunSpec, found: Checkpoint
) -> tuple[ExportedModel, PreTrainedTokenizerFast]:
    tokenizer = Tokenizer.load(directory.path / "tokenizer.json")
    end = tokenizer.eot
    config = QKLabConfig(spec=spec.model, bos_token_id=end, eos_token_id=end, pad_token_id=end)
    weights = {name.removeprefix("model."): tensor for name, tensor in found.read_tensors("model.").items()}
    model = build_with_weights(config, weights)
    return model, make_fast_tokenizer(tokenizer, spec.model.context)


def wrap_decoder(decoder: Decoder, **config: Any) -> ExportedModel:
    """A decoder as a Transformers model that shares its weights; `config` are further fields, e.g. eos_token_id."""
    weights = {name: parameter.detach() for name, parameter in decoder.named_parameters()}
    return build_with_weights(QKLabConfig(spec=decoder.spec, **config), weights)


def build_with_weights(config: QKLabConfig, weights: dict[str, torch.Tensor]) -> ExportedModel:
    """The model of `config` with a decoder's weights, each by the decoder's own name."""
    with torch.device("meta"):
        model = (QKLabForCausalLM if config.decoder_spec.causal else QKLabForMaskedLM)(config)
    named = {"lm_head.weight" if name == "head.weight" else f"model.{name}": value for name, value in weights.items()}
    if config.tie_word_embeddings:
        named["lm_head.weight"] = named["model.embed.weight"]
    model.load_state_dict(named, assign=True)
    model.tie_weights()
    return model.eval()


def make_fast_tokenizer(tokenizer: Tokenizer, context: int) -> PreTrainedTokenizerFast:
    """The tokenizer as Transformers' own. It puts end-of-text before a text, as training did; that token written out
    in a text is text."""
    from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
    from tokenizers import Tokenizer as Plain

    options: dict[str, Any] = {"padding_side": "left", "model_max_length": context, "split_special_tokens": True}
    if tokenizer.definition["kind"] == "symbols":
        numbers = {token: number for number, token in enumerate(tokenizer.definition["tokens"])}
        end = tokenizer.definition["tokens"][-1]
        plain = Plain(models.WordLevel(numbers, unk_token=end))
        plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        return PreTrainedTokenizerFast(tokenizer_object=plain, pad_token=end, eos_token=end, **options)
    if tokenizer.definition["kind"] == "bytes":
        numbers = byte_of_character()
        plain = Plain(models.BPE(vocab={**numbers, END_OF_TEXT: tokenizer.eot}, merges=[]))
        plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    else:
        plain = build_bpe(tokenizer.definition)
    plain.decoder = decoders.ByteLevel()
    end = tokenizer.definition.get("tokens", [END_OF_TEXT])[-1]
    plain.add_special_tokens([AddedToken(end, special=True, normalized=False)])
    plain.post_processor = processors.TemplateProcessing(
        single=[end, "$A"], pair=[end, "$A", end, "$B"], special_tokens=[(end, tokenizer.eot)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=plain,
        bos_token=end,
        eos_token=end,
        pad_token=end,
        **options,
        clean_up_tokenization_spaces=False,
    )


def refuse_occupied(folder: Path) -> None:
    if folder.is_file():
        raise RunError(f"the export goes into a folder, but {folder} is a file.")
    if folder.exists() and any(folder.iterdir()):
        raise RunError(f"{folder} is not empty; choose a new folder for the export, or empty it first.")


def format_model_card(directory: RunDirectory, spec: RunSpec, found: Checkpoint, which: Which) -> str:
    """README.md: what the model is, where it comes from, and how to load it."""
    record, summary = directory.read(), directory.summary()
    corpus = record["spec"]["corpus"]
    facts = {
        "Model": spec.model.name,
        "Parameters": f"{spec.model.parameters():,}",
        "Cache": f"{spec.model.cache_bytes_per_token():,} bytes per token in bfloat16",
        "Context": f"{spec.model.context:,} tokens",
        "Corpus": f"{Path(corpus['source']).name}, SHA-256 {record['data']['hash']}",
        "Tokenizer": f"{corpus['tokenizer']}, SHA-256 {record['data']['tokenizer']}",
        "Checkpoint": f"{which}, step {found.step:,}",
        "Tokens seen": f"{found.step * spec.tokens_per_step:,}",
        "Last validation loss": format_loss(found.state.get("validation_loss")),
        "Run": f"{record['id']}, settings {record['fingerprint'][:16]}, seed {spec.seed}",
        "Code": f"qklab at commit {record['commit'] or 'unknown'}",
        "Trained with": ", ".join(f"{name} {version}" for name, version in record["environment"]["packages"].items()),
    }
    if summary is not None:
        for split, result in summary["evaluation"].items():
            facts[f"Loss on all of {split} when the run ended"] = format_loss(result["loss"])
    rows = "\n".join(f"| {name} | {value} |" for name, value in facts.items())
    kind, tag = (
        ("AutoModelForCausalLM", "text-generation") if spec.model.causal else ("AutoModelForMaskedLM", "fill-mask")
    )
    use = (
        """text = tokenizer("Once", return_tensors="pt")
print(tokenizer.decode(model.generate(**text, max_new_tokens=40)[0]))"""
        if spec.asks == "next token"
        else """text = tokenizer("…", return_tensors="pt")
print(tokenizer.decode(model(**text).logits[0].argmax(-1)))"""
    )
    return f"""---
library_name: transformers
pipeline_tag: {tag}
tags: [qklab]
---
# {spec.model.name}

| | |
|---|---|
{rows}

```python
import qklab.hf  # makes the model known to Transformers
from transformers import AutoTokenizer, {kind}

model = {kind}.from_pretrained(".")
tokenizer = AutoTokenizer.from_pretrained(".")
{use}
```

The tokenizer puts {END_OF_TEXT}, which began every text of training, before each text; leave it out with
`add_special_tokens=False`.
"""


def format_loss(loss: float | None) -> str:
    return "not measured" if loss is None else f"{loss:.4f} nats per token"
