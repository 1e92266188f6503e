"""A node task with a real Ray: what its driver sees, how each of them ends, and that nothing stays."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from serverless_gpu.node.inside import linux, protocol
from tests.support.golden import golden
from tests.support.local.observe import wait_for
from tests.support.ray import drivers
from tests.support.ray.node_tasks import LIMIT_S, NodeTask, cluster_directory, node_task, share

pytestmark = [pytest.mark.heavy, pytest.mark.slow, pytest.mark.timeout(240)]

REFUSED = """
pid_namespace._probe = lambda: "the kernel says no"
"""
TAKEN = """
import socket
from _sgpu_inside.raycluster import ray_start
somebody, find, found = socket.create_server(("127.0.0.1", 0)), ray_start.find_ports, []
def find_once_too_late(address):
    found.append(find(address))
    return found[0]._replace(gcs=somebody.getsockname()[1]) if len(found) == 1 else found[-1]
ray_start.find_ports = find_once_too_late
"""


@pytest.fixture
def directory() -> Iterator[Path]:
    """Have a directory for a cluster."""
    with cluster_directory() as path:
        yield path


def waiting(task: NodeTask) -> None:
    """Return when the driver waits."""
    task.hear_until("enter")
    wait_for(lambda: "waits" in task.output(), "the driver waits", limit_s=LIMIT_S)


def test_the_function_is_the_driver_of_a_cluster_of_the_nodes_devices(tmp_path: Path, directory: Path) -> None:
    with node_task(tmp_path / "a", share(directory), drivers.look_around, RAY_ADDRESS="192.0.2.1:6379") as task:
        assert task.end() == 0, (task.said, task.output())
    seen = task.value()
    assert isinstance(seen, dict)
    assert [event["event"] for event in task.said if event["event"] != "say"] == ["exec", "enter", "returned"]
    assert task.sentences()[-1] == golden("ray.node_task.ray-60-node")
    assert sorted(visible for _, visible, *_ in seen["tasks"]) == ["0", "1"]
    assert {where for *_, where, _ in seen["tasks"]} == {str(task.attempt)}
    assert {address for *_, address in seen["tasks"]} == {seen["variables"]["RAY_ADDRESS"]}
    assert (seen["resources"]["GPU"], seen["resources"]["accelerator_type:H100"]) == (2, 1)
    assert seen["address"] == "127.0.0.1"
    assert seen["variables"]["RAY_ADDRESS"].startswith("127.0.0.1:")
    assert "RANK" not in seen["variables"]
    assert "the driver runs" in task.output()
    assert (directory / "1" / "ray-start.log").exists()


def test_an_exception_of_a_task_is_the_runs_also_without_a_namespace_and_at_the_second_try(
    tmp_path: Path, directory: Path
) -> None:
    with node_task(tmp_path / "a", share(directory), drivers.fail_in_a_task, before=REFUSED + TAKEN) as task:
        failure = task.failure()
        assert task.end() == 1
        assert linux.descendants(os.getpid()) == []
    assert (failure["type"], failure["kind"]) == ("RayTaskError(ValueError)", "exception")
    assert golden("ray.node_task.raised-task") in str(failure["message"])
    assert any(golden("ray.node_task.started-again-gcs") in sentence for sentence in task.sentences())
    assert any(golden("ray.node_task.pid-namespace-own") in sentence for sentence in task.sentences())


def test_a_driver_that_is_killed_is_told_as_that_and_is_asked_where_it_is(tmp_path: Path, directory: Path) -> None:
    with node_task(tmp_path / "a", share(directory), drivers.wait) as task:
        stack = task.hear_until("exec")["stack"]
        waiting(task)
        linux.signal_main_thread(task.child.pid, protocol.STACK_SIGNAL)
        answer = Path(f"/proc/{task.child.pid}/fd/{stack}")
        wait_for(lambda: "drivers.py" in answer.read_text(errors="replace"), "the driver has said where it is")
        task.named("sgpu-driver")[0].kill()
        assert task.end() == -signal.SIGKILL
    assert not any(event["event"] in ("failed", "returned") for event in task.said)


def test_a_driver_that_asks_whether_to_stop_goes_on_with_ray_until_it_has_saved(
    tmp_path: Path, directory: Path
) -> None:
    own = share(directory)
    stop = {"SGPU_STOP_FILE": str(tmp_path / "stop")}
    with node_task(tmp_path / "a", own, drivers.save_when_asked_to_stop, "asks", **stop) as task:
        waiting(task)
        task.process.send(signal.SIGTERM)
        assert task.end() == 0, (task.said, task.output())
    assert task.value() == "saved"


def test_a_head_that_dies_after_the_function_returned_is_no_failure(tmp_path: Path, directory: Path) -> None:
    with node_task(tmp_path / "a", share(directory), drivers.return_after, str(tmp_path / "go")) as task:
        waiting(task)
        driver = task.named("sgpu-driver")
        task.named("raylet")[0].kill()
        (tmp_path / "go").touch()
        assert task.end() == 0, task.said
        assert driver
    assert task.value() == "done"


def test_a_stop_while_the_head_starts_ends_it_at_once(tmp_path: Path, directory: Path) -> None:
    with node_task(tmp_path / "a", share(directory), drivers.never) as task:
        wait_for(lambda: task.named("gcs_server"), "the head starts", limit_s=LIMIT_S)
        task.process.send(signal.SIGTERM)
        assert task.end() == -signal.SIGTERM
    assert not any(event["event"] in ("exec", "failed") for event in task.said)


def test_an_environment_without_ray_is_told_how_to_get_it(tmp_path: Path, directory: Path) -> None:
    with node_task(tmp_path / "a", share(directory), drivers.never, python=Path(sys.executable)) as task:
        failure = task.failure()
        assert task.end() == 1
    assert failure["type"] == "ModuleNotFoundError"
    assert "pip install 'ray[default]'" in str(failure["message"])
