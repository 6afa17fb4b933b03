"""Carry out a study on a Ray cluster: each run a task that asks for its CPUs or its GPU, on whichever node has room.

The study's folder must be on a file system that all nodes share, with locks that hold between them. As with local
processes the run directories alone say what is done. A run whose worker or node is lost is submitted again and goes on
from its checkpoint, after whoever may still be saving it elsewhere. When this process is lost, so are its tasks, and
their runs save their state and stop.
"""

import functools
import importlib
import json
import logging
import os
import platform
import signal
import socket
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import qklab
from qklab.data.prepare import prepare_corpus
from qklab.runs.files import append_line, describe_os_error
from qklab.study.execute import POLL, Active, Slots, Study, read_data, read_spec
from qklab.study.mirror import Mirror
from qklab.study.plan import Planned
from qklab.study.results import Result
from qklab.study.spec import StudyError, StudySpec
from qklab.study.worker import SAVING, Ended, Nursery
from qklab.train.launch import EXIT_CODES
from qklab.train.progress import Display
from qklab.train.signals import StopRequest
from qklab.train.spec import RunSpec

OBJECT_STORE = 80 * 2**20  # bytes; nothing but exit codes travels between the nodes
ROOM = 10_000  # runs at a time where nobody set a limit: the cluster's own resources are the limit
TRIES = 4  # to join or start a cluster
SEEN = 90.0  # seconds until a file written on one node must be visible on another
ASK = 5.0  # seconds until a task that was asked to stop is asked again
ENDED = (EXIT_CODES["finished"], EXIT_CODES["diverged"])
SHARED = "the study's folder must be on a file system that all nodes of the Ray cluster share."


class RayStudy(Study):
    """A study whose runs are tasks on the Ray cluster at `address`; None: a cluster on this machine, for this study."""

    def __init__(
        self,
        spec: StudySpec,
        folder: Path,
        *,
        data: Path | None = None,
        execution: Mapping[str, Any] | None = None,
        mirror: Mirror | None = None,
        address: str | None = None,
    ):
        data = None if data is None else data.absolute()
        super().__init__(spec, folder.absolute(), data=data, execution=execution, mirror=mirror)
        self.address = address

    @contextmanager
    def opened(self) -> Iterator["RayStudy"]:
        library()
        with super().opened(), connected(self.address):
            self.starter = Tasks(self.folder, self.spec.fingerprint)
            yield self

    def slots(self, device: str = "auto", at_once: int | None = None) -> Slots:
        """What each run gets: a GPU and its share of the node's CPUs where the cluster has GPUs, else one CPU."""
        nodes = [node["Resources"] for node in library().nodes() if node["Alive"]]
        gpus = [node for node in nodes if node.get("GPU", 0) >= 1]
        if device == "cuda" and not gpus:
            raise StudyError("no node of the Ray cluster has a GPU, but device=cuda came; add one or leave device out.")
        count = ROOM if at_once is None else at_once
        if device == "cpu" or not gpus:
            return Slots(count, 1)
        return Slots(count, max(1, int(min(node.get("CPU", 1) // node["GPU"] for node in gpus))), (0,))

    def perform(
        self, planned: Sequence[Planned], slots: Slots, display: Display, stop: StopRequest, total: int
    ) -> list[Result]:
        wanted = {"CPU": slots.threads, "GPU": 1 if slots.gpus else 0}
        if self.left(planned) and not has_room(library().nodes(), wanted):
            told = " and ".join(f"{count} {name}{'s' * (count > 1)}" for name, count in wanted.items() if count)
            display.say(f"no node of the Ray cluster has {told}; the runs wait until one joins.")
        return super().perform(planned, slots, display, stop, total)

    def ended(self, run: Active, code: int | None, display: Display) -> bool:
        until = time.monotonic() + SEEN
        while code in ENDED and self.result(run.planned) is None:
            if time.monotonic() > until:
                raise StudyError(f"the run {run.planned.name} ended, but its result is not in {self.folder}; {SHARED}")
            time.sleep(POLL)
        return super().ended(run, code, display)

    def why(self, run: Active, code: int | None) -> str:
        return "its Ray worker or node was lost" if code is None else super().why(run, code)

    def tell(self, active: Iterable[Active], total: int, display: Display) -> None:
        started = [run for run in active if run.log.exists() and run.log.stat().st_size > run.said]
        if started:
            super().tell(started, total, display)
        else:
            display.show(len(self.known) / total, f"{len(self.known)}/{total} runs · waiting for a node with room")


class Tasks:
    """Runs as tasks of Ray, with a nursery in each of its workers."""

    lost = False

    def __init__(self, folder: Path, fingerprint: str):
        self.folder, self.fingerprint = folder, fingerprint
        self.count = 0
        self.numbers: dict[Any, int] = {}

    def start(self, task: Mapping[str, Any], log: Path, environment: Mapping[str, str]) -> int:
        """Submit a run. Which GPU it sees is Ray's to say."""
        del environment
        order = {
            "study": str(self.folder),
            "fingerprint": self.fingerprint,
            "version": qklab.__version__,
            "log": str(log),
            "from": os.getcwd(),
            "environment": {name: value for name, value in os.environ.items() if name.startswith("QKLAB_")},
            "task": dict(task),
        }
        execution = task["execution"]
        options = {"num_cpus": execution["threads"], "num_gpus": 1 if execution["device"] == "cuda" else 0}
        ref = remote_attempt().options(max_retries=0, scheduling_strategy="SPREAD", **options).remote(order)
        self.count += 1
        self.numbers[ref] = self.count
        return self.count

    def ended(self, patience: float) -> Ended:
        if not self.numbers:
            return []
        ready, _ = library().wait(list(self.numbers), num_returns=len(self.numbers), timeout=patience)
        return [(self.numbers.pop(ref), code_of(ref)) for ref in ready]

    def stop(self) -> int:
        """Ask more than once: Ray drops a request that comes before the task listens."""
        refs, until = list(self.numbers), time.monotonic() + 1.1 * SAVING
        self.numbers.clear()
        while refs and (left := until - time.monotonic()) > 0:
            for ref in refs:
                library().cancel(ref)
            _, refs = library().wait(refs, num_returns=len(refs), timeout=min(ASK, left))
        return len(refs)

    def close(self) -> None: ...


def library() -> Any:
    try:
        return importlib.import_module("ray")
    except ImportError:
        raise StudyError("a study on a cluster needs Ray, which is not installed: pip install 'qklab[ray]'.") from None


@functools.cache
def remote_attempt() -> Any:
    return library().remote(attempt)


@contextmanager
def connected(address: str | None) -> Iterator[None]:
    """Connected to the cluster, which one started for this study does not outlive; one already connected to is kept."""
    ray = library()
    if ray.is_initialized():
        yield
        return
    if address is not None:
        refuse_unreachable(address)
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
    own = {"object_store_memory": OBJECT_STORE, "include_dashboard": False, "num_cpus": Slots.of_machine("cpu").count}
    before = signal.getsignal(signal.SIGTERM)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # otherwise Ray reports to its makers
    for tries in range(TRIES):
        try:
            ray.init(address=address or "local", **quiet, **({} if address else own))
            break
        except (OSError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
            ray.shutdown()
            if tries < TRIES - 1 and not isinstance(error, ValueError):
                continue  # a busy machine answers late, and Ray gives up early
            said = str(error).strip().splitlines()
            where = f"the Ray cluster at {address} cannot be joined" if address else "no Ray cluster can be started"
            raise StudyError(f"{where}: {said[0].rstrip('.') if said else type(error).__name__}.") from None
    try:
        yield
    finally:
        ray.shutdown()
        with suppress(ValueError):  # not in the main thread, where Ray has left the handler alone too
            signal.signal(signal.SIGTERM, before)


def refuse_unreachable(address: str) -> None:
    """Ray itself would try for minutes."""
    if address == "auto":
        return
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise StudyError(
            f"the address of a Ray cluster must be HOST:PORT, or auto for the one this machine is part of, but "
            f"{address!r} came."
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
    except OSError as error:
        raise StudyError(
            f"no Ray cluster answers at {address}: {describe_os_error(error)}; start one there with: ray start --head."
        ) from None


def has_room(nodes: Sequence[dict[str, Any]], wanted: Mapping[str, int]) -> bool:
    return any(
        node["Alive"] and all(node["Resources"].get(name, 0) >= count for name, count in wanted.items())
        for node in nodes
    )


def code_of(ref: Any) -> int | None:
    """The exit code of a run's process; None if the task, its worker or its node was lost."""
    ray = library()
    try:
        return ray.get(ref)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, StudyError):
            raise error.cause from None
        if isinstance(error, ray.exceptions.TaskCancelledError):
            return None
        if "No module named 'qklab" in str(error):
            raise StudyError("a node of the Ray cluster lacks qklab; install the same version on all nodes.") from None
        said = str(error).strip().splitlines()
        raise StudyError(f"a task failed on a node of the Ray cluster: {said[-1].strip().rstrip('.')}.") from None
    except ray.exceptions.RayError:
        return None


NURSERIES: dict[int, Nursery] = {}  # threads → in a worker of Ray, kept from run to run


def attempt(order: dict[str, Any]) -> int | None:
    """On a node, inside a worker of Ray: one run in a process of its own; its exit code, None if it was lost or
    the task was cancelled.

    However this worker ends, its nursery goes with it, and the run saves its state and stops. Ray cancels a task by
    SIGINT, which is ignored where the cluster was started in a script's background.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return attended(order, readied(order))
    finally:
        signal.signal(signal.SIGINT, before)


def readied(order: dict[str, Any]) -> Mirror | None:
    """See that the run can be done on this node; the mirror of a study that has a URL."""
    if os.path.isdir(order["from"]):
        os.chdir(order["from"])  # a corpus may be named by a path from there
    os.environ.update(order["environment"])
    mirror = settled(order)
    task, log, node = order["task"], Path(order["log"]), platform.node()
    refuse_unfit(order, node)
    append_line(log, f"on the node {node}:")
    if mirror is not None:
        mirror.put_log(place_of(task))
    return mirror


def attended(order: Mapping[str, Any], mirror: Mirror | None) -> int | None:
    """Do the run until it ends or the task is cancelled, which is looked at between the nursery's reports: an exception
    might come between a run and the note that it is there, or lose the report that it is over."""
    asked: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: asked.append(number))
    task, threads = order["task"], order["task"]["execution"]["threads"]
    if threads in NURSERIES and NURSERIES[threads].lost:
        NURSERIES.pop(threads).close()
    if threads not in NURSERIES:
        NURSERIES[threads] = Nursery(Path(order["study"], "logs", "processes.log"), {"OMP_NUM_THREADS": str(threads)})
    nursery = NURSERIES[threads]
    gpus = {name: value for name, value in os.environ.items() if name == "CUDA_VISIBLE_DEVICES"}
    try:
        number, ended = nursery.start(task, Path(order["log"]), order["environment"] | gpus), dict[int, int | None]()
        while number not in ended and not asked:
            ended = dict(nursery.ended(POLL))
        return ended.get(number)
    finally:
        nursery.stop()  # where the study is stopped; the run saves its state first
        if mirror is not None:
            with suppress(StudyError):  # the run itself has told more of it
                mirror.put_log(place_of(task))


def settled(order: dict[str, Any]) -> Mirror | None:
    """Where the study has a URL: let the order mean folders of this node, and bring what is not the run's own."""
    task = order["task"]
    if task["url"] is None:
        return None
    mirror, place = Mirror(task["url"]), place_of(task)
    mirror.fetch_study()
    order["task"] = task | {"folder": str(mirror.local / "runs" / place)}
    order |= {"study": str(mirror.local), "log": str(mirror.fetch_log(place))}
    return mirror


def place_of(task: Mapping[str, Any]) -> Path:
    return Path(*Path(task["folder"]).parts[-3:])


def refuse_unfit(order: Mapping[str, Any], node: str) -> None:
    """Refuse a node that would make another run than the one that is meant."""
    if qklab.__version__ != order["version"]:
        raise StudyError(
            f"the node {node} has qklab {qklab.__version__}, but the study was started with {order['version']}; "
            "install the same version on all nodes."
        )
    path = Path(order["study"], "study.json")
    if not path.exists() or read_spec(path).fingerprint != order["fingerprint"]:
        raise StudyError(f"the node {node} does not see this study in {order['study']}; {SHARED}")
    spec = RunSpec.from_dict(order["task"]["spec"]).corpus
    try:
        corpus = prepare_corpus(spec, data=order["task"]["data"])
    except ValueError as error:
        raise StudyError(f"the node {node} cannot prepare the corpus: {error}") from None
    wanted = [entry["hash"] for entry in read_data(path) if entry["spec"] == json.loads(json.dumps(spec.to_dict()))]
    if corpus.hash not in wanted:
        raise StudyError(
            f"the corpus {spec.source} is another text on the node {node} than where the study was started; put one "
            "copy on the shared file system and name it by its path."
        )
