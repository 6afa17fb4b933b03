"""Words for published claims: what each is said for, and how often it is wrong over thousands of simulated studies."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest

from qklab.schema import SpecError
from qklab.study.claims import Claim, ClaimVerdict, MeasuredEffect, judge_claim
from qklab.study.spec import StudySpec

LADDER = {"nano": 1.6e6, "micro": 6.8e6, "mini": 17e6, "51m": 34e6}
PATTERN = np.array([-1.0, -0.5, 0.0, 0.5, 1.0])  # five seeds, of spread 0.79


def effect(
    mean: float, size: str = "51m", *, spread: float = 0.004, n: int = 5, **places: float | str
) -> MeasuredEffect:
    return MeasuredEffect(size, LADDER[size], mean + spread * PATTERN[:n], **places)  # pyright: ignore[reportArgumentType]


def judge(effects: Sequence[MeasuredEffect], published: float = -6.6, parameters: float = 60e6) -> ClaimVerdict:
    return judge_claim(effects, published, parameters, 0.01, arm="leapfrog", baseline="standard")


def at_sizes(*means: float, spread: float = 0.004) -> list[MeasuredEffect]:
    names = [*LADDER][-len(means) :]
    return [effect(mean, size, spread=spread) for size, mean in zip(names, means, strict=True)]


CASES: Mapping[str, tuple[Sequence[MeasuredEffect], float, float, str]] = {
    "inside": ([effect(-0.068)], -6.6, 60e6, "reproduced"),
    "beyond": ([effect(-0.12)], -6.6, 60e6, "reproduced"),
    "harm": ([effect(0.031)], 3.1, 60e6, "reproduced"),
    "smaller": ([effect(-0.03)], -6.6, 60e6, "smaller than published"),
    "nothing": ([effect(0.0)], -6.6, 60e6, "refuted"),
    "opposite": ([effect(0.02)], -6.6, 60e6, "refuted"),
    "negligible": ([effect(-0.004, spread=0.001)], -6.6, 60e6, "refuted"),
    "within the margin as published": ([effect(-0.007, spread=0.001)], -0.7, 60e6, "reproduced"),
    "noisy": ([effect(-0.01, spread=0.03)], -6.6, 60e6, "open"),
    "seeds alike, of no effect": ([effect(0.0, spread=0.0)], -6.6, 60e6, "refuted"),
    "seeds alike, of an effect": ([effect(-0.1, spread=0.0)], -6.6, 60e6, "open"),
    "one seed": ([effect(-0.1, n=1)], -6.6, 60e6, "open"),
    "diverged": ([effect(-0.1, diverged=2)], -6.6, 60e6, "open"),
    "vanishes": (at_sizes(-0.1, -0.05, 0.0), -6.6, 60e6, "depends on size"),
    "appears, in reach": (at_sizes(0.0, 0.0, -0.066), -6.6, 60e6, "reproduced"),
    "appears": (at_sizes(0.0, 0.03, 0.03), 3.1, 300e6, "seen from mini on"),
    "with a gap": (at_sizes(0.03, 0.0, 0.03, 0.03), 3.1, 300e6, "seen from mini on"),
    "everywhere": (at_sizes(0.03, 0.03, 0.03), 3.1, 300e6, "seen from micro on"),
    "nowhere": (at_sizes(0.0, 0.0, 0.0), 3.1, 300e6, "not seen up to 51m"),
    "opposite, out of reach": (at_sizes(-0.02, -0.02, -0.02), 3.1, 300e6, "not seen up to 51m"),
    "vanishes, out of reach": (at_sizes(0.03, 0.03, 0.0), 3.1, 300e6, "depends on size"),
    "of a smaller model": (at_sizes(-0.066, 0.03, 0.03), -6.6, 6e6, "depends on size"),
    "corpora": ([effect(-0.07, corpus="wiki"), effect(0.1, corpus="web")], -6.6, 60e6, "depends on corpus"),
    "corpora alike": (
        [effect(-0.07, corpus="wiki"), effect(-0.05, corpus="web")],
        -6.6,
        60e6,
        "smaller than published",
    ),
    "corpora not shown to differ": (
        [effect(-0.015, corpus="wiki", spread=0.015), effect(-0.005, corpus="web", spread=0.0057)],
        -6.6,
        60e6,
        "smaller than published",
    ),
    "tuned away": ([effect(0.0), effect(-0.02, lr=3e-4), effect(0.0, lr=3e-3)], -6.6, 60e6, "depends on learning rate"),
    "survives tuning": ([effect(-0.07), effect(-0.07, lr=3e-4), effect(0.0, lr=3e-3)], -6.6, 60e6, "reproduced"),
    "no difference": ([effect(0.0)], 0.0, 60e6, "reproduced"),
    "a difference after all": ([effect(-0.03)], 0.0, 60e6, "refuted"),
    "a difference at the margin": ([effect(-0.01)], 0.0, 60e6, "open"),
}


@pytest.mark.parametrize("case", CASES)
def test_words(case: str) -> None:
    effects, published, parameters, phrase = CASES[case]
    assert judge(effects, published, parameters).phrase == phrase


def test_the_sentence_says_what_was_seen_what_was_published_and_the_trend() -> None:
    found = judge(at_sizes(-0.09, -0.07, -0.05))
    assert found.sentence == (
        "Smaller than published: perplexity −4.9 % (95 % interval −5.2 to −4.5 %) for leapfrog against standard at 51m "
        "(34 M parameters, 5 seeds); published −6.6 % at 60 M. With ten times the parameters the effect changes by "
        "+5.9 % (95 % interval +5.2 to +6.5 %)."
    )
    assert (found.low, found.percent, found.high) == pytest.approx((-5.247, -4.877, -4.506), abs=0.01)
    level = judge(at_sizes(-0.07, -0.07, -0.07)).sentence
    assert "the effect changes by +0 % (95 % interval −0.66 to +0.66 %)" in level  # not by −1.3e−15 %


def test_places_with_tokenizers_of_their_own_compare_in_bits_per_byte() -> None:
    """A gain of a hundredth of a bit per byte everywhere is the larger change of perplexity the longer the tokens."""
    lengths = {"nano": 2.0, "micro": 3.0, "mini": 4.0}
    nats = {size: -0.01 * np.log(2) * length for size, length in lengths.items()}
    alike = [effect(nats[size], size, spread=0.001) for size in lengths]
    own = [replace(each, bytes_per_token=lengths[each.size]) for each in alike]
    for effects, significant in ((alike, True), (own, False)):
        found = judge(effects, -2.0, 17e6)
        assert (found.p_interaction["size"] < 0.001) == significant
        assert (found.percent, found.phrase) == (judge(alike[-1:], -2.0, 17e6).percent, "reproduced")
    assert "(95 % interval −0.00072 to +0.00072 bits per byte)." in judge(own, -2.0, 17e6).sentence
    assert "changes by −1.3 % (95 %" in judge(alike, -2.0, 17e6).sentence


def test_an_open_claim_says_what_would_settle_it() -> None:
    assert "more seeds" in judge([effect(-0.01, spread=0.02)]).sentence
    assert "leapfrog diverged there in 2 of its runs" in judge([effect(0.0, diverged=2)]).sentence.replace("L", "l")
    assert "anecdote" in judge([effect(0.0, n=1)]).sentence


def test_what_a_verdict_depends_on_is_told_by_place_with_its_p() -> None:
    found = judge([effect(-0.07, corpus="wiki"), effect(0.1, corpus="web")])
    assert "(interaction p < 0.001)" in found.sentence
    assert "By corpus: wiki −6.8 % (95 %" in found.sentence
    assert found.p_interaction["corpus"] < 0.001


# Error rates


def simulate(chance: np.random.Generator, means: Mapping[str, float], spread: float, n: int, corpora: int = 1) -> list:
    return [
        MeasuredEffect(size, LADDER[size], mean + spread * chance.standard_normal(n), f"corpus {corpus}")
        for size, mean in means.items()
        for corpus in range(corpora)
    ]


def count_words(means: Mapping[str, float], published: float, parameters: float, **how: float) -> dict[str, float]:
    """How often each word is said."""
    chance, n, corpora = np.random.default_rng(7), int(how.get("n", 5)), int(how.get("corpora", 1))
    studies = int(how.get("studies", 2000))
    words = Counter(
        judge_claim(
            simulate(chance, means, how.get("spread", 0.02), n, corpora), published, parameters, 0.01, plan=False
        ).word
        for _ in range(studies)
    )
    return {word: count / studies for word, count in words.items()}


SLACK = 3 * (0.05 * 0.95 / 2000) ** 0.5  # three standard errors of a rate of 5 % over 2,000 studies


@pytest.mark.parametrize(("n", "parameters"), [(3, 60e6), (8, 600e6)])
def test_without_an_effect_few_claims_are_called_present(n: int, parameters: float) -> None:
    rates = count_words(dict.fromkeys(["micro", "mini", "51m"], 0.0), -6.6, parameters, n=n)
    present = sum(rates.get(word, 0.0) for word in ("reproduced", "smaller than published", "seen", "depends on"))
    assert present <= 0.025 + SLACK


def test_an_effect_as_published_is_seldom_called_smaller_refuted_or_dependent() -> None:
    means = dict.fromkeys(["micro", "mini", "51m"], float(np.log1p(-0.03)))
    rates = count_words(means, -3.0, 60e6, corpora=2)
    assert rates["reproduced"] > 0.8
    assert rates.get("smaller than published", 0.0) <= 0.025 + SLACK
    assert rates.get("refuted", 0.0) <= SLACK
    assert rates.get("depends on", 0.0) <= 0.05 + SLACK


def test_an_effect_at_the_edge_of_the_margin_is_refuted_at_most_at_its_rate() -> None:
    rates = count_words({"51m": -0.01}, -6.6, 60e6, spread=0.004)
    assert 0.02 < rates["refuted"] <= 0.05 + SLACK


def test_effects_half_as_large_and_effects_that_vanish_are_told() -> None:
    assert count_words({"51m": -0.033}, -6.6, 60e6, spread=0.01, studies=300)["smaller than published"] > 0.9
    assert (
        count_words({"nano": -0.06, "micro": -0.03, "51m": 0.0}, -6.6, 60e6, spread=0.005, studies=300)["depends on"]
        > 0.85
    )
    assert (
        count_words({"nano": 0.0, "micro": 0.0, "51m": 0.0}, 3.1, 600e6, spread=0.005, studies=300)["not seen"] > 0.85
    )


# In a study's file

CLAIM = {"id": "A1", "arm": "b", "published": -6.6, "parameters": 60e6, "source": "arXiv 2604.01683"}
STUDY = {"baseline": "a", "arms": {"a": {}, "b": {"z_loss": 0.1}}}


def test_a_study_names_one_claim_or_several() -> None:
    one, several = StudySpec.from_dict(STUDY | {"claims": CLAIM}), StudySpec.from_dict(STUDY | {"claims": [CLAIM]})
    assert one.claims == several.claims == (Claim.from_dict(CLAIM),)
    assert StudySpec.from_dict(one.to_dict()) == one
    assert one.fingerprint == StudySpec.from_dict(STUDY).fingerprint  # no run changes by it


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"published": None}, "claims[0]: Claim needs published, which is missing."),
        ({"source": None}, "claims[0]: Claim needs source, which is missing."),
        ({"published": "-6.6 %"}, "claims[0]: published must be a finite number above -100, but '-6.6 %' came."),
        ({"corpus": 3}, "claims[0]: corpus must be a text that is not empty, but 3 came."),
        ({"arm": "c"}, "claim A1 is about arm c, which is none of a, b."),
        ({"arm": "a"}, "claim A1 is about arm a, which is the baseline it would be compared with."),
        ({"corpus": "wiki"}, "claim A1 is about corpus wiki, which is none of stdlib."),
    ],
)
def test_a_claim_that_cannot_be_judged_is_refused(changes: dict[str, object], sentence: str) -> None:
    claim = {name: value for name, value in (CLAIM | changes).items() if value is not None}
    with pytest.raises(SpecError) as caught:
        StudySpec.from_dict(STUDY | {"claims": [claim]})
    assert sentence in str(caught.value)
