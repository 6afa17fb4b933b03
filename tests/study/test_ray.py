"""A study on a Ray cluster is the same study, whatever happens to its processes and nodes meanwhile."""

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from small_study import (
    TWO,
    Told,
    alive,
    caught,
    check_saved,
    check_whole,
    let_go,
    let_go_when_asked,
    parent,
    resumes,
    small,
    unfinished,
    until,
)

from qklab.study import execute, ray_executor
from qklab.study.execute import Active, Slots, Study, StudyInterrupted, read_data
from qklab.study.plan import Planned, confirming, tuning
from qklab.study.ray_executor import RayStudy, Tasks, attempt, refuse_unfit
from qklab.study.results import chosen_lrs
from qklab.study.spec import StudyError, StudySpec
from qklab.study.worker import in_use
from qklab.train.progress import Silent
from qklab.train.signals import StopRequest


@pytest.fixture
def cluster() -> Iterator[Any]:
    """A cluster of one node with one CPU, which ignores SIGINT like all that a script starts in the background."""
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    quick = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500, "health_check_failure_threshold": 10}
    node = {"num_cpus": 1, "object_store_memory": 80 * 2**20, "include_dashboard": False, "_system_config": quick}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_worker_niceness", "0")  # runs would wait for every other test on this machine
        before, heeded = signal.getsignal(signal.SIGTERM), signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            cluster = Cluster(initialize_head=True, head_node_args=node)
        finally:
            signal.signal(signal.SIGINT, heeded)
        try:
            yield cluster
        finally:
            cluster.shutdown()
            signal.signal(signal.SIGTERM, before)


def on_cluster(spec: StudySpec, folder: Path, address: str) -> None:
    with RayStudy(spec, folder, address=address).opened() as study:
        study.carry_out(Slots(1, 1), Silent())


def worker_of(pid: int) -> int:
    """The worker of Ray that a run's process belongs to, 0 for an orphan; between them is the worker's nursery."""
    worker = parent(parent(pid))
    return worker if b"ray::" in Path(f"/proc/{worker or 1}/cmdline").read_bytes() else 0


def node_of(pid: int) -> int:
    return parent(worker_of(pid))


def log_of(folder: Path, run: Planned) -> Path:
    return folder / "logs" / run.place.with_name(f"{run.place.name}.log")


@pytest.mark.long
def test_a_study_survives_whatever_happens_to_its_cluster(
    corpus: str, cluster: Any, driver: Callable[..., Any], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    folder = tmp_path / "study"
    node = cluster.add_node(num_cpus=1, object_store_memory=80 * 2**20)
    process = driver(on_cluster, small(corpus), folder, cluster.address)
    run, pid = until(lambda: caught(folder), "run under way")
    nursery = parent(pid)
    process.kill()
    process.join()
    until(lambda: not alive(nursery), "end of a nursery whose study is gone")
    let_go(pid)
    until(lambda: not alive(pid), "end of a run whose study is gone")
    until(lambda: not any(map(in_use, unfinished(folder))), "end of all")
    assert run in unfinished(folder)
    check_saved(folder)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(execute, "SHOW", 0.0)
        patch.setattr(execute, "POLL", 0.01)
        with RayStudy(small(corpus), folder, address=cluster.address).opened() as study:
            refused_on_a_node(study)
            failed_on_a_node(study, corpus)
            stopped(study)
            lost(study, cluster, node)
    check_whole(folder, request.getfixturevalue("undisturbed"))
    assert len(resumes(folder)) >= 4


def refused_on_a_node(study: RayStudy) -> None:
    """The study was started where the corpus is another text."""
    data = read_data(study.folder / "study.json")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(study, "prepare", lambda _: study.write([entry | {"hash": "another"} for entry in data]))
        with pytest.raises(StudyError, match=r"^the corpus .* is another text on the node .* shared file system"):
            study.carry_out(TWO, Silent())
    study.write(data)


def failed_on_a_node(study: RayStudy, corpus: str) -> None:
    """A run meets an error that it would meet again."""
    run = Planned(corpus, "k=v", 1e-2, 0).folder(study.folder)
    assert not run.exists()
    run.mkdir(parents=True)
    (run / "metrics.jsonl").write_text("")
    with pytest.raises(StudyError, match=r"the run k=v .* failed: .* holds what a run left but no run.json"):
        study.carry_out(TWO, Silent())
    assert not any(map(in_use, unfinished(study.folder)))
    shutil.rmtree(run)


def stopped(study: RayStudy) -> None:
    """SIGTERM comes in the midst of a run."""
    found = list[Path]()

    def act() -> None:
        if not found and (one := caught(study.folder)):
            found.append(one[0])
            os.kill(os.getpid(), signal.SIGTERM)
            let_go_when_asked(one[1])

    with pytest.raises(StudyInterrupted, match=r"^stopped by SIGTERM; the same command continues\.$"):
        study.carry_out(TWO, Told(act))
    assert found[0] in unfinished(study.folder)
    assert not any(map(in_use, unfinished(study.folder)))
    check_saved(study.folder)


def lost(study: RayStudy, cluster: Any, node: Any) -> None:
    """In the midst of a run its worker is killed, and later, in the midst of another, its node is lost."""
    raylet, victims, held = node.all_processes["raylet"][0].process.pid, list[Path](), list[int]()

    def act() -> None:
        if told.count("its Ray worker or node was lost") < len(victims):
            return
        if held:
            let_go(held.pop())
        if not victims and (one := caught(study.folder, lambda pid: node_of(pid) not in (0, raylet))):
            os.kill(worker_of(one[1]), signal.SIGKILL)
        elif len(victims) == 1 and (one := caught(study.folder, lambda pid: node_of(pid) == raylet)):
            cluster.remove_node(node, allow_graceful=False)
        else:
            return
        victims.append(one[0])
        held.append(one[1])

    told = Told(act)
    results = study.carry_out(TWO, told)
    assert len(victims) == 2
    assert not held
    # a run that was just being sent to the lost node is lost with it
    assert told.count("its process died (its Ray worker or node was lost); it is resumed") >= 2
    folder, chosen = study.folder, chosen_lrs(study.spec, results)
    for run in (*tuning(study.spec), *confirming(study.spec, chosen)):
        assert log_of(folder, run).read_text().count("on the node ") > victims.count(run.folder(folder))


def test_a_cluster_on_this_machine(
    corpus: str, undisturbed: dict[str, Any], undisturbed_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = pytest.importorskip("ray")
    monkeypatch.chdir(tmp_path)
    handler = signal.getsignal(signal.SIGTERM)
    shutil.copytree(undisturbed_folder, "study")
    study = RayStudy(small(corpus), Path("study"))
    with study.opened():
        slots = study.slots()
        assert (slots.threads, slots.gpus) == (1, ())
        assert slots.count > 2  # the cluster decides
        monkeypatch.setattr(study, "start", None)
        assert len(study.carry_out(study.slots("cpu", at_once=2), Silent())) == 6  # done: nothing is submitted
    assert not ray.is_initialized()
    assert signal.getsignal(signal.SIGTERM) is handler
    check_whole(tmp_path / "study", undisturbed)


def first(corpus: str) -> Planned:
    return Planned(corpus, "standard", 1e-3, 0)


def test_a_node_that_would_make_another_run_is_refused(
    corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order as it is submitted, looked at on nodes where something is wrong."""
    orders: list[dict[str, Any]] = []
    monkeypatch.setattr(ray_executor, "remote_attempt", lambda: Recorder(orders))
    study = RayStudy(small(corpus), tmp_path / "study")
    with Study.opened(study):
        study.prepare(Silent())
        study.starter = Tasks(study.folder, study.spec.fingerprint)
        study.start(first(corpus), TWO, {}, Silent())
    (order,) = orders
    stopped_on_a_node(order, monkeypatch)
    refuse_unfit(order, "here")
    with pytest.raises(StudyError, match=r"the node there has qklab .*, but the study was started with 0\.0; install"):
        refuse_unfit(order | {"version": "0.0"}, "there")
    with pytest.raises(StudyError, match=r"does not see this study in .*nowhere; the study's folder must be on a file"):
        refuse_unfit(order | {"study": str(tmp_path / "nowhere")}, "there")
    with pytest.raises(StudyError, match="does not see this study"):
        refuse_unfit(order | {"fingerprint": "another"}, "there")
    task = json.loads(json.dumps(order["task"]))
    task["spec"]["corpus"]["source"] = str(tmp_path / "nothing")
    with pytest.raises(StudyError, match="the node there cannot prepare the corpus: "):
        refuse_unfit(order | {"task": task}, "there")
    study.write([entry | {"hash": "of another text"} for entry in read_data(study.folder / "study.json")])
    with pytest.raises(StudyError, match="is another text on the node there than where the study was started"):
        refuse_unfit(order, "there")
    assert not (tmp_path / "nowhere").exists()


def stopped_on_a_node(order: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray cancels the task while its run is begun: no run is left, and none that never began is waited for."""
    heeded = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        monkeypatch.setattr(ray_executor, "Nursery", Interrupted)
        assert attempt(dict(order)) is None
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, heeded)
    nursery = ray_executor.NURSERIES.pop(1)
    assert isinstance(nursery, Interrupted)
    assert nursery.done == ["started", "stopped"]


class Interrupted:
    """In the place of a nursery: SIGINT comes before the run is begun, and again while it saves its state."""

    lost = False

    def __init__(self, log: Path, environment: dict[str, str]):
        self.done = list[str]()

    def start(self, task: Any, log: Path, environment: dict[str, str]) -> int:
        os.kill(os.getpid(), signal.SIGINT)
        self.done.append("started")
        return 1

    def ended(self, patience: float) -> list[Any]:
        return []

    def stop(self) -> int:
        os.kill(os.getpid(), signal.SIGINT)
        self.done.append("stopped")
        return 0


class Deaf:
    """In the place of Ray: the first request to stop each task is lost."""

    def __init__(self) -> None:
        self.asked = list[str]()

    def cancel(self, ref: str) -> None:
        self.asked.append(ref)

    def wait(self, refs: list[str], num_returns: int, timeout: float) -> tuple[list[str], list[str]]:
        assert num_returns == len(refs)
        assert timeout <= ray_executor.ASK
        heard = [ref for ref in refs if ref != "never" and self.asked.count(ref) > 1]
        return heard, [ref for ref in refs if ref not in heard]


def test_a_task_that_was_asked_too_early_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, tasks = Deaf(), Tasks(tmp_path, "")
    monkeypatch.setattr(ray_executor, "library", lambda: cluster)
    tasks.numbers = {"one": 1, "other": 2}
    assert tasks.stop() == 0
    assert cluster.asked == ["one", "other"] * 2
    monkeypatch.setattr(ray_executor, "SAVING", 0.1)
    tasks.numbers = {"never": 3, "one": 4}
    assert tasks.stop() == 1  # in the end a run that hangs is given up
    assert cluster.asked.count("never") > 2
    assert not tasks.numbers


class Recorder:
    """In the place of Ray's remote function: keeps what it would have been called with."""

    def __init__(self, orders: list[dict[str, Any]]):
        self.orders = orders

    def options(self, **options: Any) -> "Recorder":
        assert (options["num_cpus"], options["num_gpus"], options["max_retries"]) == (1, 0, 0)
        return self

    def remote(self, order: dict[str, Any]) -> object:
        self.orders.append(order)
        return object()


class Nodes:
    """In the place of Ray: a cluster of nodes with these resources."""

    def __init__(self, *resources: dict[str, float]):
        self.resources = resources

    def nodes(self) -> list[dict[str, Any]]:
        return [{"Alive": True, "Resources": one} for one in self.resources] + [
            {"Alive": False, "Resources": {"CPU": 64.0, "GPU": 64.0}}
        ]


def test_a_run_gets_a_gpu_and_its_share_of_the_cpus(
    corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = RayStudy(small(corpus), tmp_path / "study")
    cluster = Nodes({"CPU": 8.0}, {"CPU": 32.0, "GPU": 4.0}, {"CPU": 12.0, "GPU": 2.0})
    monkeypatch.setattr(ray_executor, "library", lambda: cluster)
    assert study.slots() == study.slots("cuda") == Slots(ray_executor.ROOM, 6, (0,))
    assert study.slots("cpu", at_once=3) == Slots(3, 1)
    assert ray_executor.has_room(cluster.nodes(), {"CPU": 6, "GPU": 1})
    assert not ray_executor.has_room(cluster.nodes(), {"CPU": 33, "GPU": 1})
    cluster.resources = ({"CPU": 2.0},)
    assert study.slots() == Slots(ray_executor.ROOM, 1)
    with pytest.raises(StudyError, match="no node of the Ray cluster has a GPU, but device=cuda came"):
        study.slots("cuda")


def test_a_result_that_is_written_elsewhere_and_a_queue_are_told(
    corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study, display = RayStudy(small(corpus), tmp_path / "study"), Lines()
    run = Active(first(corpus), 0, tmp_path / "log", said=0, saved="")
    study.tell([run], 4, display)
    assert display.shown == "0/4 runs · waiting for a node with room"
    (tmp_path / "log").write_text("on the node there:\n")
    study.began = 0.0
    study.tell([run], 4, display)
    assert run.planned.name in display.shown
    monkeypatch.setattr(ray_executor, "SEEN", 0.2)
    with pytest.raises(StudyError, match=r"ended, but its result is not in .*; the study's folder must be on a file"):
        study.ended(run, 0, display)
    monkeypatch.setattr(ray_executor, "library", lambda: Nodes({"CPU": 1.0}))
    monkeypatch.setattr(Study, "perform", lambda *_: [])
    study.perform([run.planned], Slots(1, 2, (0,)), display, StopRequest(), 4)
    assert display.said == ["no node of the Ray cluster has 2 CPUs and 1 GPU; the runs wait until one joins."]


class Lines(Silent):
    def __init__(self) -> None:
        self.said, self.shown = list[str](), ""

    def say(self, sentence: str) -> None:
        self.said.append(sentence)

    def show(self, done: float, line: str) -> None:
        self.shown = line


def test_without_ray_one_sentence(corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with (
        pytest.raises(StudyError, match=r"^a study on a cluster needs Ray, which is not installed: pip install 'qklab"),
        RayStudy(small(corpus), tmp_path / "study").opened(),
    ):
        pass
    assert not (tmp_path / "study").exists()


@pytest.mark.parametrize(
    ("address", "sentence"),
    [
        ("nonsense", r"^the address of a Ray cluster must be HOST:PORT, or auto .*, but 'nonsense' came\.$"),
        ("127.0.0.1:99999", "must be HOST:PORT"),
        (
            "127.0.0.1:1",
            r"^no Ray cluster answers at 127\.0\.0\.1:1: connection refused; start one there with: ray start",
        ),
    ],
)
def test_an_address_where_no_cluster_is(corpus: str, tmp_path: Path, address: str, sentence: str) -> None:
    pytest.importorskip("ray")
    with (
        pytest.raises(StudyError, match=sentence),
        RayStudy(small(corpus), tmp_path / "study", address=address).opened(),
    ):
        pass
