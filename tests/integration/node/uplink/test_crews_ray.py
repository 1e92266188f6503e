"""A run's Ray cluster on two nodes of a server: one driver, whose node the others join, and nothing left of either.

Ray itself is a fake (`tests/support/node/fake_ray.py`); two nodes of the real one are in tests/e2e/ray.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from serverless_gpu.model.lifecycle.attempt import Reason
from serverless_gpu.model.spec import RayCluster
from serverless_gpu.node.attempt.claim import has_begun
from serverless_gpu.node.attempt.history import first_facts
from serverless_gpu.node.inside import payload
from tests.support.local.observe import nothing_of_a_run, supervisor, wait_for
from tests.support.node import fake_ray
from tests.support.node.gangs import SeenGang, order_gang
from tests.support.node.node import Node
from tests.support.ray import drivers

ADDRESSES = ("127.0.0.11", "127.0.0.12")


@pytest.fixture(autouse=True)
def ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have what looks like Ray in the caller's environment."""
    place = tmp_path / "installed"
    fake_ray.install(place)
    monkeypatch.syspath_prepend(str(place))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(place), os.environ.get("PYTHONPATH", "")]))


def start(nodes: list[Node], go: Path) -> SeenGang:
    """Start a driver that waits for a file, and return the gang."""
    gang = order_gang(nodes[0].server, drivers.return_after, str(go), spec={"ray": RayCluster()})
    gang.addresses = ADDRESSES
    return gang


def assert_nothing_is_left(nodes: list[Node], gang: SeenGang) -> None:
    for node, crew in zip(nodes, gang.crews, strict=True):
        wait_for(lambda node=node: nothing_of_a_run(node.home.root), "nothing is left")  # type: ignore[misc]  # mypy does not type a lambda's defaults
        path = (node.directory(crew) / "ray" / "directory").read_text().strip()
        assert path.startswith("/tmp/sgpu-ray-") and not Path(path).exists()


def test_two_nodes_make_one_cluster_of_ray_for_one_driver(nodes: list[Node], tmp_path: Path) -> None:
    gang = start(nodes, tmp_path / "go")
    gang.running()
    (tmp_path / "go").touch()
    first, second = gang.settled().crews
    assert (first.reason, second.reason) == (Reason.COMPLETED, Reason.COMPLETED)
    assert payload.load(str(nodes[0].directory(first) / "results" / "0.pkl")) == "done"
    assert payload.load(str(nodes[1].directory(second) / "results" / "1.pkl")) is None
    assert {"results/0.pkl"} == set(first.files) and {"results/1.pkl"} == set(second.files)
    said = {report.sentence for report in first.reports}
    assert any("2 nodes, 4 H100" in sentence for sentence in said), said
    assert_nothing_is_left(nodes, gang)


def test_F45_a_node_of_the_cluster_that_is_lost_ends_the_driver(nodes: list[Node], tmp_path: Path) -> None:
    gang = start(nodes, tmp_path / "go")
    gang.running()
    first, second = gang.crews
    assert has_begun(first_facts(nodes[0].directory(first)))
    supervisor(nodes[1].home.root, second.start.run_id).kill()
    gang.settled()
    assert second.reason is Reason.SUPERVISOR_KILLED
    assert first.reason in (Reason.ENGINE_HEAD_LOST, Reason.PEER_FAILED)
    assert_nothing_is_left(nodes, gang)
