"""The text that a conversion is fitted to, repaired by and judged on: windows of tokens, a part of them held out."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from qklab.data.documents import select_documents
from qklab.data.order import shuffle_windows
from qklab.data.sources import find_source
from qklab.data.spec import DataSpec

READ = 2**28  # bytes of training text at most: more than a short repair sees, and still little memory
JUDGED = 2**16  # held-out tokens at most
LOGITS = 2**27  # of one forward pass at most, where that leaves a row


@dataclass(frozen=True)
class TokenWindows:
    """A stream of tokens as windows of `context` + 1 that overlap by one: each token but the first is a target once."""

    ids: Tensor  # [tokens]
    context: int

    def __len__(self) -> int:
        return max(0, len(self.ids) - 1) // self.context

    def read(self, places: Sequence[int]) -> Tensor:
        """[B, context + 1]."""
        return torch.stack([self.ids[place * self.context :][: self.context + 1] for place in places])

    def read_in_order(self, rows: int) -> Iterator[Tensor]:
        """Every token once: batches of whole windows, then what is left as a shorter one."""
        for first in range(0, len(self), rows):
            yield self.read(range(first, min(first + rows, len(self))))
        left = self.ids[len(self) * self.context :]
        if len(left) > 1:
            yield left[None]

    def draw(self, step: int, batch: int, seed: int) -> Tensor:
        """The windows of a training step, counted from 0: a pure function, every window once an epoch."""
        places = []
        for sample in range(step * batch, (step + 1) * batch):
            epoch, place = divmod(sample, len(self))
            places.append(int(shuffle_windows(len(self), seed, epoch)[place]))
        return self.read(places)

    def hash(self) -> str:
        return hashlib.sha256(self.ids.numpy().tobytes()).hexdigest()


def read_windows(text: str, tokenizer: Any, words: int, context: int) -> tuple[TokenWindows, TokenWindows]:
    """Training windows and held-out ones of a file or folder. What its files call valid or test is held out, else a
    tenth: whole documents where there are enough of them, else the end of each."""
    spec = DataSpec(source=text, valid=0.1, test=0.0, limit_bytes=READ)
    source = find_source(spec.source, None, spec)
    start = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    for by_position in (False, True):
        parts: dict[bool, list[int]] = {False: [], True: []}  # by whether it is held out
        for document in select_documents(source, spec, Counter(), by_position):
            found = tokenizer(document.raw.decode(), add_special_tokens=False, verbose=False)["input_ids"]
            parts[document.split != "train"] += found if start is None else [start, *found]
        train, held_out = (TokenWindows(torch.tensor(ids, dtype=torch.long), context) for ids in parts.values())
        if len(train) and len(held_out):
            break
    else:
        raise ValueError(
            f"{text} is too short: it has {len(train.ids):,} tokens to train on and {len(held_out.ids):,} to hold out, "
            f"and a window takes {context + 1:,} of either; give more text or a smaller --context."
        )
    largest = int(max(train.ids.max(), held_out.ids.max()))
    if largest >= words:
        raise ValueError(
            f"the tokenizer gives the number {largest}, but the model knows {words} tokens; they do not fit together."
        )
    return train, TokenWindows(held_out.ids[: JUDGED + 1], context)


def count_words(model: Any) -> int:
    """Tokens that a model knows."""
    return model.get_input_embeddings().weight.shape[0]


def choose_rows(context: int, words: int, batch: int) -> int:
    """Rows of a forward pass whose logits are not too many."""
    return max(1, min(batch, LOGITS // (context * words)))


@torch.no_grad()
def measure_loss(model: Any, windows: TokenWindows) -> float:
    """Mean loss in nats over the windows' tokens, each predicted from those before it in its window."""
    nats = 0.0
    model.eval()
    for ids in windows.read_in_order(choose_rows(windows.context, count_words(model), 16)):
        ids = ids.to(model.device)
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits
        nats += float(F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten(), reduction="sum"))
    return nats / (len(windows.ids) - 1)


def describe_losses(losses: dict[str, float], windows: TokenWindows, words: int) -> dict[str, Any]:
    """For the record: perplexity, and what it is per."""
    return {
        "per": f"token of the model's own tokenizer, which knows {words:,}",
        "held_out_tokens": len(windows.ids) - 1,
        "context": windows.context,
        "nats_per_token": losses,
        "perplexity": {name: math.exp(min(nats, 700.0)) for name, nats in losses.items()},
    }
