"""Interim analyses: a study that is judged again after seeds were added has more than one chance to be wrong."""


def alpha_of_each(alpha: float, analyses: int) -> float:
    """The level of each of so many analyses that keeps the chance of any false alarm at `alpha` (Bonferroni)."""
    if not 0 < alpha < 1:
        raise ValueError(f"alpha must lie between 0 and 1, but {alpha:g} came.")
    if analyses < 1:
        raise ValueError(f"analyses counts the times the study is judged, at least 1, but {analyses} came.")
    return alpha / analyses


def false_alarm_bound(alpha: float, planned: int, taken: int) -> float:
    """What the chance of a false alarm is at most after `taken` analyses where `planned` were."""
    return alpha * max(1.0, taken / planned)
