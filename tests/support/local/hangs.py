"""Helpers of the tests of hangs that other tests use as well."""

from __future__ import annotations

from typing import Any

import pytest

from serverless_gpu import Run
from serverless_gpu.errors import CollectiveHang
from tests.support.golden import golden
from tests.support.local.observe import wait_for

WARNING = "SERVERLESS_GPU_HANG_WARNING"


def hung(run: Run[Any]) -> CollectiveHang:
    """Wait for the end of a run that has to hang, and check what every such end has in common."""
    with pytest.raises(CollectiveHang) as caught:
        run.results(timeout=50)
    error = caught.value
    receipt = run.receipt(timeout=50)
    assert (error.reason, error.run_id, error.rank) == ("collective_hang", run.id, None)
    assert (run.status(), receipt.state, receipt.reason) == ("FAILED", "FAILED", "collective_hang")
    # A rank that moved once more on a busy machine leaves an earlier report.
    newest = max(run.directory.glob("hang-*.txt"))
    assert error.hint == golden("local.hangs.python-stacks-all", file=newest)
    assert golden("local.hangs.hang-txt-stacks-2", message=error.message) in receipt.notes
    stacks = run.directory.glob("failures/*.stack")
    assert not any(path.stat().st_size for path in stacks), "a stack that was asked for is no crash"
    return error


def report_of(run: Run[Any], number: int = 1) -> str:
    """Wait for the file with all stacks and return it."""
    path = run.directory / f"hang-{number}.txt"
    return str(wait_for(lambda: path.exists() and path.read_text(), f"{path.name} is there"))


def section(report: str, rank: int) -> str:
    """Return what the file says about one rank's stacks."""
    return report.partition(f"---- rank {rank} (")[2].partition("\n---- rank ")[0]
