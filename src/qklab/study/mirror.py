"""A study whose folder is a URL: s3://, gs://, file:// or whatever else fsspec and its plugins know.

A run always trains in a local folder. `Mirror` brings the run there before it begins and carries it back as it goes, so
that a machine which never saw the run continues it. The URL has the layout of a local study, and two things more: in
every run `holder.json`, which names the one who carries it, and in every checkpoint the run's metrics.jsonl up to then.
"""

import hashlib
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

from qklab.study.carry import Carrier, is_json, write_file
from qklab.study.remote import Store
from qklab.study.spec import StudyError
from qklab.train.signals import StopRequest

ASIDE = ".next"
ORPHAN = 600.0  # seconds that a process still carrying a run on this machine is waited for


def is_url(text: str) -> bool:
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", text) is not None


def cache_of(url: str) -> Path:
    """Where the study at `url` lives on this machine."""
    root = Path(os.environ.get("QKLAB_CACHE") or Path.home() / ".cache" / "qklab")
    name = re.sub(r"[^A-Za-z0-9]+", "-", url).strip("-")[-40:]
    return (root / "studies" / f"{name}-{hashlib.sha256(url.rstrip('/').encode()).hexdigest()[:12]}").absolute()


def told(sentence: str) -> None:
    print(sentence, flush=True)


def carried(url: str | None, folder: Path) -> AbstractContextManager[None]:
    """The run in `folder`, of the study at `url`, brought and carried; nothing if the study has no URL."""
    return nullcontext() if url is None else Mirror(url, folder.parents[3]).carrying(Path(*folder.parts[-3:]))


class Mirror:
    """A study at a URL and its folder on this machine, `local`; by default one in the cache."""

    def __init__(self, url: str, local: Path | None = None, say: Callable[[str], None] = told):
        self.url, self.store, self.local = url, Store(url, say), local or cache_of(url)

    def carrier(self, place: Path) -> Carrier:
        return Carrier(self.store, self.local / "runs" / place, place.as_posix())

    @contextmanager
    def carrying(self, place: Path) -> Iterator[None]:
        """Bring the run at `place` before it trains, carry it while it does, and end when all of it is at the URL."""
        run = self.carrier(place)
        with run.alone(ORPHAN) as alone:
            if not alone:
                raise StudyError(f"{run.folder} is still carried by another process; end it and run the command again.")
            run.begin()
            done = threading.Event()
            thread = threading.Thread(target=run.keep_carrying, args=(done,), name="mirror", daemon=True)
            thread.start()
            try:
                yield
            finally:
                done.set()
                thread.join()
                with StopRequest():  # a request to stop that comes now is being followed
                    run.carry(everything=True)

    def fetch_study(self) -> None:
        """Bring study.json, where the URL has one."""
        if not self.fetch("study.json") and next(self.local.glob("runs/*/*/*/run.json"), None) is not None:
            raise StudyError(
                f"{self.url} holds no study, but {self.local} has runs of one that was there; delete that folder to "
                "begin anew."
            )

    def fetch(self, name: str) -> bool:
        """Bring a JSON file of the study; whether the URL has it."""
        content, aside = self.store.read(name), self.store.read(f"{name}{ASIDE}")
        if aside is not None and is_json(aside) and (content is None or not is_json(content)):
            self.store.write(name, aside)  # whoever was writing it died
            content = aside
        if content is None or not is_json(content):
            return False
        write_file(self.local / name, content)
        return True

    def fetch_results(self, places: Iterable[Path] | None = None, *, checkpoints: bool = False) -> None:
        """Bring the records and logs of runs (of all, if not told which), and if asked for the newest checkpoint of
        those that ended. A run that ended here and could not be carried is carried now."""
        if places is None:
            known = {path.parent.relative_to(self.local / "runs") for path in self.local.glob("runs/*/*/*/run.json")}
            names = self.store.sizes("runs")
            places = sorted(known | {Path(name).parent for name in names if name.endswith("/run.json")})
        for place in places:
            run = self.carrier(place)
            if run.at_home():
                with run.alone() as alone:
                    left = alone and run.left()
                if left:
                    with self.carrying(place):
                        pass
                continue
            if not run.ended():
                self.fetch_log(place)
            with run.alone() as alone:
                if alone:
                    run.bring_results(checkpoints=checkpoints)

    def newest(self, place: Path) -> str:
        """The name of a run's newest checkpoint, at the URL or here."""
        run = self.carrier(place)
        run.survey()
        return max((*run.whole, *run.here()), default="")

    def fetch_log(self, place: Path) -> Path:
        """Bring the log of a run, unless more of it is here; where it is."""
        path, content = self.local / log_of(place), self.store.read(log_of(place)) or b""
        path.parent.mkdir(parents=True, exist_ok=True)
        if len(content) > (path.stat().st_size if path.exists() else 0):
            write_file(path, content)
        return path

    def put_log(self, place: Path) -> None:
        self.put(log_of(place))

    def put(self, name: str) -> None:
        """Carry a file of the study to the URL. A JSON file goes there twice, so that one is always whole."""
        content = (self.local / name).read_bytes()
        if not name.endswith(".json"):
            self.store.write(name, content)
        elif content != self.store.read(name):
            self.store.write(f"{name}{ASIDE}", content)
            self.store.write(name, content)
            self.store.delete(f"{name}{ASIDE}")


def log_of(place: Path) -> str:
    return f"logs/{place.as_posix()}.log"
