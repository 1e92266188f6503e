"""C3: the watching process of the environment service: it saves looks, and is missed by nobody when it is gone."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from serverless_gpu.environment import service_messages
from serverless_gpu.environment.scan import watcher
from serverless_gpu.environment.service_messages import (
    Answer,
    CaptureDone,
    EnvironmentQuestion,
    FilesChecked,
    Unchanged,
)
from tests.support.environment.libraries import Library, write_in_place
from tests.support.golden import golden
from tests.support.local.observe import Process, wait_for

DEADLINE_S = 60
SERVICE = """
import socket, sys
from pathlib import Path
from serverless_gpu.environment import service, watch_process

def say(word):
    with open(sys.argv[3], "a") as log:
        log.write(word + "\\n")

def said(word, real):
    def function(*arguments):
        say(word)
        return real(*arguments)
    return function

def hear(self):
    goes_on = real_hear(self)
    say("placed" if goes_on else "ended: " + self.reason)
    return goes_on

real_hear, watch_process.WatchProcess.hear = watch_process.WatchProcess.hear, hear
service._check = said("look", service._check)

class Wire:
    def __init__(self, sock):
        self.fileno, self.send, self._sock = sock.fileno, sock.send, sock
    def receive(self):
        return self._sock.recv(1 << 20) or None

service.Service(Wire(socket.socket(fileno=int(sys.argv[1]))), Path(sys.argv[2])).serve(-1)
"""


class Caller:
    """A caller of a service of its own, which writes down when it looks at every file, and what its watches do."""

    def __init__(self, where: Path) -> None:
        self.library = Library(where)
        self.store = where / "store"
        self._log = where / "log"
        self._log.touch()
        self._number = 0
        self._sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._sock.settimeout(DEADLINE_S)
        arguments = (sys.executable, "-c", SERVICE, str(theirs.fileno()), str(where / "index"), str(self._log))
        self.service = subprocess.Popen(arguments, pass_fds=(theirs.fileno(),), stderr=subprocess.PIPE, text=True)
        theirs.close()

    def ask(self, kind: type[Answer]) -> Answer:
        """Ask what the environment is and return the next answer of a kind."""
        self._number += 1
        described = msgspec.structs.asdict(self.library.description())
        self._sock.send(
            service_messages.encode(
                EnvironmentQuestion(number=self._number, description=described, store=str(self.store))
            )
        )
        return self.hear(kind)

    def hear(self, kind: type[Answer]) -> Answer:
        """Return the next answer of a kind to the last question."""
        while True:
            data = self._sock.recv(1 << 20)
            assert data, "the service ended"
            answer = service_messages.decode_answer(data)
            if answer.number == self._number and isinstance(answer, kind):
                return answer

    def said(self) -> list[str]:
        """Return what happened so far."""
        return self._log.read_text().splitlines()

    def wait_placed(self, times: int = 1) -> Process:
        """Wait until watches were placed so often, and return the watching process."""
        wait_for(lambda: self.said().count("placed") == times, "watches are placed")
        wait_for(lambda: len(self.watching()) == 1, "the watching process of before is gone")
        return self.watching()[0]

    def ask_until_placed(self, times: int) -> None:
        """Ask until watches were placed so often: files that were written just now are looked at once more."""
        wait_for(lambda: self.changes() == () and self.said().count("placed") == times, "watches are placed")

    def watching(self) -> list[Process]:
        """Return the watching processes of the service."""
        children = Path(f"/proc/{self.service.pid}/task/{self.service.pid}/children").read_text().split()
        return [Process(int(pid)) for pid in children if comm(pid) == "sgpu-watch"]

    def changes(self) -> tuple[str, ...]:
        """Ask, and return what has changed."""
        checked = self.ask(FilesChecked)
        assert isinstance(checked, FilesChecked)
        return checked.changes

    def close(self) -> str:
        """Let the service end; return what it logged."""
        self._sock.close()
        _, logged = self.service.communicate(timeout=DEADLINE_S)
        self.library.close()
        return logged


def comm(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


@pytest.fixture
def caller(tmp_path: Path) -> Iterator[Caller]:
    if watcher.file_system(str(tmp_path)) not in watcher.LOCAL_FILE_SYSTEMS:
        pytest.skip("temporary files lie on a file system that cannot be watched")
    started = Caller(tmp_path)
    started.ask(CaptureDone)
    yield started
    started.close()


def test_22C3_a_question_is_answered_without_a_look_while_nothing_happens(caller: Caller) -> None:
    caller.wait_placed()
    for _ in range(3):
        assert caller.changes() == ()
    assert caller.said() == ["placed"]


def test_22C3_a_change_is_found_captured_and_watched_again(caller: Caller) -> None:
    caller.wait_placed()
    assert caller.changes() == ()
    write_in_place(caller.library.other_name)
    assert caller.changes() == ("a/one.py changed",)
    taken = caller.hear(CaptureDone)
    caller.ask_until_placed(2)
    looks = caller.said().count("look")
    known = caller.ask(Unchanged)
    assert isinstance(taken, CaptureDone) and isinstance(known, Unchanged) and known.snapshot == taken.snapshot
    assert caller.hear(FilesChecked) == FilesChecked(number=known.number) and caller.said().count("look") == looks >= 1


def test_22C3_a_touched_file_is_looked_at_and_watched_again(caller: Caller) -> None:
    caller.wait_placed()
    assert caller.changes() == ()
    os.utime(caller.library.real / "b.py")
    assert caller.changes() == ()
    caller.ask_until_placed(2)
    looks = caller.said().count("look")
    assert caller.changes() == ()
    assert caller.said().count("look") == looks >= 1
    assert golden("environment.watching.every-file-looked") in caller.close()


def test_22C3_a_killed_watching_process_costs_a_look(caller: Caller) -> None:
    process = caller.wait_placed()
    assert caller.changes() == ()
    process.kill()
    write_in_place(caller.library.real / "b.py")
    assert caller.changes() == ("b.py changed",)
    assert golden("environment.watching.watching-process-ended") in caller.close()


def test_22C3_a_watching_process_that_stands_still_costs_a_second_and_is_ended(caller: Caller) -> None:
    process = caller.wait_placed()
    process.send(signal.SIGSTOP)
    write_in_place(caller.library.real / "b.py")
    assert caller.changes() == ("b.py changed",)
    process.wait_gone()
    assert golden("environment.watching.did-answer-within") in caller.close()


@pytest.mark.parametrize("end", ["killed", "its caller is gone"])
def test_22C3_the_watching_process_ends_with_its_service(caller: Caller, end: str) -> None:
    process = caller.wait_placed()
    if end == "killed":
        process.send(signal.SIGSTOP)
        caller.service.kill()
        with pytest.raises(AssertionError, match="ended"):
            caller.hear(FilesChecked)  # the watching process does not hold the service's end of the channel
        process.send(signal.SIGCONT)
    else:
        caller.close()
    process.wait_gone()


def test_22C3_another_capture_of_unchanged_libraries_has_watches_of_its_own(caller: Caller) -> None:
    caller.wait_placed()
    assert caller.changes() == ()
    caller.store.rename(caller.store.with_name("lost"))
    caller.ask(CaptureDone)
    caller.ask_until_placed(2)
    looks = caller.said().count("look")
    assert caller.changes() == ()
    assert caller.said().count("look") == looks
