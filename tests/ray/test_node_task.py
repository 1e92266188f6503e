"""A node task with a real Ray: what its driver sees, how each of them ends, and that nothing stays."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ray import drivers
from tests.ray.node_tasks import cluster_directory, node_task, share

pytestmark = [pytest.mark.heavy, pytest.mark.slow]


@pytest.fixture
def directory() -> Iterator[Path]:
    """Have a directory for a cluster."""
    with cluster_directory() as path:
        yield path


def test_the_function_is_the_driver_of_a_cluster_of_the_nodes_devices(tmp_path: Path, directory: Path) -> None:
    with node_task(tmp_path / "a", share(directory), drivers.look_around, RAY_ADDRESS="192.0.2.1:6379") as task:
        assert task.end() == 0, (task.said, task.output())
    seen = task.value()
    assert isinstance(seen, dict)
    assert [event["event"] for event in task.said] == ["say", "exec", "enter", "returned"]
    assert task.sentences() == ["Ray 2.60.0: 1 node, 2 H100, 3 CPUs, object store 0.1 GB"]
    assert sorted(visible for _, visible, _ in seen["tasks"]) == ["0", "1"]
    assert {where for *_, where in seen["tasks"]} == {str(task.attempt)}
    assert seen["resources"]["accelerator_type:H100"] == seen["resources"]["GPU"] == 2
    assert seen["address"] == "127.0.0.1"
    assert seen["variables"]["RAY_ADDRESS"].startswith("127.0.0.1:")
    assert "RANK" not in seen["variables"]
    assert "the driver runs" in task.output()
    assert "ray-start.log" in os.listdir(task.attempt / "ray" / "0")
    assert not directory.exists()
