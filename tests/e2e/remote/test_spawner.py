"""A node without the rights of root, and the spawner that acts for it: the same isolation, with fewer rights."""

from __future__ import annotations

import os
import signal
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from serverless_gpu.node.attempt.history import read_ending
from serverless_gpu.node.isolation import nft
from serverless_gpu.node.isolation.egress_rules import removal
from serverless_gpu.node.isolation.principals import PLACE, RANGE
from serverless_gpu.node.uplink.server import UplinkProfile
from serverless_gpu.wire.nodes import NodeList, PoolRequest, PoolView
from serverless_gpu.wire.runs import RunView
from tests.support.local.observe import Process, wait_for
from tests.support.remote.account_machine import ACCOUNT, AccountMachine, RunningSpawner
from tests.support.remote.gang_work import add_up_by_sockets, reached_places, stay
from tests.support.remote.machines import Machines

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can run the spawner")


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield a directory for principals and sockets, where other uids may pass."""
    with tempfile.TemporaryDirectory(prefix="sg-spawner-", dir="/var/tmp") as found:
        os.chmod(found, 0o755)
        monkeypatch.setenv(PLACE, f"{found}/principals")
        first = 1_800_000_000 + os.getpid() % 10_000 * 10  # Network rules of other tests are for other uids.
        monkeypatch.setenv(RANGE, f"{first}-{first + 9}")
        yield Path(found)
        nft.run(removal(nft.table_of(os.environ)), os.environ)  # The node ends together with its cgroup.


def join(pool: Machines, spawner: RunningSpawner) -> AccountMachine:
    """Start a node of the account with two devices."""
    made: list[AccountMachine] = []

    def make(profile: UplinkProfile, gpus: int) -> AccountMachine:
        made.append(AccountMachine(profile, gpus=gpus, spawner=spawner.path))
        return made[0]

    pool.join("n1", gpus=2, make=make)
    return made[0]


def rights(process: Process) -> tuple[str, str]:
    """Return the uid and the effective capabilities of a process."""
    fields = dict(
        line.split(":\t", 1) for line in Path(f"/proc/{process.pid}/status").read_text().splitlines() if ":\t" in line
    )
    return fields["Uid"].split()[0], fields["CapEff"]


def belongs_to_the_node(attempt: Path) -> bool:
    return {path.lstat().st_uid for path in attempt.rglob("*")} == {ACCOUNT.pw_uid}


def is_retried(pool: Machines, run: str) -> bool:
    """Return True if the attempt of a run could not start, and the scheduler will start another."""
    view = pool.ask("GET", f"/runs/{run}", answer=RunView)
    return view.state == "QUEUED" and "did not start" in view.sentence


@pytest.mark.slow
@pytest.mark.parametrize("level", [pytest.param("user", marks=pytest.mark.long), "sandbox"])
def test_a_node_without_rights_isolates_its_runs_through_the_spawner(home: Path, place: Path, level: str) -> None:
    with RunningSpawner(place) as spawner, Machines(home) as pool:
        node = join(pool, spawner)
        pool.ask("PUT", "/pools/default", PoolRequest(isolation=level, egress="none"), answer=PoolView)
        run = pool.submit(add_up_by_sockets, gpus=2)
        processes = [node.uplink(), node.agent()]
        assert [rights(process) for process in processes] == [(str(ACCOUNT.pw_uid), "0" * 16)] * len(processes)
        results = [found for found in run.results(60) if isinstance(found, tuple)]
        assert [total for total, _ in results] == [1] * 2
        assert {uid for _, uid in results}.isdisjoint({0, ACCOUNT.pw_uid})
        receipt = run.receipt()
        assert (receipt.isolation, [note for note in receipt.notes if "network" in note]) == (level, [])
        attempt = node.home.attempt(run.id, 1)
        wait_for(lambda: belongs_to_the_node(attempt), "all files of the attempt belong to the node again")
        wait_for(
            lambda: [each for each in node.status().zygotes if each.owner and each.memory_bytes > 1 << 20],
            "the agent knows the memory of the principal's interpreter",
        )


@pytest.mark.slow
def test_27_a_node_without_rights_enforces_the_network_policy_of_its_pool(home: Path, place: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed, socket.create_server(("127.0.0.1", 0)) as opened:
        services = ["{}:{}".format(*each.getsockname()) for each in (closed, opened)]
        with RunningSpawner(place, "--open", services[1]) as spawner, Machines(home) as pool:
            node = join(pool, spawner)
            policy = PoolRequest(isolation="sandbox", egress="pool", allow=tuple(services))
            pool.ask("PUT", "/pools/default", policy, answer=PoolView)
            run = pool.submit(reached_places, *services, urlsplit(pool.server.url).netloc, gpus=1)
            assert run.results(60) == [services[1:]]
            (view,) = pool.ask("GET", "/nodes", answer=NodeList).nodes
            assert view.egress_problem == ""
            assert f"--open {services[0]}" in node.log()


@pytest.mark.slow
def test_a_run_survives_the_death_of_the_spawner(home: Path, place: Path) -> None:
    """A worker of the spawner lives as long as its client. Only new clients need the spawner itself."""
    meeting = place / "meeting"
    meeting.mkdir()
    meeting.chmod(0o777)
    with RunningSpawner(place) as spawner, Machines(home) as pool:
        node = join(pool, spawner)
        pool.ask("PUT", "/pools/default", PoolRequest(isolation="user"), answer=PoolView)
        run = pool.submit(stay, str(meeting), gpus=2)
        wait_for(lambda: len(list(meeting.glob("1.rank*"))) == 2, "the ranks have started")
        spawner.end(signal.SIGKILL)
        (meeting / "go").touch()
        assert run.results(60) == [0, 1]
        attempt = node.home.attempt(run.id, 1)
        wait_for(lambda: belongs_to_the_node(attempt), "all files of the attempt belong to the node again")
        following = pool.submit(add_up_by_sockets, gpus=2)
        wait_for(lambda: is_retried(pool, following.id), "the scheduler retries the start")
        ending = read_ending(node.home.attempt(following.id, 1))
        assert ending is not None and ending.cause is not None
        assert "sgpu node spawner" in ending.cause.detail
        spawner.start()
        assert [found[0] for found in following.results(60) if isinstance(found, tuple)] == [1, 1]
