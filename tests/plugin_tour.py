"""What tests/test_plugin.py runs in a process of its own, where the package of examples/plugin is installed."""

from pathlib import Path

import pytest

from qklab import AttentionSpec, CouplingSpec, cli
from qklab.study.compare import make_study
from qklab.study.request import ComparisonRequest
from qklab.testing import CONTRACTS, contracts_of
from qklab.testing.grid import SIZE

STUDY = """
name = "turned"
baseline = "standard"
corpora = ["counting"]
metric = "token_probability"
margin = 0.01
lrs = [0.01]
seeds = 2

[base]
corpus.tokenizer = "bytes"
model = {layers = 2, width = 16, context = 16}
attention.heads = 2
batch.sequences = 2
budget.tokens = 128
evaluation = {times = 1, tokens = 64, probes = 0}

[arms.standard]
[arms."alternating and gated"]
attention = {layers = "alternating", mix = "gated"}
"""

TINY = "--model.layers 1 --model.width 16 --model.context 16 --attention.heads 2 --batch.sequences 2 --budget.tokens 64"


def run(command: str) -> None:
    code = None
    try:
        cli.main(command.split())
    except SystemExit as stop:
        code = stop.code
    assert not code, f"qklab {command} ended with {code}"


def check_contracts() -> None:
    """As their author would: the coupling, which looks back, in all its combinations, and the pattern that has it."""
    spec = AttentionSpec(**SIZE, share="k=v", kv_heads=2, coupling=CouplingSpec(kind="turn", steps=2), mix="gated")
    for name in contracts_of(spec):
        CONTRACTS[name](spec, "cpu")
    words = "-q -p pytest_qklab --pyargs qklab.testing -p no:cacheprovider --mechanism"
    some = "keeps_its_contracts and (mqa or swiglu and gqa2)"
    assert pytest.main([*words.split(), "trail", "--mechanism", "alternating", "-k", some]) == 0
    assert pytest.main([*words.split(), "trial"]) == pytest.ExitCode.INTERRUPTED  # there is none of this name


def check_commands() -> None:
    run("describe --coupling.kind turn --mix gated")
    Path("study.toml").write_text(STUDY, encoding="utf-8")
    run("study study.toml --out study --at-once 1")
    run(f"train --corpus.source counting --corpus.tokenizer bytes --attention.coupling.kind turn {TINY} --out run")
    run("report study --out report.html")
    page = Path("report.html").read_text(encoding="utf-8")
    for words in ("token probability", "alternating and gated"):
        assert words in page, f"the report does not speak of {words}"


def check_comparison() -> None:
    """As `qklab compare --arms …` plans it, short of training."""
    request = ComparisonRequest(arms=("trail", "unit-norm", "alternating", "gated"))
    make_study("pico", request, 2**20).refuse_illegal()


def check_family() -> None:
    import torch
    from transformers import CwmConfig, CwmForCausalLM

    from qklab.hf import convert
    from qklab.optim import attention_roles

    config = CwmConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8,
        bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    model = CwmForCausalLM(config).eval()
    assert len(attention_roles(model)) == 1
    ids = torch.arange(8)[None]
    with torch.no_grad():
        before = model(ids).logits
        convert(model, coupling=CouplingSpec(kind="turn", init="identity"))
        assert torch.equal(model(ids).logits, before)


if __name__ == "__main__":
    check_contracts()
    check_commands()
    check_comparison()
    check_family()
