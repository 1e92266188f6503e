"""Two node tasks form one cluster of a real Ray, each on an address of its own of this machine.

What dies how, and who says it, is in `tests/integration/node/inside/raycluster/test_ray_several_nodes.py`.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from serverless_gpu.node.inside import linux
from tests.support.golden import golden
from tests.support.local.observe import Process, wait_for
from tests.support.ray import drivers
from tests.support.ray.node_tasks import LIMIT_S, NodeTask, cluster_directory, node_task, share

pytestmark = [pytest.mark.heavy, pytest.mark.slow]

ADDRESSES = ("127.0.0.11", "127.0.0.12")
HOSTS = ("castor", "pollux")


class Two(NamedTuple):
    """The node tasks of one cluster."""

    head: NodeTask
    member: NodeTask


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Callable[..., Two]]:
    """Return what starts two node tasks."""
    with contextlib.ExitStack() as stack:
        directories = [stack.enter_context(cluster_directory()) for _ in HOSTS]

        def start(function: Callable[..., object], *args: object, **of_member: object) -> Two:
            head, secret = (ADDRESSES[0], free_port(ADDRESSES[0])), secrets.token_hex(32)
            tasks = []
            for node in (1, 0):
                changes = {"node_rank": node, "num_nodes": 2, "host": HOSTS[node], "address": ADDRESSES[node]}
                own = share(directories[node], **changes, head=head, secret=secret, **(of_member if node else {}))
                tasks.append(stack.enter_context(node_task(tmp_path / HOSTS[node], own, function, *args)))
            return Two(head=tasks[1], member=tasks[0])

        yield start


def free_port(address: str) -> int:
    with socket.create_server((address, 0)) as free:
        port: int = free.getsockname()[1]
    return port


def wait_until_tasks_run(two: Two) -> list[Process]:
    """Wait until a task runs on each node; return every process of the cluster."""
    assert two.head.hear_until("enter")
    began = [two.head.attempt / f"began-{number}" for number in range(2)]
    wait_for(lambda: all(path.exists() for path in began), "a task runs on each node", LIMIT_S)
    return [Process(pid) for task in two for pid in linux.descendants(task.process.pid)]


def assert_all_gone(processes: list[Process]) -> None:
    for process in processes:
        process.wait_gone()


@pytest.mark.spot
def test_two_nodes_are_one_cluster_and_end_together(two: Callable[..., Two]) -> None:
    head, member = two(drivers.visit_nodes, 2)
    assert head.end() == 0, f"{head.said}\n{head.output()}"
    assert member.end() == 0, f"{member.said}\n{member.output()}"
    seen = head.value()
    assert isinstance(seen, dict)
    assert seen["nodes"] == [*ADDRESSES]
    assert sorted(seen["visits"]) == [(address, ["0", "1"]) for address in ADDRESSES]
    assert (seen["resources"]["GPU"], seen["resources"]["accelerator_type:H100"]) == (4, 2)
    assert seen["resources"]["CPU"] == 6
    assert head.sentences()[-1] == golden("ray.two_nodes.ray-60-nodes")
    assert member.value() is None
    assert [event["event"] for event in member.said if event["event"] != "say"] == ["exec", "returned"]
    assert (Path(member.share.directory) / "1" / "ray-start.log").exists()


def test_F45_raylet_of_another_node_dies(two: Callable[..., Two]) -> None:
    tasks = two(drivers.wait_on_every_node, 2)
    processes = wait_until_tasks_run(tasks)
    [raylet] = tasks.member.named("raylet")
    raylet.kill()
    for task in tasks:
        failure = task.failure()
        assert failure["kind"] == "engine_head_lost"
        assert golden("ray.two_nodes.ray-node-pollux") in str(failure["message"])
        assert task.end() == 1
    assert_all_gone(processes)
