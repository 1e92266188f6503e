"""An attempt of a server is not said to be over while a process of it may be left."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from serverless_gpu.model.attempt import Reason, State, TreeEmpty
from serverless_gpu.model.ledger import Fact, FactKind
from serverless_gpu.node import protocol
from serverless_gpu.node.home import Home
from serverless_gpu.node.remote import Remote
from serverless_gpu.node.supervisor import Supervisor
from serverless_gpu.node.uplink import minder as minder_room
from serverless_gpu.node.uplink.minder import Minder
from serverless_gpu.node.uplink.server import Server
from serverless_gpu.testing import FakeClock

LONG_S = 3600.0


class Full:
    """A gang of which a process does not end."""

    is_empty = False

    def empty(self) -> bool:
        """Return whether nothing is left."""
        return self.is_empty


def supervisor(*, of_a_server: bool) -> tuple[Any, list[object]]:
    """Return a supervisor whose ranks were killed long ago, and what it says and does."""
    happened: list[object] = []
    clock = FakeClock()
    made = cast(Any, Supervisor.__new__(Supervisor))
    made._clock, made._kill_ns = clock, clock.boottime_ns()
    made._gang = Full()
    made._is_servers, made._told_full = of_a_server, False
    made._audience = SimpleNamespace(tell=happened.append)
    made._account = SimpleNamespace(notes=[])
    made._apply = happened.append
    clock.advance(LONG_S)
    return made, happened


def test_a_run_of_a_server_goes_on_stopping_until_none_of_its_processes_is_left() -> None:
    made, happened = supervisor(of_a_server=True)
    made._look_for_empty()
    made._look_for_empty()
    assert happened == [protocol.Waiting(sentence="a process of this run cannot be ended")]
    made._gang.is_empty = True
    made._look_for_empty()
    assert happened[1:] == [TreeEmpty()]


def test_a_run_of_this_machine_alone_ends_with_a_note_for_its_caller_waits() -> None:
    made, happened = supervisor(of_a_server=False)
    made._look_for_empty()
    assert happened == [TreeEmpty()]
    assert made._account.notes == ["a process of this run could not be ended in 60 s"]


def test_a_run_whose_supervisor_is_lost_goes_on_stopping_while_its_devices_are_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, free = FakeClock(), threading.Event()
    looks = threading.Semaphore(0)

    def held(home: Home, directory: Path) -> bool:
        looks.release()
        clock.advance(LONG_S)
        return not free.is_set()

    monkeypatch.setattr(minder_room, "still_held", held)
    monkeypatch.setattr(minder_room, "_LOOK_S_MAX", 0.05)
    directory = tmp_path / "runs" / "run" / "1"
    directory.mkdir(parents=True)
    remote = Remote(
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
    one = Minder(Home(tmp_path), directory, remote, server=cast(Server, None), clock=clock, say=lambda line: None)
    settling = threading.Thread(target=one._settle, daemon=True)
    settling.start()
    for _ in range(5):
        assert looks.acquire(timeout=10)
    assert one._news.known.ending is None and one._news.known.state is State.STOPPING
    assert "still has a device" in one._news.known.sentence
    free.set()
    settling.join(10)
    assert one._news.known.ending is not None and one._news.known.ending.reason is Reason.SUPERVISOR_LOST
