"""Node tasks of several nodes with a Ray that only looks like one: who waits for whom, and who says what was lost."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from serverless_gpu.node.inside import linux
from tests.support.golden import golden
from tests.support.local.observe import Process, wait_for
from tests.support.node import fake_ray
from tests.support.ray import drivers, node_tasks
from tests.support.ray.node_tasks import NodeTask, cluster_directory, node_task, share

HOSTS = ("castor", "pollux", "helena")


class Nodes(NamedTuple):
    """The node tasks of one cluster."""

    head: NodeTask
    member: NodeTask
    all: list[NodeTask]


@pytest.fixture
def ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Have what looks like Ray; return its place."""
    place = tmp_path / "installed"
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(place), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setattr(node_tasks, "PYTHON", Path(sys.executable))
    fake_ray.install(place)
    return place


@pytest.fixture
def start(tmp_path: Path, ray: Path) -> Iterator[Callable[..., Nodes]]:
    """Return what starts node tasks that are to be one cluster."""
    with contextlib.ExitStack() as stack:
        with socket.create_server(("127.0.0.1", 0)) as free:
            head = free.getsockname()
        secret = secrets.token_hex(32)

        def one(node: int, count: int, function: Callable[..., object], *args: object, **changes: object) -> NodeTask:
            plain = {"node_rank": node, "num_nodes": count, "host": HOSTS[node], "head": head, "secret": secret}
            own = share(stack.enter_context(cluster_directory()), **{**plain, **changes})
            python = Path(sys.executable)
            return stack.enter_context(node_task(tmp_path / HOSTS[node], own, function, *args, python=python))

        def all_of(function: Callable[..., object], *args: object, count: int = 2, **of_last: object) -> Nodes:
            last = count - 1
            tasks = [one(node, count, function, *args, **(of_last if node == last else {})) for node in range(count)]
            return Nodes(tasks[0], tasks[last], tasks)

        yield all_of


@pytest.fixture
def go(tmp_path: Path) -> Path:
    """Return the file for which the driver waits."""
    return tmp_path / "go"


def everything(nodes: Nodes) -> list[Process]:
    return [Process(pid) for task in nodes.all for pid in linux.descendants(task.process.pid)]


def assert_nothing_is_left(nodes: Nodes, processes: list[Process]) -> None:
    for process in processes:
        process.wait_gone()


def lost(task: NodeTask, kind: str = "engine_head_lost") -> str:
    """Return the sentence with which a task failed because of what was lost."""
    failure = task.failure()
    assert failure["kind"] == kind
    assert task.end() == 1
    return str(failure["message"])


def test_all_nodes_join_before_the_driver_begins_and_end_with_it(start: Callable[..., Nodes], go: Path) -> None:
    nodes = start(drivers.return_after, str(go), count=3, devices=1, cpus=2)
    nodes.head.hear_until("enter")
    processes = everything(nodes)
    for task in nodes.all:
        assert len(task.named("raylet")) == 1
    go.touch()
    assert [task.end() for task in nodes.all] == [0, 0, 0], nodes.head.output()
    assert nodes.head.value() == "done"
    assert nodes.member.value() is None
    assert nodes.head.sentences()[-1] == golden("node.ray_several_nodes.ray-60-nodes")
    assert [event["event"] for event in nodes.member.said if event["event"] != "say"] == ["exec", "returned"]
    assert (Path(nodes.member.share.directory) / "1" / "ray-start.log").exists()
    assert_nothing_is_left(nodes, processes)


def test_nodes_are_told_where_they_join_and_what_they_are(start: Callable[..., Nodes], go: Path) -> None:
    go.touch()
    nodes = start(drivers.return_after, str(go), address="127.0.0.12")
    assert [task.end() for task in nodes.all] == [0, 0]
    [head] = (Path(nodes.head.share.directory) / "1" / "ray-start.log").read_text().splitlines()
    [member] = (Path(nodes.member.share.directory) / "1" / "ray-start.log").read_text().splitlines()
    [port] = [word.removeprefix("--port=") for word in head.split() if word.startswith("--port=")]
    assert f"--address=127.0.0.1:{port}" in member.split()
    assert "--node-ip-address=127.0.0.12" in member.split()
    assert "--node-ip-address=127.0.0.1" in head.split()


def test_F45_raylet_of_another_node_dies(start: Callable[..., Nodes], go: Path) -> None:
    nodes = start(drivers.return_after, str(go))
    nodes.head.hear_until("enter")
    processes = everything(nodes)
    [raylet] = nodes.member.named("raylet")
    raylet.kill()
    for task in nodes.all:
        assert golden("ray.two_nodes.ray-node-pollux") in lost(task)
    assert_nothing_is_left(nodes, processes)


def test_F45_node_task_of_another_node_dies(start: Callable[..., Nodes], go: Path) -> None:
    nodes = start(drivers.return_after, str(go))
    nodes.head.hear_until("enter")
    processes = everything(nodes)
    nodes.member.process.kill()
    assert golden("node.ray_several_nodes.node-pollux-run") in lost(nodes.head)
    for process in processes:
        process.wait_gone()


def test_F45_node_task_of_the_head_dies(start: Callable[..., Nodes], go: Path) -> None:
    nodes = start(drivers.return_after, str(go))
    nodes.head.hear_until("enter")
    processes = everything(nodes)
    nodes.head.process.kill()
    assert golden("node.ray_link.node-castor-run") in lost(nodes.member)
    for process in processes:
        process.wait_gone()


def test_F45_head_dies_and_the_other_nodes_end_in_order(start: Callable[..., Nodes], go: Path) -> None:
    nodes = start(drivers.return_after, str(go))
    nodes.head.hear_until("enter")
    processes = everything(nodes)
    [gcs] = nodes.head.named("gcs_server")
    gcs.kill()
    assert golden("node.ray_several_nodes.ray-node-castor") in lost(nodes.head)
    assert nodes.member.end() == 0
    assert nodes.member.value() is None
    assert_nothing_is_left(nodes, processes)


def test_a_node_that_cannot_start_its_ray_is_named_by_both(start: Callable[..., Nodes]) -> None:
    nodes = start(drivers.never, object_store_bytes=1)
    for task in nodes.all:
        message = lost(task, "start_failed")
        assert golden("node.ray_several_nodes.ray-could-started") in message
        assert golden("node.ray_several_nodes.object-store-too") in message
        assert "exec" not in [event["event"] for event in task.said], "nothing of the user's has begun"


def test_a_failure_of_the_function_is_its_own_and_the_other_nodes_end_in_order(start: Callable[..., Nodes]) -> None:
    nodes = start(drivers.never)
    failure = nodes.head.failure()
    assert failure["type"] == "AssertionError"
    assert nodes.head.end() == 1
    assert nodes.member.end() == 0
    assert nodes.member.value() is None


def test_nodes_that_are_stopped_end_of_the_signal(start: Callable[..., Nodes], go: Path) -> None:
    nodes = start(drivers.return_after, str(go))
    nodes.head.hear_until("enter")
    processes = everything(nodes)
    nodes.member.process.send(signal.SIGTERM)
    nodes.head.process.send(signal.SIGTERM)
    assert nodes.member.end() == -signal.SIGTERM
    assert nodes.head.end() in (-signal.SIGTERM, 1)  # 1: it heard of the other first
    assert_nothing_is_left(nodes, processes)


def test_a_node_that_waits_for_its_head_can_be_stopped(start: Callable[..., Nodes], go: Path) -> None:
    nodes = start(drivers.return_after, str(go))
    nodes.head.process.send(signal.SIGSTOP)
    wait_for(lambda: (Path(nodes.member.share.directory) / "token").exists(), "it is at work")
    nodes.member.process.send(signal.SIGTERM)
    assert nodes.member.end() == -signal.SIGTERM


def test_a_ray_that_has_one_directory_for_all_nodes_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: Callable[..., Nodes]
) -> None:
    place = tmp_path / "older"
    fake_ray.install(place, "2.54.1")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(place), os.environ["PYTHONPATH"]]))
    for task in start(drivers.never).all:
        failure = task.failure()
        assert failure["type"] == "RuntimeError"
        assert failure["message"] == golden("node.ray_several_nodes.ray-54-cannot")
        assert task.end() == 1
