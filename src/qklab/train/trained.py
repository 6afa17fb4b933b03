"""A trained model back from its run directory, with nothing but safetensors and JSON."""

from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from qklab.data.tokenizer import Tokenizer
from qklab.model.decoder import Decoder
from qklab.runs.directory import RunDirectory, RunError
from qklab.train.checkpoint import Checkpoints
from qklab.train.objective import named_weights
from qklab.train.spec import RunSpec


def load(
    folder: Path | str, which: Literal["newest", "best"] = "newest", device: torch.device | str = "cpu"
) -> tuple[Decoder, Tokenizer]:
    """The model of a run's newest or best checkpoint, in evaluation mode, and the tokenizer it was trained with."""
    directory = RunDirectory(folder)
    record = directory.read()
    checkpoints = Checkpoints(directory.checkpoints_path, run=record["id"])
    found = checkpoints.newest() if which == "newest" else checkpoints.best()
    if found is None:
        raise RunError(f"{directory.path} has no {'best ' * (which == 'best')}checkpoint yet.")
    decoder = Decoder(RunSpec.from_dict(record["spec"]).model, seed=0)
    saved = found.tensors("model.")
    with torch.no_grad():
        for name, tensor in named_weights(decoder):
            tensor.copy_(saved[f"model.{name}"])
    return decoder.to(device).eval(), Tokenizer.load(directory.path / "tokenizer.json")


def sample(
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
