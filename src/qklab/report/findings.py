"""What the report says of the runs on one corpus: a study's own findings, or those of runs that belong to none."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from qklab.study.findings import Findings
from qklab.study.results import Result, ledger


def found_in_runs(results: Sequence[Result], corpus: str, arms: Sequence[str]) -> Findings:
    """Runs without a study: no baseline was named before they ran, so nothing is judged."""
    lrs = {arm: sorted({r.planned.lr for r in results if r.planned.arm == arm}) for arm in arms}
    return Findings(
        corpus,
        chosen={arm: own[0] if own else None for arm, own in lrs.items()},
        ledgers={arm: ledger(results, corpus, arm, lrs[arm]) for arm in arms},
        headline=f"Runs on {corpus}, without a comparison",
        notes=[
            "These runs belong to no study: no baseline and no measure were fixed before they ran, so there is no "
            "verdict. qklab compare and qklab study make one."
        ],
    )


def verdict_told(findings: Findings, baseline: str, arm: str) -> dict[str, Any] | None:
    """An arm's verdict with the difference at every seed, as the page gets it."""
    if arm not in findings.verdicts:
        return None
    values = findings.values
    return findings.verdicts[arm].to_dict() | {"differences": differences(values[arm], values[baseline])}


def differences(arm: Mapping[int, float], baseline: Mapping[int, float]) -> dict[str, float | None]:
    """Seed → arm − baseline; None where one of them diverged."""
    found = {seed: arm[seed] - baseline[seed] for seed in arm}
    return {str(seed): value if math.isfinite(value) else None for seed, value in found.items()}
