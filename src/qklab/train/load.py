"""A trained model back from its run directory, with nothing but safetensors and JSON."""

from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from qklab.data.tokenizer import Tokenizer
from qklab.model.decoder import Decoder
from qklab.runs.directory import RunDirectory, RunError
from qklab.train.checkpoint import Checkpoint, Checkpoints
from qklab.train.objective import named_weights
from qklab.train.spec import RunSpec

Which = Literal["newest", "best"]


def find_checkpoint_of_run(folder: Path | str, which: Which) -> tuple[RunDirectory, RunSpec, Checkpoint]:
    if which not in ("newest", "best"):
        raise ValueError(f"which checkpoint must be 'newest' or 'best', but {which!r} came.")
    directory = RunDirectory(folder)
    record = directory.read()
    checkpoints = Checkpoints(directory.checkpoints_path, run=record["id"])
    found = checkpoints.find_newest() if which == "newest" else checkpoints.find_best()
    if found is None:
        best = "best " * (which == "best")
        raise RunError(
            f"{directory.path} has no {best}checkpoint yet; train it until one is saved: qklab train --out "
            f"{directory.path}."
        )
    return directory, RunSpec.from_dict(record["spec"]), found


def load_model(folder: Path | str, which: Which = "newest") -> tuple[Decoder, Tokenizer]:
    """The model of a run's newest or best checkpoint, in evaluation mode, and the tokenizer it was trained with."""
    directory, spec, checkpoint = find_checkpoint_of_run(folder, which)
    return load_decoder(spec, checkpoint), Tokenizer.load(directory.path / "tokenizer.json")


def load_decoder(spec: RunSpec, checkpoint: Checkpoint) -> Decoder:
    """The model of a checkpoint, in evaluation mode."""
    decoder = Decoder(spec.model, seed=0)
    weights = checkpoint.read_tensors("model.")
    with torch.no_grad():
        for name, tensor in named_weights(decoder):
            tensor.copy_(weights[f"model.{name}"])
    return decoder.eval()


def sample_text(
    decoder: Decoder, tokenizer: Tokenizer, prompt: str, tokens: int, *, temperature: float, seed: int | None
) -> str:
    """`prompt` continued by up to `tokens` tokens, drawn through the cache; ends where the model ends its text."""
    ids = [tokenizer.eot, *(int(token) for token in tokenizer.encode([prompt])[0])] if prompt else [tokenizer.eot]
    device = decoder.embed.weight.device
    given: Tensor = torch.tensor([ids], device=device)
    drawn = decoder.generate(given, tokens, temperature=temperature, seed=seed, stop_token=tokenizer.eot)[0, 1:]
    ends = (drawn[len(ids) - 1 :] == tokenizer.eot).nonzero()
    until = len(ids) - 1 + int(ends[0]) if len(ends) else len(drawn)
    return tokenizer.decode(drawn[:until].cpu().numpy())
