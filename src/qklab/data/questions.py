"""Sets of questions in local .jsonl files: what their lines are, and where the files lie. Nothing is downloaded.

A line is one of four kinds, told apart by its keys:

{"query", "choices", "gold"}                  which of the choices continues the query
{"context", "continuation"}                   is the continuation what the model would say
{"context_options", "continuation", "gold"}   after which of the contexts is the continuation likelier
{"sentence_good", "sentence_bad"}             which of two sentences is likelier
"""

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from qklab.schema import suggest_name

Line = dict[str, Any]


@dataclass(frozen=True)
class LocalTask:
    """How a file's lines become questions.

    Args:
        file: Its name without .jsonl; of a group, the folder of the files.
        metrics: Those of the harness that are reported.
        ending: What follows the query or context, before " " and the answer.
        beginning: What is dropped from the start of the query.
        choices: Makes a {"context", "continuation"} file a choice among these.
        group: Whether it is a folder of files, whose mean is reported.
    """

    file: str
    metrics: tuple[str, ...] = ("acc",)
    ending: str = ""
    beginning: str = ""
    choices: tuple[str, ...] = ()
    group: bool = False


ANSWER = "\nAnswer:"
NORMED = ("acc", "acc_norm")
TASKS = {
    "lambada": LocalTask("lambada_openai", ("acc", "perplexity")),
    "arc_easy": LocalTask("arc_easy", NORMED, ANSWER),
    "arc_challenge": LocalTask("arc_challenge", NORMED, ANSWER),
    "piqa": LocalTask("piqa", NORMED, ANSWER),
    "openbookqa": LocalTask("openbook_qa", NORMED),
    "boolq": LocalTask("boolq", ending=ANSWER, beginning="Passage: "),
    "copa": LocalTask("copa"),
    "commonsense_qa": LocalTask("commonsense_qa"),
    "siqa": LocalTask("siqa"),
    "winogrande": LocalTask("winogrande"),
    "wsc273": LocalTask("winograd_wsc"),
    "pubmedqa": LocalTask("pubmed_qa_labeled", choices=("yes", "no", "maybe")),
    "jeopardy": LocalTask("jeopardy_all", ending=ANSWER),
    "blimp": LocalTask("blimp", group=True),
}


def is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())


def is_text_list(value: object) -> bool:
    return isinstance(value, list) and len(value) > 1 and all(is_text(inner) for inner in value)


KINDS: dict[str, dict[str, Callable[[object], bool]]] = {
    "choice": {"query": is_text, "choices": is_text_list},
    "schema": {"context_options": is_text_list, "continuation": is_text},
    "pair": {"sentence_good": is_text, "sentence_bad": is_text},
    "cloze": {"context": is_text, "continuation": is_text},
}
OPTIONS = {"choice": "choices", "schema": "context_options"}  # of which "gold" says the right one


def find_kind(line: Any) -> str | None:
    return next((kind for kind, keys in KINDS.items() if isinstance(line, dict) and keys.keys() <= line.keys()), None)


def find_wrong_key(kind: str, line: Any) -> str | None:
    """The key of a line that is missing or wrong."""
    if not isinstance(line, dict):
        return next(iter(KINDS[kind]))
    wrong = next((key for key, fits in KINDS[kind].items() if not fits(line.get(key))), None)
    if wrong is None and kind in OPTIONS:
        gold = line.get("gold")
        right = isinstance(gold, int) and not isinstance(gold, bool) and 0 <= gold < len(line[OPTIONS[kind]])
        return None if right else "gold"
    return wrong


def read_lines(path: Path) -> tuple[str, list[Line]]:
    """The kind of a file and its lines, every one of them checked."""
    lines: list[Line] = []
    kind = None
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read as UTF-8 text: {error}.") from None
    for place, text in enumerate(content.split("\n"), 1):
        if not text.strip():
            continue
        try:
            line = json.loads(text)
        except ValueError:
            raise ValueError(f"line {place} of {path} is no JSON; fetch the file again.") from None
        kind = kind or find_kind(line)
        if kind is None:
            raise ValueError(
                f"{path} is of no known kind: a line has query, choices and gold; context and continuation; "
                "context_options, continuation and gold; or sentence_good and sentence_bad."
            )
        wrong = find_wrong_key(kind, line)
        if wrong:
            raise ValueError(f"line {place} of {path} has no usable {wrong!r}, which each of its lines needs.")
        lines.append(line)
    if kind is None:
        raise ValueError(f"{path} holds no questions: it is empty.")
    return kind, lines


def make_question(kind: str, line: Line, task: LocalTask) -> Line:
    """What the harness is given of a line: `text` and `choices` with `gold`, or `text` and `target`."""
    if kind == "pair":
        return {"text": "", "choices": [line["sentence_good"], line["sentence_bad"]], "gold": 0}
    if kind == "schema":
        contexts = [context.rstrip() for context in line["context_options"]]
        return {"choices": contexts, "target": line["continuation"].strip(), "gold": line["gold"]}
    text = line["query" if kind == "choice" else "context"].rstrip().removeprefix(task.beginning) + task.ending
    if kind == "choice":
        return {"text": text, "choices": line["choices"], "gold": line["gold"]}
    answer = line["continuation"].strip()
    if not task.choices:
        return {"text": text, "target": f" {answer}"}
    if answer not in task.choices:
        raise ValueError(
            f"an answer of {task.file}.jsonl is {answer!r}, but it must be one of {', '.join(task.choices)}."
        )
    return {"text": text, "choices": list(task.choices), "gold": task.choices.index(answer)}


def find_task_file(data: Path, name: str, file: str, prefix: str) -> Path:
    """The file or folder in `data`, or one or two folders below it; `prefix` as in `find_question_files`."""
    levels = ([data / file], sorted(data.glob(f"*/{file}")), sorted(data.glob(f"*/*/{file}")))
    there = next((found for level in levels if (found := [path for path in level if path.exists()])), [])
    if not there and name in TASKS:
        raise ValueError(f"{prefix}{name} reads {file}, but it is neither in {data} nor in a folder of it.")
    if not there:
        files = sorted(path.stem for path in data.rglob("*.jsonl"))
        close = suggest_name(prefix + name, [prefix + known for known in (*TASKS, *files)])
        raise ValueError(
            f"{prefix}{name} is no known task and {file} is neither in {data} nor in a folder of it{close}; known are "
            f"{', '.join(prefix + task for task in TASKS)}."
        )
    if len(there) > 1:
        raise ValueError(f"{file} is in {data} more than once: {there[0]} and {there[1]}; choose a folder with --data.")
    return there[0]


def find_question_files(name: str, data: Path, prefix: str = "") -> list[Path]:
    """The file of a set of questions, or the files of a group; `prefix` stands before names where they are typed."""
    task = TASKS.get(name)
    if task is None or not task.group:
        return [find_task_file(data, name, f"{task.file if task else name}.jsonl", prefix)]
    folder = find_task_file(data, name, task.file, prefix)
    paths = sorted(folder.glob("*.jsonl"))
    if not paths:
        raise ValueError(f"{folder} holds no .jsonl files, of which {prefix}{name} is the mean.")
    return paths


def describe_file(name: str, path: Path, kind: str) -> LocalTask:
    """How its lines become questions: as is known of the set, or by their kind."""
    metrics = {"choice": NORMED, "cloze": ("acc", "perplexity")}.get(kind, ("acc",))
    return TASKS.get(name) or LocalTask(path.stem, metrics)


def measure_guessing(name: str, data: Path, limit: int | None = None) -> float | None:
    """The share of questions that guessing gets right; where all have the same choices, such as yes and no, that saying
    the most frequent one does. None where there is nothing to choose among."""
    shares: list[float] = []
    for path in find_question_files(name, data):
        kind, lines = read_lines(path)
        questions = [make_question(kind, line, describe_file(name, path, kind)) for line in lines[:limit]]
        if "choices" not in questions[0]:
            return None
        guessing = fmean(1 / len(question["choices"]) for question in questions)
        if all(question["choices"] == questions[0]["choices"] for question in questions):
            guessing = max(Counter(question["gold"] for question in questions).values()) / len(questions)
        shares.append(guessing)
    return fmean(shares)
