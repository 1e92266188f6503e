"""Time and interruption: timeouts, grace, Ctrl-C. Rows F08, F61 and F73 of the failure matrix.

Times are only compared with generous bounds that express a promise.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest

from serverless_gpu import attach, distributed
from serverless_gpu.errors import RunCancelled, RunTimedOut
from tests.support.golden import golden
from tests.support.local.observe import Process, announced, ended, start_script, wait_for
from tests.support.local.ranks import announce, ignore_sigterm, stay, wait_for_file
from tests.support.paths import REPOSITORY

# --- F08: grace -------------------------------------------------------------------------------------------------------


def test_F08_ranks_that_ignore_sigterm_are_killed_after_the_grace(warm: Path, where: str) -> None:
    run = distributed(gpus=2, quiet=True, grace=0.5)(ignore_sigterm).submit(where)
    ranks = [announced(Path(where), f"rank{number}")[0] for number in (0, 1)]
    run.cancel()
    with pytest.raises(RunCancelled) as caught:
        run.results(timeout=50)
    assert caught.value.reason == "cancelled"
    receipt = run.receipt(timeout=50)
    assert receipt.state == "CANCELLED"
    assert golden("common.golden.ranks-did-stop") in receipt.notes
    assert receipt.segments.stop_ms is not None and receipt.segments.stop_ms >= 500
    assert receipt.segments.run_ms is not None and receipt.bill is not None
    assert 0 <= receipt.bill.billed_ms - 2 * (receipt.segments.run_ms + 500) <= 2, "the grace is theirs, not the kill"
    assert receipt.gpu_ms > receipt.bill.billed_ms and "not billed" in receipt.text()
    assert not any(rank.alive() for rank in ranks)


def test_F08_ranks_that_heed_sigterm_are_not_waited_for(warm: Path, where: str) -> None:
    run = distributed(gpus=2, quiet=True, grace=600.0)(stay).submit(where)
    ranks = [announced(Path(where), f"rank{number}")[0] for number in (0, 1)]
    run.cancel()
    with pytest.raises(RunCancelled):
        run.results(timeout=50)
    assert run.receipt(timeout=50).notes == ()
    assert not any(rank.alive() for rank in ranks)


def test_a_rank_may_save_a_checkpoint_when_it_is_cancelled(warm: Path, where: str) -> None:
    def train(where: str) -> str:
        signal.signal(signal.SIGTERM, lambda *_: announce(where, "asked"))
        announce(where, "ready")
        wait_for_file(where, "asked")
        Path(where, "checkpoint").write_text("saved")
        return "stopped early"

    run = distributed(gpus=1, quiet=True)(train).submit(where)
    announced(Path(where), "ready")
    run.cancel()
    with pytest.raises(RunCancelled):
        run.results(timeout=50)
    assert Path(where, "checkpoint").read_text() == "saved"


def test_cancelling_a_run_that_waits_or_has_ended_is_fine(warm: Path, where: str) -> None:
    first = distributed(gpus=8, quiet=True)(stay).submit(where)
    announced(Path(where), "rank7")
    second = distributed(gpus=1, quiet=True)(stay).submit(where)
    assert second.status() == "QUEUED"
    second.cancel()
    with pytest.raises(RunCancelled):
        second.results(timeout=50)
    assert second.receipt(timeout=50).gpu_ms == 0
    Path(where, "go").touch()
    assert first.results(timeout=50) == list(range(8))
    first.cancel()
    assert first.status() == "SUCCEEDED" and first.results() == list(range(8))


# --- F73: timeouts ----------------------------------------------------------------------------------------------------


def test_F73_sigterm_comes_early_enough_for_a_checkpoint_inside_the_limit(warm: Path, where: str) -> None:
    def train(where: str) -> None:
        signal.signal(signal.SIGTERM, lambda *_: announce(where, "asked"))
        started = time.monotonic()
        wait_for_file(where, "asked")
        Path(where, "asked_after").write_text(str(time.monotonic() - started))
        threading.Event().wait(60)

    run = distributed(gpus=1, quiet=True, timeout=6.0, grace=3.0)(train).submit(where)
    with pytest.raises(RunTimedOut, match=re.escape(golden("local.limits.time-limit"))) as caught:
        run.results(timeout=50)
    assert caught.value.reason == "timeout"
    assert float(Path(where, "asked_after").read_text()) < 6.0, "SIGTERM comes at limit − grace, 3 s"
    receipt = run.receipt(timeout=50)
    assert receipt.state == "TIMED_OUT"
    assert receipt.segments.run_ms is not None and 2_900 <= receipt.segments.run_ms < 6_000
    assert receipt.segments.stop_ms is not None and receipt.segments.stop_ms >= 2_900


def test_F73_a_short_timeout_is_halved_for_the_grace(warm: Path, where: str) -> None:
    run = distributed(gpus=1, quiet=True, timeout=4.0)(ignore_sigterm).submit(where)  # the grace is 30 s otherwise
    with pytest.raises(RunTimedOut, match=re.escape(golden("local.limits.time-limit-2"))):
        run.results(timeout=50)
    receipt = run.receipt(timeout=50)
    assert receipt.segments.run_ms is not None and receipt.segments.run_ms >= 1_990
    assert any("and was killed" in note for note in receipt.notes), (receipt.notes, receipt.segments)


def test_F73_time_counts_from_the_first_user_byte_not_from_the_queue(warm: Path, where: str) -> None:
    holder = distributed(gpus=8, quiet=True)(stay).submit(where)
    announced(Path(where), "rank7")
    waiter = distributed(gpus=1, quiet=True, timeout=1.0)(len).submit("abc")
    assert not waiter.wait(1.5), "it waits for longer than its limit, and that costs it nothing"
    Path(where, "go").touch()
    assert waiter.results(timeout=50) == [3]
    assert holder.results(timeout=50) == list(range(8))


def test_F73_a_run_within_its_limit_is_left_alone(warm: Path) -> None:
    assert distributed(gpus=2, quiet=True, timeout=60)(len).distributed("ab") == [2, 2]


# --- F61: Ctrl-C ------------------------------------------------------------------------------------------------------

SCRIPT = """
import asyncio, sys
from serverless_gpu import distributed
from tests.support.local.ranks import ignore_sigterm, stay
function = ignore_sigterm if "ignore" in sys.argv else stay

def call():
    print(distributed(gpus=2, **options)(function).distributed(sys.argv[1]))

async def in_a_loop():
    call()
options = {"on_interrupt": "detach"} if "detach" in sys.argv else {"grace": 60.0}
try:
    asyncio.run(in_a_loop()) if "loop" in sys.argv else call()
except KeyboardInterrupt:
    print("interrupted")
    sys.exit(130)
"""

ROOT = str(REPOSITORY)


def start(where: str, *words: str) -> tuple[subprocess.Popen[str], list[Process]]:
    """Start the script and return it with its two ranks, once they run."""
    path = Path(where, "script.py")
    path.write_text(SCRIPT)
    environ = {"PYTHONPATH": os.pathsep.join(filter(None, [ROOT, os.environ.get("PYTHONPATH")]))}
    process = start_script(path, where, *words, environ=environ)
    try:
        return process, [announced(Path(where), f"rank{number}")[0] for number in (0, 1)]
    except AssertionError:
        process.kill()
        raise


def run_id_of(home: Path) -> str:
    """Return the newest run."""
    return max((home / "runs").iterdir(), key=lambda path: path.name).name


def test_F61_one_ctrl_c_cancels_waits_for_the_hand_back_and_says_so(own: Path, where: str) -> None:
    process, ranks = start(where)
    process.send_signal(signal.SIGINT)
    code, out, err = ended(process)
    assert (code, out) == (130, "interrupted\n"), err
    assert golden("local.limits.cancelling-press-ctrl") in err
    assert re.search(r"cancelled; 2 GPUs verified free: .*, after [\d.]+ m?s", err), err
    assert not any(rank.alive() for rank in ranks)
    run = attach(run_id_of(own))
    assert run.status() == "CANCELLED"
    with pytest.raises(RunCancelled):
        run.results()


def test_F61_a_second_ctrl_c_leaves_at_once_and_the_run_is_still_cancelled(own: Path, where: str) -> None:
    process, ranks = start(where, "ignore")
    process.send_signal(signal.SIGINT)
    run = attach(run_id_of(own))
    wait_for(lambda: run.status() == "STOPPING" or stopping(own), "the run is being cancelled")
    process.send_signal(signal.SIGINT)
    code, _, err = ended(process, 40)  # its grace is 60 s
    assert code == 130 and golden("local.limits.left-run-still", id=run.id) in err
    for rank in ranks:
        rank.send(signal.SIGKILL)  # instead of a minute's grace
    with pytest.raises(RunCancelled):
        run.results(timeout=50)


def test_F61_one_ctrl_c_is_enough_where_an_event_loop_has_taken_it(own: Path, where: str) -> None:
    process, ranks = start(where, "loop")
    process.send_signal(signal.SIGINT)
    code, out, err = ended(process)
    assert (code, out) == (130, "interrupted\n"), err
    assert golden("local.limits.cancelled-gpus-verified") in err
    assert not any(rank.alive() for rank in ranks)


def stopping(home: Path) -> bool:
    """Return whether the newest run has been asked to stop, as a new watcher is told."""
    return attach(run_id_of(home)).status() == "STOPPING"


def test_F61_detach_only_stops_watching(own: Path, where: str) -> None:
    process, ranks = start(where, "detach")
    process.send_signal(signal.SIGINT)
    code, out, err = ended(process)
    assert (code, out) == (130, "interrupted\n"), err
    run_id = run_id_of(own)
    assert f"serverless_gpu.attach('{run_id}')" in err
    assert all(rank.alive() for rank in ranks)
    Path(where, "go").touch()
    assert attach(run_id).results(timeout=50) == [0, 1]
