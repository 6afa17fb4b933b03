import dataclasses
import shlex
import time
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from tyro.conf import Positional


@dataclasses.dataclass(frozen=True)
class CompareCommand:
    """Train arms on your own text with paired seeds and equal tuning, and say which attention is better on it.

    Args:
        texts: files or folders of text (.txt, .md, .jsonl, .json, .csv, .tsv, .parquet), or names of corpora, compared
            on one by one; by default Python's own library; or tasks, such as task:mqar?pairs=16&length=128
        arms: which attentions, by name; the standard one is always among them; by default standard, leapfrog, affine,
            k=v and qk-norm
        minutes: how long it may take, which decides the size of the models and how many tokens they see; by default the
            size decides, so that every machine gets the same answer
        seeds: how many paired seeds in all; by default 5, and 8 where the size pico decides how long it takes
        more: give the comparison that is there more: --seeds in all, or as many as fit into --minutes
        size: pico, nano, micro, mini, 34m, 51m or 124m; by default what fits the minutes, or pico
        sizes: two or more sizes to compare at, each with as many tokens a parameter, instead of minutes: how the effect
            changes with size, and how much more compute the standard attention would need
        tokens_per_parameter: of each of the sizes; by default 10
        final_tokens: how much of validation and of test text is read at the end of a run; 0 for all of it; by default
            an eighth of what it trained on
        column: the field or column that holds the text, where files have several; by default text
        encoding: that of the files, by default utf-8
        skip_bad: leave out files that cannot be read, and name them
        device: cpu or cuda; auto takes GPUs if there are any
        at_once: runs at a time; by default one per core or GPU
        out: the folder of the comparison; one that is there is continued
        data: where corpora are looked for by name; by default $QKLAB_DATA
    """

    texts: Positional[tuple[str, ...]] = ()
    arms: tuple[str, ...] | None = None
    minutes: float | None = None
    seeds: int | None = None
    size: str | None = None
    sizes: tuple[str, ...] | None = None
    tokens_per_parameter: float | None = None
    more: Annotated[bool, tyro.conf.arg(name="continue")] = False
    final_tokens: int | None = None
    column: str | None = None
    encoding: str | None = None
    skip_bad: bool = False
    device: Literal["auto", "cpu", "cuda"] = "auto"
    at_once: int | None = None
    out: Path | None = None
    data: Path | None = None

    def execute(self) -> int:
        from qklab.cli.study import execute_and_report
        from qklab.runs.progress import Terminal
        from qklab.study import compare
        from qklab.study.execute import Study
        from qklab.study.executors.local import LocalExecutor
        from qklab.study.extend import extend_comparison, refuse_other_request
        from qklab.study.records import holds_study, read_study_record
        from qklab.study.request import ComparisonRequest, default_comparison_folder

        began = time.monotonic()
        given = {"column": self.column, "encoding": self.encoding, "skip_bad": self.skip_bad or None}
        reading = {name: value for name, value in given.items() if value is not None}
        request = ComparisonRequest(
            *(self.texts, self.arms, self.minutes, self.seeds, self.size, self.final_tokens, reading),
            *(self.sizes, self.tokens_per_parameter),
        )
        display = Terminal()
        executor = LocalExecutor(self.device, self.at_once, say=display.say)
        folder = self.out or default_comparison_folder(self.texts, self.sizes)
        words = ["qklab", "compare", "--out", str(folder), *(() if self.data is None else ("--data", str(self.data)))]
        command = f"{shlex.join(words)} --continue --seeds {{total}}"
        record = read_study_record(folder) if holds_study(folder) else None
        known = None if record is None else record.spec
        if self.sizes is not None or (known is not None and known.sizes):
            return self.execute_sizes(compare.plan_sizes(request, known), folder, display, command)
        if record is not None:
            by_size = record.asked.get("minutes") is None
            executor.slots = compare.choose_slots(executor.slots, record.spec.first_run, self.at_once, by_size)
            if self.more:
                record = extend_comparison(record, folder, request, executor.slots)
            else:
                refuse_other_request(record, folder, request)
            spec, asked = record.spec, record.asked
            display.say(f"going on with the comparison in {folder}: {spec.seeds} seeds of {', '.join(spec.arms)}.")
        elif self.more:
            raise ValueError(f"there is no comparison in {folder} to continue; leave --continue out to begin one.")
        else:
            plan = compare.plan_comparison(
                request, slots=executor.slots, at_once=self.at_once, data=self.data, say=display.say
            )
            executor.slots, spec, asked = plan.slots, plan.study, plan.to_record(request)
        minutes = asked.get("minutes")
        left = None if minutes is None else compare.OVERTIME * minutes - (time.monotonic() - began) / 60
        study = Study(spec, folder, data=self.data, asked=asked, extend_minutes=left)
        return execute_and_report(study, lambda: executor, display, command)

    def execute_sizes(self, spec: Any, folder: Path, display: Any, command: str) -> int:
        from qklab.cli.study import execute_sizes
        from qklab.study.compare import choose_slots
        from qklab.study.execute import Study
        from qklab.study.executors.local import LocalExecutor

        def make_study(part: Any, where: Path, minutes: float | None) -> Study:
            return Study(part, where, data=self.data, minutes=minutes)

        def make_executor(part: Any) -> LocalExecutor:
            executor = LocalExecutor(self.device, self.at_once, say=display.say)
            executor.slots = choose_slots(executor.slots, part.first_run, self.at_once, True)
            return executor

        return execute_sizes(spec, folder, make_study, make_executor, display, command)
