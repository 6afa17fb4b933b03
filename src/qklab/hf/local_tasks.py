"""Sets of questions in local files as tasks of lm-evaluation-harness."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from qklab.data.questions import TASKS, Line, LocalTask, describe_file, find_question_files, make_question, read_lines

PREFIX = "local-"  # tells them from the harness's own
HIGHER_IS_BETTER = {"acc": True, "acc_norm": True, "perplexity": False}


def make_task_settings(name: str, kind: str, task: LocalTask, questions: Sequence[Line]) -> dict[str, Any]:
    """The harness's task: how text, choices and target of a question become requests, and what is reported."""
    from datasets import Dataset

    settings: dict[str, Any]
    if kind == "cloze" and not task.choices:  # the target brings its space along
        settings = {
            "output_type": "loglikelihood",
            "doc_to_text": "text",
            "doc_to_target": "target",
            "target_delimiter": "",
        }
    elif kind == "schema":  # a number as text: the choices are contexts
        settings = {"output_type": "multiple_choice", "doc_to_text": "gold", "doc_to_target": "target"}
    else:
        settings = {"output_type": "multiple_choice", "doc_to_text": "text", "doc_to_target": "gold"}
    if settings["output_type"] == "multiple_choice":
        settings["doc_to_choice"] = "choices"
    if kind == "pair":
        settings["num_fewshot"] = 0
    return settings | {
        "task": name,
        "custom_dataset": lambda **_: {"test": Dataset.from_list(list(questions))},
        "test_split": "test",
        "fewshot_split": "test",
        "metric_list": [
            {
                "metric": metric,
                "aggregation": "perplexity" if metric == "perplexity" else "mean",
                "higher_is_better": better,
            }
            for metric, better in HIGHER_IS_BETTER.items()
            if metric in task.metrics
        ],
        "metadata": {"version": 1.0},
    }


def make_local_task(name: str, data: Path | None) -> tuple[Any, dict[str, str]]:
    """A harness task or group for `name` (after `PREFIX`), and the SHA-256 of every file it reads."""
    from lm_eval.api.group import Group
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.config.group import AggMetricConfig

    if data is None:
        raise ValueError(f"{PREFIX}{name} reads a local file; say with --data in which folder it is.")
    if not data.is_dir():
        raise ValueError(f"--data must be a folder with .jsonl files, but {data} is none.")
    hashes: dict[str, str] = {}

    def build_task(path: Path, called: str) -> ConfigurableTask:
        kind, lines = read_lines(path)
        chosen = describe_file(name, path, kind)
        hashes[path.name] = hashlib.sha256(path.read_bytes()).hexdigest()
        return ConfigurableTask(
            config=make_task_settings(called, kind, chosen, [make_question(kind, line, chosen) for line in lines])
        )

    paths, task = find_question_files(name, data, PREFIX), TASKS.get(name)
    if task is None or not task.group:
        return build_task(paths[0], PREFIX + name), hashes
    mean = AggMetricConfig(metric="acc", aggregation="mean", weight_by_size=False)
    group = Group(PREFIX + name, aggregate_metric_list=[mean])
    for path in paths:
        group.add(build_task(path, f"{PREFIX}{name}_{path.stem}"))
    return group, hashes
