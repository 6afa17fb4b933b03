"""The decoder: counts, packing, caching, learned positions, initialisation, recipes."""

from typing import Any

import pytest
import torch

from qklab import AttentionSpec, CouplingSpec, Decoder, DecoderSpec, LatentSpec, SpecError, recipe, register
from qklab.attention.project import PROJECTIONS
from qklab.model import RECIPES, stack
from qklab.model.stack import StackError
from qklab.testing import DECODER_CONTRACTS, PATTERNS

SMALL: dict[str, Any] = {"vocab": 97, "context": 24}
MODELS: dict[str, dict[str, Any]] = {
    "standard": {},
    "(Q,K=V) leapfrog gqa": {"share": "k=v", "kv_heads": 2, "coupling": CouplingSpec(kind="leapfrog")},
    "learned positions": {"position": "learned"},
    "differential qk-norm": {"mix": "differential", "norm": "qk"},
    "MLA": {"latent": LatentSpec(query_rank=32, kv_rank=16, rope_width=8)},
}


def name_pattern(pattern: tuple[AttentionSpec, ...]) -> str:
    return " | ".join(spec.name for spec in pattern)


def model(name: str, **changes: Any) -> Decoder:
    return Decoder(recipe("nano", **SMALL, **MODELS[name]).replace(**changes), seed=0).double()


def tokens(batch: int = 2, length: int = 12) -> torch.Tensor:
    return torch.randint(97, (batch, length), generator=torch.Generator().manual_seed(2))


CASES = {
    **{name: recipe("nano", **SMALL, layers=2, **choices) for name, choices in MODELS.items()},
    "gelu, biased LayerNorm": recipe("nano", **SMALL, layers=1, mlp="gelu").replace(norm="layer", bias=True),
    "untied, LayerNorm": recipe("nano", **SMALL, layers=1, tied=False).replace(norm="layer"),
    **{
        name_pattern(pattern): DecoderSpec(vocab=97, width=8, layers=len(pattern) + 1, attention=pattern, context=24)
        for pattern in PATTERNS
    },
}


# what compiles as a layer of a pattern need not compile alone
COMPILED = CASES.keys() - {"standard", "(Q,K=V) leapfrog gqa", "differential qk-norm", "MLA", name_pattern(PATTERNS[0])}


@pytest.mark.parametrize(
    ("contract", "name"),
    [(c, name) for c in DECODER_CONTRACTS for name in CASES if c != "decoder_compilation" or name in COMPILED],
)
def test_contract(contract: str, name: str, device: str) -> None:
    DECODER_CONTRACTS[contract](CASES[name], device)


def test_stacked_models_refuse_what_only_a_member_can() -> None:
    stacked = stack([model("standard", layers=1) for _ in range(2)])
    for call in (lambda: stacked.new_cache(1, 4), stacked.fold):
        with pytest.raises(StackError, match=r"take .* with unstack"):
            call()
    dropping = model("standard", layers=1)
    dropping.blocks[0].add_module("drop", torch.nn.Dropout(0.1))  # as a mechanism of another package may
    with pytest.raises(StackError, match="torch's dropout would draw other masks"):
        stack([dropping])
    with pytest.raises(StackError, match=r"ids must have shape \[members, batch, tokens\]"):
        stacked(tokens())


def test_learned_positions_end_at_the_context() -> None:
    decoder = model("learned positions")
    with pytest.raises(ValueError, match="learned positions for 24 tokens, but 25 came"):
        decoder(tokens(length=25))
    cache = decoder.new_cache(2, 24)
    decoder(tokens(length=24), cache=cache)
    with pytest.raises(ValueError, match="but 25 came"):
        decoder(tokens(length=1), cache=cache)
    assert model("standard")(tokens(length=25)).shape == (2, 25, 97)  # RoPE has no such end


@pytest.mark.parametrize(
    "other",
    [{"rope_base": 100.0}, {"rope_fraction": 0.5}, {"kv_rotation": "on-read"}, {"heads": 2, "kv_heads": 2}],
    ids=str,
)
@torch.no_grad()
def test_layers_of_a_pattern_stand_where_their_own_spec_says(other: dict[str, Any]) -> None:
    """What the layers share gives, over a prompt and the steps after it, what each finds out for itself."""
    attention = {"share": "k=v", "heads": 4}
    decoder = Decoder(recipe("nano", **SMALL, attention=[attention, attention | other]), seed=0).eval()
    ids, whole, alone = tokens(), decoder.new_cache(2, 20), decoder.new_cache(2, 20)
    for piece in ids.split([5, 1, ids.shape[1] - 6], 1):
        x = decoder.embed(piece)
        for layer, block in enumerate(decoder.blocks):
            positions, visibility = decoder.attention(layer).locate(x, cache=alone[layer])
            x = block(x, positions, visibility, alone[layer])
        torch.testing.assert_close(decoder(piece, cache=whole), decoder.head(decoder.norm(x)))


def test_bad_ids_are_refused() -> None:
    wrong: list[Any] = [torch.zeros(3, dtype=torch.long), torch.zeros(1, 3), torch.zeros(1, 3).bool(), [[1, 2]]]
    for ids in wrong:
        with pytest.raises(ValueError, match="ids must be a tensor of whole numbers of shape"):
            model("standard")(ids)


def test_bytes_are_ids() -> None:
    ids = tokens()
    assert torch.equal(model("standard")(ids.to(torch.uint8)), model("standard")(ids))


EVERY_CHOICE = [
    *({"coupling": CouplingSpec.from_dict({"kind": kind})} for kind in register.coupling),
    *({"mix": mix} for mix in register.mix),
    *({"share": share} for share in PROJECTIONS),
    *({"norm": norm} for norm in register.norm),
    {"latent": LatentSpec(query_rank=8, kv_rank=8, rope_width=4)},
    {"share": "q=k", "causal": False, "asymmetry_2d": True, "asymmetry_free_scale": True},
    {"position": "learned"},
    {"short_conv": 3},
    *(
        {"latent": LatentSpec(query_rank=8, kv_rank=8, rope_width=4), "coupling": CouplingSpec(kind=kind)}
        for kind in ("affine", "uncoupled")
    ),
]


@pytest.mark.parametrize("choices", EVERY_CHOICE, ids=str)
def test_one_seed_is_one_model(choices: dict[str, Any]) -> None:
    """No parameter escapes the initialisation table, whatever the state of torch's global generator."""
    spec = recipe("nano", **SMALL, **choices)
    first = Decoder(spec, seed=5).state_dict()
    torch.manual_seed(99)
    again = Decoder(spec, seed=0)
    again.initialise(5)
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in first.items())


def test_building_on_the_meta_device_and_then_for_real() -> None:
    spec = recipe("nano", **SMALL)
    with torch.device("meta"):
        decoder = Decoder(spec)
    decoder = decoder.to_empty(device="cpu")
    decoder.initialise(0)
    assert decoder.head.weight is decoder.embed.weight
    assert torch.equal(decoder(tokens()), Decoder(spec, seed=0)(tokens()))


@pytest.mark.parametrize("share", ["none", "q=k=v"])
def test_a_decoder_folds(share: str) -> None:
    spec = recipe("nano", **SMALL, share=share, coupling=CouplingSpec(kind="linear", steps=2))
    decoder = Decoder(spec, seed=0).double().eval()
    folded = decoder.fold()
    torch.testing.assert_close(folded(tokens()), decoder(tokens()))
    assert folded.spec.pattern[0].coupling is None
    assert not any(module.training for module in folded.modules())
    assert sum(parameter.numel() for parameter in folded.parameters()) == folded.spec.parameters()


@pytest.mark.parametrize("name", ["learned positions", "MLA"])
def test_compiled_models_take_any_length(name: str) -> None:
    decoder = model(name, layers=1)
    torch._dynamo.reset()
    compiled = torch.compile(decoder, fullgraph=True, backend="eager", dynamic=True)
    for length in (12, 7, 1):
        torch.testing.assert_close(compiled(tokens(length=length)), decoder(tokens(length=length)))


def test_arms_share_the_initial_values_of_shared_parameters() -> None:
    """By name, whatever else differs; and under torch's global seed as well."""
    plain = Decoder(recipe("nano"), seed=7).state_dict()
    for arm in ({"coupling": CouplingSpec(kind="euler")}, {"norm": "qk"}, {"share": "k=v"}, {"mix": "differential"}):
        other = Decoder(recipe("nano", **arm), seed=7).state_dict()
        shared = plain.keys() & other.keys()
        assert len(shared) > 20
        assert all(torch.equal(plain[name], other[name]) for name in shared)
    assert not torch.equal(plain["embed.weight"], Decoder(recipe("nano"), seed=8).state_dict()["embed.weight"])
    torch.manual_seed(11)
    first = Decoder(recipe("nano"))
    torch.manual_seed(11)
    second = Decoder(recipe("nano", norm="qk"))
    assert torch.equal(first.head.weight, second.head.weight)


def test_initial_values_do_not_depend_on_torchs_default_precision() -> None:
    spec = recipe("nano", coupling=CouplingSpec(kind="leapfrog"), mix="differential")
    usual = Decoder(spec, seed=7).state_dict()
    torch.set_default_dtype(torch.float64)
    try:
        double = Decoder(spec, seed=7).state_dict()
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(double[name].float(), value) for name, value in usual.items())


def test_initialisation_follows_the_table() -> None:
    coupling = CouplingSpec(kind="affine")
    decoder = Decoder(recipe("nano", coupling=coupling, norm="qk", bias=True).replace(bias=True), seed=0)
    for name, parameter in decoder.named_parameters():
        value = parameter.detach()
        if "couple" in name:
            continue
        if name.endswith("bias"):
            assert not value.any(), name
        elif "norm" in name:  # decoder norms and QK-norm gains
            assert value.eq(1).all(), name
        else:
            residual = name.endswith(("attention.output.weight", "mlp.down.weight"))
            expected = 0.02 / (8**0.5) if residual else 0.02
            assert abs(float(value.std()) / expected - 1) < 0.05, name


SIZES = {
    "nano": 1.574,
    "micro": 6.819,
    "mini": 16.913,
    "34m": 33.563,
    "51m": 50.93,
    "60m": 59.32,
    "124m": 123.59,
    "150m": 151.90,
    "300m": 305.53,
    "350m": 353.55,
    "455m": 454.21,
    "1.2b": 1215.10,
}


def test_recipes_have_the_published_sizes() -> None:
    assert SIZES.keys() == RECIPES.keys()
    for name, millions in SIZES.items():
        assert recipe(name).parameters() / 1e6 == pytest.approx(millions, abs=0.006), name
    with pytest.raises(ValueError, match=r"recipe must be one of .*did you mean '60m'"):
        recipe("60mm")


def test_recipes_take_choices_of_the_model_too() -> None:
    spec = recipe("nano", layers=2, mlp="gelu", tied=False, norm="qk")
    assert (spec.layers, spec.mlp, spec.tied, spec.norm, spec.pattern[0].norm) == (2, "gelu", False, "rms", "qk")


def test_recipes_keep_their_width_when_heads_change() -> None:
    assert recipe("60m", heads=16).pattern[0].head_width == 32
    assert recipe("60m", heads=16).parameters() == recipe("60m").parameters()


def test_classic_recipes_are_gpt2s_family() -> None:
    spec = recipe("300m")
    assert (spec.norm, spec.bias, spec.mlp, spec.tied, spec.context) == ("layer", True, "gelu", True, 2048)
    assert (spec.pattern[0].position, spec.pattern[0].bias, spec.pattern[0].heads) == ("learned", True, 16)
    assert (recipe("1.2b").layers, recipe("1.2b").width, recipe("1.2b").pattern[0].heads) == (22, 2048, 32)


def test_widths_must_agree() -> None:
    with pytest.raises(SpecError, match=r"width=256 is refused: the attention spec has width=128.*width=128\.$"):
        DecoderSpec(vocab=10, width=256, layers=1, attention=recipe("nano").attention)


@pytest.mark.parametrize("name", ["(Q,K=V) leapfrog gqa", "learned positions", "MLA"])
@torch.no_grad()
def test_compiled_decoding_needs_no_graph_per_length(name: str) -> None:
    """One graph for the prompt and one for every later token, whatever the cache's length."""
    decoder, ids = model(name, layers=1), tokens(length=20)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(decoder, fullgraph=True, backend="aot_eager")
    cache = decoder.new_cache(2, 20)
    decoded = torch.cat([compiled(chunk, cache=cache) for chunk in ids.split([10] + [1] * 10, 1)], 1)
    torch.testing.assert_close(decoded, decoder(ids))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 3


def kept_and_gradients(decoder: Decoder, segments: torch.Tensor) -> tuple[int, list[torch.Tensor]]:
    """Bytes that the forward pass keeps for the backward, and the gradients."""
    kept: dict[int, int] = {}

    def keep(x: torch.Tensor) -> torch.Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    torch.manual_seed(1)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        loss = decoder(tokens(), segments=segments).square().mean()
    own = {p.untyped_storage().data_ptr() for p in decoder.parameters()}
    gradients = torch.autograd.grad(loss, list(decoder.parameters()))
    return sum(size for at, size in kept.items() if at not in own), list(gradients)


@pytest.mark.parametrize("choice", ["leapfrog", "affine", "none"])
def test_recomputing_keeps_less_and_gives_the_same_gradients(choice: Any) -> None:
    coupling = None if choice == "none" else CouplingSpec(kind=choice)
    spec = recipe("nano", **SMALL, coupling=coupling).replace(dropout=0.3)
    decoder = Decoder(spec, seed=0)
    segments = (torch.arange(12) > 6).long().expand(2, -1)
    kept, gradients = kept_and_gradients(decoder, segments)
    fewer = {}
    for what in ("coupling", "layers", "none"):
        decoder.recompute(what)
        fewer[what], again = kept_and_gradients(decoder, segments)
        assert all(map(torch.equal, again, gradients)), what
    assert fewer["none"] == kept
    assert fewer["coupling"] < kept if coupling else fewer["coupling"] == kept
    assert fewer["layers"] < 0.2 * kept


def test_recomputing_leaves_decoding_alone() -> None:
    decoder, ids = model("(Q,K=V) leapfrog gqa"), tokens()
    expected = decoder(ids)
    for what in ("coupling", "layers"):
        decoder.recompute(what)
        cache = decoder.new_cache(2, 12)
        torch.testing.assert_close(torch.cat([decoder(part, cache=cache) for part in ids.split(4, 1)], 1), expected)


def test_an_unknown_recomputation_is_refused() -> None:
    with pytest.raises(ValueError, match="recompute must be one of none, coupling, layers, but 'blocks' came"):
        model("standard").recompute("blocks")  # pyright: ignore[reportArgumentType]
