"""Until when others have the devices of this machine: how that is worked out of what lies in the home."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from pathlib import Path

import msgspec
import pytest

from serverless_gpu.client import estimating
from serverless_gpu.model.scheduling.duration_estimates import LEAVING_S, START_S
from serverless_gpu.model.spec import RunSpec
from serverless_gpu.node.attempt.history import RunRecord
from serverless_gpu.node.base.home import Home
from serverless_gpu.node.devices.locks import LockHolder

S = 1_000_000_000
NOW = 1_000 * S
SINCE = NOW - 5 * S
HAVE = {"a1": NOW - 60 * S, "b1": NOW - 30 * S, "c1": None}
"""Runs that have devices, and since when their user code runs."""


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Counter[str]:
    """Have a home with three runs that have devices and nine earlier ones; return how often each was read."""
    count: Counter[str] = Counter()
    past = [f"{name}{number}" for name in "abc" for number in (2, 3, 4)]
    for run_id in (*HAVE, *past):
        (tmp_path / "runs" / run_id).mkdir(parents=True)

    def read_run(runs: Path, run_id: str, queued: Collection[str] = ()) -> RunRecord:
        count[run_id] += 1
        spec = RunSpec(name=run_id[0], timeout_s=100.0, grace_s=10.0)
        record = RunRecord(run_id=run_id, directory=runs, state="RUNNING", live=True, created_ns=0, spec=spec)
        if run_id in HAVE:
            return msgspec.structs.replace(record, began_ns=HAVE[run_id])
        return msgspec.structs.replace(record, state="SUCCEEDED", began_ns=0, ended_ns=90 * S)

    monkeypatch.setattr(estimating, "read_run", read_run)
    return count


def holders() -> list[LockHolder]:
    return [LockHolder(uuid=run_id, run_id=run_id, user="alice", pid=1, since_wall_ns=SINCE) for run_id in HAVE]


def test_the_past_is_read_once_however_many_have_devices(read: Counter[str], tmp_path: Path) -> None:
    found = estimating.device_holders(Home(tmp_path), holders(), NOW)
    assert [(each.title, each.until_ns, each.is_bound) for each in found] == [
        ("alice/a", NOW + 30 * S, False),  # as its like: 90 s
        ("alice/b", NOW + 60 * S, False),
        ("alice/c", SINCE + 90 * S, False),
    ]
    assert all(count <= 1 + (run_id in HAVE) for run_id, count in read.items())


def test_the_latest_end_is_what_the_server_would_say(read: Counter[str], tmp_path: Path) -> None:
    for directory in (tmp_path / "runs").iterdir():
        if directory.name not in HAVE:
            directory.rmdir()  # nothing is known of their like
    found = {
        each.title: (each.until_ns, each.is_bound) for each in estimating.device_holders(Home(tmp_path), holders(), NOW)
    }
    assert found["alice/b"] == (NOW + (70 + 10) * S + int(LEAVING_S) * S, True)
    assert found["alice/c"] == (SINCE + (100 + 10) * S + int(START_S + LEAVING_S) * S, True)
