"""The command line: parse, call, print."""

import dataclasses
import functools
import json
import operator
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

try:
    import tyro
    from tyro.conf import Positional
except ImportError:
    sys.exit("qklab: the command line needs the package tyro; install it with: pip install tyro")

from qklab import describe
from qklab.flags import CorpusChoices, RunChoices, SpecFlags, attention_spec, chosen


@dataclasses.dataclass(frozen=True)
class Describe(SpecFlags):
    __doc__ = SpecFlags.__doc__
    json: bool = False


@dataclasses.dataclass(frozen=True)
class Mechanisms:
    """Every mechanism: what it costs in parameters, FLOPs and cache, and whether decoding through its cache agrees."""


def run_describe(flags: Any) -> int:
    """Name, formula, parameters, FLOPs and cache bytes of an attention layer, against (Q,K,V); or why it is illegal."""
    spec = attention_spec(flags)
    print(json.dumps(describe.as_dict(spec), indent=2, ensure_ascii=False) if flags.json else describe.as_text(spec))
    return 0


def run_mechanisms(flags: Any) -> int:
    """Build every mechanism, print what it costs, and check its cache."""
    from rich.console import Console

    from qklab import mechanisms

    del flags
    return 0 if mechanisms.show(Console(width=None if sys.stdout.isatty() else 140)) else 1


@dataclasses.dataclass(frozen=True)
class Train(RunChoices):
    """Train one model. Settings come from FILE, overridden by flags, and else from the defaults.

    Args:
        file: a TOML file with the settings
        out: the run directory; if a run is there it is continued
        data: where corpora are looked for by name; by default $QKLAB_DATA
        quiet: show no progress
    """

    file: Positional[Path | None] = None
    out: Path | None = None
    data: Path | None = None
    quiet: bool = False


def run_train(flags: Any) -> int:
    """Train a model on a corpus; run the same command again to continue where it stopped."""
    from qklab.train import launch
    from qklab.train.progress import Terminal

    values = chosen(flags)
    file, out, data, quiet = (values.pop(name, None) for name in ("file", "out", "data", "quiet"))
    spec, execution = launch.asked(values, file, out)
    outcome = launch.train(spec, out, execution, data=data, display=None if quiet else Terminal())
    if int(os.environ.get("RANK", 0)) == 0:
        print(launch.told(outcome))
    return launch.EXIT_CODES[outcome.status]


@dataclasses.dataclass(frozen=True)
class Sample:
    """Continue a text with a trained model, drawing through its key/value cache.

    Args:
        run: a run directory
        prompt: the text to continue
        tokens: how many tokens at most
        temperature: 0 takes the likeliest token
        best: the best checkpoint instead of the newest
    """

    run: Positional[Path]
    prompt: Positional[str] = ""
    tokens: int = 100
    temperature: float = 0.8
    seed: int | None = None
    best: bool = False


def run_sample(flags: Any) -> int:
    """Continue a text with a trained model."""
    from qklab.train.trained import load, sample

    decoder, tokenizer = load(flags.run, "best" if flags.best else "newest")
    print(sample(decoder, tokenizer, flags.prompt, flags.tokens, temperature=flags.temperature, seed=flags.seed))
    return 0


@dataclasses.dataclass(frozen=True)
class Export:
    """Write a trained model as a folder that Transformers loads: weights, configuration, tokenizer and model card.

    Args:
        run: a run directory
        folder: where to, a folder that is new or empty
        best: the best checkpoint instead of the newest
    """

    run: Positional[Path]
    folder: Positional[Path]
    best: bool = False


def run_export(flags: Any) -> int:
    """Write a trained model as a folder that Transformers loads."""
    try:
        from qklab.hf.export import export
    except ImportError as error:
        raise ValueError(str(error)) from error
    print(export(flags.run, flags.folder, "best" if flags.best else "newest"))
    return 0


@dataclasses.dataclass(frozen=True)
class DataPrepare(CorpusChoices):
    """Read a source, split it into train, valid and test, tokenise it, and keep it as hashed shards.

    Args:
        where: a file or folder of .txt, .jsonl or .parquet (also .gz, .xz, .zst), "stdlib", "hf:NAME/CONFIG", or the
            name of a corpus under --data
        data: where corpora are looked for by name; by default $QKLAB_DATA
        out: the folder to prepare it in; by default one in the cache
        workers: processes that tokenise; by default one per processor
    """

    where: Positional[str] = "stdlib"
    data: Path | None = None
    out: Path | None = None
    workers: int | None = None


@dataclasses.dataclass(frozen=True)
class DataStats(CorpusChoices):
    """Tokens, bytes per token, documents, and how heterogeneous a corpus is.

    Args:
        where: a prepared corpus, or a source as for `prepare`
        data: where corpora are looked for by name; by default $QKLAB_DATA
    """

    where: Positional[str] = "stdlib"
    data: Path | None = None
    json: bool = False


@dataclasses.dataclass(frozen=True)
class DataVerify:
    """Check every file of a prepared corpus against its hash."""

    folder: Positional[Path]


@dataclasses.dataclass(frozen=True)
class Data:
    action: tyro.conf.OmitSubcommandPrefixes[
        Annotated[DataPrepare, tyro.conf.subcommand("prepare")]
        | Annotated[DataStats, tyro.conf.subcommand("stats")]
        | Annotated[DataVerify, tyro.conf.subcommand("verify")]
    ]


def run_data(flags: Any) -> int:
    """Prepare corpora and look at them."""
    from qklab.data import report
    from qklab.data.prepare import prepare
    from qklab.data.spec import DataSpec

    action = flags.action
    if isinstance(action, DataVerify):
        print(report.verified_text(action.folder))
        return 0
    values = chosen(action)
    own = {name: values.pop(name, None) for name in ("where", "data", "out", "workers", "json")}
    spec = DataSpec.from_dict(values | {"source": own["where"]})
    if isinstance(action, DataPrepare):
        corpus = prepare(spec, data=own["data"], out=own["out"], workers=own["workers"], progress=True)
        print(report.prepared_text(corpus))
        return 0
    stats = report.stats_dict(report.found_corpus(own["where"], spec, data=own["data"], progress=True))
    print(json.dumps(stats, indent=2, ensure_ascii=False) if own["json"] else report.stats_text(stats))
    return 0


@dataclasses.dataclass(frozen=True)
class Compare:
    """Train arms on your own text with paired seeds and equal tuning, and say which attention is better on it.

    Args:
        texts: files or folders of text, or names of corpora, compared on one by one; by default Python's own library
        arms: which attentions, by name; the standard one is always among them; by default standard, leapfrog, affine,
            k=v and qk-norm
        minutes: how long it may take, which decides the size of the models and how many tokens they see; by default 5
        seeds: how many paired seeds; by default 5
        more: add to the comparison that is there: so many --seeds more, or as many as fit into --minutes
        size: pico, nano, 51m or 124m instead of what fits the time
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
    more: Annotated[bool, tyro.conf.arg(name="continue")] = False
    device: Literal["auto", "cpu", "cuda"] = "auto"
    at_once: int | None = None
    out: Path | None = None
    data: Path | None = None


def run_compare(flags: Any) -> int:
    """Which attention should I use on this text? Trains several and answers with numbers, intervals and pictures."""
    from qklab.study import compare
    from qklab.study.execute import Slots, Study, read_spec
    from qklab.train.progress import Terminal

    display = Terminal()
    slots = Slots.of_machine(flags.device, flags.at_once)
    folder = flags.out or compare.folder_of(flags.texts)
    if (folder / "study.json").exists():
        spec = read_spec(folder / "study.json")
        compare.refuse_other(spec, folder, flags.texts, flags.arms, flags.size)
        slots = compare.room(slots, compare.size_of(spec), flags.at_once)
        if flags.more:
            spec = compare.extended(spec, folder, slots, flags.seeds, flags.minutes)
        elif flags.minutes is not None or flags.seeds not in (None, spec.seeds):
            raise ValueError(
                f"{folder} holds a comparison already; add --continue to give it more seeds or minutes, or choose "
                "another folder with --out."
            )
        display.say(f"going on with the comparison in {folder}: {spec.seeds} seeds of {', '.join(spec.arms)}.")
    elif flags.more:
        raise ValueError(f"there is no comparison in {folder} to continue; leave --continue out to begin one.")
    else:
        spec = compare.planned(
            flags.texts,
            arms=compare.DEFAULT if flags.arms is None else flags.arms,
            minutes=compare.MINUTES if flags.minutes is None else flags.minutes,
            seeds=compare.SEEDS if flags.seeds is None else flags.seeds,
            size=flags.size,
            slots=slots,
            at_once=flags.at_once,
            data=flags.data,
            say=display.say,
        )
        slots = compare.room(slots, compare.size_of(spec), flags.at_once)
    words = ["qklab", "compare", "--out", str(folder), *(() if flags.data is None else ("--data", str(flags.data)))]
    command = f"{shlex.join(words)} --continue --seeds {{more}}"
    return carry_out(
        Study(spec, folder, data=flags.data, execution=compare.execution_of(spec)), lambda: slots, display, command
    )


@dataclasses.dataclass(frozen=True)
class Study:
    """Carry out a study: arms × seeds × corpora × learning rates from a TOML file, and judge it.

    Args:
        file: the study's TOML file
        out: its folder, or a URL (s3://…, gs://…, file://…); by default runs/ and the study's name; what is there is
            continued
        seeds: how many seeds instead of what the file says: a study can be given more, not fewer
        device: cpu or cuda; auto takes GPUs if there are any
        at_once: runs at a time; by default one per core or GPU
        rows: windows per forward pass, where a whole batch does not fit into memory
        ray: run on the Ray cluster at this address; without an address on one started on this machine
        data: where corpora are looked for by name; by default $QKLAB_DATA
    """

    file: Positional[Path]
    out: str | None = None
    seeds: int | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    at_once: int | None = None
    rows: int | None = None
    ray: str | None = None
    data: Path | None = None


def run_study(flags: Any) -> int:
    """Carry out the study of a TOML file; run the same command again to continue where it stopped."""
    from qklab.study.execute import Slots, Study
    from qklab.study.mirror import Mirror, is_url
    from qklab.study.plan import file_name
    from qklab.study.spec import read_study
    from qklab.train.progress import Terminal

    spec, display = read_study(flags.file), Terminal()
    if flags.seeds is not None:
        spec = spec.replace(seeds=flags.seeds)
    out = flags.out or str(Path("runs") / file_name(spec.name.replace(" ", "-").lower()))
    mirror = Mirror(out, say=display.say) if is_url(out) else None
    folder = Path(out) if mirror is None else mirror.local
    words = ["qklab", "study", str(flags.file), "--out", out]
    for name in ("rows", "ray", "data"):
        if getattr(flags, name) is not None:
            words += [f"--{name}", str(getattr(flags, name))]
    command = f"{shlex.join(words)} --seeds {{total}}"
    if flags.ray is None:
        study = Study(spec, folder, data=flags.data, execution={"rows": flags.rows}, mirror=mirror)
        return carry_out(study, lambda: Slots.of_machine(flags.device, flags.at_once), display, command)
    from qklab.study.ray_executor import RayStudy

    address = None if flags.ray == "local" else flags.ray
    cluster = RayStudy(spec, folder, data=flags.data, execution={"rows": flags.rows}, mirror=mirror, address=address)
    return carry_out(cluster, lambda: cluster.slots(flags.device, flags.at_once), display, command)


def carry_out(study: Any, slots: Callable[[], Any], display: Any, command: str) -> int:
    """Do what is left of a study, print its answer and build its report."""
    from qklab import report
    from qklab.study.answer import answer
    from qklab.study.looks import read_looks

    try:
        with study.opened():
            room = slots()
            results = study.carry_out(room, display)
            looks = read_looks(study.folder).with_one_at(study.spec.seeds, room.count, command)
            looks.write(study.folder)
            if study.mirror is not None:
                study.mirror.fetch_results(checkpoints=True)
    finally:
        display.close()
    print(f"\n{answer(study.spec, results, looks)}")
    print(f"\nThe pictures: {report.build([study.folder], study.folder / 'report.html')}")
    if study.mirror is not None:
        for name in ("looks.json", "report.html"):
            study.mirror.put(name)
        print(f"All of it is in {study.mirror.url}.")
    return 0


@dataclasses.dataclass(frozen=True)
class Report:
    """One self-contained HTML page from studies or runs, also while they are going on.

    Args:
        folders: studies, comparisons or run directories
        out: the page; by default report.html in the first folder
        watch: serve the page on this machine and keep it up to date
        port: where to serve it
    """

    folders: Positional[tuple[Path, ...]]
    out: Path | None = None
    watch: bool = False
    port: int = 8000


def run_report(flags: Any) -> int:
    """Build the report of studies or runs from their folders alone."""
    from qklab import report

    if not flags.folders:
        raise ValueError("a report needs a study or a run directory, e.g. qklab report comparisons/stdlib.")
    if flags.watch:
        report.serve(flags.folders, flags.port)
        return 0
    print(report.build(flags.folders, flags.out or flags.folders[0] / "report.html"))
    return 0


@dataclasses.dataclass(frozen=True)
class Inspect:
    """What the attention of a trained model does on a text: figures, a page, and the numbers as JSON.

    Args:
        run: a run directory
        text: the text; by default the first of validation
        out: the folder for what is written; by default inspect in the run directory
        best: the best checkpoint instead of the newest
    """

    run: Positional[Path]
    text: Positional[str] = ""
    out: Path | None = None
    best: bool = False


def run_inspect(flags: Any) -> int:
    """Diagnostics and attention maps of a trained model on a text."""
    from qklab.report.inspect import inspect

    which = "best" if flags.best else "newest"
    out = flags.out or flags.run / "inspect"
    for path in inspect(flags.run, flags.text, out, which=which, say=lambda note: print(note, file=sys.stderr)):
        print(path)
    return 0


@dataclasses.dataclass(frozen=True)
class Eval:
    """Score a model on tasks of lm-evaluation-harness.

    Args:
        model: a run directory, or a folder with a Transformers model
        tasks: names of the harness, which downloads their data, or local-NAME for NAME.jsonl under --data
        data: the folder with the .jsonl files of local tasks
        limit: only so many questions of each task
        batch_size: texts per forward pass
        fewshot: examples before every question; by default what the task says
        device: cpu or cuda; auto takes a GPU if there is one
        seed: decides which examples are drawn
        best: the best checkpoint of a run instead of the newest
        out: a JSON file for scores, settings and where they come from
    """

    model: Positional[Path]
    tasks: tuple[str, ...] = ()
    data: Path | None = None
    limit: int | None = None
    batch_size: int = 8
    fewshot: int | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    seed: int = 0
    best: bool = False
    out: Path | None = None


def run_eval(flags: Any) -> int:
    """Score a run or a Transformers model on tasks of lm-evaluation-harness."""
    from rich.console import Console

    try:
        from qklab.hf import evaluate, scores
    except ImportError as error:
        raise ValueError(str(error)) from error
    from qklab.runs.files import write_json

    if flags.out is not None and not flags.out.parent.is_dir():
        raise ValueError(f"--out {flags.out} cannot be written: there is no folder {flags.out.parent}.")
    names = ("device", "data", "limit", "batch_size", "fewshot", "seed")
    which = "best" if flags.best else "newest"
    found = evaluate.evaluate_folder(
        flags.model, flags.tasks, which=which, **{name: getattr(flags, name) for name in names}
    )
    if flags.out is not None:
        write_json(flags.out, found)
    Console(width=None if sys.stdout.isatty() else 140).print(scores.table(found))
    for remark in scores.remarks(found):
        print(remark)
    return 0


COMMANDS = {
    "compare": (Compare, run_compare),
    "study": (Study, run_study),
    "report": (Report, run_report),
    "inspect": (Inspect, run_inspect),
    "data": (Data, run_data),
    "train": (Train, run_train),
    "sample": (Sample, run_sample),
    "export": (Export, run_export),
    "eval": (Eval, run_eval),
    "describe": (Describe, run_describe),
    "mechanisms": (Mechanisms, run_mechanisms),
}


def with_ray_address(words: Sequence[str]) -> list[str]:
    """A --ray without an address means a cluster on this machine."""
    found = list(words)
    for i, word in enumerate(words):
        if word == "--ray" and (i + 1 == len(words) or words[i + 1].startswith("--")):
            found[i] = "--ray=local"
    return found


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Entry point of `qklab`: bad input ends in one sentence on stderr and exit code 2."""
    parsers: list[Any] = [
        Annotated[flags, tyro.conf.subcommand(name, description=run.__doc__)] for name, (flags, run) in COMMANDS.items()
    ]
    either: Any = functools.reduce(operator.or_, parsers)
    try:
        words = with_ray_address(sys.argv[1:] if arguments is None else arguments)
        chosen = tyro.cli(either, prog="qklab", description="Attention, between Q and K.", args=words)
        code = next(run for flags, run in COMMANDS.values() if isinstance(chosen, flags))(chosen)
    except ValueError as error:
        if int(os.environ.get("RANK", 0)) == 0:  # of many ranks one speaks
            print(f"qklab: {error}", file=sys.stderr)
        code = getattr(error, "code", 2)
    except KeyboardInterrupt:
        print("qklab: stopped at once; what was saved before is still there.", file=sys.stderr)
        code = 130
    except BrokenPipeError:  # the reader, e.g. `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    sys.exit(code)


if __name__ == "__main__":
    main()
