"""Logit control on Transformers' models: the rows found are the right ones, logits are watched, updates are scaled."""

import copy
import itertools
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qklab.hf.watch import measure_largest
from qklab.optim import LogitControl, QKClip, Rows, attention_roles, layer_roles

transformers = pytest.importorskip("transformers")

VOCAB, TOKENS, WINDOW = 40, 9, 4
SIZE = {"vocab_size": VOCAB, "num_hidden_layers": 2, "hidden_size": 24, "intermediate_size": 16}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
LATENT = {
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
    "first_k_dense_replace": 9,
    "attention_bias": True,
}
# family → (Transformers' name of it, choices)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("Llama", SIZE | HEADS),
    "Llama, wide heads": ("Llama", SIZE | HEADS | {"head_dim": 10, "attention_bias": True}),
    "Mistral": ("Mistral", SIZE | HEADS | {"head_dim": 6, "sliding_window": WINDOW}),
    "Gemma": ("Gemma", SIZE | {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 10}),
    "Gemma 2": ("Gemma2", SIZE | HEADS | {"head_dim": 8, "sliding_window": WINDOW, "attn_logit_softcapping": 0.5}),
    "Qwen2": ("Qwen2", SIZE | HEADS),
    "Qwen3": ("Qwen3", SIZE | HEADS | {"head_dim": 8}),
    "GPT-2": ("GPT2", {"vocab_size": VOCAB, "n_layer": 2, "n_embd": 24, "n_head": 4, "n_positions": 32}),
    "GPT-NeoX": ("GPTNeoX", SIZE | {"num_attention_heads": 4, "max_position_embeddings": 32}),
    "DeepSeek-V3": ("DeepseekV3", SIZE | LATENT | {"q_lora_rank": 10}),
    "DeepSeek-V3, no query latent": ("DeepseekV3", SIZE | LATENT | {"q_lora_rank": None}),
}
NORMED = ("Qwen3",)
MLA = ("DeepSeek-V3", "DeepSeek-V3, no query latent")
CONTROLLED = [family for family in FAMILIES if family not in NORMED]


def build(family: str, attention: str = "eager", **more: Any) -> Any:
    """A model with two layers, in float64, every parameter random: biases and gains too."""
    name, choices = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**(choices | more))
    config._attn_implementation = attention
    kind = "LMHeadModel" if name == "GPT2" else "ForCausalLM"
    model = getattr(transformers, f"{name}{kind}")(config).double()
    drawn = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=drawn, dtype=torch.float64) * 0.2 + (
            parameter.dim() == 1
        )
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model.train()


def ids(rows: int = 2, seed: int = 1) -> Tensor:
    return torch.randint(VOCAB, (rows, TOKENS), generator=torch.Generator().manual_seed(seed))


@dataclass
class Call:
    """What a layer's attention function was called with."""

    query: Tensor
    key: Tensor
    value: Tensor
    scale: float

    @property
    def logits(self) -> Tensor:
        """[B, H, T, S]."""
        key = self.key.repeat_interleave(self.query.shape[1] // self.key.shape[1], 1)
        return self.query @ key.mT * self.scale


@contextmanager
def recording(model: nn.Module) -> Iterator[dict[str, Call]]:
    """Layer name → the last call of its attention function, eager or sdpa."""
    names: dict[Any, str] = {model.get_submodule(name): name for name in attention_roles(model)}
    file: Any = sys.modules[type(next(iter(names))).__module__]
    functions = transformers.AttentionInterface._global_mapping
    eager, sdpa = file.eager_attention_forward, functions["sdpa"]
    calls: dict[str, Call] = {}

    def record(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any) -> Any:
            calls[names[module]] = Call(query.detach(), key.detach(), value.detach(), options["scaling"])
            return original(module, query, key, value, mask, **options)

        return call

    file.eager_attention_forward, functions["sdpa"] = record(eager), record(sdpa)
    try:
        yield calls
    finally:
        file.eager_attention_forward, functions["sdpa"] = eager, sdpa


def recorded(model: nn.Module, **inputs: Any) -> dict[str, Call]:
    with recording(model) as calls, torch.no_grad():
        model(**({"input_ids": ids()} | inputs))
    return dict(calls)


@contextmanager
def multiplied(part: Rows, rows: Tensor, factor: float | Tensor) -> Iterator[None]:
    """The outputs `rows` of a part multiplied, and restored."""
    kept = [tensor.detach().clone() for tensor in part.tensors]
    with torch.no_grad():
        (part.weight if part.axis == 0 else part.weight.T)[rows] *= torch.as_tensor(factor).double().view(-1, 1)
        if part.bias is not None:
            part.bias[rows] *= factor
    try:
        yield
    finally:
        for tensor, before in zip(part.tensors, kept, strict=True):
            tensor.data.copy_(before)


def without_epsilon(model: nn.Module) -> None:
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            setattr(module, "variance_epsilon", 0.0)  # noqa: B010


# of query (0) or key (1), the heads and entries that rows of head h make, in a layer with `nope` unrotated entries
MAKES: dict[str, Callable[[int, int], tuple[int, Any]]] = {
    "q": lambda h, nope: (0, (slice(None), h)),
    "k": lambda h, nope: (1, (slice(None), h)),
    "uq": lambda h, nope: (0, (slice(None), h, slice(None), slice(0, nope))),
    "qr": lambda h, nope: (0, (slice(None), h, slice(None), slice(nope, None))),
    "uk": lambda h, nope: (1, (slice(None), h, slice(None), slice(0, nope))),
    "kr": lambda h, nope: (1, (slice(None), slice(None), slice(None), slice(nope, None))),
}


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in NORMED])
def test_doubling_the_rows_of_a_head_doubles_what_they_make_and_nothing_else(family: str) -> None:
    """Doubling is exact in floating point, so the comparison is bit for bit; values must not move at all."""
    model = build(family)
    before, roles = recorded(model), attention_roles(model)
    assert len(roles) == 2
    for at, (name, layer) in enumerate(roles.items()):
        expected = (
            {"q", "k"} if family not in MLA else {"uq", "uk", "qr", "kr", "dkv"} | {"dq"} & set(layer.projections)
        )
        assert set(layer.projections) == expected
        nope = getattr(model.get_submodule(name), "qk_nope_head_dim", 0)
        for symbol, part in layer.projections.items():
            for head in range(part.heads) if symbol in MAKES else ():
                with multiplied(part, part.rows[head], 2.0):
                    after = recorded(model)
                for earlier in list(roles)[:at]:
                    assert torch.equal(after[earlier].logits, before[earlier].logits)
                want = [before[name].query.clone(), before[name].key.clone()]
                side, entries = MAKES[symbol](head, nope)
                want[side][entries] *= 2
                assert torch.equal(after[name].query, want[0])
                assert torch.equal(after[name].key, want[1])
                assert torch.equal(after[name].value, before[name].value)


@pytest.mark.parametrize("family", CONTROLLED)
def test_every_logit_of_a_head_is_multiplied_when_its_rows_are(family: str) -> None:
    """And no logit of other heads: the heads of a key are those of its group."""
    model = build(family)
    roles = attention_roles(model)
    (name, layer), *_ = roles.items()
    before = recorded(model)[name].logits
    heads = layer.query.heads
    for head in range(heads):
        parts = layer.projections
        with multiplied(layer.query, layer.query.rows[head], 2.0):
            if "qr" in parts:
                with multiplied(parts["qr"], parts["qr"].rows[head], 2.0):
                    after = recorded(model)[name].logits
            else:
                after = recorded(model)[name].logits
        want = before.clone()
        want[:, head] *= 2
        assert torch.equal(after, want)
    for head in range(layer.projections["k"].heads if "k" in layer.projections else 0):
        group = heads // layer.projections["k"].heads
        with multiplied(layer.projections["k"], layer.projections["k"].rows[head], 2.0):
            after = recorded(model)[name].logits
        want = before.clone()
        want[:, head * group : (head + 1) * group] *= 2
        assert torch.equal(after, want)


@pytest.mark.parametrize("family", MLA)
def test_the_rows_of_a_latent_are_those_its_norm_divides_by(family: str) -> None:
    """Doubling all of them changes nothing; doubling all but one changes the query or key."""
    model = build(family)
    without_epsilon(model)
    before, roles = recorded(model), attention_roles(model)
    for name, layer in roles.items():
        assert ("dq" in layer.projections) == (family == "DeepSeek-V3")
        for symbol, side in (("dq", "query"), ("dkv", "key")):
            if symbol not in layer.projections:
                continue
            part = layer.projections[symbol]
            assert part.bias is not None
            with multiplied(part, part.rows[0], 2.0):
                after = recorded(model)[name]
            assert torch.equal(after.query, before[name].query)
            assert torch.equal(after.key, before[name].key)
            assert torch.equal(after.value, before[name].value)
            for missing in range(part.rows.shape[1]):
                rest = torch.cat([part.rows[0, :missing], part.rows[0, missing + 1 :]])
                with multiplied(part, rest, 2.0):
                    after = recorded(model)[name]
                assert not torch.allclose(getattr(after, side), getattr(before[name], side))


@pytest.mark.parametrize("family", MLA)
def test_the_gain_of_a_latent_is_found_where_there_is_one(family: str) -> None:
    model = build(family)
    for name, layer in attention_roles(model).items():
        module: Any = model.get_submodule(name)
        gain = module.q_a_layernorm.weight if "dq" in layer.projections else None
        assert all(layer.projections[symbol].gain is gain for symbol in ("uq", "qr"))
        assert layer.projections["uk"].gain is module.kv_a_layernorm.weight
        assert all(
            layer.projections[symbol].gain is None for symbol in ("dkv", "kr", "dq") if symbol in layer.projections
        )


def test_under_qk_norm_the_rows_of_a_head_still_make_that_head_alone() -> None:
    model = build("Qwen3")
    without_epsilon(model)
    before, roles = recorded(model), attention_roles(model)
    for name, layer in roles.items():
        assert layer.qk_norm
        for (symbol, part), side in zip(layer.projections.items(), ("query", "key"), strict=True):
            assert symbol == side[0]
            for head in range(part.heads):
                with multiplied(part, part.rows[head], 2.0):
                    assert torch.equal(getattr(recorded(model)[name], side), getattr(before[name], side))
                with multiplied(part, part.rows[head], torch.linspace(1, 2, part.rows.shape[1])):
                    after = recorded(model)[name]
                changed = (getattr(after, side) != getattr(before[name], side)).any(0).any(1).any(1)
                assert changed.nonzero().flatten().tolist() == [head]


def test_under_qk_norm_quack_and_clipping_refuse_and_a_fixed_rate_works() -> None:
    model = build("Qwen3")
    roles = attention_roles(model)
    for control in (LogitControl, QKClip):
        with pytest.raises(ValueError, match=r"refuses layer model\.layers\.0\.self_attn: .* normalised") as refused:
            control(torch.optim.AdamW(model.parameters()), roles)
        assert str(refused.value).count(".") == 1 + "model.layers.0.self_attn".count(".")
    plain = copy.deepcopy(model)
    optimiser = LogitControl(adamw(model), roles, 0.25, method="fixed")
    compare_updates(
        model,
        plain,
        optimiser,
        {id(t): 0.25 for r in roles.values() for p in r.projections.values() for t in p.tensors},
    )


def compare_updates(model: nn.Module, plain: nn.Module, optimiser: LogitControl, scales: dict[int, Any]) -> None:
    """One step of both; what the controlled one moved, decay aside, is its scale times what the plain one moved."""
    reference = adamw(plain)
    kept = 1 - reference.defaults["lr"] * reference.defaults["weight_decay"]
    before = {name: parameter.detach().clone() for name, parameter in plain.named_parameters()}
    for own, step in ((model, optimiser.step), (plain, reference.step)):
        own(input_ids=ids(), labels=ids()).loss.backward()
        step()
    theirs = dict(plain.named_parameters())
    for name, parameter in model.named_parameters():
        moved, plainly = (p.detach() - kept * before[name] for p in (parameter, theirs[name]))
        assert plainly.abs().max() > 0
        torch.testing.assert_close(moved, plainly * scales.get(id(parameter), 1.0), rtol=1e-9, atol=1e-14)


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


@pytest.mark.parametrize(
    ("config", "choice"), [("StableLm", "qk_layernorm"), ("Cohere", "use_qk_norm"), ("Phi", "qk_layernorm")]
)
def test_norms_on_q_and_k_are_noticed_under_other_names(config: str, choice: str) -> None:
    for value in (True, False):
        spec = getattr(transformers, f"{config}Config")(**SIZE, **HEADS, **{choice: value}, pad_token_id=0)
        found = attention_roles(getattr(transformers, f"{config}Model")(spec))
        assert [layer.qk_norm for layer in found.values()] == [value] * 2


class Lookalike(nn.Module):
    """Names of Llama's projections, without its attention."""

    head_dim, num_key_value_groups = 4, 2

    def __init__(self, query: int, key: int, **more: nn.Module):
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(8, query), nn.Linear(8, key)
        for name, module in more.items():
            self.add_module(name, module)


def test_layers_that_only_look_alike_are_not_taken_for_attention() -> None:
    assert attention_roles(Lookalike(16, 8))["attention"].query.heads == 4
    assert not attention_roles(Lookalike(16, 8, q_norm=nn.Identity(), o_norm=nn.LayerNorm(4)))["attention"].qk_norm
    assert attention_roles(Lookalike(16, 8, qk_norm=nn.RMSNorm(4)))["attention"].qk_norm
    for odd in (Lookalike(32, 8), Lookalike(16, 8, conv1d=nn.Conv1d(8, 8, 2))):  # a gate in q_proj; linear attention
        with pytest.raises(ValueError, match="no attention was recognised"):
            attention_roles(odd)


@pytest.mark.parametrize("family", ["GPT-2", "GPT-NeoX"])
def test_a_layer_that_fsdp_gave_another_class_is_still_found(family: str) -> None:
    model = build(family)
    want = attention_roles(model)
    for name in want:
        module: Any = model.get_submodule(name)
        module.__class__ = type(f"FSDP{type(module).__name__}", (type(module),), {})
    found = attention_roles(model)
    assert [*found] == [*want]
    for name, symbol in itertools.product(want, "qk"):
        assert torch.equal(found[name].projections[symbol].rows, want[name].projections[symbol].rows)


def test_gpt2_with_cross_attention_is_refused() -> None:
    with pytest.raises(ValueError, match="cross-attention is not known"):
        attention_roles(build("GPT-2", add_cross_attention=True))


# ----------------------------------------------------------------------------------------------------------- watching

TEXTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "padded right": {"attention_mask": torch.tensor([[1] * TOKENS, [1] * 5 + [0] * 4])},
    "padded left": {"attention_mask": torch.tensor([[0] * 3 + [1] * 6, [1] * TOKENS])},
    "packed": {"position_ids": torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4, 5], [*range(TOKENS)]]), "use_cache": False},
}


def sees(family: str, layer: int, text: str) -> Tensor:
    """[B, T, S], from the definition."""
    windows = {"Mistral": (True, True), "Gemma 2": (True, False)}.get(family, (False, False))
    real = TEXTS[text].get("attention_mask", torch.ones(2, TOKENS))
    starts = (TEXTS[text].get("position_ids", torch.ones(2, TOKENS)) == 0).cumsum(1)
    visible = torch.zeros(2, TOKENS, TOKENS, dtype=torch.bool)
    for b, i, j in itertools.product(range(2), range(TOKENS), range(TOKENS)):
        near = i - j < WINDOW or not windows[layer]
        visible[b, i, j] = j <= i and near and real[b, j] == 1 and starts[b, i] == starts[b, j]
    return visible


def watched(model: nn.Module, threshold: float = 1e9) -> QKClip:
    return QKClip(torch.optim.SGD(model.parameters(), lr=0.0), attention_roles(model), threshold)


def close(found: Tensor, want: Tensor) -> bool:
    """Equal but for the rounding of `found` to float32."""
    return torch.allclose(found.double(), want, rtol=2**-23, atol=0.0)


def largest(call: Call, visible: Tensor) -> Tensor:
    """[H], of logits [B, H, T, S] and visible [B, T, S]."""
    return call.logits.masked_fill(~visible[:, None], -math.inf).amax((0, 2, 3))


# Transformers' eager attention gives NaN in float64 for a query that sees nothing; soft caps exist only there
WATCHED = [
    pytest.param(family, text, attention, id=f"{family}, {text}, {attention}")
    for family, text, attention in itertools.product(CONTROLLED, TEXTS, ("eager", "sdpa"))
    if not (attention == "eager" and text == "padded left")
    if not (family == "Gemma 2" and (attention == "sdpa" or text == "padded right"))
]


@pytest.mark.parametrize(("family", "text", "attention"), WATCHED)
def test_the_largest_logit_seen_is_that_of_the_visible_pairs(family: str, text: str, attention: str) -> None:
    model = build(family, attention)
    clip = watched(model)
    assert all(bool((seen == -math.inf).all()) for seen in clip.watch.largest.values())
    calls = recorded(model, **TEXTS[text])
    assert [*clip.watch.largest] == [*calls]
    for at, (name, seen) in enumerate(clip.watch.largest.items()):
        assert close(seen, largest(calls[name], sees(family, at, text)))


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("family", ["Llama", "Mistral", "GPT-2", "GPT-NeoX", "DeepSeek-V3"])
def test_watching_changes_no_output_and_no_gradient(
    family: str, attention: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With dropout of attention weights, against the model's file as Transformers ships it."""
    results = []
    for control, seed in ((None, 3), (watched, 3), (None, 4)):
        model = build(family, attention, **({} if family == "GPT-2" else {"attention_dropout": 0.3}))
        layers: list[Any] = [model.get_submodule(name) for name in attention_roles(model)]
        if family == "GPT-2":
            for layer in layers:
                layer.attn_dropout.p = 0.3
        file = sys.modules[type(layers[0]).__module__]
        monkeypatch.setattr(file, "ALL_ATTENTION_FUNCTIONS", transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS)
        if control is not None:
            control(model)
        torch.manual_seed(seed)
        out = model(input_ids=ids(), labels=ids())
        out.loss.backward()
        results.append([out.logits, torch.rand(1), *(p.grad for p in model.parameters())])
    plain, seen, other = results
    assert all(torch.equal(a, b) for a, b in zip(plain, seen, strict=True))
    assert not torch.equal(plain[0], other[0])


def test_only_passes_in_training_count_and_the_largest_of_several_stays() -> None:
    model = build("Llama", "sdpa")
    clip = watched(model)
    seen = next(iter(clip.watch.largest.values()))
    model.eval()(ids())
    assert bool((seen == -math.inf).all())
    model.train()
    single = []
    for seed in (1, 2, 3):
        clip.watch.reset()
        model(ids(seed=seed))
        single.append(seen.clone())
    clip.watch.reset()
    for seed in (1, 2, 3):
        model(ids(seed=seed))
    assert torch.equal(seen, torch.stack(single).amax(0))
    assert len({tuple(values.tolist()) for values in single}) == 3


def test_recomputing_under_gradient_checkpointing_sees_the_same_logits() -> None:
    found = []
    for checkpointing in (False, True):
        model = build("Llama", "sdpa")
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        clip = watched(model)
        model(input_ids=ids(), labels=ids()).loss.backward()
        found.append((clip.watch.largest, [p.grad for p in model.parameters()]))
    assert all(torch.equal(found[0][0][name], found[1][0][name]) for name in found[0][0])
    assert all(torch.equal(a, b) for a, b in zip(found[0][1], found[1][1], strict=True))


def test_models_are_watched_each_on_its_own_and_after_a_change_of_implementation() -> None:
    first, second, stranger = build("Llama", "sdpa"), build("Llama", "sdpa"), build("Llama", "sdpa")
    clips = [watched(first), watched(second)]
    visible = sees("Llama", 0, "plain")
    calls = recorded(first)
    stranger(ids(seed=3))
    for name, call in calls.items():
        assert close(clips[0].watch.largest[name], largest(call, visible))
        assert bool((clips[1].watch.largest[name] == -math.inf).all())
    second.set_attn_implementation("eager")
    calls = recorded(second)
    copy.deepcopy(second)(ids(seed=2))
    for name, call in calls.items():
        assert close(clips[1].watch.largest[name], largest(call, visible))


def test_functions_registered_later_and_names_unknown_are_as_in_transformers() -> None:
    def mine(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any) -> Any:
        return transformers.AttentionInterface._global_mapping["sdpa"](module, query, key, value, mask, **options)

    model, plain = build("Llama", "sdpa"), build("Llama", "sdpa")
    clip = watched(model)
    transformers.AttentionInterface.register("mine", mine)
    model.config._attn_implementation_internal = "mine"
    try:
        assert torch.equal(model(ids()).logits, plain(ids()).logits)
        calls = recorded(model)
    finally:
        del transformers.AttentionInterface._global_mapping["mine"]
    for name, seen in clip.watch.largest.items():
        assert close(seen, largest(calls[name], sees("Llama", 0, "plain")))
    with pytest.raises(KeyError, match="mine"):
        model(ids())


def test_a_compiled_model_is_watched_in_one_graph() -> None:
    model = build("Llama", "sdpa", num_hidden_layers=1)
    clip = watched(model)
    model(ids())
    want = {name: largest.clone() for name, largest in clip.watch.largest.items()}
    clip.watch.reset()
    torch.compile(model, backend="aot_eager", fullgraph=True)(ids())
    assert all(close(clip.watch.largest[name], want[name].double()) for name in want)


def test_what_cannot_be_watched_is_refused() -> None:
    with pytest.raises(ValueError, match="logits of Lookalike cannot be watched, as it does not ask Transformers"):
        watched(Lookalike(16, 8))
    with pytest.raises(ValueError, match="cannot be watched under reorder_and_upcast_attn"):
        watched(build("GPT-2", reorder_and_upcast_attn=True))
    watched(build("GPT-2", "sdpa", reorder_and_upcast_attn=True))


@dataclass
class Case:
    """One call of an attention function, and the pairs it visits: (b, i, j) → whether."""

    name: str
    mask: Any
    options: dict[str, Any]
    visits: Callable[[int, int, int], bool]
    batch: int = 2
    queries: int = 6
    keys: int = 6


def is_even(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (j <= i) & ((i - j) % (b + 2) == 0)


PADDING = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0]])
LENGTHS = {"cu_seq_lens_q": torch.tensor([0, 2, 6]), "cu_seq_lens_k": torch.tensor([0, 2, 6], dtype=torch.int32)}
POSITIONS = {"position_ids": torch.tensor([[0, 1, 0, 1, 2, 3]])}
LEAST = torch.finfo(torch.float64).min  # Transformers' «not visible»
BOTH = {"position_ids": torch.tensor([[0, 1, 0, 1, 2, 3]] * 2)}
ADDED = (
    torch.arange(36.0).view(6, 6).remainder(5).double().masked_fill(~torch.ones(6, 6).tril().bool(), LEAST)[None, None]
)
CASES = {
    "flash": Case("flash_attention_2", None, {}, lambda b, i, j: j <= i),
    "flash after a cache": Case("flash_attention_2", None, {}, lambda b, i, j: j <= i + 3, queries=3),
    "flash both ways": Case("flash_attention_3", None, {"is_causal": False}, lambda b, i, j: True),
    "flash in a window": Case("x/flash-attn2", None, {"sliding_window": 2}, lambda b, i, j: j in (i, i - 1)),
    "flash both ways in a window": Case(
        "flash_attention_2", None, {"sliding_window": 2, "is_causal": False}, lambda b, i, j: abs(i - j) < 2
    ),
    "flash padded": Case(
        "flash_attention_2", PADDING, {}, lambda b, i, j: bool(j <= i and PADDING[b, i] * PADDING[b, j])
    ),
    "flash packed by lengths": Case(
        "flash_attention_2", None, LENGTHS, lambda b, i, j: j <= i and (j > 1) == (i > 1), 1
    ),
    "flash packed by positions": Case(
        "flash_attention_2", None, POSITIONS, lambda b, i, j: j <= i and (j > 1) == (i > 1), 1
    ),
    "flash takes positions of several rows for single texts": Case(
        "flash_attention_2", None, BOTH, lambda b, i, j: j <= i
    ),
    "flex": Case("flex_attention", is_even, {}, lambda b, i, j: j <= i and (i - j) % (b + 2) == 0),
    "flex without a mask": Case("flex_attention", None, {}, lambda b, i, j: True),
    "eager without a mask": Case("eager", None, {}, lambda b, i, j: True),
    "eager with values in its mask": Case("eager", ADDED, {}, lambda b, i, j: j <= i),
    "sdpa": Case("sdpa", None, {}, lambda b, i, j: j <= i),
    "sdpa both ways": Case("sdpa", None, {"is_causal": False}, lambda b, i, j: True),
    "sdpa of one query": Case("sdpa", None, {}, lambda b, i, j: True, queries=1),
    "sdpa aligned at the first key": Case("sdpa", None, {}, lambda b, i, j: j <= i, queries=4),
    "sdpa with a mask for all queries": Case(
        "sdpa", PADDING.bool()[:, None, None], {}, lambda b, i, j: bool(PADDING[b, j])
    ),
    "sdpa with a mask longer than the keys": Case(
        "sdpa", torch.ones(1, 1, 6, 9, dtype=torch.bool).tril(-1), {}, lambda b, i, j: j < i
    ),
}


@pytest.mark.parametrize("bias", [False, True], ids=["", "with a bias"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_visible_pairs_of_every_implementation(case: Case, bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a loop over pairs; two queries at a time, so that chunks meet their own rows of the masks."""
    monkeypatch.setattr("qklab.hf.watch.ROWS", 2)
    drawn = torch.Generator().manual_seed(5)
    query = torch.randn(case.batch, 4, case.queries, 3, generator=drawn, dtype=torch.float64)
    key = torch.randn(case.batch, 2, case.keys, 3, generator=drawn, dtype=torch.float64)
    added = torch.randn(1, 4, case.queries, case.keys, generator=drawn, dtype=torch.float64) if bias else None
    mask = case.mask
    if callable(mask):
        from torch.nn.attention.flex_attention import create_block_mask

        mask = create_block_mask(is_even, case.batch, None, case.queries, case.keys, "cpu")
    options = {"scaling": 0.7, "position_bias": added} | case.options
    found = measure_largest(case.name, nn.Identity(), query, key, mask, options)
    want = torch.full((4,), -math.inf, dtype=torch.float64)
    for b, h, i, j in itertools.product(range(case.batch), range(4), range(case.queries), range(case.keys)):
        if case.visits(b, i, j):
            logit = 0.7 * query[b, h, i] @ key[b, h // 2, j] + (0.0 if added is None else added[0, h, i, j])
            want[h] = max(want[h], logit + (ADDED[0, 0, i, j] if mask is ADDED else 0.0))
    assert close(found, want)


@pytest.mark.parametrize("family", ["Llama", "Llama, wide heads", "Qwen2", "GPT-2", "GPT-NeoX", *MLA])
def test_a_clip_brings_the_largest_logit_down_to_the_threshold(family: str) -> None:
    """In one layer, as a layer's clip changes what later ones read; γ is held in float32."""
    one = {"n_layer": 1} if family == "GPT-2" else {"num_hidden_layers": 1}
    model = build(family, "sdpa", **one)
    probe = watched(model)
    model(ids())
    (before,) = (largest.clone() for largest in probe.watch.largest.values())
    threshold = float(before.sort().values[1])  # all but two heads pass it
    assert threshold > 0
    clip = watched(model, threshold)
    model(ids())
    clip.step()
    model(ids())
    (after,) = clip.watch.largest.values()
    torch.testing.assert_close(after, before.clamp(max=threshold), rtol=1e-6, atol=0.0)
    assert bool((before > threshold * 1.001).any())


# --------------------------------------------------------------------------------------------------------- controlling


def matrices(family: str, module: Any) -> dict[str, list[Tensor]]:
    """Symbol → the matrix of every head, bias as a column and gain multiplied in, cut out as the layer's code does."""

    def column(weight: Tensor, bias: Tensor | None) -> Tensor:
        return weight if bias is None else torch.cat([weight, bias[:, None]], 1)

    if family == "GPT-2":
        q, k, _ = column(module.c_attn.weight.T, module.c_attn.bias).split(module.split_size)
        return {"q": list(q.split(module.head_dim)), "k": list(k.split(module.head_dim))}
    if family == "GPT-NeoX":
        heads = column(module.query_key_value.weight, module.query_key_value.bias).split(3 * module.head_size)
        return {symbol: [head.chunk(3)[i] for head in heads] for i, symbol in enumerate("qk")}
    if family not in MLA:
        linear = {"q": module.q_proj, "k": module.k_proj}
        return {s: list(column(m.weight, m.bias).split(module.head_dim)) for s, m in linear.items()}
    nope, rope, up = module.qk_nope_head_dim, module.qk_rope_head_dim, module.kv_b_proj.weight
    query = module.q_proj.weight if module.q_a_proj is None else module.q_b_proj.weight * module.q_a_layernorm.weight
    queries = query.split(nope + rope)
    keys = (up * module.kv_a_layernorm.weight).split(nope + module.v_head_dim)
    down = module.kv_a_proj_with_mqa
    dkv, kr = column(down.weight, down.bias).split([module.kv_lora_rank, rope])
    found = {"uq": [m[:nope] for m in queries], "qr": [m[nope:] for m in queries], "uk": [m[:nope] for m in keys]}
    found |= {"dkv": [dkv], "kr": [kr]}
    if module.q_a_proj is not None:
        found["dq"] = [column(module.q_a_proj.weight, module.q_a_proj.bias)]
    return found


def norms(family: str, module: Any) -> dict[str, list[float]]:
    return {s: [math.sqrt(float(m.detach().square().sum())) for m in ms] for s, ms in matrices(family, module).items()}


def by_hand(now: dict[str, list[float]], initial: dict[str, list[float]]) -> dict[str, list[float]]:
    """The factors of §3 as loops over heads; a latent's norms are those of normalised latents."""
    held = {s: [max(n, 0.3 * n0) for n, n0 in zip(now[s], initial[s], strict=True)] for s in now}

    def speeds(n: dict[str, list[float]]) -> dict[str, list[float]]:
        if "q" in n:
            group = len(n["q"]) // len(n["k"])
            return {
                "q": [1 / n["k"][h // group] for h in range(len(n["q"]))],
                "k": [1 / max(n["q"][g * group : (g + 1) * group]) for g in range(len(n["k"]))],
            }
        heads, (dkv,), (kr,) = range(len(n["uq"])), n["dkv"], n["kr"]
        dq = n["dq"][0] if "dq" in n else 1.0
        found = {
            "uq": [1 / n["uk"][h] for h in heads],
            "uk": [1 / n["uq"][h] for h in heads],
            "qr": [1 / kr for _ in heads],
            "kr": [1 / max(n["qr"])],
            "dkv": [1 / max(n["uq"][h] * dq * n["uk"][h] for h in heads)],
        }
        if "dq" in n:
            straight = 1 / max(n["uq"][h] * n["uk"][h] * dkv for h in heads)
            found["dq"] = [min(straight, 1 / max(n["qr"][h] * kr for h in heads))]
        return found

    then, new = speeds(initial), speeds(held)
    factors = {s: [a / b for a, b in zip(new[s], then[s], strict=True)] for s in new}
    for down in ("dq", "dkv"):
        if down in factors:
            factors[down][0] *= min(1.0, held[down][0] / initial[down][0])
    return factors


@pytest.mark.parametrize("family", CONTROLLED)
def test_factors_are_one_at_first_and_then_those_computed_by_hand(family: str) -> None:
    """The weights are changed by head and by a lot, so that norms rise, fall, and fall below their floor."""
    model = build(family)
    roles = attention_roles(model)
    initial = {name: norms(family, model.get_submodule(name)) for name in roles}
    optimiser = LogitControl(adamw(model), roles, tau=0.5)
    model(input_ids=ids(), labels=ids()).loss.backward()
    optimiser.step()
    first = optimiser.factors()
    assert all(bool((factor == 1).all()) for parts in first.values() for factor in parts.values())
    drawn = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for layer in roles.values():
            for part in layer.projections.values():
                for rows in part.rows:
                    factor = float(torch.empty(()).uniform_(math.log(0.15), math.log(4), generator=drawn).exp())
                    (part.weight if part.axis == 0 else part.weight.T)[rows] *= factor
                    if part.bias is not None:
                        part.bias[rows] *= factor
    now = {name: norms(family, model.get_submodule(name)) for name in roles}
    plain = copy.deepcopy(model)
    optimiser.zero_grad()
    plain.zero_grad()
    optimiser.bases[0].state.clear()
    scales: dict[int, Tensor] = {}
    wanted = {name: by_hand(now[name], initial[name]) for name in roles}
    for name, layer in roles.items():
        for symbol, part in layer.projections.items():
            for head, rows in enumerate(part.rows):
                scale = scales.setdefault(id(part.weight), torch.ones_like(part.weight))
                (scale if part.axis == 0 else scale.T)[rows] = 0.5 * wanted[name][symbol][head]
                if part.bias is not None:
                    bias = scales.setdefault(id(part.bias), torch.ones_like(part.bias))
                    bias[rows] = 0.5 * wanted[name][symbol][head]
    compare_updates(model, plain, optimiser, scales)
    found = optimiser.factors()
    for name in roles:
        assert {s: len(values) for s, values in found[name].items()} == {s: len(v) for s, v in wanted[name].items()}
        for symbol, values in wanted[name].items():
            torch.testing.assert_close(found[name][symbol], torch.tensor(values).double(), rtol=1e-6, atol=0.0)


class Split(nn.Module):
    """GPT-2's c_attn as three layers."""

    def __init__(self, fused: Any):
        super().__init__()
        width = fused.weight.shape[0]
        self.q, self.k, self.v = (nn.Linear(width, width, dtype=torch.float64) for _ in range(3))
        for linear, weight, bias in zip(
            (self.q, self.k, self.v), fused.weight.split(width, 1), fused.bias.split(width), strict=True
        ):
            linear.weight.data.copy_(weight.T)
            linear.bias.data.copy_(bias)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.q(x), self.k(x), self.v(x)], -1)


def test_a_fused_gpt2_moves_as_one_with_split_weights() -> None:
    """Rounding in gradients, 1e-16, over AdamW's eps of 1e-8 is 1e-8 of a step of 1e-2."""
    fused, split = build("GPT-2"), build("GPT-2")
    roles = {}
    for number, block in enumerate(split.transformer.h):
        block.attn.c_attn = Split(block.attn.c_attn)
        roles[str(number)] = layer_roles(query=block.attn.c_attn.q, key=block.attn.c_attn.k, heads=4)
    controls = LogitControl(adamw(fused), attention_roles(fused), 2.0), LogitControl(adamw(split), roles, 2.0)
    for step in range(8):
        for model, control in zip((fused, split), controls, strict=True):
            control.zero_grad()
            model(input_ids=ids(seed=step), labels=ids(seed=step)).loss.backward()
            control.step()
    factors = [torch.cat([f for parts in c.factors().values() for f in parts.values()]) for c in controls]
    assert float((factors[0] - 1).abs().max()) > 1e-2
    torch.testing.assert_close(factors[0], factors[1], rtol=1e-7, atol=0.0)
    torch.testing.assert_close(fused(ids()).logits, split(ids()).logits, rtol=0.0, atol=1e-8)
    for whole, block in zip(fused.transformer.h, split.transformer.h, strict=True):
        own = block.attn.c_attn
        together = torch.cat([own.q.weight, own.k.weight, own.v.weight]).T
        torch.testing.assert_close(whole.attn.c_attn.weight, together, rtol=0.0, atol=1e-9)
        biases = torch.cat([own.q.bias, own.k.bias, own.v.bias])
        torch.testing.assert_close(whole.attn.c_attn.bias, biases, rtol=0.0, atol=1e-9)
