"""Models after their training compared on something else: which models, paired by seed, and what is known then."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from qklab.study.metrics import find_metric
from qklab.study.records import holds_study, read_results, read_study_record, select_rate
from qklab.study.spec import StudyError
from qklab.study.tuning import choose_learning_rates
from qklab.study.verdict import judge_arms


def find_models(folders: Sequence[Path], seeds: int) -> dict[str, dict[int, Path]]:
    """Arm → seed → folder: of a study each arm's runs at the learning rate chosen for it, by the seed of training; else
    each folder at so many seeds, the baseline first."""
    missing = next((folder for folder in folders if not folder.is_dir()), None)
    if missing is not None:
        raise StudyError(f"there is no folder {missing}; give run directories, Transformers folders or a study.")
    if any(holds_study(folder) for folder in folders):
        if len(folders) > 1:
            raise StudyError("a study is compared alone, but other folders came with it; leave them out.")
        return find_models_of_study(folders[0])
    names = [folder.resolve().name for folder in folders]
    if len(set(names)) < len(names):
        names = [str(folder) for folder in folders]
    return {name: dict.fromkeys(range(seeds), folder) for name, folder in zip(names, folders, strict=True)}


def find_models_of_study(folder: Path) -> dict[str, dict[int, Path]]:
    study = read_study_record(folder).spec
    results = read_results(folder, study)
    lrs = choose_learning_rates(study, results)
    found: dict[str, dict[int, Path]] = {}
    several = len(study.corpora) > 1
    arms = [study.baseline, *(arm for arm in study.arms if arm != study.baseline)]
    for corpus in study.corpora:
        for arm in arms:
            at_rate = select_rate(results, corpus, arm, lrs[corpus, arm])
            own = [result.planned for result in at_rate if result.status == "finished"]
            if own:
                name = f"{arm} of {corpus}" if several else arm
                found[name] = {run.seed: run.folder_in(folder) for run in own}
    if not found:
        raise StudyError(f"no run of the study in {folder} has ended; carry it out first.")
    seeds = set.intersection(*(set(own) for own in found.values()))
    return {arm: {seed: own[seed] for seed in sorted(seeds)} for arm, own in found.items()}


def write_downstream_answer(found: Mapping[str, Any], margin: float) -> str:
    """The mean score of each arm with its chance level, and a verdict on each against the first."""
    scores: Mapping[str, Mapping[int, float]] = found["scores"]
    metric = find_metric("glue")
    baseline, *others = scores
    width = max(map(len, scores))
    lines = [f"{metric.unit} of {found['task']} (saying the most frequent label: {found['chance']:.2f})", ""]
    for arm, own in scores.items():
        values = [value for value in own.values() if math.isfinite(value)]
        rate = f"lr {found['lrs'][arm]:g}"
        lines.append(f"  {arm.ljust(width)}  {fmean(values):6.2f}  {rate}, {len(values)} seed{'s' * (len(values) > 1)}")
    if others and len(scores[baseline]):
        verdicts = judge_arms(
            {arm: scores[arm] for arm in others}, scores[baseline], margin, name=baseline, metric=metric
        )
        lines += ["", *(f"- {verdict.sentence}" for verdict in verdicts.values())]
    return "\n".join(lines)
