"""A node without the rights of root whose account has subordinate ids: sandboxes through a user namespace."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from serverless_gpu.wire.nodes import NodeList, PoolRequest, PoolView
from tests.support.local.observe import wait_for
from tests.support.remote.gang_work import add_up_by_sockets
from tests.support.remote.machines import Machines
from tests.support.remote.subordinate_machine import UID, UIDS, SubordinateMachine

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can make the account of the test"),
    pytest.mark.skipif(shutil.which("newuidmap") is None, reason="the package uidmap is not installed"),
]


@pytest.mark.slow
@pytest.mark.parametrize("level", ["user", "sandbox"])
def test_27_a_node_without_root_isolates_its_runs_through_subordinate_uids(home: Path, level: str) -> None:
    with Machines(home) as pool:
        node = pool.join("n1", gpus=2, make=lambda profile, gpus: SubordinateMachine(profile, gpus=gpus))
        [view] = pool.ask("GET", "/nodes", answer=NodeList).nodes
        assert (view.isolation, view.isolation_problem) == ("sandbox", f"with subordinate uids {UIDS[0]}-{UIDS[-1]} of tia")
        pool.ask("PUT", "/pools/default", PoolRequest(isolation=level), answer=PoolView)
        run = pool.submit(add_up_by_sockets, gpus=2)
        import subprocess; wait_for(lambda: run.done(), "d"); print(subprocess.run(f"tail -n 40 {node.root}/*.log {node.root}/.local/share/serverless-gpu/principals/*.log", shell=True, capture_output=True, text=True).stdout)
        results = [found for found in run.results(60) if isinstance(found, tuple)]
        assert [total for total, _ in results] == [1] * 2
        assert {uid for _, uid in results} == {UIDS[0]}
        assert run.receipt().isolation == level
        attempt = node.home.attempt(run.id, 1)
        wait_for(
            lambda: {path.lstat().st_uid for path in attempt.rglob("*")} == {UID},
            "all files of the attempt belong to the node again",
        )
