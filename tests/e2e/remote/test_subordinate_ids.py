"""A node without the rights of root whose account has subordinate ids: sandboxes through a user namespace."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from serverless_gpu.model.canary import ATTEMPTS, CGROUP, EGRESS
from serverless_gpu.wire.nodes import NodeList, PoolRequest, PoolView
from tests.e2e.remote.test_isolation import run_canary
from tests.support.local.observe import Process, processes_of, wait_for
from tests.support.remote.gang_work import add_up_by_sockets
from tests.support.remote.machines import Machines
from tests.support.remote.subordinate_machine import NAME, UID, UIDS, SubordinateMachine

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can make the account of the test"),
    pytest.mark.skipif(shutil.which("newuidmap") is None, reason="the package uidmap is not installed"),
]


LEVELS = (pytest.param("user", marks=pytest.mark.long), "sandbox")
REFUSED = {
    *("server-key", "node-token", "attempt-token", "other-log", "other-arguments", "own-facts", "other-facts"),
    *("node-home", "list-other-runs", "poison-unit", "agent-variables", "rank-memory-call", "rank-files"),
    *("take-descriptor", "trace-rank", "signal-rank", "end-supervisor", "end-agent", "end-zygote", "trace-stem"),
    *("agent-socket", "supervisor-socket", "setuid-program"),
}
"""Attempts on files, processes and memory of others whose control succeeds without root."""
NOT_ENFORCED = {EGRESS.name, CGROUP.name} if Path("/sys/fs/cgroup/memory").exists() else {EGRESS.name}
"""Measures that need root. On hybrid hosts, only root can limit memory and processes (cgroup v1)."""


@contextlib.contextmanager
def isolated(home: Path, level: str) -> Iterator[tuple[Machines, SubordinateMachine]]:
    """Yield a pool with a node of an account with subordinate ids."""
    with Machines(home) as pool:
        node = pool.join("n1", gpus=4, make=lambda profile, gpus: SubordinateMachine(profile, gpus=gpus))
        pool.ask("PUT", "/pools/default", PoolRequest(isolation=level), answer=PoolView)
        assert isinstance(node, SubordinateMachine)
        yield pool, node


def spawners(node: SubordinateMachine) -> list[Process]:
    """Return the processes of a node's spawner: one that listens, and one for each client."""
    lines = [line for line in processes_of(node.place) if "namespace_process" in line]
    return [Process(int(line.partition(":")[0])) for line in lines]


@pytest.mark.slow
@pytest.mark.parametrize("level", LEVELS)
def test_27_a_node_without_root_isolates_its_runs_through_subordinate_uids(home: Path, level: str) -> None:
    with isolated(home, level) as (pool, node):
        [view] = pool.ask("GET", "/nodes", answer=NodeList).nodes
        assert view.isolation == "sandbox"
        assert f"{UIDS[0]}-{UIDS[-1]} of {NAME}" in view.isolation_problem
        run = pool.submit(add_up_by_sockets, gpus=2)
        results = [found for found in run.results(60) if isinstance(found, tuple)]
        assert [total for total, _ in results] == [1] * 2
        assert {uid for _, uid in results} == {UIDS[0]}
        assert run.receipt().isolation == level
        attempt = node.home.attempt(run.id, 1)
        wait_for(
            lambda: {path.lstat().st_uid for path in attempt.rglob("*")} == {UID},
            "all files of the attempt belong to the node again",
        )
        for process in spawners(node):
            process.kill()
        wait_for(lambda: not spawners(node), "the spawner has ended")
        again = pool.submit(add_up_by_sockets, gpus=2)
        assert again.results(60), "another spawner enters the namespace of the warm interpreter"
        assert again.receipt().warm


@pytest.mark.slow
@pytest.mark.parametrize("level", LEVELS)
def test_27_the_canary_of_a_node_with_subordinate_uids_does_nothing_that_an_enforced_measure_refuses(
    home: Path, level: str
) -> None:
    with isolated(home, level) as (pool, _):
        report = run_canary(pool.administrator())
        assert (report.problem, report.level, len(report.rows)) == ("", level, len(ATTEMPTS))
        possible = {row.attempt: row.measure for row in report.rows if row.required and row.verdict == "possible"}
        assert {name for name, measure in possible.items() if measure not in NOT_ENFORCED} == set()
        assert set(possible.values()) <= NOT_ENFORCED
        refused = {row.attempt for row in report.rows if row.verdict == "refused"}
        assert refused >= REFUSED, REFUSED - refused
