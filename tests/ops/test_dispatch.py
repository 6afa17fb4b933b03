"""Which implementation runs, and what is said about it."""

import importlib.util
import logging

import pytest
import torch

from qklab.ops.dispatch import choose_automatically, choose_impl

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(autouse=True)
def unannounced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    choose_automatically.cache_clear()


def with_triton(monkeypatch: pytest.MonkeyPatch, present: bool) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if present else None)


def test_auto_takes_the_kernel_on_a_gpu_only(monkeypatch: pytest.MonkeyPatch) -> None:
    with_triton(monkeypatch, present=True)
    assert choose_impl("thing", "auto", GPU) == "triton"
    assert choose_impl("thing", "auto", CPU) == "reference"
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert choose_impl("thing", "triton", CPU) == "triton"
    assert choose_impl("thing", "auto", CPU) == "reference"


def test_auto_without_triton_takes_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    with_triton(monkeypatch, present=False)
    assert choose_impl("thing", "auto", GPU) == "reference"


def test_the_reference_runs_everywhere() -> None:
    assert choose_impl("thing", "reference", CPU) == choose_impl("thing", "reference", GPU) == "reference"


def test_a_kernel_that_cannot_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with_triton(monkeypatch, present=True)
    with pytest.raises(ValueError, match=r"^thing: impl='triton' cannot run: it needs tensors on a GPU.* on cpu; use"):
        choose_impl("thing", "triton", CPU)
    with_triton(monkeypatch, present=False)
    with pytest.raises(ValueError, match="the package triton is not installed; use impl='reference' or 'auto'"):
        choose_impl("thing", "triton", GPU)


def test_what_speaks_against_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    with_triton(monkeypatch, present=True)
    for against in ({"obstacle": "it is too wide"}, {"objection": "it is slower"}):
        assert choose_impl("thing", "auto", GPU, **against) == "reference"
        assert choose_impl("thing", "auto", GPU, fallback="sdpa", **against) == "sdpa"
    assert choose_impl("thing", "triton", GPU, objection="it is slower") == "triton"
    with pytest.raises(ValueError, match="cannot run: it is too wide; use impl='sdpa' or 'auto'"):
        choose_impl("thing", "triton", GPU, obstacle="it is too wide", fallback="sdpa")
    assert choose_impl("thing", "sdpa", GPU, fallback="sdpa") == "sdpa"
    with pytest.raises(ValueError, match="impl must be one of 'auto', 'reference', 'triton'"):
        choose_impl("thing", "sdpa", GPU)


def test_unknown_names_are_refused_with_a_suggestion() -> None:
    with pytest.raises(
        ValueError, match=r"impl must be one of 'auto', .* \(did you mean 'triton'\?\), but 'tritn' came"
    ):
        choose_impl("thing", "tritn", CPU)


def test_the_choice_is_said_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    with_triton(monkeypatch, present=True)
    with caplog.at_level(logging.INFO, logger="qklab"):
        for _ in range(3):
            choose_impl("thing", "auto", CPU)
            choose_impl("other", "auto", GPU)
            choose_impl("third", "reference", CPU)
    assert caplog.messages == [
        "thing: impl='auto' takes 'reference', since it needs tensors on a GPU, and these are on cpu.",
        "other: impl='auto' takes 'triton', since the tensors are on a GPU.",
    ]
