"""A node task with a Ray that only looks like one: what goes wrong before, beside and after its driver."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from serverless_gpu.node.inside import linux
from tests.support.golden import golden
from tests.support.local.observe import wait_for
from tests.support.node import fake_ray
from tests.support.node.rank_process import run_rank
from tests.support.ray import drivers, node_tasks
from tests.support.ray.node_tasks import NodeTask, cluster_directory, node_task, share

REFUSED = """
pid_namespace._probe = lambda: "the kernel says no"
pid_namespace._REAP_S = 0.02
"""
NO_PROCESS = """
fork = pid_namespace.Family.fork
pid_namespace.Family.fork = lambda family, run: (_ for _ in ()).throw(OSError(11, "no process can be had"))
"""
# What the supervisor does to all ranks of a run when one of them has failed.
STOPPED_WHILE_IT_SAYS_SO = """
import signal
store = rank._store_failure
def told(*words):
    os.kill(os.getpid(), signal.SIGTERM)
    return store(*words)
rank._store_failure = told
"""


IMPATIENT = "from _sgpu_inside.raycluster import task\ntask._FAREWELL_S = 0.2"


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Have what looks like Ray, and a directory for a cluster."""
    place = tmp_path / "installed"
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(place), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setattr(node_tasks, "PYTHON", Path(sys.executable))
    fake_ray.install(place)
    with cluster_directory() as path:
        yield path


def own(task: NodeTask) -> list[int]:
    """Return the processes whose parent a node task is, also those that have ended."""
    return linux.children(task.child.pid)


def test_no_room_for_the_token_is_a_failure_that_says_so(tmp_path: Path, directory: Path) -> None:
    (directory / "token").touch()
    with node_task(tmp_path / "a", share(directory), drivers.never, python=Path(sys.executable)) as task:
        failure = task.failure()
        assert task.end() == 1
    message = str(failure["message"])
    assert failure["kind"] == "start_failed", "the driver has not begun"
    assert message.startswith("Ray could not be started on node node-of-the-test: [Errno 17] File exists")
    assert str(directory / "token") in message


@pytest.mark.parametrize("before", [NO_PROCESS, NO_PROCESS.replace(".fork", "._fork")])
def test_no_process_to_be_had_is_a_failure_that_says_so(before: str, tmp_path: Path, directory: Path) -> None:
    with node_task(tmp_path / "a", share(directory), drivers.never, python=Path(sys.executable), before=before) as task:
        failure = task.failure()
        assert task.end() == 1
    assert failure["message"] == golden("node.ray_node_task.ray-could-started")


def test_a_node_that_says_what_it_lost_is_not_disturbed_by_being_stopped(tmp_path: Path, directory: Path) -> None:
    lonely = share(directory, node_rank=1, num_nodes=2, head=("127.0.0.1", 1))
    impatient = "from _sgpu_inside.raycluster import cluster\ncluster._REACH_S = 0.0"
    with node_task(
        tmp_path / "a",
        lonely,
        drivers.never,
        python=Path(sys.executable),
        before=STOPPED_WHILE_IT_SAYS_SO + impatient,
    ) as task:
        message = str(task.failure()["message"])
        assert task.end() == 1, task.output()
    assert golden("node.ray_node_task.could-reach-head") in message
    assert task.output() == ""


def test_processes_that_lost_their_parent_are_reaped_where_there_is_no_namespace(
    tmp_path: Path, directory: Path
) -> None:
    go = tmp_path / "go"
    with node_task(
        tmp_path / "a",
        share(directory),
        drivers.leave_orphans,
        str(go),
        python=Path(sys.executable),
        before=REFUSED,
    ) as task:
        task.hear_until("enter")
        wait_for(lambda: "orphans" in task.output(), "the orphans have been made")
        wait_for(lambda: len(own(task)) == 2, "only `ray start` and the driver are left")
        go.touch()
        assert task.end() == 0, (task.said, task.output())
    assert task.value() == "done"


def test_a_driver_that_has_returned_and_cannot_leave_without_ray_is_ended(tmp_path: Path, directory: Path) -> None:
    go = tmp_path / "go"
    with node_task(
        tmp_path / "a", share(directory), drivers.never_leave, str(go), python=Path(sys.executable), before=IMPATIENT
    ) as task:
        wait_for(lambda: "waits" in task.output(), "the driver waits")
        [raylet] = task.named("raylet")
        go.touch()
        task.hear_until("returned")
        raylet.kill()
        assert task.end() == 0, (task.said, task.output())
    assert task.value() == "done"
    assert not any(event["event"] == "failed" for event in task.said)


@pytest.mark.parametrize("first", ["asks", "connects"])
def test_a_driver_that_asks_whether_to_stop_is_not_ended_by_rays_own_handler(
    first: str, tmp_path: Path, directory: Path
) -> None:
    with node_task(
        tmp_path / "a",
        share(directory),
        drivers.save_when_asked_to_stop,
        first,
        python=Path(sys.executable),
        SGPU_STOP_FILE=str(tmp_path / "stop"),
    ) as task:
        wait_for(lambda: "waits" in task.output(), "the driver waits")
        task.process.send(signal.SIGTERM)
        assert task.end() == 0, (task.said, task.output())
    assert task.value() == "saved"


def test_a_driver_that_asks_for_nothing_ends_of_the_signal_as_any_rank_does(tmp_path: Path, directory: Path) -> None:
    with node_task(tmp_path / "a", share(directory), drivers.wait, python=Path(sys.executable)) as task:
        wait_for(lambda: "waits" in task.output(), "the driver waits")
        task.process.send(signal.SIGTERM)
        assert task.end() == -signal.SIGTERM


DRIVER = """
import os, signal, time
from _sgpu_inside import linux
from _sgpu_inside.raycluster import task
class Family:
    def fork(self, run):
        pid = os.fork()
        if pid == 0:
            os._exit(run())
        return pid
"""


def test_a_driver_that_was_reaped_is_sent_nothing_for_its_pid_may_be_somebody_elses() -> None:
    said = run_rank(
        DRIVER
        + """
one = task.Driver(Family(), os.environ.copy(), lambda report: 7)
one.begin({})
print(one.reap(), one.has_ended())
somebody = os.fork()
if somebody == 0:
    time.sleep(600)
one.pid = somebody
one.end(signal.SIGTERM)
one.look(signal.SIGTERM)
print(os.waitpid(somebody, os.WNOHANG))
os.kill(somebody, signal.SIGKILL)
print(os.waitstatus_to_exitcode(os.waitpid(somebody, 0)[1]))
"""
    )
    assert said == "7 True\n(0, 0)\n-9\n"


def test_a_driver_that_is_killed_has_ended_before_anything_else_is_written() -> None:
    said = run_rank(
        DRIVER
        + """
def grow(report):
    memory = bytearray(os.urandom(1 << 20) * 300)  # which takes the kernel a while to take back
    report({"event": "enter"})
    time.sleep(600)
one = task.Driver(Family(), os.environ.copy(), grow)
one.begin({})
print(one.hear()["event"])
one.kill()
print(one.has_ended(), one.reap())
"""
    )
    assert said == "enter\nTrue -9\n"


def test_descriptors_above_those_that_select_knows_are_waited_for() -> None:
    said = run_rank(
        """
import fcntl, os, resource
from _sgpu_inside import linux
from _sgpu_inside.raycluster import ray_start, task
resource.setrlimit(resource.RLIMIT_NOFILE, (2048, 2048))
reading, writing = os.pipe()
high = fcntl.fcntl(reading, fcntl.F_DUPFD_CLOEXEC, 1500)
engine = ray_start.RayProcesses(1, {high: "raylet"}, None, "")
one = task.Driver.__new__(task.Driver)
one.pidfd = high
print(repr(engine.gone(0.01)), one.has_ended(), linux.readable([high], 0))
linux.die_with(high)  # it would end this process if it took the descriptor for readable
os.close(writing)
print(repr(engine.gone()), one.has_ended(), linux.readable([high]) == {high})
"""
    )
    assert said == golden("node.ray_node_task.false-set-raylet")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_a_user_whose_rank_has_threads_has_a_cluster_without_a_namespace() -> None:
    said = run_rank(
        """
import codecs, os, threading
from _sgpu_inside.raycluster import pid_namespace
codecs.lookup("ascii")
os.setgid(65534)
os.setuid(65534)
stop = threading.Event()
threading.Thread(target=stop.wait, daemon=True).start()
family = pid_namespace.Family()
print(bool(family.refused))
print(os.waitstatus_to_exitcode(os.waitpid(family.fork(lambda: 7), 0)[1]))
family.end()
"""
    )
    assert said == "True\n7\n"
