"""Nodes that reach their server and not each other, with real processes in namespaces: before they meet, and after."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from serverless_gpu.model.lifecycle.attempt import Reason
from serverless_gpu.wire.runs import AttemptList, AttemptView, RunView
from tests.e2e.network.cluster import Cluster
from tests.support.golden import golden
from tests.support.local.observe import wait_for
from tests.support.network.beats import beats, talk
from tests.support.network.namespaces import Network, need_root

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SETTINGS = {"heartbeat_s": 1.0}
FAR_S = 60.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Yield a server with three nodes of a GPU each."""
    need_root()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SERVERLESS_GPU_PREWARM", "0")
        home = tmp_path_factory.mktemp("server")
        with Network() as network, Cluster(network, home, SETTINGS, wires=3) as cluster:
            for node in [cluster.invite(name) for name in ("n1", "n2", "n3")]:
                cluster.joined(node)
            yield cluster


def attempts(cluster: Cluster, run_id: str) -> tuple[AttemptView, ...]:
    """Return the attempts of a run."""
    return tuple(cluster.ask("GET", f"/runs/{run_id}/attempts", answer=AttemptList).attempts)


def ended(cluster: Cluster, run_id: str) -> RunView:
    """Return a run once it has ended, and everything of it is told."""
    wait_for(lambda: cluster.run(run_id).finished, "the run is finished", FAR_S)
    return cluster.run(run_id)


def talking(where: Path, fence: int) -> None:
    """Wait until both ranks of an attempt talk to each other."""
    met = [where / f"{fence}.{rank}.met" for rank in (0, 1)]
    wait_for(lambda: all(path.exists() for path in met), f"attempt {fence} goes on", FAR_S)


def test_F19_nodes_of_which_one_does_not_reach_the_other_are_named_and_the_gang_is_placed_elsewhere(
    cluster: Cluster, tmp_path: Path
) -> None:
    one, other = cluster.nodes["n1"].wire, cluster.nodes["n2"].wire
    one.part(other)  # and nothing is lost the other way
    run_id = cluster.submit_gang(talk, str(tmp_path))
    said = wait_for(lambda: "did not start" in (text := cluster.run(run_id).sentence) and text, "it is told why", FAR_S)
    assert str(said).startswith("attempt 1 did not start on n1, n2: n2 does not reach n1: tried "), said
    assert golden("network.gangs_apart.answer", peer_address=one.peer_address) in str(said) and golden(
        "network.gangs_apart.tried-again"
    ) in str(said), said
    talking(tmp_path, 2)
    (tmp_path / "go2").touch()
    assert ended(cluster, run_id).reason is Reason.COMPLETED
    first, second = attempts(cluster, run_id)
    assert (first.reason, first.node, first.started_ns) == (Reason.NODES_APART, "n1, n2", None)
    assert "n3" in second.node
    assert not beats(tmp_path, 1, 0) and not beats(tmp_path, 1, 1), "no user code where nodes do not reach each other"
    one.join(other)


@pytest.mark.spot
def test_F18_nodes_that_lose_each_other_while_a_gang_runs_are_the_ranks_own_to_notice(
    cluster: Cluster, tmp_path: Path
) -> None:
    run_id = cluster.submit_gang(talk, str(tmp_path), "1")
    talking(tmp_path, 1)
    one, other = (cluster.nodes[name].wire for name in cluster.run(run_id).node.split(", "))
    one.part(other)
    run = ended(cluster, run_id)
    one.join(other)
    assert run.reason is Reason.RANK_RAISED
    assert "UNREACHABLE" not in cluster.states(run_id), "the server hears of both all the time"
    assert "TimeoutError: timed out" in run.sentence and "rank 1" in run.sentence, run.sentence


def test_F18_nodes_that_lost_each_other_are_cancelled_at_once_though_their_ranks_wait_for_ever(
    cluster: Cluster, tmp_path: Path
) -> None:
    run_id = cluster.submit_gang(talk, str(tmp_path))
    talking(tmp_path, 1)
    one, other = (cluster.nodes[name].wire for name in cluster.run(run_id).node.split(", "))
    one.part(other)
    other.part(one)
    cluster.ask("POST", f"/runs/{run_id}/stop", {"reason": "cancel"}, answer=RunView)
    assert ended(cluster, run_id).reason is Reason.CANCELLED
    one.join(other)
    other.join(one)
