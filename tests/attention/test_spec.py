"""Specs: frozen, hashable, round-trip, and every bad one refused in one sentence."""

import json
import pickle
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qklab import AttentionSpec, CouplingSpec, DecoderSpec, LatentSpec, SpecError, recipe, register

BASE: dict[str, Any] = {"width": 32, "heads": 4}
LATENT = LatentSpec(query_rank=8, kv_rank=8, rope_width=4)

ILLEGAL: list[tuple[dict[str, Any], str]] = [
    ({"kv_heads": 3}, "kv_heads"),
    ({"kv_heads": 8}, "kv_heads"),
    ({"share": "q=k", "kv_heads": 2}, "kv_heads"),
    ({"share": "q=k=v", "kv_heads": 1}, "kv_heads"),
    ({"head_width": 7}, "head_width"),
    ({"width": 30}, "head_width"),
    ({"rope_fraction": 0.3}, "rope_fraction"),
    ({"position": "none", "rope_fraction": 0.5}, "rope_fraction"),
    ({"position": "learned", "rope_base": 500.0}, "rope_base"),
    ({"heads": 3, "head_width": 4, "mix": "differential"}, "heads"),
    ({"kv_heads": 1, "mix": "differential"}, "kv_heads"),
    ({"width": 12, "heads": 3, "mix": "differential"}, "heads"),
    ({"share": "q=k", "mix": "differential-v2"}, "mix"),
    ({"kv_rotation": "on-read"}, "kv_rotation"),
    ({"share": "k=v", "position": "none", "kv_rotation": "on-read"}, "kv_rotation"),
    ({"asymmetry_2d": True}, "asymmetry_2d"),
    ({"asymmetry_2d": True, "share": "q=k"}, "asymmetry_2d"),
    ({"asymmetry_free_scale": True}, "asymmetry_free_scale"),
    ({"differential_gain": False}, "differential_gain"),
    ({"latent": LATENT, "coupling": CouplingSpec()}, "coupling"),
    ({"latent": LATENT, "coupling": CouplingSpec(kind="cca")}, "coupling"),
    ({"latent": LATENT, "coupling": CouplingSpec(kind="affine", force_sharing="per-head")}, "coupling"),
    ({"latent": LATENT, "coupling": CouplingSpec(kind="uncoupled", step_sharing="per-head")}, "coupling"),
    ({"latent": LATENT, "coupling": CouplingSpec(kind="uncoupled", force="gradient")}, "coupling"),
    ({"latent": LATENT, "short_conv": 4}, "short_conv"),
    ({"latent": LATENT, "key_shift": True}, "key_shift"),
    ({"coupling": CouplingSpec(kind="cca"), "norm": "qk"}, "norm"),
    ({"key_shift": True}, "key_shift"),
    ({"key_shift": True, "position": "none"}, "key_shift"),
    ({"short_conv": 1}, "short_conv"),
    ({"latent": LATENT, "norm": "qk"}, "norm"),
    ({"latent": LATENT, "mix": "differential"}, "mix"),
    ({"latent": LATENT, "share": "k=v"}, "share"),
    ({"latent": LATENT, "kv_heads": 2}, "kv_heads"),
    ({"latent": LATENT, "position": "none"}, "latent"),
    ({"latent": LATENT.replace(rope_width=0)}, "position"),
    ({"latent": LATENT, "rope_fraction": 0.5}, "rope_fraction"),
    ({"latent": LATENT, "value_norm": True}, "value_norm"),
    ({"share": "k=v", "value_norm": True, "kv_rotation": "on-read"}, "kv_rotation"),
    ({"share": "k=v", "value_norm": True, "key_shift": True, "rope_fraction": 0.5}, "value_norm"),
    ({"share": "q=k", "asymmetry_2d": True, "causal": False, "sinks": True}, "sinks"),
    ({"window": 0}, "window"),
    ({"gate": "heads"}, "gate"),
    ({"share": "q=v"}, "share"),
    ({"heads": 0}, "heads"),
    ({"heads": True}, "heads"),
    ({"width": 32.0}, "width"),
    ({"norm_eps": 0.0}, "norm_eps"),
    ({"rope_base": float("nan")}, "rope_base"),
    ({"causal": 1}, "causal"),
    ({"coupling": "leapfrog"}, "coupling"),
]


def assert_one_sentence(error: ValueError, field: str) -> None:
    text = str(error)
    assert field.rsplit(".", 1)[-1] in text
    assert text.endswith(".")
    assert "\n" not in text
    assert len(text) < 600


@pytest.mark.parametrize(("choices", "field"), ILLEGAL, ids=lambda value: str(value)[:70])
def test_illegal_specs_name_the_field_and_the_nearest_legal_one(choices: dict[str, Any], field: str) -> None:
    with pytest.raises(SpecError) as caught:
        AttentionSpec(**BASE | choices)
    assert caught.value.field == field
    assert_one_sentence(caught.value, field)
    if caught.value.nearest is not None:
        assert "nearest legal" in str(caught.value)
        AttentionSpec(**BASE | choices | caught.value.nearest)


@pytest.mark.parametrize(
    ("choices", "field"),
    [
        ({"kind": "leap-frog"}, "kind"),
        ({"steps": 0}, "steps"),
        ({"kind": "affine", "force": "gradient"}, "force"),
        ({"kind": "linear", "force": "gradient"}, "force"),
        ({"kind": "linear", "force_width": 8}, "force_width"),
        ({"kind": "uncoupled", "force_width": 5}, "force_width"),
        ({"kind": "affine", "step_size": 0.5}, "step_size"),
        ({"kind": "affine", "step_sharing": "per-head"}, "step_sharing"),
        ({"kind": "euler", "init": "identity", "step_size": 0.1}, "step_size"),
        ({"kind": "euler", "scale_limit": 1.0}, "scale_limit"),
        ({"step_size": float("inf")}, "step_size"),
        ({"kind": "cca", "steps": 2}, "steps"),
        ({"kind": "cca", "init": "identity"}, "init"),
        ({"kind": "cca", "force_sharing": "per-head"}, "force_sharing"),
        ({"kind": "cca", "force_width": 8}, "force_width"),
        ({"kind": "cca", "step_size": 0.5}, "step_size"),
    ],
    ids=str,
)
def test_illegal_couplings(choices: dict[str, Any], field: str) -> None:
    with pytest.raises(SpecError) as caught:
        CouplingSpec(**choices)
    assert caught.value.field == field
    assert_one_sentence(caught.value, field)
    if caught.value.nearest is not None:
        CouplingSpec(**choices | caught.value.nearest)


def test_unknown_keys_come_with_a_suggestion() -> None:
    with pytest.raises(SpecError, match=r"no field 'kv_head' .did you mean 'kv_heads'.."):
        AttentionSpec.from_dict(BASE | {"kv_head": 2})
    with pytest.raises(SpecError, match=r"coupling: CouplingSpec has no field 'step' .did you mean 'steps'.."):
        AttentionSpec.from_dict(BASE | {"coupling": {"kind": "euler", "step": 2}})
    with pytest.raises(SpecError, match="needs heads"):
        AttentionSpec.from_dict({"width": 8})


def test_unknown_names_are_refused_wherever_they_come() -> None:
    spec = DecoderSpec(vocab=10, width=32, layers=1, attention=AttentionSpec(**BASE))
    with pytest.raises(SpecError, match=r"no field 'sahre' \(did you mean 'share'\?\)"):
        spec.pattern[0].replace(sahre="k=v")
    with pytest.raises(SpecError, match=r"no field 'share' \(it belongs to attention\)"):
        spec.replace(share="k=v")
    with pytest.raises(SpecError, match=r"no field 'shar' \(did you mean 'share'\?\)"):
        recipe("nano", shar="k=v")
    with pytest.raises(SpecError, match="width is what the recipe nano sets"):
        recipe("nano", width=64)


def test_refusals_survive_the_way_back_from_a_worker() -> None:
    with pytest.raises(SpecError) as caught:
        AttentionSpec(**BASE, kv_heads=3)
    twin = pickle.loads(pickle.dumps(caught.value))
    assert (str(twin), twin.field, twin.nearest) == (str(caught.value), "kv_heads", {"kv_heads": 2})
    with pytest.raises(SpecError, match=rf"share must be .*, but '{'k' * 56}\.\.\. came"):
        AttentionSpec.from_dict(BASE | {"share": "k" * 90})


def test_what_is_registered_later_can_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SpecError, match="kind must be one of"):
        CouplingSpec.from_dict({"kind": "mine"})
    monkeypatch.setitem(register.coupling.entries, "mine", register.coupling["leapfrog"])
    assert CouplingSpec.from_dict({"kind": "mine"}).name == "mine×1"


def test_specs_round_trip_through_json_and_hash_by_value() -> None:
    spec = AttentionSpec(**BASE, share="k=v", kv_heads=2, coupling=CouplingSpec(kind="affine", steps=2), norm="qk")
    model = DecoderSpec(vocab=100, width=32, layers=2, attention=spec)
    for one in (spec, model, AttentionSpec(**BASE, latent=LATENT)):
        twin = type(one).from_dict(json.loads(json.dumps(one.to_dict())))
        assert twin == one
        assert hash(twin) == hash(one)
    with pytest.raises(AttributeError):
        spec.width = 64  # pyright: ignore[reportAttributeAccessIssue]
    assert len({spec, spec.replace(norm="none"), spec.replace()}) == 2


def test_derived_fields_follow_when_their_source_is_replaced() -> None:
    spec = AttentionSpec(width=512, heads=8)
    assert (spec.replace(heads=16).kv_heads, spec.replace(heads=16).head_width) == (16, 32)
    assert spec.replace(width=1024).head_width == 128
    chosen = AttentionSpec(width=512, heads=8, kv_heads=2, head_width=32)
    assert (chosen.replace(heads=16).kv_heads, chosen.replace(heads=16).head_width) == (2, 32)


def test_names() -> None:
    coupled = CouplingSpec(kind="leapfrog")
    assert (
        AttentionSpec(width=512, heads=16, kv_heads=4, share="k=v", coupling=coupled).name
        == "(Q,K=V) · leapfrog×1 · gqa4"
    )
    assert AttentionSpec(width=512, heads=8).name == "(Q,K,V)"
    assert AttentionSpec(width=512, heads=8, kv_heads=1, mix="differential-v2", norm="qk").name == (
        "(Q,K,V) · mqa · qk-norm · diff-v2"
    )


ODD = [2**70, -1, "q=k", "k=v", "rope", "differential", "affine", {"kind": "euler"}, {"rope_width": 3}]
ANY = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=5),
    st.lists(st.integers()),
    st.sampled_from(ODD),
)


def plausible(kind: type) -> st.SearchStrategy[dict[str, Any]]:
    """Dictionaries of mostly right values: legal choices often, small numbers, and now and then anything at all."""
    fields = {}
    for name, field in kind.__dataclass_fields__.items():
        right = st.sampled_from(tuple(field.metadata["among"])) if "among" in field.metadata else st.integers(1, 12)
        if "spec" in field.metadata:
            right = st.one_of(st.none(), plausible(field.metadata["spec"]))
        fields[name] = st.one_of(right, right, right, right, right, ANY)
    required = {n: s for n, s in fields.items() if n in ("width", "heads", "query_rank", "kv_rank", "rope_width")}
    optional = {n: s for n, s in fields.items() if n not in required} | {"typo": ANY}
    return st.fixed_dictionaries(required, optional=optional)


@settings(max_examples=1500, deadline=None)
@given(plausible(AttentionSpec))
def test_any_dictionary_is_a_valid_spec_or_one_sentence(values: dict[str, Any]) -> None:
    try:
        spec = AttentionSpec.from_dict(values)
    except SpecError as error:
        assert_one_sentence(error, error.field)
        if error.nearest is not None and "." not in error.field:
            # mending the named fields leads to a legal spec, unless another value was wrong in itself
            try:
                AttentionSpec.from_dict(values | error.nearest)
            except SpecError as second:
                raise AssertionError(f"{error} did not help: {second}") from second
    else:
        assert AttentionSpec.from_dict(spec.to_dict()) == spec
        assert spec.parameters() > 0
        assert spec.flops_per_token(16) > 0
        assert spec.cache_bytes(1) > 0
        assert spec.name
        assert all(isinstance(text, str) for text in spec.formula.values())


@settings(max_examples=300, deadline=None)
@given(st.one_of(ANY, st.dictionaries(st.text(max_size=8), ANY)))
def test_any_value_at_all_is_refused_in_one_sentence(value: Any) -> None:
    with pytest.raises(SpecError) as caught:
        AttentionSpec.from_dict(value)
    assert str(caught.value).endswith(".")
