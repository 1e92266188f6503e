"""F21, F22 for gangs: one of two nodes restarts, or never comes back, with real processes in namespaces.

A machine that restarts has no process any more and another boot identifier; that is proof for the server at once.
"""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from serverless_gpu.model.lifecycle.attempt import Reason
from serverless_gpu.wire.nodes import ForgetRequest, NodeView
from serverless_gpu.wire.runs import AttemptList
from tests.e2e.network.cluster import Cluster, ClusterNode
from tests.support.local.observe import wait_for
from tests.support.network.beats import beats, talk
from tests.support.network.namespaces import Network, entering, need_root
from tests.support.node.joining import join_command

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SETTINGS = {"soft_expiry_s": 4.0, "heartbeat_s": 0.5}
"""The hard fence is at 15 minutes: nothing here waits for it."""
LIMIT_S = 100.0


@pytest.fixture
def cluster(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """Yield a server with two nodes of a GPU each."""
    need_root()
    monkeypatch.setenv("SERVERLESS_GPU_PREWARM", "0")
    home = tmp_path_factory.mktemp("server")
    with Network() as network, Cluster(network, home, SETTINGS, wires=3) as cluster:
        for node in [cluster.invite(name) for name in ("n1", "n2")]:
            cluster.joined(node)
        yield cluster


def talking(where: Path, fence: int) -> None:
    """Wait until both ranks of an attempt talk to each other."""
    met = [where / f"{fence}.{rank}.met" for rank in (0, 1)]
    wait_for(lambda: all(path.exists() for path in met), f"attempt {fence} goes on", LIMIT_S)


def die(cluster: Cluster, node: ClusterNode, run_id: str) -> None:
    """End every process of a node, and wait until the server sees that it is silent."""
    node.wire.signal_all(signal.SIGKILL)
    wait_for(lambda: not node.wire.pids(), "no process of it is left")
    wait_for(lambda: cluster.run(run_id).state == "UNREACHABLE", "the silence is seen", LIMIT_S)


def boot(node: ClusterNode) -> None:
    """Have its uplink running on a machine that was booted anew."""
    (node.home.root / "boot_id").write_text("00000000-0000-4000-8000-000000000021\n")
    script = 'mount --bind "$0" /proc/sys/kernel/random/boot_id && exec "$@"'
    around = ["unshare", "--mount", "sh", "-c", script, str(node.home.root / "boot_id")]
    command = [*entering(node.wire.namespace), *around, *join_command(node.home.root, node.profile)]
    subprocess.run(command, check=True, env=node.environ, timeout=60)


def check(cluster: Cluster, run_id: str, where: Path, reason: Reason, told: str) -> None:
    """Check that the second attempt began when nothing of the first was left, and why there is one."""
    (where / "go2").touch()
    wait_for(lambda: cluster.run(run_id).ended_ns, "the run has ended", LIMIT_S)
    assert cluster.run(run_id).reason is Reason.COMPLETED
    found = cluster.ask("GET", f"/runs/{run_id}/attempts", answer=AttemptList).attempts
    assert [one.reason for one in found] == [reason, Reason.COMPLETED]
    ((why,),) = cluster.rows("SELECT sentence FROM events WHERE run_id = ? AND fence = 1 AND state = 'QUEUED'", run_id)
    assert told in why, why
    first, second = ([*beats(where, fence, 0), *beats(where, fence, 1)] for fence in (1, 2))
    assert max(first) < min(second), "user code of two attempts ran at once"


def test_F21_a_node_of_a_gang_that_restarts_is_proof_at_once(cluster: Cluster, tmp_path: Path) -> None:
    run_id = cluster.submit_gang(talk, str(tmp_path), retries=1)
    talking(tmp_path, 1)
    node = cluster.nodes["n2"]
    die(cluster, node, run_id)
    boot(node)
    talking(tmp_path, 2)
    check(cluster, run_id, tmp_path, Reason.NODE_REBOOTED, "the node restarted: on n2")


def test_F22_a_node_of_a_gang_that_never_returns_is_given_up_at_once_when_an_operator_knows(
    cluster: Cluster, tmp_path: Path
) -> None:
    run_id = cluster.submit_gang(talk, str(tmp_path), retries=1)
    talking(tmp_path, 1)
    die(cluster, cluster.nodes["n1"], run_id)
    cluster.join("n3")
    cluster.ask("POST", "/nodes/n1/forget", ForgetRequest(i_know_it_is_dead=True), answer=NodeView)
    talking(tmp_path, 2)
    check(cluster, run_id, tmp_path, Reason.NODE_GONE, "the node did not reconnect: on n1: root said that n1 is dead")
