"""The environment service: who is answered what, in which order, whoever else asks."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from serverless_gpu.ambient import SystemClock
from serverless_gpu.environment import service_messages
from serverless_gpu.environment.scan.description import Description
from serverless_gpu.environment.scan.interpreter import describe
from serverless_gpu.environment.service_messages import (
    Abandon,
    CapturedEnvironment,
    CaptureDone,
    CaptureFailed,
    EnvironmentQuestion,
    FilesChecked,
    Unchanged,
    UnknownEnvironment,
)
from serverless_gpu.errors import StoreUnavailable
from serverless_gpu.server.storage.server_stores import DiskLimits, open_storage
from tests.support.environment.scans import write
from tests.support.golden import golden
from tests.support.server.listening import app_of, listening

DEADLINE_S = 60
SERVICE = """
import socket, sys
from pathlib import Path
from serverless_gpu.environment.service import Service

class Wire:
    def __init__(self, sock):
        self.fileno, self.send, self._sock = sock.fileno, sock.send, sock
    def receive(self):
        return self._sock.recv(1 << 20) or None

Service(Wire(socket.socket(fileno=int(sys.argv[1]))), Path(sys.argv[2])).serve(-1)
"""


class Caller:
    """Somebody who asks a service of his own about an environment of a few files."""

    def __init__(self, where: Path) -> None:
        self.site = write(where / "venv/lib/python3/site-packages", {"a/one.py": "one = 1\n", "b.py": "b = 1\n"})
        self.store = where / "store"
        self._where = where
        self._sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._sock.settimeout(DEADLINE_S)
        arguments = (sys.executable, "-c", SERVICE, str(theirs.fileno()), str(where / "index"))
        self._process = subprocess.Popen(arguments, pass_fds=(theirs.fileno(),))
        theirs.close()

    def description(self) -> dict[str, object]:
        described = msgspec.convert(describe(), Description)
        own = msgspec.structs.replace(
            described,
            prefix=str(self._where / "venv"),
            purelib=str(self.site),
            platlib=str(self.site),
            sys_path=(str(self.site),),
            site_directories=(str(self.site),),
            loaded=(),
            own_home=str(self._where / "home"),
        )
        return msgspec.structs.asdict(own)

    def ask(self, number: int, *, capture: bool = True, store: str = "", token: str = "") -> None:
        store = store or str(self.store)
        ask = EnvironmentQuestion(
            number=number, description=self.description(), store=store, token=token, capture=capture
        )
        self._sock.send(service_messages.encode(ask))

    def abandon(self, number: int) -> None:
        self._sock.send(service_messages.encode(Abandon(number=number)))

    def hear(self, number: int, kind: type[service_messages.Answer]) -> service_messages.Answer:
        """Return the next answer of a kind to a question."""
        while True:
            data = self._sock.recv(1 << 20)
            assert data, "the service ended"
            answer = service_messages.decode_answer(data)
            if answer.number == number and isinstance(answer, kind):
                return answer

    def close(self) -> None:
        self._sock.close()
        assert self._process.wait(DEADLINE_S) == 0


@pytest.fixture
def caller(tmp_path: Path) -> Iterator[Caller]:
    started = Caller(tmp_path)
    try:
        yield started
    finally:
        started.close()


def edit_in_place(file: Path, text: str) -> None:
    with file.open("r+") as opened:
        opened.write(text)
        os.fsync(opened.fileno())


def test_a_new_environment_is_found_captured_and_known(caller: Caller) -> None:
    caller.ask(1)
    assert isinstance(caller.hear(1, UnknownEnvironment), UnknownEnvironment)
    found, taken = caller.hear(1, CapturedEnvironment), caller.hear(1, CaptureDone)
    assert (
        isinstance(found, CapturedEnvironment)
        and found.first
        and isinstance(taken, CaptureDone)
        and taken.sent_units == 1
    )
    caller.ask(2)
    known, checked = caller.hear(2, Unchanged), caller.hear(2, FilesChecked)
    assert isinstance(known, Unchanged) and known.snapshot == taken.snapshot
    assert isinstance(checked, FilesChecked) and not checked.changes


def test_a_question_that_wants_no_capture_decides_for_nobody_else(caller: Caller) -> None:
    """Two prewarms, which let go at once, and a call: a file was edited in place, so the call's look captures it."""
    caller.ask(1)
    caller.hear(1, CaptureDone)
    edit_in_place(caller.site / "a" / "one.py", "one = 2\n")
    for number in (2, 3):
        caller.ask(number, capture=False)
    caller.ask(4)
    for number in (2, 3):
        caller.abandon(number)
    found, taken = caller.hear(4, CapturedEnvironment), caller.hear(4, CaptureDone)
    assert isinstance(found, CapturedEnvironment) and found.changes == ("a/one.py changed",)
    assert isinstance(taken, CaptureDone) and taken.sent_units == 1


def test_a_store_that_lost_everything_gets_it_again_and_that_is_said(caller: Caller) -> None:
    caller.ask(1)
    caller.hear(1, CaptureDone)
    caller.store.rename(caller.store.with_name("lost"))
    caller.ask(2)
    found, taken = caller.hear(2, CapturedEnvironment), caller.hear(2, CaptureDone)
    assert isinstance(found, CapturedEnvironment) and not found.first and not found.changes
    assert found.remarks == (golden("environment.service.environment-captured-again"),)
    assert isinstance(taken, CaptureDone) and taken.sent_units == 1


def test_what_the_server_lacks_is_found_beside_the_start_and_sent_there(caller: Caller, tmp_path: Path) -> None:
    """Captured here before; the first question about a server's store is answered at once, and then corrected."""
    caller.ask(1)
    taken = caller.hear(1, CaptureDone)
    assert isinstance(taken, CaptureDone)
    (tmp_path / "server").mkdir()
    storage = open_storage(tmp_path / "server", "", {}, clock=SystemClock(), room=DiskLimits(kept_free_bytes=0))
    with listening(app_of(storage)) as url:
        for number, says in ((2, ("the server does not have the environment, or has deleted it",)), (3, ())):
            caller.ask(number, store=f"sgpu+{url}", token="member")
            known, checked = caller.hear(number, Unchanged), caller.hear(number, FilesChecked)
            assert isinstance(known, Unchanged) and known.snapshot == taken.snapshot
            assert isinstance(checked, FilesChecked) and checked.changes == says
            if says:
                found, sent = caller.hear(number, CapturedEnvironment), caller.hear(number, CaptureDone)
                assert (
                    isinstance(found, CapturedEnvironment)
                    and golden("environment.service.server-does") in found.remarks[0]
                )
                assert isinstance(sent, CaptureDone) and sent.snapshot == known.snapshot and sent.sent_units == 1
        storage.environments.need(taken.snapshot)
        caller.ask(4, store=f"sgpu+{url}", token="nobody")
        failed = caller.hear(4, CaptureFailed)
        assert isinstance(failed, CaptureFailed) and failed.code == StoreUnavailable.code
