"""Runs that stand still in a collective of torch (gloo): who waits, and that a look disturbs nobody. Row F04."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

from serverless_gpu import distributed
from serverless_gpu.ambient import SystemClock
from tests.support.local.hangs import WARNING, hung, report_of, section
from tests.support.local.observe import announced, wait_for
from tests.support.local.ranks import announce, wait_for_file

pytestmark = pytest.mark.torch


@pytest.mark.parametrize(
    "call", ["backward", *(pytest.param(call, marks=pytest.mark.long) for call in ("all_reduce", "barrier"))]
)
def test_F04_a_rank_that_does_not_come_to_a_collective(warm: Path, where: str, call: str) -> None:
    def train(where: str, call: str, rank: int = -1) -> None:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(torch.nn.Linear(4, 4))
        for step in range(3):
            model(torch.ones(2, 4)).sum().backward()
            if rank == 1 and step == 1:
                time.sleep(600)
            if step == 1 and call != "backward":
                dist.barrier() if call == "barrier" else dist.all_reduce(torch.ones(2))

    run = distributed(gpus=3, quiet=True, hang_timeout=5.0)(train).submit(where, call)
    error = hung(run)
    assert (error.ranks_waiting, error.ranks_elsewhere) == ([0, 2], [1])
    report = report_of(run)
    frame = {"all_reduce": " in all_reduce", "barrier": " in barrier", "backward": " in _engine_run_backward"}[call]
    assert frame in section(report, 0) and frame in section(report, 2) and frame not in section(report, 1)


def test_F04_while_one_rank_is_at_work_the_others_may_wait(
    warm: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 evaluates, the others wait for it: said, and not ended."""

    def train(where: str, rank: int = -1) -> int:
        dist.init_process_group("gloo")
        while rank == 0 and not Path(where, "go").exists():
            sum(range(10_000))
        dist.barrier()
        return rank

    monkeypatch.setenv(WARNING, "0")
    run = distributed(gpus=2, quiet=True, hang_timeout=1.5)(train).submit(where)
    assert "rank 1 waits in " in report_of(run)
    assert "rank 0 is busy" in run.last_sentence()
    began_ns = SystemClock().boottime_ns()
    wait_for(lambda: SystemClock().boottime_ns() - began_ns > 3.5e9, "twice the limit has passed")
    Path(where, "go").touch()
    assert run.results(timeout=50) == [0, 1]
    (note,) = (note for note in run.receipt().notes if "hang-" in note)
    assert note.startswith("hang-1.txt has the stacks of all ranks")


def test_collectives_that_are_looked_at_give_the_right_result(
    warm: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(where: str, rank: int = -1) -> list[object]:
        dist.init_process_group("gloo")
        if rank == 0:
            announce(where, "there")
            wait_for_file(where, "go")
        tensor = torch.ones(1 << 20) * (rank + 1)
        dist.all_reduce(tensor)
        store = dist.distributed_c10d._get_default_store()
        if rank == 0:
            wait_for_file(where, "again")
            store.set("word", "said")
        return [float(tensor.sum()), store.get("word").decode()]

    monkeypatch.setenv(WARNING, "1")
    run = distributed(gpus=2, quiet=True)(train).submit(where)
    announced(Path(where), "there")
    assert " in all_reduce" in section(report_of(run), 1)
    Path(where, "go").touch()
    report_of(run, 2)
    Path(where, "again").touch()
    assert run.results(timeout=50) == [[3.0 * (1 << 20), "said"]] * 2
