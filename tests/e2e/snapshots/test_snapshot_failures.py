"""`env="snapshot"` when things go wrong: a caller or a service goes away, a disk is full, the store is damaged.

Stages are held by stopping (SIGSTOP) the process whose turn it is, so that what is killed is killed there and then.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from serverless_gpu import distributed
from serverless_gpu.client.agent import stop_agent
from serverless_gpu.client.launch import launch
from serverless_gpu.client.launch.preflight import pack
from serverless_gpu.model.lifecycle.attempt import MEANINGS, Reason, State
from serverless_gpu.model.spec import RunSpec
from serverless_gpu.node.agent.connection import connect
from serverless_gpu.node.attempt.history import read_ending, read_receipt
from serverless_gpu.node.attempt.submission import write_submission
from serverless_gpu.node.base import protocol
from serverless_gpu.node.base.home import Home
from serverless_gpu.node.inside.channel import Channel
from tests.support.golden import golden
from tests.support.local.observe import Process, nothing_of_a_run, wait_for
from tests.support.local.small_environment import (
    WORK,
    Dialogue,
    SmallEnvironment,
    directories,
    named,
    parent_of,
    restorer,
)
from tests.support.small_disks import small_disk


@pytest.fixture
def warmed(own: Path, dialogue: Dialogue) -> Dialogue:
    """Return a caller that has run something: its service, the agent, its restoring process and a zygote are there."""
    assert dialogue.ask("call(work.code)") == "'first'"
    return dialogue


# --- waiting for Confirm ----------------------------------------------------------------------------------------------


def unconfirmed(home: Path, path: Path) -> tuple[protocol.Launch, Channel]:
    """Launch a call that would write a file, and do not confirm its environment."""
    channel, greeting = connect(Home(home))
    order = launch.LaunchOrder(RunSpec(name="touch", quiet=True), 0)
    message = launch.make_message(order, Home(home), greeting)
    message = msgspec.structs.replace(message, confirmed=False)
    Home(home).make_attempt(message.run_id, message.fence)
    write_submission(message, greeting.version)
    pack(str(Path(message.directory) / "call.pkl"), Path.touch, (path,), {})
    protocol.send(channel, message)
    wait_for(lambda: standing_by(Path(message.directory)), "it has its devices")
    return message, channel


def standing_by(directory: Path) -> bool:
    """Return whether a run has its devices."""
    facts = directory / "facts.jsonl"
    return facts.exists() and "reserved" in facts.read_text()


@pytest.mark.parametrize("end", ["goes away", "cancels"])
def test_user_code_never_starts_without_the_callers_word(own: Path, tmp_path: Path, end: str) -> None:
    distributed(gpus=1, quiet=True)(len).distributed("a")
    message, channel = unconfirmed(own, tmp_path / "ran")
    directory = Path(message.directory)
    if end == "cancels":
        protocol.send(channel, protocol.Cancel())
    else:
        channel.close()
    wait_for(lambda: read_receipt(directory) is not None, "it has ended")
    channel.close()
    ending, receipt = read_ending(directory), read_receipt(directory)
    assert ending is not None and receipt is not None
    assert (ending.state, ending.reason) == (State.CANCELLED, Reason.CANCELLED)
    assert not (tmp_path / "ran").exists() and receipt.gpu_ms == 0
    if end == "goes away":
        assert receipt.notes == (golden("snapshots.snapshot_failures.caller-ended-before"),)
    wait_for(lambda: nothing_of_a_run(own), "nothing is left")


def test_the_callers_word_lets_it_start_and_nobody_elses_does(own: Path, tmp_path: Path) -> None:
    distributed(gpus=1, quiet=True)(len).distributed("a")
    message, channel = unconfirmed(own, tmp_path / "ran")
    directory = Path(message.directory)
    other = connected(Home(own).sockets() / f"{message.run_id}.sock")
    protocol.send(other, protocol.Confirm())
    protocol.send(other, protocol.Confirm())
    assert isinstance(protocol.receive(other), tuple)
    assert not (tmp_path / "ran").exists()
    protocol.send(channel, protocol.Confirm())
    wait_for(lambda: read_receipt(directory) is not None, "it has ended")
    receipt = read_receipt(directory)
    assert (tmp_path / "ran").exists() and receipt is not None and receipt.state == "SUCCEEDED"
    other.close()
    channel.close()


def connected(path: Path) -> Channel:
    """Return a connection to a supervisor, as `attach` makes one."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.connect(str(path))
    return Channel(sock)


# --- somebody is killed -----------------------------------------------------------------------------------------------


def test_a_service_that_says_nothing_is_told_and_then_given_up(own: Path, warmed: Dialogue) -> None:
    (service,) = named("sgpu-snapshots", own)
    module = "sys.modules['serverless_gpu.client.launch.snapshot_environment']"
    warmed.ask(f"setattr({module}, 'SILENT_S', 0.2), setattr({module}, 'SILENT_S_MAX', 0.6)")
    service.send(signal.SIGSTOP)
    assert warmed.ask("call(work.value)").startswith("EnvironmentProblem: the process that scans the environment has")
    service.kill()
    assert golden("snapshots.snapshot_failures.gone") in warmed.close()


def test_a_killed_caller_leaves_no_run_that_was_not_confirmed(
    own: Path, small: SmallEnvironment, warmed: Dialogue, tmp_path: Path
) -> None:
    stopped = restorer(own)
    stopped.send(signal.SIGSTOP)
    with (small.site / "toy" / "__init__.py").open("r+") as file:
        file.write("VALUE = 'TWO'\n")  # found only by the look at every file
    small.write("work.py", WORK + "\n# another\n")
    (service,) = named("sgpu-snapshots", own)
    service.send(signal.SIGSTOP)
    runs = len(directories(own))
    warmed.say(f"call(work.touch, {str(tmp_path / 'ran')!r})")
    wait_for(lambda: len(directories(own)) > runs, "the call has begun")
    warmed.process.kill()
    warmed.process.wait()
    service.send(signal.SIGCONT)
    service.wait_gone()
    stopped.send(signal.SIGCONT)
    wait_for(lambda: nothing_of_a_run(own), "nothing is left")
    assert not (tmp_path / "ran").exists()


# --- Ctrl-C -----------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_ctrl_c_while_the_environment_is_captured(own: Path, small: SmallEnvironment, dialogue: Dialogue) -> None:
    (small.site / "large.bin").write_bytes(os.urandom(100_000_000))
    dialogue.say("call(work.code)")
    children = wait_for(lambda: captures(own), "a capture goes on")
    dialogue.process.send_signal(signal.SIGINT)
    assert dialogue.hear() == "KeyboardInterrupt"
    for child in children:
        child.wait_gone()
    assert directories(own) == []
    assert dialogue.ask("call(work.code)") == "'first'", "what was stored is not stored twice"


def captures(home: Path) -> list[Process]:
    """Return the children of a home's services."""
    found = named("sgpu-snapshots", home)
    pids = {process.pid for process in found}
    return [process for process in found if parent_of(process) in pids]


# --- disks and stores -------------------------------------------------------------------------------------------------


@pytest.fixture
def tiny(own: Path) -> Iterator[Path]:
    """Yield the directory of environments on a file system of 128 MB; the home itself has space."""
    with small_disk("128m", at=own / "environments") as place:
        yield place


@pytest.mark.long
def test_F40_a_full_disk_while_capturing(tiny: Path, own: Path, small: SmallEnvironment, dialogue: Dialogue) -> None:
    large = small.site / "large.bin"
    large.write_bytes(os.urandom(200_000_000))
    answer = dialogue.ask("call(work.code)")
    assert answer.startswith("StorageError: ") and "free" in answer, answer
    assert directories(own) == [], "nothing was started"
    large.unlink()
    assert dialogue.ask("call(work.code)") == "'first'"


def test_F27_a_full_disk_while_restoring(tiny: Path, own: Path, small: SmallEnvironment, dialogue: Dialogue) -> None:
    zeros = small.site / "zeros.bin"
    zeros.write_bytes(bytes(200_000_000))  # nothing in the store, and more than the disk when unpacked
    answer = dialogue.ask("call(work.code)")
    assert answer.startswith("RunError: the node's disk is too full for the environment"), answer
    assert str(tiny) in answer
    zeros.unlink()
    assert dialogue.ask("call(work.code)") == "'first'"


@pytest.mark.parametrize(
    "kinds",
    [
        ("snapshots", "units", "packs"),
        *(pytest.param((kind,), marks=pytest.mark.long) for kind in ("packs", "units", "snapshots")),
    ],
)
def test_F29_F42_what_was_altered_in_the_store_is_captured_again_by_the_run(
    own: Path, small: SmallEnvironment, warmed: Dialogue, kinds: tuple[str, ...]
) -> None:
    alter(own, *kinds)
    forget_what_was_restored(own)
    assert warmed.ask("call(work.code)") == "'first'"
    assert warmed.ask("call(work.code)") == "'first'"
    said = warmed.close()
    assert said.count("the stored environment is damaged") == 1, said


def test_F29_what_was_altered_and_is_there_no_more_fails_the_run_by_name(
    own: Path, small: SmallEnvironment, warmed: Dialogue
) -> None:
    small.install("toy", "2.0", {"toy/__init__.py": "VALUE = 'two'\n"})
    stopped = restorer(own)
    stopped.send(signal.SIGSTOP)
    warmed.ask("setattr(sys, 'going', snapshot(work.code))")
    alter(own, "packs")
    small.install("toy", "3.0", {"toy/__init__.py": "VALUE = 'three'\n"})
    stopped.send(signal.SIGCONT)
    answer = warmed.ask("sys.going.results(60)")
    assert answer.startswith(f"RunError: {MEANINGS[Reason.ENV_CORRUPT].sentence}: pack "), answer
    assert golden("snapshots.snapshot_failures.removed-store") in answer and "call the function again" in answer
    assert warmed.ask("call(work.code)") == "'first'"


def alter(home: Path, *kinds: str) -> None:
    """Flip a bit in the middle of every object of these kinds in the store of a home."""
    for kind in kinds:
        for path in (home / "environments" / "store" / kind).rglob("*"):
            if path.is_file():
                data = bytearray(path.read_bytes())
                data[len(data) // 2] ^= 1
                path.chmod(0o600)
                path.write_bytes(bytes(data))


def forget_what_was_restored(home: Path) -> None:
    """Have a node as one that has never restored anything."""
    wait_for(lambda: nothing_of_a_run(home), "no run uses it")
    stop_agent(home)
    wait_for(lambda: not named("sgpu-restore", home), "nothing writes there any more")
    for name in ("units", "trees"):
        shutil.rmtree(home / "environments" / name)


def packs(home: Path) -> list[Path]:
    """Return the packs in the store of a home."""
    return [path for path in (home / "environments" / "store" / "packs").rglob("*") if path.is_file()]


@pytest.mark.long
def test_a_snapshot_collected_from_the_store_does_not_touch_a_run_that_uses_it(
    own: Path, small: SmallEnvironment, warmed: Dialogue, where: str
) -> None:
    wait = (
        "\ndef wait(path):\n    open(path + '.waits', 'w').close()\n    while not os.path.exists(path):\n        pass\n"
        "    import toy\n    return toy.VALUE\n"
    )
    small.write("work.py", WORK + wait)
    warmed.ask("importlib.reload(work)")
    gate = os.path.join(where, "go")
    warmed.ask(f"setattr(sys, 'going', snapshot(work.wait, {gate!r}))")
    wait_for(Path(f"{gate}.waits").exists, "it is restored, and runs")
    shutil.rmtree(own / "environments" / "store")
    Path(gate).touch()
    assert warmed.ask("sys.going.results(60)") == "['one']"
    assert warmed.ask("call(work.code)") == "'first'", "captured again"
