"""What a model is scored on at the end of its run: sets of questions, by lm-evaluation-harness, and tasks of GLUE, by
fine-tuning."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from qklab import register
from qklab.data.glue import GLUE, find_glue_task, read_glue, score_constant
from qklab.data.questions import find_question_files, measure_guessing, read_lines
from qklab.data.sources import list_data_folders
from qklab.data.tokenizer import Tokenizer
from qklab.hf.evaluate import find_tasks, hash_weights, require_harness, run_harness, silence_harness
from qklab.hf.export import ExportedModel, make_fast_tokenizer, wrap_decoder
from qklab.hf.finetune import finetune_classifier, finetune_once, make_classifier
from qklab.hf.fit import FineTuning, FitProgress
from qklab.hf.local_tasks import PREFIX
from qklab.model.decoder import Decoder
from qklab.runs.files import write_json
from qklab.train.score import ScoringWork
from qklab.train.spec import BenchmarkSpec

BATCH = 16  # texts per forward pass
FEWSHOT = None  # as each task says


@register.scorer("benchmarks")
class BenchmarkScorer:
    """Scores decoders as `spec` says, from the files under `data`, which are all looked for when it is made."""

    def __init__(self, spec: BenchmarkSpec, data: Path | None):
        folder = next(iter(list_data_folders(data)), None)
        if folder is None or not folder.is_dir():
            came = "none was named" if folder is None else f"{folder} is none"
            raise ValueError(f"{spec.names} are read from a folder, but {came}: say with --data or QKLAB_DATA which.")
        self.spec, self.data = spec, folder
        if spec.questioned:
            require_harness()
        for name in spec.listed:
            if name in GLUE:
                read_glue(name, self.data)
            else:
                for path in find_question_files(name, self.data):
                    read_lines(path)

    def score(self, decoder: Decoder, tokenizer: Tokenizer, seed: int, work: ScoringWork) -> dict[str, dict[str, Any]]:
        """Name → its `score` from 0 to 1, `chance` where it has one, and what else is known of it. What is done is kept
        in the work's folder, by the weights it was done with."""
        end = tokenizer.eot
        model = wrap_decoder(decoder, bos_token_id=end, eos_token_id=end, pad_token_id=end)
        weights = hash_weights(model)
        found: dict[str, dict[str, Any]] = {}
        for name in self.spec.listed:
            if name in GLUE:
                found[name] = self.finetune(model, weights, tokenizer, name, seed, work)
                continue
            path = work.folder / f"{name}-{weights[:16]}.json"
            if not path.exists():
                scores = self.ask(model, tokenizer, name, lambda done, name=name: work.tick(name, done))
                work.folder.mkdir(parents=True, exist_ok=True)
                write_json(path, scores)
            found[name] = json.loads(path.read_text(encoding="utf-8"))
        return found

    def ask(
        self, model: ExportedModel, tokenizer: Tokenizer, name: str, tick: Callable[[float], None]
    ) -> dict[str, Any]:
        fast = make_fast_tokenizer(tokenizer, model.config.decoder_spec.context)
        with silence_harness():
            tasks = find_tasks([PREFIX + name], self.data, FEWSHOT)
            scores = run_harness(model, fast, tasks, self.spec.questions, BATCH, FEWSHOT, seed=0, tick=tick)
        rows = [row for row in scores["rows"] if row["task"] == PREFIX + name]
        (right,) = (row for row in rows if row["metric"] == "acc")
        others = {row["metric"]: row["value"] for row in rows if row is not right}
        about = {"score": right["value"], "stderr": right["stderr"], "questions": right["n"]}
        guessed = measure_guessing(name, self.data, self.spec.questions)
        return about | ({} if guessed is None else {"chance": guessed}) | others

    def finetune(
        self, model: ExportedModel, weights: str, tokenizer: Tokenizer, name: str, seed: int, work: ScoringWork
    ) -> dict[str, Any]:
        """Of the rates that were tried the one that does best on held-out examples, and what it scores on dev."""
        task, examples = find_glue_task(name), read_glue(name, self.data, self.spec.examples)
        fast, device = make_fast_tokenizer(tokenizer, model.config.decoder_spec.context), str(model.device)
        tried: dict[float, dict[str, Any]] = {}
        for lr in self.spec.lrs:
            how = FineTuning(lr, seed, self.spec.epochs)

            def begin(progress: FitProgress, how: FineTuning = how) -> dict[str, Any]:
                classifier: Any = make_classifier(model, max(1, len(task.words)), seed).to(device)  # pyright: ignore[reportArgumentType]
                return finetune_classifier(classifier, fast, task, examples, how, device, progress)

            tried[lr] = finetune_once(name, examples, weights, how, work, begin)["scores"]
        best = max(tried, key=lambda lr: tried[lr]["valid"]["glue"])
        chance = score_constant(task, examples["train"].labels, examples["test"].labels)
        own = {f"{which}_{score}": value for which in ("valid", "test") for score, value in tried[best][which].items()}
        return {"score": tried[best]["test"]["glue"], "chance": chance, "lr": best, "glue": True} | own
