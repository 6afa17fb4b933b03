"""What is known of other people's models: rows, norms and couplings before and after conversion, and watched logits."""

import copy
import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers
from small_models import FAMILIES, ODD_HEADS, SHAPE, TOKENS, WINDOW, enable_checkpointing, tiny, token_ids
from torch import Tensor, nn

from qklab.hf import convert
from qklab.hf.families import convertible_families
from qklab.hf.watch import measure_largest
from qklab.optim import LogitControl, QKClip, Rows, attention_roles

NORMED = (
    *("qwen3", "qwen3_moe", "gemma3_text", "olmo2", "olmo3", "cohere, normed", "stablelm, normed", "phi, normed"),
    *("apertus", "hy_v3", "glm4_moe", "dots1", "gemma3n_text", "gemma4_text", "gemma4_unified_text", "minimax_m2"),
    *("olmoe", "exaone4", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"),
    "gemma4_text, lent keys",
)
MLA = ("deepseek_v3", "deepseek_v3, no query latent", "glm4_moe_lite")
FUSED = ("gpt2", "gpt_neox")


@dataclass
class Model:
    """A family, changes to its configuration, and what it is converted to."""

    family: str
    changes: dict[str, Any]
    conversion: dict[str, Any]

    def build(self) -> Any:
        return build(self.family, convert_to=self.conversion, **self.changes)


SHARED = {"share": "k=v"}
MODELS = {family: Model(family, {}, {}) for family in FAMILIES if family not in NORMED}
MODELS |= {f"{name}, k=v": Model(name, {}, SHARED) for name in ("llama", "mistral", "gemma2", "phi3", *FUSED)}
MODELS |= {f"{family}, leapfrog": Model(family, {}, {"coupling": "leapfrog"}) for family in ("llama", *FUSED)}
MODELS |= {
    f"{family}, {heads}{', k=v' if conversion else ''}": Model(family, ODD_HEADS[heads], conversion)
    for family, heads, conversion in itertools.product(FUSED, ODD_HEADS, ({}, SHARED))
}
MODELS["deepseek_v3, affine"] = Model("deepseek_v3", {}, {"coupling": "affine"})
MODELS["llama, merged, k=v"] = Model("llama", {}, {"kv_heads": 1, "share": "k=v"})


def build(family: str, attention: str = "sdpa", convert_to: dict[str, Any] | None = None, **changes: Any) -> Any:
    """In float64 and training, every parameter random, biases and gains too, and nothing dropped."""
    model = tiny(family, **changes).double()
    if convert_to:
        convert(model, **convert_to)
    drawn = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if ".couple." not in name:
            new = torch.randn(parameter.shape, generator=drawn, dtype=torch.float64) * 0.2
            parameter.data = new + (parameter.dim() == 1)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    set_attention(model, attention)
    return model.train()


def set_attention(model: Any, implementation: str) -> None:
    """Gemma 2 has no sdpa, since that has no soft cap; queries and keys of the first layer are the same."""
    model.config._attn_implementation_internal = implementation


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


def record_calls(model: Any, **inputs: Any) -> dict[str, Call]:
    """Layer name → the call of its attention function in one pass, under sdpa."""
    names: dict[Any, str] = {model.get_submodule(name): name for name in attention_roles(model)}
    functions = transformers.AttentionInterface._global_mapping
    original, calls = functions["sdpa"], {}

    def call(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any) -> Any:
        calls[names[module]] = Call(query.detach(), key.detach(), value.detach(), options["scaling"])
        return original(module, query, key, value, mask, **(options | {"softcap": None}))

    functions["sdpa"] = call
    try:
        with torch.no_grad():
            model(**({"input_ids": token_ids(), "use_cache": False} | inputs))
    finally:
        functions["sdpa"] = original
    return calls


@contextmanager
def multiply(part: Rows, rows: Tensor, factor: float | Tensor) -> Iterator[None]:
    """The outputs `rows` of a projection multiplied, and restored."""
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


def drop_epsilon(model: nn.Module) -> None:
    for module in model.modules():
        for name in ("variance_epsilon", "eps"):
            if hasattr(module, name):
                setattr(module, name, 0.0)


# of query (0) or key (1), the heads and entries that rows of head h make, in a layer with `nope` unrotated entries
MAKES: dict[str, Callable[[int, int], tuple[int, Any]]] = {
    "q": lambda h, nope: (0, (slice(None), h)),
    "k": lambda h, nope: (1, (slice(None), h)),
    "uq": lambda h, nope: (0, (slice(None), h, slice(None), slice(0, nope))),
    "qr": lambda h, nope: (0, (slice(None), h, slice(None), slice(nope, None))),
    "uk": lambda h, nope: (1, (slice(None), h, slice(None), slice(0, nope))),
    "kr": lambda h, nope: (1, (slice(None), slice(None), slice(None), slice(nope, None))),
}


@pytest.mark.parametrize("name", MODELS)
def test_doubling_the_rows_of_a_head_doubles_what_they_make_and_nothing_else(name: str) -> None:
    """Doubling is exact in floating point, so the comparison is bit for bit. Values move where they are the keys."""
    family, conversion = MODELS[name].family, MODELS[name].conversion
    model = MODELS[name].build()
    before, roles = record_calls(model), attention_roles(model)
    assert [*roles] == [*before]
    layer_name, layer = list(roles.items())[-1]
    found, call = set(layer.projections), before[layer_name]
    assert found == ({"q", "k"} if family not in MLA else {"uq", "uk", "qr", "kr", "dkv"} | {"dq"} & found)
    assert layer.query.heads == call.query.shape[1]
    assert layer.key_is_value == ("share" in conversion)
    assert layer.coupling == ("nonlinear" if "coupling" in conversion and family not in MLA else "none")
    assert not layer.qk_norm
    nope = getattr(model.get_submodule(layer_name), "qk_nope_head_dim", 0)
    for symbol, part in layer.projections.items():
        assert symbol != "k" or part.heads == call.key.shape[1]
        for head in range(part.heads) if symbol in MAKES else ():
            with multiply(part, part.rows[head], 2.0):
                after = record_calls(model)[layer_name]
            want = [call.query.clone(), call.key.clone(), call.value.clone()]
            side, entries = MAKES[symbol](head, nope)
            want[side][entries] *= 2
            if symbol == "k" and layer.key_is_value:
                want[2][entries] *= 2
            assert all(torch.equal(a, b) for a, b in zip((after.query, after.key, after.value), want, strict=True))


@pytest.mark.parametrize("name", [n for n, m in MODELS.items() if m.family in set(convertible_families()) - {*MLA}])
def test_weights_that_are_read_and_written_are_what_they_were(name: str) -> None:
    model = MODELS[name].build()
    before, family = model.state_dict(), convertible_families()[MODELS[name].family]
    for layer in family.layers(model).values():
        family.write(layer, family.read(layer))
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[part], value) and after[part] is not value for part, value in before.items())


@pytest.mark.parametrize("family", MLA)
def test_the_rows_of_a_latent_are_those_its_norm_divides_by(family: str) -> None:
    """Doubling all of them changes nothing; doubling all but one changes the query or key. Its gain is found."""
    model = build(family)
    drop_epsilon(model)
    before, roles = record_calls(model), attention_roles(model)
    name, layer = next(iter(roles.items()))
    module: Any = model.get_submodule(name)
    assert ("dq" in layer.projections) == ("no query latent" not in family)
    gain = module.q_a_layernorm.weight if "dq" in layer.projections else None
    gains = {"uq": gain, "qr": gain, "uk": module.kv_a_layernorm.weight}
    assert all(part.gain is gains.get(symbol) for symbol, part in layer.projections.items())
    for symbol, side in (("dq", "query"), ("dkv", "key")):
        if symbol not in layer.projections:
            continue
        part = layer.projections[symbol]
        assert part.bias is not None
        with multiply(part, part.rows[0], 2.0):
            after = record_calls(model)[name]
        assert all(torch.equal(getattr(after, s), getattr(before[name], s)) for s in ("query", "key", "value"))
        for missing in range(part.rows.shape[1]):
            rest = torch.cat([part.rows[0, :missing], part.rows[0, missing + 1 :]])
            with multiply(part, rest, 2.0):
                after = record_calls(model)[name]
            assert not torch.allclose(getattr(after, side), getattr(before[name], side))


def test_without_a_query_latent_its_norm_counts_as_one() -> None:
    model = build("deepseek_v3, no query latent")
    control = LogitControl(torch.optim.SGD(model.parameters(), lr=0.0), attention_roles(model))
    name, layer = next(iter(control.roles.items()))
    with torch.no_grad():
        for head, size in enumerate((2.0, 4.0)):
            layer.projections["uk"].weight[layer.projections["uk"].rows[head]] *= size
    control.step()
    factors = control.factors()[name]
    torch.testing.assert_close(factors["uq"], torch.tensor([0.5, 0.25, 1.0, 1.0]).double())
    assert factors.keys() == {"uq", "qr", "dkv", "kr", "uk"}
    assert float(factors["dkv"]) < 1
    assert (factors["uk"] == 1).all()


@pytest.mark.parametrize("family", ["qwen3", "qwen3_next", "gemma4_text", "llama", *FUSED])
def test_a_norm_on_q_and_k_is_noticed_inserted_or_not_and_refused(family: str) -> None:
    """The rows of a head still make that head alone: doubled they change nothing, doubled in part only it."""
    model = build(family, convert_to={"coupling": "leapfrog"} if family in NORMED else {"norm": "qk-norm"})
    drop_epsilon(model)
    before, roles = record_calls(model), attention_roles(model)
    name, layer = next(iter(roles.items()))
    assert layer.qk_norm
    for (symbol, part), side in zip(layer.projections.items(), ("query", "key"), strict=True):
        assert symbol == side[0]
        for head in range(part.heads):
            with multiply(part, part.rows[head], 2.0):
                assert torch.equal(getattr(record_calls(model)[name], side), getattr(before[name], side))
            with multiply(part, part.rows[head], torch.linspace(1, 2, part.rows.shape[1])):
                after = record_calls(model)[name]
            changed = (getattr(after, side) != getattr(before[name], side)).any(0).any(1).any(1)
            assert changed.nonzero().flatten().tolist() == [head]
    for control in (LogitControl, QKClip):
        with pytest.raises(ValueError, match=rf"refuses layer {name}: its q and k are normalised"):
            control(torch.optim.AdamW(model.parameters()), roles)
    LogitControl(torch.optim.AdamW(model.parameters()), roles, 0.25, method="fixed")


@pytest.mark.parametrize(
    ("conversion", "why"),
    [
        ({"coupling": "affine"}, "its coupling is not linear"),
        ({"coupling": "linear", "share": "k=v"}, "under a linear coupling W_k would have to shrink"),
    ],
)
def test_an_inserted_coupling_is_noticed_and_clipping_refused(conversion: dict[str, Any], why: str) -> None:
    model = build("llama", convert_to=conversion)
    with pytest.raises(ValueError, match=why):
        QKClip(torch.optim.SGD(model.parameters()), attention_roles(model))


@pytest.mark.parametrize(
    ("config", "choice"), [("StableLm", "qk_layernorm"), ("Cohere", "use_qk_norm"), ("Phi", "qk_layernorm")]
)
def test_norms_on_q_and_k_are_noticed_under_other_names(config: str, choice: str) -> None:
    for value in (True, False):
        spec = getattr(transformers, f"{config}Config")(**(SHAPE | {choice: value}))
        found = attention_roles(getattr(transformers, f"{config}Model")(spec))
        assert [layer.qk_norm for layer in found.values()] == [value] * 2


class Lookalike(nn.Module):
    """Names of Llama's projections, without its attention."""

    head_dim, num_key_value_groups = 4, 2

    def __init__(self, query: int, key: int, **more: nn.Module):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = nn.Linear(8, query), nn.Linear(8, key), nn.Linear(8, key)
        for name, module in more.items():
            self.add_module(name, module)


def test_layers_that_only_look_alike_are_not_taken_for_attention() -> None:
    assert attention_roles(Lookalike(16, 8))["attention"].query.heads == 4
    assert not attention_roles(Lookalike(16, 8, q_norm=nn.Identity(), o_norm=nn.LayerNorm(4)))["attention"].qk_norm
    assert attention_roles(Lookalike(16, 8, qk_norm=nn.RMSNorm(4)))["attention"].qk_norm
    for odd in (Lookalike(32, 8), Lookalike(16, 8, conv1d=nn.Conv1d(8, 8, 2))):  # a gate in q_proj; linear attention
        with pytest.raises(ValueError, match="no attention was recognised"):
            attention_roles(odd)


@pytest.mark.parametrize("family", FUSED)
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


@pytest.mark.newest
@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "deepseek_v3, no query latent"])
def test_roles_are_those_of_the_same_rows_after_conversion(name: str) -> None:
    """Every layer with keys of its own, its heads and its norm, and then the coupling as well."""
    kind = convertible_families().get(name.partition(",")[0])
    if kind is None:
        return
    model = tiny(name)
    before, layers = attention_roles(model), kind.layers(model)
    assert [*before] == [*layers]
    assert all(before[at].qk_norm == (name in NORMED) for at in layers)
    assert all(before[at].key_is_value == (getattr(layers[at], "v_proj", 0) is None) for at in layers)
    convert(model, coupling="affine")
    for at, after in attention_roles(model).items():
        assert after.coupling == ("none" if kind.latent else "nonlinear")
        assert (after.qk_norm, after.key_is_value) == (before[at].qk_norm, before[at].key_is_value)
        for symbol, part in after.projections.items():
            assert part.weight is before[at].projections[symbol].weight
            assert torch.equal(part.rows, before[at].projections[symbol].rows)
        if not kind.latent:
            assert after.query.heads == model.config.num_attention_heads
            assert after.projections["k"].heads == kind.count_kv_heads(layers[at])


def test_gpt2_with_cross_attention_is_refused() -> None:
    with pytest.raises(ValueError, match="cross-attention is not known"):
        attention_roles(build("gpt2", add_cross_attention=True))


# Watching

TEXTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "padded right": {"attention_mask": torch.tensor([[1] * TOKENS, [1] * 5 + [0] * (TOKENS - 5)])},
    "padded left": {"attention_mask": torch.tensor([[0] * 3 + [1] * (TOKENS - 3), [1] * TOKENS])},
    "packed": {"position_ids": torch.tensor([[0, 1, 2, *range(TOKENS - 3)], [*range(TOKENS)]])},
}


def find_visible(family: str, layer: int, text: str) -> Tensor:
    """[B, T, S], from the definition."""
    choices = FAMILIES[family][1]
    windows = ("sliding_window" in choices, "sliding_window" in choices and "layer_types" not in choices)
    real = TEXTS[text].get("attention_mask", torch.ones(2, TOKENS))
    starts = (TEXTS[text].get("position_ids", torch.ones(2, TOKENS)) == 0).cumsum(1)
    visible = torch.zeros(2, TOKENS, TOKENS, dtype=torch.bool)
    for b, i, j in itertools.product(range(2), range(TOKENS), range(TOKENS)):
        near = i - j < WINDOW or not windows[layer]
        visible[b, i, j] = j <= i and near and real[b, j] == 1 and starts[b, i] == starts[b, j]
    return visible


def watch(model: nn.Module, threshold: float = 1e9) -> QKClip:
    return QKClip(torch.optim.SGD(model.parameters(), lr=0.0), attention_roles(model), threshold)


def close(found: Tensor, want: Tensor) -> bool:
    """Equal but for the rounding of `found` to float32."""
    return torch.allclose(found.double(), want, rtol=2**-23, atol=0.0)


def largest(call: Call, visible: Tensor) -> Tensor:
    """[H], of logits [B, H, T, S] and visible [B, T, S]."""
    return call.logits.masked_fill(~visible[:, None], -math.inf).amax((0, 2, 3))


UNWATCHED = ("gemma2", "gemma2, k=v", "vaultgemma")  # sdpa has no soft cap
WATCHED = [(name, "plain", "sdpa") for name in MODELS if "leapfrog" not in name and name not in UNWATCHED]
WATCHED += [(name, text, "sdpa") for name in ("llama", "gpt2, 4 × 12, k=v") for text in TEXTS if text != "plain"]
WATCHED += [(name, "packed", "eager") for name in ("llama", "gemma2", "gpt2", "gemma2, k=v")]


@pytest.mark.parametrize(("name", "text", "attention"), WATCHED)
def test_the_largest_logit_seen_is_that_of_the_visible_pairs(name: str, text: str, attention: str) -> None:
    model = MODELS[name].build()
    calls = record_calls(model, **TEXTS[text])
    set_attention(model, attention)
    clip = watch(model)
    assert all(bool((seen == -math.inf).all()) for seen in clip.watch.largest.values())
    with torch.no_grad():
        model(token_ids(), use_cache=False, **TEXTS[text])
    assert [*clip.watch.largest] == [*calls]
    for at, (layer, seen) in enumerate(clip.watch.largest.items()):
        if attention == "sdpa" or at == 0:  # later layers read what a soft cap left, which sdpa does not have
            assert close(seen, largest(calls[layer], find_visible(MODELS[name].family, at, text)))


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt_neox, k=v"])
def test_watching_changes_no_output_and_no_gradient(name: str, attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With dropout of attention weights, against the model's file as Transformers ships it."""
    results = []
    for control, seed in ((None, 3), (watch, 3), (None, 4)):
        model = MODELS[name].build()
        set_attention(model, attention)
        for layer in attention_roles(model):
            module: Any = model.get_submodule(layer)
            module.attention_dropout = 0.3
            if name == "gpt2":
                module.attn_dropout.p = 0.3
            for kind in type(module).__mro__:
                names = getattr(vars(kind).get("forward"), "__globals__", {})
                if "ALL_ATTENTION_FUNCTIONS" in names:
                    original = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS
                    monkeypatch.setitem(names, "ALL_ATTENTION_FUNCTIONS", original)
        if control is not None:
            control(model)
        torch.manual_seed(seed)
        out = model(input_ids=token_ids(), labels=token_ids())
        out.loss.backward()
        results.append([out.logits, torch.rand(1), *(p.grad for p in model.parameters())])
    plain, seen, other = results
    assert all(torch.equal(a, b) for a, b in zip(plain, seen, strict=True))
    assert not torch.equal(plain[0], other[0])


def test_only_passes_in_training_count_and_the_largest_of_several_stays() -> None:
    model = build("llama")
    clip = watch(model)
    seen = next(iter(clip.watch.largest.values()))
    model.eval()(token_ids())
    assert bool((seen == -math.inf).all())
    model.train()
    single = []
    for seed in (1, 2, 3):
        clip.watch.reset()
        model(token_ids(seed=seed))
        single.append(seen.clone())
    clip.watch.reset()
    for seed in (1, 2, 3):
        model(token_ids(seed=seed))
    assert torch.equal(seen, torch.stack(single).amax(0))
    assert len({tuple(values.tolist()) for values in single}) == 3


def test_recomputing_under_gradient_checkpointing_sees_the_same_logits() -> None:
    found = []
    for checkpointing in (False, True):
        model = build("llama")
        if checkpointing:
            enable_checkpointing(model)
        clip = watch(model)
        model(input_ids=token_ids(), labels=token_ids()).loss.backward()
        found.append([*clip.watch.largest.values(), *(p.grad for p in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_models_are_watched_each_on_its_own_and_after_a_change_of_implementation() -> None:
    first, second, stranger = build("llama"), build("llama"), build("llama")
    clips = [watch(first), watch(second)]
    visible = find_visible("llama", 0, "plain")
    calls = record_calls(first)
    stranger(token_ids(seed=3))
    for name, call in calls.items():
        assert close(clips[0].watch.largest[name], largest(call, visible))
        assert bool((clips[1].watch.largest[name] == -math.inf).all())
    second.set_attn_implementation("eager")
    with torch.no_grad():
        second(token_ids())
        copy.deepcopy(second)(token_ids(seed=2))
    for name, call in calls.items():
        assert close(clips[1].watch.largest[name], largest(call, visible))


def test_functions_registered_later_and_names_unknown_are_as_in_transformers() -> None:
    def mine(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any) -> Any:
        return transformers.AttentionInterface._global_mapping["sdpa"](module, query, key, value, mask, **options)

    model, plain = build("llama"), build("llama")
    clip = watch(model)
    transformers.AttentionInterface.register("mine", mine)
    model.config._attn_implementation_internal = "mine"
    try:
        assert torch.equal(model(token_ids()).logits, plain(token_ids()).logits)
        calls = record_calls(model)
    finally:
        del transformers.AttentionInterface._global_mapping["mine"]
    for name, seen in clip.watch.largest.items():
        assert close(seen, largest(calls[name], find_visible("llama", 0, "plain")))
    with pytest.raises(KeyError, match="mine"):
        model(token_ids())


@pytest.mark.newest
def test_a_compiled_model_is_watched_in_one_graph() -> None:
    model = build("llama", num_hidden_layers=1)
    clip = watch(model)
    model(token_ids())
    want = {name: largest.clone() for name, largest in clip.watch.largest.items()}
    clip.watch.reset()
    torch.compile(model, backend="aot_eager", fullgraph=True)(token_ids())
    assert all(close(clip.watch.largest[name], want[name].double()) for name in want)


def test_what_cannot_be_watched_is_refused() -> None:
    with pytest.raises(ValueError, match="logits of Lookalike cannot be watched, as it does not ask Transformers"):
        watch(Lookalike(16, 8))
    with pytest.raises(ValueError, match="cannot be watched under reorder_and_upcast_attn"):
        watch(build("gpt2", "eager", reorder_and_upcast_attn=True))
    watch(build("gpt2", reorder_and_upcast_attn=True))


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


@pytest.mark.newest
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


CLIPPED = [
    "llama",
    "llama, wide heads",
    "qwen2",
    *FUSED,
    "gpt_neox, 4 × 12, k=v",
    "gpt2, k=v",
    "llama, merged, k=v",
    *MLA,
]


@pytest.mark.parametrize("name", CLIPPED)
def test_a_clip_brings_the_largest_logit_down_to_the_threshold(name: str) -> None:
    """In the first layer, as a layer's clip changes what later ones read; γ is held in float32."""
    model = MODELS[name].build()
    probe = watch(model)
    before = record_calls(model)
    layer, seen = next(iter(probe.watch.largest.items()))
    sizes = seen.clone()
    threshold = float(sizes.sort().values[1])  # all but two heads pass it
    assert threshold > 0
    assert bool((sizes > threshold * 1.001).any())
    clip = watch(model, threshold)
    record_calls(model)
    clip.step()
    after = record_calls(model)
    torch.testing.assert_close(clip.watch.largest[layer], sizes.clamp(max=threshold), rtol=1e-6, atol=0.0)
    assert torch.equal(before[layer].value, after[layer].value)  # values stay what they were, shared or not
