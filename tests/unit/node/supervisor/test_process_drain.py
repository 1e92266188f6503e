"""F09: a process that cannot be ended. Its run is over after a minute, and its devices are not free."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from serverless_gpu.model.lifecycle.attempt import Fact, FactKind, Reason, State
from serverless_gpu.node.attempt.server_attempt_record import ServerAttempt
from serverless_gpu.node.base.home import Home
from serverless_gpu.node.processes.process_tree import ProcessIdentity, left_in
from serverless_gpu.node.supervisor.supervisor import ProcessDrain
from serverless_gpu.node.uplink import attempt_controller
from serverless_gpu.node.uplink.attempt_controller import AttemptController
from serverless_gpu.node.uplink.server import UplinkServer
from serverless_gpu.testing import FakeClock
from tests.support.golden import golden

LONG_S = 3600.0


class Full:
    """A gang of which a process does not end."""

    is_empty = False
    kills = 0

    def kill(self) -> None:
        """Note that it was."""
        self.kills += 1

    def left(self) -> tuple[ProcessIdentity, ...]:
        """Return what is."""
        return (ProcessIdentity(4242, 1, "python"),)

    def empty(self) -> bool:
        """Return whether nothing is left."""
        return self.is_empty


def killed(ago_s: float) -> tuple[ProcessDrain, Any, FakeClock, list[str]]:
    """Return the wait for ranks that were killed so long ago, the ranks, the clock, and what was said."""
    said: list[str] = []
    clock, gang = FakeClock(), cast(Any, Full())
    made = ProcessDrain(clock, said.append)
    made.begin(gang)
    clock.advance(ago_s)
    return made, gang, clock, said


def test_F09_who_waits_is_told_once_what_does_not_end() -> None:
    made, gang, _, said = killed(11.0)
    assert not made.is_over(gang) and not made.is_over(gang)
    assert said == [golden("node.emptying.process-4242-python")]
    gang.is_empty = True
    assert made.is_over(gang) and len(said) == 1 and gang.kills == 1


def test_F09_a_run_is_over_a_minute_after_the_kill_whatever_is_left() -> None:
    made, gang, clock, _ = killed(59.0)
    assert not made.is_over(gang)
    clock.advance(2.0)
    assert made.is_over(gang)


def test_F09_another_process_of_the_same_number_is_not_what_was_left() -> None:
    (own,) = left_in(None, [os.getpid()])
    assert own.is_there() and not msgspec.structs.replace(own, started=own.started + 1).is_there()
    assert left_in(None, [2**22 + 1]) == ()


def test_a_run_whose_supervisor_is_lost_goes_on_stopping_while_its_devices_are_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, free = FakeClock(), threading.Event()
    looks = threading.Semaphore(0)

    def held(home: Home, directory: Path) -> bool:
        looks.release()
        clock.advance(LONG_S)
        return not free.is_set()

    monkeypatch.setattr(attempt_controller, "still_held", held)
    monkeypatch.setattr(attempt_controller, "LOOK_S_MAX", 0.05)
    directory = tmp_path / "runs" / "run" / "1"
    directory.mkdir(parents=True)
    remote = ServerAttempt(
        run_id="run", fence=1, token="t", profile="", gpu_type="H100", world_size=1, partition_grace_s=900.0
    )
    fact = Fact(
        attempt="run:1",
        seq=0,
        kind=FactKind.RESERVED,
        boot_id="b",
        boottime_ns=1,
        wall_ns=1,
        gpus=("FAKE-H100-0",),
        cpus=0,
        memory_bytes=0,
    )
    (directory / "facts.jsonl").write_bytes(msgspec.json.encode(fact) + b"\n")
    one = AttemptController(
        Home(tmp_path), directory, remote, server=cast(UplinkServer, None), clock=clock, say=lambda line: None
    )
    settling = threading.Thread(target=one.write_ending, daemon=True)
    settling.start()
    for _ in range(5):
        assert looks.acquire(timeout=60)
    assert one.news.known.ending is None and one.news.known.state is State.STOPPING
    assert golden("node.emptying.still-device") in one.news.known.sentence
    free.set()
    settling.join(60)
    assert one.news.known.ending is not None and one.news.known.ending.reason is Reason.SUPERVISOR_LOST
