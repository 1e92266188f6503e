"""Ctrl-C while a call goes on through a server, and callers that vanish."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from serverless_gpu.model.lifecycle.attempt import State
from tests.support.golden import golden
from tests.support.local.observe import wait_for
from tests.support.remote.fake_server import FakeServer, Script

PROGRAM = """
import sys
from serverless_gpu import distributed

@distributed(gpus=1, gpu_type="H100", remote=True, on_interrupt=sys.argv[1])
def train():
    return 1

try:
    train.distributed()
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


@pytest.fixture
def caller(home: Path, fake: FakeServer, tmp_path: Path) -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    """Yield what starts a script that waits for a remote call."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    started: list[subprocess.Popen[str]] = []

    def start(on_interrupt: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, str(program), on_interrupt],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            cwd=tmp_path,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def running(script: Script, process: subprocess.Popen[str]) -> None:
    """Have the run begin, and wait until its caller shows that."""
    script.say(State.RUNNING)
    script.write(0, b"begun\n")
    assert process.stdout is not None and process.stdout.readline() == "[rank 0] begun\n"


def test_F61_ctrl_c_stops_the_run_and_waits_until_its_devices_are_free(
    fake: FakeServer, caller: Callable[[str], subprocess.Popen[str]]
) -> None:
    script = fake.script()
    process = caller("cancel")
    running(script, process)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert out == "interrupted\n" and script.stops == ["cancel"]
    assert golden("local.limits.cancelling-press-ctrl") in err
    assert golden("remote.interrupts.cancelled-gpu-verified") in err and "Traceback" not in err


def test_F61_a_second_ctrl_c_leaves_at_once(fake: FakeServer, caller: Callable[[str], subprocess.Popen[str]]) -> None:
    script = fake.script()
    script.is_deaf = True
    process = caller("cancel")
    running(script, process)
    process.send_signal(signal.SIGINT)
    wait_for(lambda: script.stops, "it was asked to stop")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert out == "interrupted\n" and set(script.stops) == {"cancel"}
    assert golden("local.session.still-being-cancelled") in err


def test_F61_a_second_ctrl_c_leaves_at_once_also_where_the_server_is_away(
    fake: FakeServer, caller: Callable[[str], subprocess.Popen[str]]
) -> None:
    script = fake.script()
    process = caller("cancel")
    running(script, process)
    fake.stop()
    process.send_signal(signal.SIGINT)
    assert process.stderr is not None
    lines: list[str] = []
    while not lines or golden("remote.interrupts.cancelling-press-ctrl") not in lines[-1]:
        lines.append(process.stderr.readline())
        assert lines[-1], "it ended without having said that"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert out == "interrupted\n" and script.stops == []
    assert golden("remote.interrupts.left-server-does") in err


def test_F61_a_run_that_was_on_its_way_when_ctrl_c_came_is_cancelled_when_it_arrives(
    home: Path, fake: FakeServer, caller: Callable[[str], subprocess.Popen[str]]
) -> None:
    script = fake.script()
    fake.makes.clear()
    process = caller("cancel")
    wait_for(lambda: fake.seen["POST runs"] == 1, "the run was asked for")
    process.send_signal(signal.SIGINT)
    wait_for(lambda: fake.seen["POST runs/stop"] > 0, "it was asked to stop, and was not there yet")
    fake.makes.set()
    out, _ = process.communicate(timeout=60)
    assert out == "interrupted\n" and script.stops == ["cancel"]
    assert [path.name for path in (home / "remote").iterdir() if path.name[0] != "."] == []


def test_F61_a_run_that_may_have_been_started_is_named_when_its_caller_leaves(
    home: Path, fake: FakeServer, caller: Callable[[str], subprocess.Popen[str]]
) -> None:
    fake.script()
    fake.makes.clear()
    process = caller("cancel")
    wait_for(lambda: fake.seen["POST runs"] == 1, "the run was asked for")
    fake.stop()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    (run_id,) = (path.name for path in (home / "remote").iterdir() if path.name[0] != ".")
    assert out == "interrupted\n" and golden("remote.interrupts.whether-run-started", run_id=run_id) in err
    fake.makes.set()


def test_F61_with_detach_the_run_goes_on(fake: FakeServer, caller: Callable[[str], subprocess.Popen[str]]) -> None:
    script = fake.script()
    process = caller("detach")
    running(script, process)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert out == "interrupted\n" and script.stops == []
    assert golden("remote.interrupts.goes-find-again") in err


def test_F62_a_caller_that_vanishes_leaves_the_run_and_its_identifier(
    home: Path, fake: FakeServer, caller: Callable[[str], subprocess.Popen[str]]
) -> None:
    script = fake.script()
    process = caller("cancel")
    running(script, process)
    process.kill()
    process.wait()
    assert script.stops == []
    assert [path.name for path in (home / "remote").iterdir() if path.name[0] != "."] == list(fake.runs)
