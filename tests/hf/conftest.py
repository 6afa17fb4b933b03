"""Small models, and Transformers without its progress bars."""

from typing import Any

import pytest
import torch
from small_models import END, Small, decoder
from transformers.utils import logging

from qklab.hf import QKLabForCausalLM
from qklab.hf.export import wrap_decoder


@pytest.fixture
def small() -> Small:
    """A small language model of some kind, e.g. small("MLA", tied=False)."""

    def build(kind: str = "(Q,K=V)", seed: int = 0, **changes: Any) -> QKLabForCausalLM:
        model = wrap_decoder(decoder(kind, seed, **changes), bos_token_id=END, eos_token_id=END, pad_token_id=END)
        assert isinstance(model, QKLabForCausalLM)
        return model

    return build


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(0, END, (3, 9), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def left() -> torch.Tensor:
    """The mask of rows that begin with 4, 1 and 0 tokens of padding."""
    return (torch.arange(9) >= torch.tensor([[4], [1], [0]])).long()


@pytest.fixture(autouse=True)
def _no_progress_bars() -> None:
    logging.disable_progress_bar()
