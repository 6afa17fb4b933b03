"""A study on a Ray cluster is the same study, whatever happens to its processes and nodes meanwhile."""

import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from small_study import (
    InProcess,
    RecordingDisplay,
    alive,
    caught,
    check_saved,
    check_whole,
    let_go,
    let_go_when_asked,
    parent,
    resumes,
    small_spec,
    unfinished,
    until,
)

from qklab.runs.progress import Display
from qklab.study import execute
from qklab.study.execute import Study, StudyInterrupted
from qklab.study.executors import Unit, WorkerSlots, ray
from qklab.study.executors.ray import (
    NodeOrder,
    RayExecutor,
    perform_on_node,
    prepare_node,
    refuse_unfit_node,
    share_nodes,
)
from qklab.study.plan import PlannedRun
from qklab.study.records import StudyRecord, is_in_use, read_study_record
from qklab.study.remote import RemoteStudy
from qklab.study.spec import StudyError, StudySpec


@pytest.fixture
def cluster() -> Iterator[Any]:
    """A cluster of one node with one CPU, which ignores SIGINT like all that a script starts in the background."""
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    quick = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500, "health_check_failure_threshold": 10}
    node = {"num_cpus": 1, "object_store_memory": 80 * 2**20, "_system_config": quick}
    node |= {"include_dashboard": False, "include_log_monitor": False, "no_monitor": True}  # processes that nobody asks
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


def carry_out_on_cluster(spec: StudySpec, folder: Path, address: str) -> None:
    with Study(spec, folder).open() as study, closing(RayExecutor("cpu", 1, address)) as executor:
        study.carry_out(executor, Display())


def worker_of(pid: int) -> int:
    """The worker of Ray that a run's process belongs to, 0 for an orphan; between them is the one that forks."""
    worker = parent(parent(pid))
    return worker if b"ray::" in Path(f"/proc/{worker or 1}/cmdline").read_bytes() else 0


def node_of(pid: int) -> int:
    return parent(worker_of(pid))


@pytest.mark.long
def test_a_study_survives_whatever_happens_to_its_cluster(
    corpus: str, cluster: Any, driver: Callable[..., Any], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    folder = tmp_path / "study"
    node = cluster.add_node(num_cpus=1, object_store_memory=80 * 2**20, include_log_monitor=False)
    process = driver(carry_out_on_cluster, small_spec(corpus), folder, cluster.address)
    run, pid = until(lambda: caught(folder), "run under way")
    worker = worker_of(pid)
    process.kill()
    process.join()
    until(lambda: not alive(worker), "end of a worker whose study is gone")
    let_go(pid)
    until(lambda: not alive(pid), "end of a run whose study is gone")
    until(lambda: not any(map(is_in_use, unfinished(folder))), "end of all")
    assert run in unfinished(folder)
    check_saved(folder)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(execute, "SHOW", 0.0)
        patch.setattr(execute, "POLL", 0.01)
        with (
            Study(small_spec(corpus), folder).open() as study,
            closing(RayExecutor("cpu", 2, cluster.address)) as executor,
        ):
            refuse_on_a_node(study, executor)
            fail_on_a_node(study, executor, corpus)
            stop(study, executor)
            lose(study, executor, cluster, node)
    check_whole(folder, request.getfixturevalue("undisturbed"))
    assert len(resumes(folder)) >= 4


def refuse_on_a_node(study: Study, executor: RayExecutor) -> None:
    """The study was started where the corpus is another text."""
    data = read_study_record(study.folder).data
    with pytest.MonkeyPatch.context() as patch:
        other = [entry | {"hash": "another"} for entry in data]
        patch.setattr(study, "prepare_corpora", lambda _: study.files.write_record(other))
        with pytest.raises(StudyError, match=r"^the corpus .* is another text on the node .* shared file system"):
            study.carry_out(executor, Display())
    study.files.write_record(data)


def fail_on_a_node(study: Study, executor: RayExecutor, corpus: str) -> None:
    """A run meets an error that it would meet again."""
    run = PlannedRun(corpus, "k=v", 1e-2, 0).folder_in(study.folder)
    shutil.rmtree(run, ignore_errors=True)
    run.mkdir(parents=True)
    (run / "metrics.jsonl").write_text("")
    with pytest.raises(StudyError, match=r"the run k=v .* failed: .* holds what a run left but no run.json"):
        study.carry_out(executor, Display())
    assert not any(map(is_in_use, unfinished(study.folder)))
    shutil.rmtree(run)


def stop(study: Study, executor: RayExecutor) -> None:
    """SIGTERM comes in the midst of a run."""
    found = list[Path]()

    def act() -> None:
        if not found and (one := caught(study.folder)):
            found.append(one[0])
            os.kill(os.getpid(), signal.SIGTERM)
            let_go_when_asked(one[1])

    with pytest.raises(StudyInterrupted, match=r"^stopped by SIGTERM; the same command continues\.$"):
        study.carry_out(executor, RecordingDisplay(act))
    assert found[0] in unfinished(study.folder)
    assert not any(map(is_in_use, unfinished(study.folder)))
    check_saved(study.folder)


def lose(study: Study, executor: RayExecutor, cluster: Any, node: Any) -> None:
    """In the midst of a run its worker is killed, and in that of another its node is lost, in any order."""
    raylet, victims, held = node.all_processes["raylet"][0].process.pid, dict[str, Path](), list[tuple[int, int]]()

    def act() -> None:
        if held:
            pid, worker = held[-1]
            if not alive(worker):  # before that the run, which is short, might end as if nothing had happened
                let_go(pid)
                held.pop()
            return
        if "node" not in victims and (one := caught(study.folder, lambda pid: node_of(pid) == raylet)):
            held.append((one[1], worker_of(one[1])))
            cluster.remove_node(node, allow_graceful=False)
            victims["node"] = one[0]
        elif "worker" not in victims and (one := caught(study.folder, lambda pid: node_of(pid) not in (0, raylet))):
            held.append((one[1], worker_of(one[1])))
            os.kill(held[-1][1], signal.SIGKILL)
            victims["worker"] = one[0]

    study.carry_out(executor, RecordingDisplay(act))
    assert len(victims) == 2
    assert not held
    for victim in victims.values():
        assert (victim / "log.txt").read_text().count("process ") >= 2


# in the place of Ray


@pytest.fixture
def order(corpus: str, tmp_path: Path) -> NodeOrder:
    """The first unit of a study, as a node gets it."""
    study = Study(small_spec(corpus), tmp_path / "study")
    with study.open():
        study.prepare_corpora(Display())
    return NodeOrder.of(study.make_unit([PlannedRun(corpus, "standard", 1e-3, 0)], InProcess()), WorkerSlots(3, 1))


def test_a_node_that_would_make_another_run_is_refused(order: NodeOrder, tmp_path: Path) -> None:
    refuse_unfit_node(order, "here")
    with pytest.raises(StudyError, match=r"the node there has qklab .*, but the study was started with 0\.0; install"):
        refuse_unfit_node(replace(order, version="0.0"), "there")
    with pytest.raises(StudyError, match=r"does not see this study in .*nowhere; the study's folder must be on a file"):
        refuse_unfit_node(replace(order, unit=replace(order.unit, study=tmp_path / "nowhere")), "there")
    with pytest.raises(StudyError, match="does not see this study"):
        refuse_unfit_node(replace(order, unit=replace(order.unit, fingerprint="another")), "there")
    (task,) = order.unit.tasks
    other = replace(task, spec=task.spec | {"corpus": task.spec["corpus"] | {"source": str(tmp_path / "nothing")}})
    with pytest.raises(StudyError, match="the node there cannot prepare the corpus: "):
        refuse_unfit_node(replace(order, unit=replace(order.unit, tasks=(other,))), "there")
    record = read_study_record(order.unit.study)
    StudyRecord(record.spec, [entry | {"hash": "of another text"} for entry in record.data]).write(order.unit.study)
    with pytest.raises(StudyError, match="is another text on the node there than where the study was started"):
        refuse_unfit_node(order, "there")
    assert not (tmp_path / "nowhere").exists()


def test_a_node_that_shares_nothing_but_a_url(
    order: NodeOrder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QKLAB_CACHE", str(tmp_path / "cache"))
    url = f"file://{tmp_path}/url"
    RemoteStudy(url, order.unit.study).send_study()
    unit = prepare_node(replace(order, unit=replace(order.unit, url=url)))
    assert unit.study == RemoteStudy(url).local / "node"
    assert (unit.study / "study.json").exists()
    assert unit.tasks[0].folder.relative_to(unit.study) == order.unit.tasks[0].folder.relative_to(order.unit.study)
    assert unit.measure_progress() == [(False, "")]


class Interrupted:
    """In the place of the local executor: SIGINT comes before the unit is begun, and again while it saves its state."""

    def __init__(self, device: str):
        self.running, self.done = [1], list[str]()
        made.append(self)

    def submit(self, unit: Unit) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        self.done.append("started")
        assert not hasattr(sys.modules["__main__"], "__file__")

    def wait(self, seconds: float) -> list[Any]:
        return []

    def stop(self) -> int:
        os.kill(os.getpid(), signal.SIGINT)
        self.done.append("stopped")
        return 0


made: list[Interrupted] = []


def test_a_task_that_is_cancelled_lets_its_runs_save(order: NodeOrder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray cancels the task while its unit is begun: no run is left, and none that never began is waited for."""
    main, heeded = sys.modules["__main__"], signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        monkeypatch.setattr(ray, "LocalExecutor", Interrupted)
        assert perform_on_node(order) is False
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, heeded)
    assert made.pop().done == ["started", "stopped"]
    assert sys.modules["__main__"] is main


class FakeRay:
    """In the place of Ray: a task is a number; `lost` are those whose worker was, `asked` who was cancelled how often.
    The first request to stop a task is lost, and 99 never hears one."""

    class exceptions:  # noqa: N801
        RayError = type("RayError", (Exception,), {})
        RayTaskError = type("RayTaskError", (RayError,), {})
        TaskCancelledError = type("TaskCancelledError", (RayTaskError,), {})

    def __init__(self) -> None:
        self.submitted, self.lost, self.asked, self.options_of = (
            list[NodeOrder](),
            set[int](),
            list[int](),
            dict[str, Any](),
        )

    def options(self, **options: Any) -> "FakeRay":
        self.options_of = options
        return self

    def remote(self, order: NodeOrder) -> int:
        self.submitted.append(order)
        return len(self.submitted)

    def get(self, ref: int) -> bool:
        if ref in self.lost:
            raise self.exceptions.RayError("lost")
        return True

    def cancel(self, ref: int) -> None:
        self.asked.append(ref)

    def wait(self, refs: list[int], num_returns: int, timeout: float) -> tuple[list[int], list[int]]:
        heard = [ref for ref in refs if not self.asked or (ref != 99 and self.asked.count(ref) > 1)]
        return heard, [ref for ref in refs if ref not in heard]

    def is_initialized(self) -> bool:
        return True

    def nodes(self) -> list[dict[str, Any]]:
        return [{"Alive": True, "Resources": {"CPU": 1.0}}, {"Alive": False, "Resources": {"CPU": 64.0, "GPU": 64.0}}]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    fake = FakeRay()
    monkeypatch.setattr(ray, "import_ray", lambda: fake)
    monkeypatch.setattr(ray, "remote_task", lambda: fake)
    return fake


def test_what_ray_begins_anew_and_what_the_study_does(order: NodeOrder, fake: FakeRay) -> None:
    said = list[str]()
    executor, (task,) = RayExecutor("cpu", 2, say=said.append), order.unit.tasks
    executor.submit(order.unit)
    assert executor.free == 1
    assert (fake.options_of["num_cpus"], fake.options_of["num_gpus"], fake.options_of["max_retries"]) == (1, 0, 2)
    fake.lost = {1}
    (task.folder / "checkpoints" / "step-0000000001").mkdir(parents=True)
    assert executor.wait(0.0) == []  # it got further, so it is submitted once more
    assert said == [f"{task.name}: its Ray worker or node was lost; it is resumed."]
    fake.lost = {2}
    with pytest.raises(StudyError, match="was lost 3 times without its getting further"):
        executor.wait(0.0)
    executor.submit(order.unit)
    assert executor.wait(0.0) == [task]
    assert executor.wait(0.0) == []


def test_a_population_is_one_task_and_whoever_ended_stays_when_it_is_lost(
    order: NodeOrder, fake: FakeRay, tmp_path: Path
) -> None:
    (one,) = order.unit.tasks
    tasks = tuple(replace(one, name=f"run {number}", folder=tmp_path / f"{number}") for number in range(3))
    executor = RayExecutor("cpu", 2, say=lambda sentence: None)
    executor.submit(replace(order.unit, tasks=tasks, together=3))
    (tasks[0].folder / "checkpoints" / "step-0000000001").mkdir(parents=True)
    (tasks[0].folder / "summary.json").touch()
    fake.lost = {1}
    assert executor.wait(0.0) == [tasks[0]]
    assert [submitted.unit.tasks for submitted in fake.submitted] == [tasks, tasks]
    for task in tasks[1:]:
        task.folder.mkdir()
        (task.folder / "summary.json").touch()
    assert executor.wait(0.0) == [*tasks[1:]]
    assert executor.free == 2


def test_a_task_that_was_asked_too_early_is_asked_again(
    order: NodeOrder, fake: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = RayExecutor("cpu", 2)
    for _ in range(2):
        executor.submit(order.unit)
    assert executor.stop() == 0
    assert fake.asked == [1, 2] * 2
    monkeypatch.setattr(ray, "SAVING", 0.1)
    monkeypatch.setattr(executor, "units", {99: None, 1: None})
    assert executor.stop() == 1  # in the end a run that hangs is given up
    assert fake.asked.count(99) > 1
    assert not executor.units


def test_a_unit_gets_a_gpu_and_its_share_of_the_cpus(fake: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [{"CPU": 8.0}, {"CPU": 32.0, "GPU": 4.0}, {"CPU": 12.0, "GPU": 2.0}]
    assert share_nodes(nodes, "auto", None) == share_nodes(nodes, "cuda", None) == WorkerSlots(ray.UNLIMITED, 6, (0,))
    assert share_nodes(nodes, "cpu", 3) == WorkerSlots(3, 1)
    assert share_nodes([{"CPU": 2.0}], "auto", None) == WorkerSlots(ray.UNLIMITED, 1)
    with pytest.raises(StudyError, match="no node of the Ray cluster has a GPU, but device=cuda came"):
        share_nodes([{"CPU": 2.0}], "cuda", None)
    said = list[str]()
    monkeypatch.setattr(ray, "share_nodes", lambda *_: WorkerSlots(1, 2, (0,)))
    RayExecutor(say=said.append)
    assert said == ["no node of the Ray cluster has 2 CPUs and 1 GPU; the runs wait until one joins."]


def test_without_ray_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(StudyError, match=r"^a study on a cluster needs Ray, which is not installed: pip install 'qkl"):
        RayExecutor()


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
def test_an_address_where_no_cluster_is(address: str, sentence: str) -> None:
    pytest.importorskip("ray")
    with pytest.raises(StudyError, match=sentence):
        RayExecutor(address=address)
