"""Scores of a model on the tasks of lm-evaluation-harness, through its own Transformers model class."""

import contextlib
import hashlib
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import date
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from qklab.data.questions import TASKS
from qklab.hf.local_tasks import PREFIX, make_local_task
from qklab.hf.scores import describe_tasks, list_scores
from qklab.runs.directory import RunDirectory
from qklab.runs.environment import describe_environment, find_commit, find_version
from qklab.schema import suggest_name

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

FORMAT = 1
RESAMPLINGS = 1000  # for standard errors that have no formula, such as perplexity's
TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
NEEDED = ("lm_eval", "transformers", "accelerate", "datasets")


def require_harness() -> None:
    """One sentence where the harness, or what its model class needs, is missing."""
    from importlib.util import find_spec

    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise ValueError(f"evaluation needs {', '.join(missing)}, which is not installed: pip install 'qklab[eval]'.")


def load_for_evaluation(
    folder: Path, which: Literal["newest", "best"] = "newest", device: str = "cpu"
) -> tuple["PreTrainedModel", "PreTrainedTokenizerBase", dict[str, Any]]:
    """The model and tokenizer of a run directory or of a Transformers folder, and what is to be facts about it."""
    refuse_other_folder(folder)
    if (folder / "run.json").exists():
        from qklab.hf.export import to_transformers

        record = RunDirectory(folder).read()
        model, tokenizer = to_transformers(folder, which)
        facts = {"run": record["id"], "which": which, "fingerprint": record.get("fingerprint")}
    else:
        model, tokenizer = load_folder(folder)
        facts = {"fingerprint": hashlib.sha256((folder / "config.json").read_bytes()).hexdigest()}
    facts = {"folder": str(folder), **facts, "weights": hash_weights(model)}
    model = model.to(device).eval()  # pyright: ignore[reportArgumentType]
    return model, tokenizer, facts


def hash_weights(model: torch.nn.Module) -> str:
    """SHA-256 of all weights in the order of their names, so that a run and its export have the same."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def refuse_other_folder(folder: Path) -> None:
    if not (folder / "run.json").exists() and not (folder / "config.json").exists():
        raise ValueError(
            f"{folder} is neither a run directory (it has no run.json) nor a Transformers model (no config.json)."
        )


def load_folder(folder: Path) -> tuple["PreTrainedModel", "PreTrainedTokenizerBase"]:
    """A Transformers folder, ours or another's, from safetensors and JSON alone."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    def first_line(error: Exception) -> str:
        return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")

    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", local_files_only=True, use_safetensors=True)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise ValueError(f"{folder} holds no causal language model that can be loaded: {first_line(error)}.") from None
    if not any((folder / name).exists() for name in TOKENIZERS):
        raise ValueError(f"{folder} has no tokenizer; put one beside the model with tokenizer.save_pretrained.")
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"{folder} has no tokenizer that can be loaded: {first_line(error)}.") from None
    return model, tokenizer


class FoundTasks(NamedTuple):
    """Tasks and groups of the harness, its task manager, and the hashes of local files."""

    tasks: list[Any]
    manager: Any
    hashes: dict[str, dict[str, str]]


def find_tasks(names: Sequence[str], data: Path | None, fewshot: int | None) -> FoundTasks:
    """What these names stand for."""
    from lm_eval.tasks import TaskManager

    if not names:
        raise ValueError(f"say with --tasks what to score on: tasks of the harness, or {PREFIX}lambada with --data.")
    repeated = next((name for name in names if list(names).count(name) > 1), None)
    if repeated:
        raise ValueError(f"the task {repeated} was asked for more than once.")
    tasks: list[Any] = []
    hashes: dict[str, dict[str, str]] = {}
    local = [name for name in names if name.startswith(PREFIX)]
    for name in local:
        task, hashes[name] = make_local_task(name.removeprefix(PREFIX), data)
        tasks.append(task)
    manager = TaskManager(include_defaults=len(local) < len(names))
    for name in names:
        if name not in local:
            tasks += load_harness_tasks(manager, name)
    refuse_fewshot(tasks, fewshot)
    return FoundTasks(tasks, manager, hashes)


def load_harness_tasks(manager: Any, name: str) -> list[Any]:
    """What the harness itself knows by `name`; it downloads the data."""
    here = f"; {PREFIX}{name} reads local files instead" if name in TASKS else ""
    if name not in manager.all_tasks:
        known = [*manager.all_tasks, *(PREFIX + task for task in TASKS)]
        raise ValueError(
            f"there is no task {name!r}{suggest_name(name, known)}; lm-eval ls tasks lists the harness's{here}."
        )
    try:
        loaded = manager.load([name])
    except OSError as error:  # every failure to reach the hub is one
        reason = str(error).strip().splitlines()[0].rstrip(".")
        raise ValueError(f"the data of {name} could not be downloaded: {reason}{here}.") from None
    return [loaded["groups"][name]] if name in loaded["groups"] else list(loaded["tasks"].values())


def make_scorer(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    batch_size: int,
    tick: Callable[[float], None] = lambda done: None,
) -> Any:
    """The harness's model around ours; it counts the texts whose beginning did not fit, and calls `tick` with the share
    of an evaluation that is done."""
    from lm_eval.models import huggingface

    harness: Any = huggingface.HFLM

    class Scorer(harness):
        cut = asked = done = 0

        def _loglikelihood_tokens(self, requests: Any, *arguments: Any, **options: Any) -> Any:
            known = self.model.get_input_embeddings().num_embeddings
            pieces: list[Any] = []
            counts: list[int] = []
            for text, context_ids, ids in requests:
                if not ids:
                    raise ValueError(f"an answer must have at least 1 token, but one after {text[0][-40:]!r} has none.")
                largest = max(*context_ids, *ids)
                if largest >= known:
                    raise ValueError(
                        f"the tokenizer gives the number {largest}, but the model knows {known} tokens; they do not "
                        "belong together."
                    )
                self.cut += len(context_ids) + len(ids) > self.max_length + 1
                own = split_answer(context_ids, ids, self.max_length)
                pieces += [(text if len(own) == 1 else None, *piece) for piece in own]
                counts.append(len(own))
            self.asked, self.done = len(pieces), 0
            found = iter(super()._loglikelihood_tokens(pieces, *arguments, **options))
            return [join_answer(list(islice(found, count))) for count in counts]

        def _model_call(self, inps: torch.Tensor, *arguments: Any, **options: Any) -> Any:
            tick(min(1.0, self.done / max(1, self.asked)))
            self.done += len(inps)
            return super()._model_call(inps, *arguments, **options)

    return Scorer(pretrained=model, tokenizer=tokenizer, batch_size=batch_size)


def split_answer(context: list[int], answer: list[int], longest: int) -> list[tuple[list[int], list[int]]]:
    """An answer and its context as the model reads them: whole, or, where the answer alone does not fit, in pieces of
    half of what the model sees, each after all that precedes it."""
    if len(answer) <= longest:
        return [(context, answer)]
    half = max(1, longest // 2)
    return [(context + answer[:first], answer[first : first + half]) for first in range(0, len(answer), half)]


def join_answer(pieces: list[tuple[float, bool]]) -> tuple[float, bool]:
    """Log-probability of an answer, and whether greedy decoding says it."""
    return sum(value for value, _ in pieces), all(greedy for _, greedy in pieces)


@contextlib.contextmanager
def silence_harness() -> Iterator[None]:
    """The harness's progress and errors on stderr, without its advice; and without its list of every installed package,
    which takes seconds for each result and is not kept."""
    from lm_eval import evaluator

    names = ("lm_eval", "huggingface_hub", "datasets")
    levels = {name: logging.getLogger(name).level for name in names}
    before, survey = os.environ.get("DISABLE_MULTIPROC"), evaluator.add_env_info
    try:
        evaluator.add_env_info = lambda storage: None
        for name in names:
            logging.getLogger(name).setLevel(logging.ERROR)
        os.environ["DISABLE_MULTIPROC"] = "1"  # one lot of resamplings: a pool of processes would gain nothing
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        evaluator.add_env_info = survey
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
        os.environ.pop("DISABLE_MULTIPROC") if before is None else os.environ.update(DISABLE_MULTIPROC=before)


def refuse_fewshot(tasks: Sequence[Any], fewshot: int | None) -> None:
    from lm_eval.api.group import Group

    leaves = [leaf for task in tasks for leaf in (task.get_all_tasks() if isinstance(task, Group) else [task])]
    for task in leaves:
        if fewshot and task.get_config("num_fewshot") == 0:
            raise ValueError(f"{task.task_name} is defined without examples; leave --fewshot out.")
        most = len(task.eval_docs) - 1
        if fewshot and task.task_name.startswith(PREFIX) and fewshot > most:
            raise ValueError(
                f"{task.task_name} has {most + 1} questions, so at most {most} examples; {fewshot} came with --fewshot."
            )


def evaluate(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    tasks: Sequence[str],
    *,
    data: Path | None = None,
    limit: int | None = None,
    batch_size: int = 8,
    fewshot: int | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """Scores on `tasks`: {"rows": one per task and metric, "tasks": how they were asked, "cut", "context"}.

    A row has task, metric, value, stderr (None where the harness has none), n and higher_is_better; members of a group
    name it under "group". `cut` counts the texts that were longer than the model's `context` tokens.
    """
    require_harness()
    check_numbers(limit, batch_size, fewshot)
    with silence_harness():
        return run_harness(model, tokenizer, find_tasks(tasks, data, fewshot), limit, batch_size, fewshot, seed)


def evaluate_folder(
    folder: Path,
    tasks: Sequence[str],
    *,
    which: Literal["newest", "best"] = "newest",
    device: str = "auto",
    data: Path | None = None,
    limit: int | None = None,
    batch_size: int = 8,
    fewshot: int | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """`evaluate` for a run directory or a Transformers folder, with commit, machine, versions and settings."""
    require_harness()
    check_numbers(limit, batch_size, fewshot)
    device = choose_device(device)
    refuse_other_folder(folder)
    with silence_harness():
        found = find_tasks(tasks, data, fewshot)
        model, tokenizer, facts = load_for_evaluation(folder, which, device)
        scores = run_harness(model, tokenizer, found, limit, batch_size, fewshot, seed)
    packages = {name: find_version(name) for name in ("lm_eval", "datasets", "accelerate")}
    machine = describe_environment(
        {"type": device} | ({"name": torch.cuda.get_device_name()} if device == "cuda" else {})
    )
    return {
        "format": FORMAT,
        "date": date.today().isoformat(),
        "commit": find_commit(),
        "environment": machine | {"packages": machine["packages"] | packages},
        "model": facts | {"dtype": str(model.dtype).removeprefix("torch."), "parameters": model.num_parameters()},
        "settings": {
            "tasks": list(tasks),
            "data": None if data is None else str(data),
            "limit": limit,
            "batch_size": batch_size,
            "fewshot": fewshot,
            "seed": seed,
        },
        **scores,
    }


def choose_device(device: str) -> str:
    """The device that is meant by "auto", "cpu" or "cuda"."""
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device is cuda, but torch sees no CUDA device; leave it out or use cpu.")
    return ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device


def check_numbers(limit: int | None, batch_size: int, fewshot: int | None) -> None:
    for name, value, least in (("limit", limit, 1), ("batch_size", batch_size, 1), ("fewshot", fewshot, 0)):
        if value is not None and value < least:
            raise ValueError(f"{name} must be at least {least}, but {value} came.")


def run_harness(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    found: FoundTasks,
    limit: int | None,
    batch_size: int,
    fewshot: int | None,
    seed: int,
    tick: Callable[[float], None] = lambda done: None,
) -> dict[str, Any]:
    """What the harness says; `tick` is told the share that is done."""
    import lm_eval

    lm = make_scorer(model, tokenizer, batch_size, tick)
    harness: Any = lm_eval.simple_evaluate
    results = harness(
        model=lm,
        tasks=found.tasks,
        num_fewshot=fewshot,
        batch_size=batch_size,
        limit=limit,
        bootstrap_iters=RESAMPLINGS,
        task_manager=found.manager,
        random_seed=seed,
        numpy_random_seed=seed,
        torch_random_seed=seed,
        fewshot_random_seed=seed,
    )
    return {
        "rows": list_scores(results),
        "tasks": describe_tasks(results, found.hashes),
        "cut": lm.cut,
        "context": lm.max_length,
    }
