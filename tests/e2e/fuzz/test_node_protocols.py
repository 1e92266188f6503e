"""Garbage at the sockets of a node: agent, supervisor, monitor, stem and zygote. They live, take no more memory and no
descriptors, and serve everybody else.

Who can reach these sockets is the same user. So this is not about keeping somebody out: a client that was killed in
the middle of a word, or is of another version, must not cost anybody else a run.
"""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serverless_gpu import distributed
from serverless_gpu.node.base import protocol
from serverless_gpu.node.base.home import Home
from serverless_gpu.node.inside.channel import Channel, pair
from serverless_gpu.node.monitor.messages import AnyMonitorMessage, monitor_socket
from serverless_gpu.testing import agent_status
from tests.e2e.fuzz.conftest import ASKED
from tests.e2e.fuzz.frames import Frame, bare_tags, bodies, encoded, fields, frames, messages, tags
from tests.support.local.observe import Process, announced, supervisor, wait_for
from tests.support.local.ranks import stay

pytestmark = pytest.mark.slow

MEMORY_MAX = 200 << 20
UNSAID = [tag for tag in tags() if tag not in ("retire", "prewarm", "cancel")]
"""What a message may be called here; those that end what listens, or start an interpreter, do what they say."""
BARE = st.sampled_from([tag for tag in bare_tags() if tag in UNSAID]).map(lambda tag: encoded({"type": tag}))
SPOKEN = st.lists(frames(bodies | BARE | messages(UNSAID, fields(), "type")), min_size=1, max_size=6)


def talk(path: Path, said: list[Frame]) -> None:
    """Connect, say something, and hang up without reading."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.settimeout(10)
        sock.connect(str(path))
        for frame in said:
            frame.send(sock)


def descriptors(pid: int) -> int:
    """Return how many descriptors a process has."""
    return len(os.listdir(f"/proc/{pid}/fd"))


def resident(pid: int) -> int:
    """Return how much memory a process has."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Watched:
    """A process that is talked to: it must be the same afterwards."""

    def __init__(self, pid: int) -> None:
        self.process = Process(pid)
        self.pid = pid
        self._descriptors = descriptors(pid)
        self._resident = resident(pid)

    def is_well(self) -> bool:
        """Return whether it has let go of everything it was given."""
        assert self.process.alive(), "it has died"
        assert resident(self.pid) < self._resident + MEMORY_MAX
        return descriptors(self.pid) <= self._descriptors + 2


def test_the_agent_survives_what_is_no_message(warm: Path, where: str) -> None:
    assert distributed(gpus=1, quiet=True)(len).distributed("abc") == [3]
    status = agent_status(warm)
    assert status is not None
    agent, path = Watched(status.pid), protocol.agent_socket(Home(warm).sockets())

    @ASKED
    @given(SPOKEN)
    def garbage(said: list[Frame]) -> None:
        talk(path, said)

    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as silent:
        silent.connect(str(path))  # says nothing, and keeps nobody waiting
        garbage()
        wait_for(agent.is_well, "the agent has closed what it was given")
        assert distributed(gpus=1, quiet=True)(len).distributed("abc") == [3]
    assert agent_status(warm) is not None


def test_a_supervisor_survives_what_is_no_message_and_its_run_goes_on(warm: Path, where: str) -> None:
    run = distributed(gpus=1, quiet=True)(stay).submit(where)
    announced(Path(where), "rank0")
    watched = Watched(supervisor(warm, run.id).pid)
    path = Home(warm).sockets() / f"{run.id}.sock"

    @ASKED
    @given(SPOKEN)
    def garbage(said: list[Frame]) -> None:
        talk(path, said)

    garbage()
    wait_for(watched.is_well, "the supervisor has closed what it was given")
    Path(where, "go").touch()
    assert run.results(timeout=60) == [0]
    assert run.receipt(timeout=60).state == "SUCCEEDED"


def test_the_monitor_survives_what_is_no_word(warm: Path, where: str) -> None:
    run = distributed(gpus=1, quiet=True)(stay).submit(where)
    announced(Path(where), "rank0")
    path = monitor_socket(Home(warm).sockets())
    wait_for(path.exists, "a monitor listens")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.connect(str(path))
        pid = int.from_bytes(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 4), "little")
    monitor = Watched(pid)
    names = [str(each.__struct_config__.tag) for each in AnyMonitorMessage.__args__]
    known = messages([name for name in names if name not in ("retire", "prepare", "watch")], fields(), "type")

    @ASKED
    @given(st.lists(frames(bodies | known), min_size=1, max_size=6))
    def garbage(said: list[Frame]) -> None:
        talk(path, said)

    garbage()
    wait_for(monitor.is_well, "the monitor has closed what it was given")
    Path(where, "go").touch()
    assert run.results(timeout=60) == [0]
    assert run.receipt(timeout=60).uses, "the monitor has seen the run"


def test_a_rank_that_says_what_cannot_be_ends_its_own_run_and_nothing_else(warm: Path) -> None:
    def lies() -> None:
        for fd in range(3, 64):
            try:
                line = Channel(socket.socket(fileno=os.dup(fd)))
            except OSError:
                continue
            for body in (b'{"event":"returned","rank":7}', b'{"event":"exited"}', b"[" * 100_000):
                try:
                    line.send(body)
                except OSError:
                    break
        threading.Event().wait(60)

    run = distributed(gpus=1, quiet=True)(lies).submit()
    with pytest.raises(Exception, match="cannot be understood"):
        run.results(timeout=60)
    assert run.receipt(timeout=60).state == "FAILED"
    assert distributed(gpus=1, quiet=True)(len).distributed("abc") == [3]


@ASKED
@given(frames(bodies | messages(tags(), fields(), "type")))
def test_a_message_is_understood_or_refused(frame: Frame) -> None:
    ours, theirs = pair()
    before = len(os.listdir("/proc/self/fd"))
    try:
        frame.send(theirs.sock)
        received = protocol.receive(ours)
        for fd in received[1] if received is not None else ():
            os.close(fd)
    except (OSError, msgspec.MsgspecError):
        pass
    assert len(os.listdir("/proc/self/fd")) == before, "no descriptor is left open"
    ours.close()
    theirs.close()
