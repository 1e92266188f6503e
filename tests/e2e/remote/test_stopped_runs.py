"""Runs of a server that are stopped: what ranks are told, and the next attempt that goes on where they saved."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from serverless_gpu import Run, distributed
from serverless_gpu import runtime as rt
from serverless_gpu.errors import RunCancelled, RunTimedOut
from tests.e2e.remote import counting
from tests.e2e.remote.counting import count
from tests.support.local.observe import supervisor, wait_for
from tests.support.remote.server_process import ServerProcess


def saved(home: Path, run: Run[tuple[int, int, str | None]], fence: int = 1) -> dict[str, object]:
    return counting.saved(home, run.id, fence)


def test_a_run_that_makes_room_goes_on_as_a_new_attempt_and_whoever_waits_gets_its_results(
    served: Path, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    run = distributed(gpus=1, gpu_type="H100", remote=True, resume=True, quiet=True)(count).submit(600, str(gate))
    wait_for(lambda: "from 0" in run.logs(), "it counts")
    run.preempt()
    gate.touch()
    ((first, reached, why),) = run.results(60)
    assert (reached, why) == (600, None)
    assert first > 0 and saved(served, run) == {"count": first, "why": "preempt"}
    assert (served / "runs" / run.id / "2" / "logs" / "0.stdout").read_text() == f"from {first}\n"


def test_it_makes_room_twice_and_goes_on_from_the_newest(served: Path, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    run = distributed(gpus=1, gpu_type="H100", remote=True, resume=True, quiet=True)(count).submit(600, str(gate))
    for fence in (1, 2):
        wait_for_file(served / "runs" / run.id / str(fence) / "logs" / "0.stdout")
        wait_for(lambda: "from" in run.logs(), "it has begun")
        run.preempt()
        wait_for_file(served / "checkpoints" / run.id / str(fence) / "count.json")
    gate.touch()
    ((first, reached, _),) = run.results(60)
    assert reached == 600
    assert first == saved(served, run, 2)["count"]


def wait_for_file(path: Path) -> None:
    """Wait until there is something in a file."""
    wait_for(lambda: path.exists() and path.stat().st_size, f"{path} is there")


def test_without_resume_a_run_that_makes_room_has_ended(served: Path) -> None:
    run = distributed(gpus=1, gpu_type="H100", remote=True, quiet=True)(count).submit(100_000)
    wait_for(lambda: "from 0" in run.logs(), "it counts")
    run.preempt()
    with pytest.raises(RunCancelled) as caught:
        run.results(60)
    assert (caught.value.reason, run.status(), saved(served, run)["why"]) == ("preempted", "CANCELLED", "preempt")


def test_a_cancel_is_final_also_with_resume(served: Path) -> None:
    run = distributed(gpus=1, gpu_type="H100", remote=True, resume=True, quiet=True)(count).submit(100_000)
    wait_for(lambda: "from 0" in run.logs(), "it counts")
    run.cancel()
    with pytest.raises(RunCancelled) as caught:
        run.results(60)
    assert (caught.value.reason, saved(served, run)["why"]) == ("cancelled", "cancel")
    assert not (served / "runs" / run.id / "2").exists()


def test_the_time_limit_is_final_too_and_says_so(served: Path) -> None:
    run = distributed(gpus=1, gpu_type="H100", remote=True, resume=True, quiet=True, timeout=12)(count).submit(100_000)
    with pytest.raises(RunTimedOut):
        run.results(60)
    assert saved(served, run)["why"] == "timeout"


@pytest.mark.long
def test_a_server_that_is_killed_while_a_run_makes_room_starts_it_again(
    own_server: ServerProcess, home: Path, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    run = distributed(gpus=1, gpu_type="H100", remote=True, resume=True, quiet=True)(count).submit(600, str(gate))
    wait_for(lambda: "from 0" in run.logs(), "it counts")
    run.preempt()
    own_server.kill()  # before the node has heard of it, or after
    own_server.start()
    wait_for_file(home / "checkpoints" / run.id / "1" / "count.json")
    gate.touch()
    ((first, reached, why),) = run.results(90)
    assert (reached, why) == (600, None)
    assert first > 0 and first == saved(home, run)["count"]


def save_as_you_go(limit: int, gate: str) -> tuple[int, int]:
    """Count, and save every number: whatever ends this attempt, the next one goes on; the last once a file is there."""
    found = rt.resume_dir()
    first = int((found / "count").read_text()) if found is not None else 0
    for reached in range(first + 1, limit + 1):
        while reached == limit and not Path(gate).exists():
            time.sleep(0.005)
        unfinished = rt.checkpoint_dir() / "count.tmp"
        unfinished.write_text(str(reached))
        unfinished.rename(rt.checkpoint_dir() / "count")
        time.sleep(0.005)
    return first, limit


def test_a_run_whose_supervisor_is_killed_goes_on_from_what_it_had_saved(
    own_server: ServerProcess, home: Path, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    start = distributed(gpus=1, gpu_type="H100", remote=True, resume=True, quiet=True)
    run = start(save_as_you_go).submit(600, str(gate))
    wait_for_file(home / "checkpoints" / run.id / "1" / "count")
    supervisor(home, run.id).kill()
    gate.touch()
    ((first, reached),) = run.results(90)
    assert first > 0 and reached == 600
