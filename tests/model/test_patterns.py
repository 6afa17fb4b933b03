"""Models whose layers differ: how a pattern is written, kept and refused (the contracts say what they compute)."""

import json
from typing import Any

import pytest
import torch

from qklab import AttentionSpec, Decoder, DecoderSpec, SpecError, recipe
from qklab.attention import KeyValueCache, SharedCache
from qklab.model.decoder import locate_tokens
from qklab.train.settings import resolve_run

A, B = AttentionSpec(width=16, heads=4), AttentionSpec(width=16, heads=4, share="k=v")


def build_spec(attention: Any, layers: int = 4) -> DecoderSpec:
    return DecoderSpec(vocab=11, width=16, layers=layers, attention=attention)


def test_a_pattern_repeats_over_the_layers() -> None:
    spec = build_spec((A, A, B))
    assert spec.attentions == [A, A, B, A]
    assert spec.name == "4×16 swiglu · 2× (Q,K,V) | (Q,K=V)"
    assert spec.parameters() == 3 * build_spec(A, 1).parameters() + build_spec(B, 1).parameters() - 3 * (11 + 1) * 16
    assert spec.cache_bytes(7) == 3 * A.cache_bytes(7) + B.cache_bytes(7)
    decoder = Decoder(spec, seed=0)
    assert [decoder.attention(layer).spec for layer in range(4)] == [A, A, B, A]
    assert [type(cache) for cache in decoder.new_cache(1, 4)] == [KeyValueCache] * 2 + [SharedCache, KeyValueCache]


def test_one_pattern_is_written_one_way() -> None:
    """So that equal models have equal specs, fingerprints and records."""
    assert build_spec([A, B, A, B]) == build_spec((A, B))
    assert build_spec((A, A)) == build_spec(A)
    assert build_spec((A, A)).attention is A
    assert build_spec((A, B, A)).pattern == (A, B, A)
    assert json.dumps(build_spec(A).to_dict()["attention"]) == json.dumps(A.to_dict())
    assert build_spec((A, B)).to_dict()["attention"] == [A.to_dict(), B.to_dict()]


@pytest.mark.parametrize(
    ("attention", "message"),
    [
        ((A, A.replace(position="learned")), r"attention is refused: learned positions are added once, before"),
        ((A, A.replace(causal=False)), "attention is refused: either all layers of a model are causal or none"),
        ((A, AttentionSpec(width=8, heads=4)), "attention is refused: all layers of a model have one width"),
        (
            (A, A, A, A, B),
            r"layers=4 is refused: the pattern of attention is 5 layers long; .*layers=5\.$",
        ),
        ((A, "B"), "attention must be of type AttentionSpec, or several of these that repeat"),
        ((), "attention must be of type AttentionSpec"),
    ],
)
def test_what_cannot_stand_in_one_model_is_refused_with_the_reason(attention: Any, message: str) -> None:
    with pytest.raises(SpecError, match=message) as caught:
        build_spec(attention)
    if caught.value.nearest:
        assert build_spec(**{"attention": attention} | caught.value.nearest)


def test_an_error_says_which_layer() -> None:
    with pytest.raises(SpecError, match=r"^attention\[1\]: share must be one of .*'kv' came\.$"):
        DecoderSpec.from_dict(build_spec(A).to_dict() | {"attention": [A.to_dict(), A.to_dict() | {"share": "kv"}]})


def test_recipes_and_run_files_take_patterns() -> None:
    spec = recipe("nano", kv_heads=2, attention=[{}, {"share": "k=v"}])
    assert [one.name for one in spec.pattern] == ["(Q,K,V) · gqa2", "(Q,K=V) · gqa2"]
    coupled = {"coupling": {"kind": "leapfrog", "steps": 2}}
    layers = [{}, {"coupling": {"kind": "none"}}, {"coupling": {"steps": 3}}]
    run, _ = resolve_run({"model": {"recipe": "nano", "width": 64}, "attention": coupled | {"layers": layers}})
    assert [one.name for one in run.model.pattern] == ["(Q,K,V) · leapfrog×2", "(Q,K,V)", "(Q,K,V) · leapfrog×3"]
    assert {one.heads for one in run.model.pattern} == {2}
    with pytest.raises(SpecError, match="attention must be a list of choices for each layer of a pattern"):
        recipe("nano", attention=A)
    with pytest.raises(SpecError, match=r"attention.layers is a list of tables, .*, but \{\} came"):
        resolve_run({"attention": {"layers": {}}})
    with pytest.raises(SpecError, match=r"^attention\[0\]: share must be one of"):
        resolve_run({"attention": {"layers": [{"share": "v=k"}, {}]}})


def test_each_layer_sees_and_turns_as_its_own_spec_says() -> None:
    pattern = [A.replace(window=2), A.replace(window=3), A, A.replace(rope_base=50.0)]
    located = locate_tokens(pattern, torch.zeros(1, 6, 16), None, None)
    assert [visibility.window for _, visibility in located] == [2, 3, None, None]
    turned = [positions.angles for positions, _ in located]
    assert all(angles is not None for angles in turned)
    assert [bool(angles[0].equal(turned[0][0])) for angles in turned if angles and turned[0]] == [True] * 3 + [False]


def test_a_hybrid_shows_what_its_windows_save() -> None:
    local, whole = A.replace(window=512), A.replace(rope_base=1e6)
    spec = build_spec((local,) * 5 + (whole,), layers=6)
    assert spec.name == "6×16 swiglu · 5× (Q,K,V) · window 512 | (Q,K,V) · base 1e+06"
    assert spec.cache_bytes(32_768) == (5 * 512 + 32_768) * A.cache_bytes(1)
