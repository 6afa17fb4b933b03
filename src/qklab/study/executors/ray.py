"""The executor of a Ray cluster: each unit a task that asks for its CPUs or its GPU, on whichever node has room.

The study's folder must be on a file system that all nodes share, with locks that hold between them, or at a URL. On its
node a task carries out the unit as `LocalExecutor` does. When a worker or a node is lost Ray begins the task anew, and
its runs go on from their checkpoints, after whoever may still be saving them elsewhere; when the study is lost, so are
its tasks, and their runs save their state and stop.
"""

import functools
import importlib
import logging
import os
import platform
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import qklab
from qklab import register
from qklab.data.prepare import prepare_corpus
from qklab.runs.files import describe_os_error
from qklab.study.executors import ATTEMPTS, SAVING, Attempts, RunTask, Unit, WorkerSlots
from qklab.study.executors.local import LocalExecutor
from qklab.study.records import holds_study, read_study_record
from qklab.study.remote import RemoteStudy
from qklab.study.spec import StudyError
from qklab.train.spec import RunSpec

OBJECT_STORE = 80 * 2**20  # bytes; nothing but settings travels between the nodes
UNLIMITED = 10_000  # units at a time where nobody set a limit: the cluster's own resources are the limit
TRIES = 4  # to join or start a cluster
CANCEL = 5.0  # seconds until a task that was asked to stop is asked again
POLL = 0.1
SHARED = "the study's folder must be on a file system that all nodes of the Ray cluster share."


@register.executor("ray")
class RayExecutor:
    """Units as tasks on the Ray cluster at `address`; None: a cluster on this machine, for this study."""

    def __init__(
        self,
        device: str = "auto",
        at_once: int | None = None,
        address: str | None = None,
        say: Callable[[str], None] = print,
    ):
        self.say = say
        self.units: dict[Any, Attempts] = {}
        self.reported: set[str] = set()
        self.sigterm, self.own = signal.getsignal(signal.SIGTERM), connect(address)
        nodes = [node["Resources"] for node in import_ray().nodes() if node["Alive"]]
        self.slots = share_nodes(nodes, device, at_once)
        wanted = {"CPU": self.slots.threads, "GPU": 1 if self.slots.gpus else 0}
        if not any(all(node.get(name, 0) >= count for name, count in wanted.items()) for node in nodes):
            words = " and ".join(f"{count} {name}{'s' * (count > 1)}" for name, count in wanted.items() if count)
            say(f"no node of the Ray cluster has {words}; the runs wait until one joins.")

    @property
    def free(self) -> int:
        return self.slots.count - len(self.units)

    def submit(self, unit: Unit) -> None:
        self.start(Attempts(unit))

    def start(self, attempts: Attempts) -> None:
        attempts.count += ATTEMPTS  # Ray itself begins a lost task anew so often
        options = {"num_cpus": self.slots.threads, "num_gpus": 1 if self.slots.gpus else 0}
        task = remote_task().options(max_retries=ATTEMPTS - 1, scheduling_strategy="SPREAD", **options)
        self.units[task.remote(NodeOrder.of(attempts.unit, self.slots))] = attempts

    def wait(self, seconds: float) -> list[RunTask]:
        if not self.units:
            return []
        ready, _ = import_ray().wait(list(self.units), num_returns=len(self.units), timeout=seconds)
        ended: list[RunTask] = []
        for ref in ready:
            attempts = self.units.pop(ref)
            if was_carried_out(ref):
                ended += attempts.unit.tasks
            elif attempts.may_retry():
                self.say(f"{attempts.unit.tasks[0].name}: its Ray worker or node was lost; it is resumed.")
                self.start(attempts)
            else:
                raise StudyError(
                    f"the run {attempts.unit.tasks[0].name} failed: its Ray worker or node was lost "
                    f"{ATTEMPTS} times without its getting further."
                )
        for attempts in self.units.values():
            if len(attempts.unit.tasks) > 1:
                ended += [task for task in attempts.unit.tasks if task.ended]
        new = [task for task in ended if task.name not in self.reported]
        self.reported.update(task.name for task in new)
        return new

    def stop(self) -> int:
        """Ask more than once: Ray drops a request that comes before the task listens."""
        refs, until = list(self.units), time.monotonic() + 1.1 * SAVING
        self.units.clear()
        while refs and (left := until - time.monotonic()) > 0:
            for ref in refs:
                import_ray().cancel(ref)
            _, refs = import_ray().wait(refs, num_returns=len(refs), timeout=min(CANCEL, left))
        return len(refs)

    def close(self) -> None:
        self.stop()
        if self.own:
            import_ray().shutdown()
            with suppress(ValueError):  # not in the main thread, where Ray has left the handler alone too
                signal.signal(signal.SIGTERM, self.sigterm)


def share_nodes(nodes: Sequence[Mapping[str, float]], device: str, at_once: int | None) -> WorkerSlots:
    """What each unit gets: a GPU and its share of the node's CPUs where the cluster has GPUs, else one CPU."""
    gpus = [node for node in nodes if node.get("GPU", 0) >= 1]
    if device == "cuda" and not gpus:
        raise StudyError("no node of the Ray cluster has a GPU, but device=cuda came; add one or leave device out.")
    count = UNLIMITED if at_once is None else at_once
    if device == "cpu" or not gpus:
        return WorkerSlots(count, 1)
    return WorkerSlots(count, max(1, int(min(node.get("CPU", 1) // node["GPU"] for node in gpus))), (0,))


def import_ray() -> Any:
    try:
        return importlib.import_module("ray")
    except ImportError:
        raise StudyError("a study on a cluster needs Ray, which is not installed: pip install 'qklab[ray]'.") from None


@functools.cache
def remote_task() -> Any:
    return import_ray().remote(perform_on_node)


def connect(address: str | None) -> bool:
    """Join the cluster, or start one for this study; whether that was done, since one already joined is kept."""
    ray = import_ray()
    if ray.is_initialized():
        return False
    if address is not None:
        refuse_unreachable(address)
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
    own = {
        "object_store_memory": OBJECT_STORE,
        "include_dashboard": False,
        "num_cpus": WorkerSlots.of_machine("cpu").count,
    }
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
    return True


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


def was_carried_out(ref: Any) -> bool:
    """Whether a task has done its unit; False if it, its worker or its node was lost. Its errors are raised."""
    ray = import_ray()
    try:
        return ray.get(ref)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, StudyError):
            raise error.cause from None
        if isinstance(error, ray.exceptions.TaskCancelledError):
            return False
        if "No module named 'qklab" in str(error):
            raise StudyError("a node of the Ray cluster lacks qklab; install the same version on all nodes.") from None
        said = str(error).strip().splitlines()
        raise StudyError(f"a task failed on a node of the Ray cluster: {said[-1].strip().rstrip('.')}.") from None
    except ray.exceptions.RayError:
        return False


# On a node


@dataclass(frozen=True)
class NodeOrder:
    """A unit as a node gets it, with what the node must have in common with the machine of the study."""

    unit: Unit
    slots: WorkerSlots
    version: str
    directory: str
    environment: dict[str, str]

    @classmethod
    def of(cls, unit: Unit, slots: WorkerSlots) -> "NodeOrder":
        environment = {name: value for name, value in os.environ.items() if name.startswith("QKLAB_")}
        return cls(unit, replace(slots, count=1), qklab.__version__, os.getcwd(), environment)


def perform_on_node(order: NodeOrder) -> bool:
    """Inside a worker of Ray: the unit in a process of its own; whether it was done, False if the task was cancelled.

    However this worker ends, the runs save their state and stop. Ray cancels a task by SIGINT, which is ignored where
    the cluster was started in a script's background; it is looked at between reports, since an exception might come
    between a process and the note that it is there.
    """
    cancelled: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: cancelled.append(number))
    try:
        unit = prepare_node(order)
        executor = LocalExecutor("cpu")
        executor.slots = order.slots
        main = sys.modules["__main__"]
        try:
            sys.modules["__main__"] = ModuleType("__main__")  # Ray's own, which processes would import once more
            executor.submit(unit)
            while executor.running and not cancelled:
                executor.wait(POLL)
            return not executor.running
        finally:
            executor.stop()
            sys.modules["__main__"] = main
    finally:
        signal.signal(signal.SIGINT, before)


def prepare_node(order: NodeOrder) -> Unit:
    """See that the unit can be done on this node; the unit with folders of this node where the study is at a URL."""
    if os.path.isdir(order.directory):
        os.chdir(order.directory)  # a corpus may be named by a path from there
    os.environ.update(order.environment)
    unit = order.unit
    if unit.url is not None:
        remote = RemoteStudy(unit.url, RemoteStudy(unit.url).local / "node")
        remote.fetch_study()
        tasks = [replace(task, folder=remote.local / task.folder.relative_to(unit.study)) for task in unit.tasks]
        unit = replace(unit, study=remote.local, tasks=tuple(tasks))
    refuse_unfit_node(replace(order, unit=unit), platform.node())
    return unit


def refuse_unfit_node(order: NodeOrder, node: str) -> None:
    """Refuse a node that would make other runs than those that are meant."""
    unit = order.unit
    if qklab.__version__ != order.version:
        raise StudyError(
            f"the node {node} has qklab {qklab.__version__}, but the study was started with {order.version}; install "
            "the same version on all nodes."
        )
    record = read_study_record(unit.study) if holds_study(unit.study) else None
    if record is None or record.spec.fingerprint != unit.fingerprint:
        raise StudyError(f"the node {node} does not see this study in {unit.study}; {SHARED}")
    for spec in {RunSpec.from_dict(task.spec).corpus for task in unit.tasks}:
        try:
            corpus = prepare_corpus(spec, data=unit.data)
        except ValueError as error:
            raise StudyError(f"the node {node} cannot prepare the corpus: {error}") from None
        if corpus.hash != record.find_hash(spec.to_dict()):
            raise StudyError(
                f"the corpus {spec.source} is another text on the node {node} than where the study was started; put "
                "one copy on the shared file system and name it by its path."
            )
