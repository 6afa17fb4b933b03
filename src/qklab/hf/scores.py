"""What lm-evaluation-harness found, as rows for a file and a table for people."""

from typing import TYPE_CHECKING, Any

from qklab.runs.metrics import finite_or_none

if TYPE_CHECKING:
    from rich.table import Table


def list_scores(results: Any) -> list[dict[str, Any]]:
    """The harness's results, one row per task and metric, a group before its members."""
    group_of = {name: group for group, names in results.get("group_subtasks", {}).items() for name in names}
    found = []
    for task, scores in results["results"].items():
        for key, value in scores.items():
            metric, _, rule = key.partition(",")
            if not rule or metric.endswith("_stderr"):
                continue
            row = {
                "task": task,
                "metric": metric,
                "value": finite_or_none(value),
                "stderr": finite_or_none(scores.get(f"{metric}_stderr,{rule}")),
                "n": sum(results["n-samples"][name]["effective"] for name in find_leaf_tasks(results, task)),
                "higher_is_better": results["higher_is_better"].get(task, {}).get(metric),
            }
            row |= {"filter": rule} if rule != "none" else {}
            found.append(row | ({"group": group_of[task]} if task in group_of else {}))
    places = {task: place for place, task in enumerate(results["results"])}
    return sorted(found, key=lambda row: find_order(row["task"], places, group_of))


def find_order(task: str, places: dict[str, int], group_of: dict[str, str]) -> tuple[int, ...]:
    """Where a row stands: after its group, and that after its own."""
    above = find_order(group_of[task], places, group_of) if group_of.get(task) in places else ()
    return (*above, places[task])


def find_leaf_tasks(results: Any, task: str) -> list[str]:
    """The tasks that a group stands for; a task stands for itself."""
    below = results.get("group_subtasks", {}).get(task)
    return [leaf for name in below for leaf in find_leaf_tasks(results, name)] if below else [task]


def describe_tasks(results: Any, hashes: dict[str, dict[str, str]]) -> dict[str, Any]:
    """Of every task: version, examples, the first request as the model got it, and the hashes of local files."""
    found: dict[str, Any] = {}
    for task, samples in results["samples"].items():
        first = samples[0]["arguments"][0]
        found[task] = {
            "version": results["versions"].get(task),
            "fewshot": results["n-shot"].get(task),
            "first_request": [part for part in first if isinstance(part, str)],
        }
    for name, files in hashes.items():
        found.setdefault(name, {})["sha256"] = files
    return found


def make_score_table(scores: dict[str, Any]) -> "Table":
    """The rows for people."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("task")
    table.add_column("metric")
    for name in ("value", "stderr", "n"):
        table.add_column(name, justify="right")
    for row in scores["rows"]:
        arrow = {True: " ↑", False: " ↓", None: ""}[row["higher_is_better"]]
        value, stderr = (format_score(row[name]) for name in ("value", "stderr"))
        table.add_row("  " * ("group" in row) + row["task"], row["metric"] + arrow, value, stderr, f"{row['n']:,}")
    return table


def format_score(value: float | None) -> str:
    return "–" if value is None else f"{value:,.4f}" if abs(value) < 1e6 else f"{value:.4g}"


def list_remarks(scores: dict[str, Any]) -> list[str]:
    """What a reader of the table should know."""
    remarks = []
    if scores["cut"]:
        longest = f"{scores['context']:,}"
        remarks.append(
            f"{scores['cut']:,} texts were longer than the model's {longest} tokens; their beginnings were cut."
        )
    if any(row["value"] is None for row in scores["rows"]):
        remarks.append("– stands for what is no finite number.")
    return remarks
