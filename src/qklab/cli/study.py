import contextlib
import dataclasses
import shlex
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from tyro.conf import Positional


@dataclasses.dataclass(frozen=True)
class StudyCommand:
    """Carry out a study: arms × seeds × corpora × learning rates from a TOML file, and judge it.

    Args:
        file: the study's TOML file
        merge: unite these folders, slices of one study that were done on different machines, in --out
        out: its folder, or a URL (s3://…, gs://…, file://…); by default runs/ and the study's name; what is there is
            continued
        seeds: how many seeds instead of what the file says: a study can be given more, not fewer
        device: cpu or cuda; auto takes GPUs if there are any
        at_once: processes at a time; by default one per core or GPU
        rows: windows per forward pass, where a whole batch does not fit into memory
        population: how many runs that differ in seed and learning rate are trained as one model: a number, off, or
            auto, which does so on a GPU
        compile: yes or no for all runs; by default on a GPU where the study is long enough to gain by it
        minutes: begin only what can end in so many minutes, and stop; the same command continues
        only: begin runs of these arms alone, since other machines do the others; --merge unites them
        keep: how many checkpoints of a run stay beside its best; 0: none once it has ended
        ray: run on the Ray cluster at this address; without an address on one started on this machine
        executor: where runs are carried out: local, ray, or what a package registered
        data: where corpora are looked for by name; by default $QKLAB_DATA
    """

    file: Positional[Path | None] = None
    merge: tuple[Path, ...] = ()
    out: str | None = None
    seeds: int | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    at_once: int | None = None
    rows: int | None = None
    population: str = "auto"
    compile: Literal["yes", "no"] | None = None
    minutes: float | None = None
    only: tuple[str, ...] = ()
    keep: int = 1
    ray: str | None = None
    executor: str | None = None
    data: Path | None = None

    @staticmethod
    def complete_words(words: Sequence[str]) -> list[str]:
        """A --ray without an address means a cluster on this machine."""
        completed = list(words)
        for i, word in enumerate(words):
            if word == "--ray" and (i + 1 == len(words) or words[i + 1].startswith("--")):
                completed[i] = "--ray=local"
        return completed

    def execute(self) -> int:
        from qklab import register
        from qklab.runs.progress import Terminal
        from qklab.study.execute import Study
        from qklab.study.plan import encode_file_name
        from qklab.study.remote import RemoteStudy, is_url
        from qklab.study.spec import read_study

        if self.merge:
            return self.merge_slices()
        if self.file is None:
            raise ValueError("a study needs its TOML file, e.g. qklab study studies/a1.toml.")
        spec, display = read_study(self.file), Terminal()
        if self.seeds is not None:
            spec = spec.replace(seeds=self.seeds)
        out = self.out or str(Path("runs") / encode_file_name(spec.name.replace(" ", "-").lower()))
        execution = {"rows": self.rows, "population": self.population, "keep": self.keep}
        execution |= {} if self.compile is None else {"compile": self.compile}
        settings: dict[str, Any] = {"data": self.data, "execution": execution, "only": self.only}
        words = ["qklab", "study", str(self.file), "--out", out]
        for name in ("rows", "compile", "executor", "ray", "data"):
            if getattr(self, name) is not None:
                words += [f"--{name}", str(getattr(self, name))]
        make = register.executor[self.executor or ("local" if self.ray is None else "ray")]
        address = None if self.ray == "local" else self.ray
        command = f"{shlex.join(words)} --seeds {{total}}"

        def make_executor() -> Any:
            return make(self.device, self.at_once, address, display.say)

        def make_study(part: Any, folder: Path, minutes: float | None) -> Study:
            return Study(part, folder, minutes=minutes, **settings)

        if spec.sizes:
            if is_url(out):
                raise ValueError(f"a study of several sizes needs a folder, but {out} came; name one with --out.")
            return execute_sizes(
                spec, Path(out), make_study, lambda _: make_executor(), display, command, minutes=self.minutes
            )
        remote = RemoteStudy(out, say=display.say) if is_url(out) else None
        folder = Path(out) if remote is None else remote.local
        return execute_and_report(
            Study(spec, folder, remote=remote, minutes=self.minutes, **settings), make_executor, display, command
        )

    def merge_slices(self) -> int:
        from qklab.study.merge import merge_studies

        if self.file is not None or self.out is None:
            raise ValueError("a merge takes folders and --out, e.g. qklab study --merge one two --out runs/all.")
        print(merge_studies(self.merge, Path(self.out)).describe())
        return 0


def execute_sizes(
    spec: Any,
    folder: Path,
    make_study: Callable[[Any, Path, float | None], Any],
    make_executor: Callable[[Any], Any],
    display: Any,
    command: str,
    minutes: float | None = None,
) -> int:
    """Do what is left of a study at each of its sizes in turn, print what holds across them, and build one report.

    `make_study` makes the study of a size in its folder, with so many minutes left, and `make_executor` its executor.
    """
    from qklab import report
    from qklab.study.across import compare_across
    from qklab.study.answer import write_across, write_corpora
    from qklab.study.parts import find_size_folder, read_parts
    from qklab.study.records import StudyRecord, explain_file_errors
    from qklab.study.sizes import split_sizes

    parts = split_sizes(spec)
    for part in parts.values():  # all of it, before anything runs
        part.refuse_illegal()
    if (folder / "runs").exists():
        raise ValueError(f"{folder} holds a study of one size; choose another folder with --out.")
    with explain_file_errors():
        folder.mkdir(parents=True, exist_ok=True)
        StudyRecord(spec, []).write(folder)
    until = None if minutes is None else time.monotonic() + 60 * minutes
    for size, part in parts.items():
        left = None if until is None else max(0.01, (until - time.monotonic()) / 60)
        study = make_study(part, find_size_folder(folder, size), left)
        results, analyses = carry_out_study(study, lambda part=part: make_executor(part), display, command)
        print(f"\n{size}\n\n{write_corpora(part, results, analyses)}")
    print(f"\n{write_across(compare_across(*read_parts(folder)))}")
    print(f"\nThe pictures: {report.build_report([folder], folder / 'report.html')}")
    return 0


def carry_out_study(study: Any, make_executor: Callable[[], Any], display: Any, command: str) -> tuple[Any, Any]:
    """Do what is left of a study, and count the analysis; its results, and the analyses it has had."""
    from qklab.study.records import read_analyses

    try:
        with study.open(), contextlib.closing(make_executor()) as executor:
            results = study.carry_out(executor, display)
            analyses = read_analyses(study.folder).add(
                study.spec.seeds, executor.slots.count, command, study.asked.get("run_seconds")
            )
            analyses.write(study.folder)
            if study.remote is not None:
                study.remote.send_study()
                study.remote.fetch_records(checkpoints=True)
    finally:
        display.close()
    return results, analyses


def execute_and_report(study: Any, make_executor: Callable[[], Any], display: Any, command: str) -> int:
    """Do what is left of a study, print its answer and build its report."""
    from qklab import report
    from qklab.study.answer import write_answer

    results, analyses = carry_out_study(study, make_executor, display, command)
    print(f"\n{write_answer(study.spec, results, analyses)}")
    print(f"\nThe pictures: {report.build_report([study.folder], study.folder / 'report.html')}")
    if study.remote is not None:
        study.remote.send_report()
        print(f"All of it is in {study.remote.url}.")
    return 0
