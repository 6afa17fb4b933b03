"""Studies: what paired runs say, with how much certainty, and what would settle the rest. Needs scipy."""

from qklab.study.claims import Claim, ClaimVerdict, MeasuredEffect, judge_claim
from qklab.study.metrics import Metric
from qklab.study.spec import StudySpec, read_study
from qklab.study.stats.curves import (
    Curve,
    DifferenceAlong,
    FirstReached,
    SampleEfficiency,
    compare_along,
    compare_sample_efficiency,
    find_common_loss,
    find_first_reached,
)
from qklab.study.stats.equivalence import EquivalenceTest, assess_equivalence
from qklab.study.stats.paired import FinitePairs, PairedDifference, adjust_holm, compare_paired, separate_diverged
from qklab.study.stats.power import SeedPlan, plan_more_seeds
from qklab.study.verdict import Verdict, judge_arms

__all__ = [
    "Claim",
    "ClaimVerdict",
    "Curve",
    "DifferenceAlong",
    "EquivalenceTest",
    "FinitePairs",
    "FirstReached",
    "MeasuredEffect",
    "Metric",
    "PairedDifference",
    "SampleEfficiency",
    "SeedPlan",
    "StudySpec",
    "Verdict",
    "adjust_holm",
    "assess_equivalence",
    "compare_along",
    "compare_paired",
    "compare_sample_efficiency",
    "find_common_loss",
    "find_first_reached",
    "judge_arms",
    "judge_claim",
    "plan_more_seeds",
    "read_study",
    "separate_diverged",
]
