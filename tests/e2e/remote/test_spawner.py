"""A node without the rights of root, and the spawner that acts for it: the same isolation, with fewer rights."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from serverless_gpu.node.isolation.principals import PLACE
from serverless_gpu.wire.nodes import PoolRequest, PoolView
from tests.support.local.observe import Process, wait_for
from tests.support.remote.account_machine import ACCOUNT, AccountMachine, running_spawner
from tests.support.remote.gang_work import add_up_by_sockets
from tests.support.remote.machines import Machines

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can run the spawner")


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield a directory for principals and sockets, where other uids may pass."""
    with tempfile.TemporaryDirectory(prefix="sg-spawner-", dir="/var/tmp") as found:
        os.chmod(found, 0o755)
        monkeypatch.setenv(PLACE, f"{found}/principals")
        yield Path(found)


def rights(process: Process) -> tuple[str, str]:
    """Return the uid and the effective capabilities of a process."""
    fields = dict(
        line.split(":\t", 1) for line in Path(f"/proc/{process.pid}/status").read_text().splitlines() if ":\t" in line
    )
    return fields["Uid"].split()[0], fields["CapEff"]


@pytest.mark.slow
@pytest.mark.parametrize("level", ["user", "sandbox"])
def test_a_node_without_rights_isolates_its_runs_through_the_spawner(home: Path, place: Path, level: str) -> None:
    with running_spawner(place) as socket, Machines(home) as pool:
        node = pool.join("n1", gpus=2, make=lambda profile, gpus: AccountMachine(profile, gpus=gpus, spawner=socket))
        pool.ask("PUT", "/pools/default", PoolRequest(isolation=level), answer=PoolView)
        run = pool.submit(add_up_by_sockets, gpus=2)
        processes = [node.uplink(), node.agent()]
        assert [rights(process) for process in processes] == [(str(ACCOUNT.pw_uid), "0" * 16)] * len(processes)
        results = [found for found in run.results(60) if isinstance(found, tuple)]
        assert [total for total, _ in results] == [1] * 2
        assert {uid for _, uid in results}.isdisjoint({0, ACCOUNT.pw_uid})
        assert run.receipt().isolation == level
        attempt = node.home.attempt(run.id, 1)
        wait_for(
            lambda: {path.lstat().st_uid for path in attempt.rglob("*")} == {ACCOUNT.pw_uid},
            "all files of the attempt belong to the node again",
        )
