import dataclasses
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from tyro.conf import Positional


@dataclasses.dataclass(frozen=True)
class StudyCommand:
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

    @staticmethod
    def complete_words(words: Sequence[str]) -> list[str]:
        """A --ray without an address means a cluster on this machine."""
        completed = list(words)
        for i, word in enumerate(words):
            if word == "--ray" and (i + 1 == len(words) or words[i + 1].startswith("--")):
                completed[i] = "--ray=local"
        return completed

    def execute(self) -> int:
        from qklab.study.execute import Slots, Study
        from qklab.study.mirror import Mirror, is_url
        from qklab.study.plan import file_name
        from qklab.study.spec import read_study
        from qklab.train.progress import Terminal

        spec, display = read_study(self.file), Terminal()
        if self.seeds is not None:
            spec = spec.replace(seeds=self.seeds)
        out = self.out or str(Path("runs") / file_name(spec.name.replace(" ", "-").lower()))
        mirror = Mirror(out, say=display.say) if is_url(out) else None
        folder = Path(out) if mirror is None else mirror.local
        words = ["qklab", "study", str(self.file), "--out", out]
        for name in ("rows", "ray", "data"):
            if getattr(self, name) is not None:
                words += [f"--{name}", str(getattr(self, name))]
        command = f"{shlex.join(words)} --seeds {{total}}"
        if self.ray is None:
            study = Study(spec, folder, data=self.data, execution={"rows": self.rows}, mirror=mirror)
            return execute_and_report(study, lambda: Slots.of_machine(self.device, self.at_once), display, command)
        from qklab.study.ray_executor import RayStudy

        address = None if self.ray == "local" else self.ray
        cluster = RayStudy(spec, folder, data=self.data, execution={"rows": self.rows}, mirror=mirror, address=address)
        return execute_and_report(cluster, lambda: cluster.slots(self.device, self.at_once), display, command)


def execute_and_report(study: Any, slots: Callable[[], Any], display: Any, command: str) -> int:
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
    print(f"\nThe pictures: {report.build_report([study.folder], study.folder / 'report.html')}")
    if study.mirror is not None:
        for name in ("looks.json", "report.html"):
            study.mirror.put(name)
        print(f"All of it is in {study.mirror.url}.")
    return 0
