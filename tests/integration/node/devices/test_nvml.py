"""Row F26: a driver that hangs takes the process with it that asks it, and nobody else."""

from __future__ import annotations

import gc
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from serverless_gpu.node.devices.nvml import NO_DRIVER, NvmlProcess, NvmlTimeout
from serverless_gpu.testing import FakeClock
from tests.support.golden import golden
from tests.support.local.observe import wait_for

LIMIT_S = 20.0
SHORT_S = 0.3


def helpers() -> set[int]:
    """Return the processes that ask for this one."""
    me = os.getpid()
    children = Path(f"/proc/{me}/task/{me}/children").read_text().split()
    return {int(pid) for pid in children if _is_helper(int(pid))}


def _is_helper(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return Path(f"/proc/{pid}/comm").read_text().strip() == "sgpu-nvml" and state != "Z"
    except OSError:
        return False


def another(before: set[int]) -> set[int]:
    """Return the one process that asks now, once those before are gone."""
    wait_for(lambda: len(helpers() - before) == 1 and not helpers() & before, "another one asks, alone")
    return helpers()


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[Path]:
    """Yield the state file of a driver that hangs."""
    path = tmp_path / "fake_gpus.json"
    path.write_text('{"FAKE-H100-0":{"hangs":true}}')
    yield path
    gc.collect()
    wait_for(lambda: not helpers(), "what asked has ended with who had it ask")


@pytest.mark.parametrize("forks", [False, True])
def test_F26_nobody_waits_twice_and_what_recovers_is_believed(driver: Path, forks: bool) -> None:
    asker = NvmlProcess(str(driver), SHORT_S, forks=forks)
    for _ in range(3):
        with pytest.raises(NvmlTimeout, match=re.escape(golden("node.nvml_process.did-answer"))):
            asker.ask(["FAKE-H100-0"])
    wait_for(lambda: len(helpers()) == 1, "one process asks")
    driver.write_text("{}")

    def answers() -> bool:
        try:
            return asker.ask(None).seen == ()
        except NvmlTimeout:
            return False

    wait_for(answers, "the driver answers again")
    assert len(helpers()) == 1


def test_F26_another_one_tries_and_never_more_than_a_few(driver: Path) -> None:
    clock = FakeClock()
    asker = NvmlProcess(str(driver), SHORT_S, forks=True, clock=clock)
    before: set[int] = set()
    for _ in range(4):
        with pytest.raises(NvmlTimeout):
            asker.ask(None)
        before |= another(before)
        clock.advance(31)


@pytest.mark.parametrize("forks", [False, True])
def test_nvml_itself_is_asked_there(forks: bool) -> None:
    asker = NvmlProcess("", LIMIT_S, forks=forks)
    found = asker.ask(None)
    assert asker.ask([]).usage == {}
    used = asker.ask(["GPU-no-such"]).usage["GPU-no-such"]
    assert used.problem and not used.silent
    assert found.seen or found.unavailable or used.problem == NO_DRIVER


def test_one_that_dies_is_made_up_for(driver: Path) -> None:
    driver.write_text("{}")
    asker = NvmlProcess(str(driver), LIMIT_S, forks=True)
    assert asker.ask(None).unavailable == ()
    wait_for(lambda: len(helpers()) == 1, "one process asks")
    (pid,) = helpers()
    os.kill(pid, signal.SIGKILL)
    assert asker.ask(["FAKE-H100-0"]).usage == {}
    assert helpers() != {pid}
