"""Gangs on two nodes of a real server, of one of which a process is killed, or all: what is told, and what follows.

Each run asked for a retry: that it runs, on the same devices, is proof that those of both nodes were given back; what
its ranks left on the disk says that it began when nothing of the first attempt was left.
"""

from __future__ import annotations

import contextlib
import itertools
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from serverless_gpu.client.runs.run import Run
from serverless_gpu.errors import RunCancelled
from serverless_gpu.model.lifecycle.attempt import Reason
from serverless_gpu.node.base import protocol
from serverless_gpu.node.inside.channel import Channel
from serverless_gpu.wire.runs import AttemptList, AttemptView
from tests.support.local.observe import Process, announced, held_locks, wait_for
from tests.support.network.beats import beats, endure, leave_one, talk
from tests.support.remote.machines import Machines

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

FIRST, OTHER = "n1", "n2"
"""Of rank 0, to whose node it happens, and of rank 1."""
GOES_ON = Reason.COMPLETED


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    """Yield a server with two nodes of a GPU each."""
    with pytest.MonkeyPatch.context() as patch:
        home = tmp_path_factory.mktemp("home")
        patch.setenv("SERVERLESS_GPU_HOME", str(home))
        with Machines(home) as pool:
            pool.join(FIRST, gpus=1)
            pool.join(OTHER, gpus=1)
            yield pool


class Going:
    """A run, in the middle of something.

    Args:
        pool: the server and its nodes.
        where: what its ranks leave behind.
    """

    def __init__(self, pool: Machines, where: Path) -> None:
        self.where = where
        self.first, self.other = pool.nodes[FIRST], pool.nodes[OTHER]
        self.uplink = self.first.uplink()
        self._pool = pool
        self.run: Run[object] | None = None
        self._agent: Process | None = None
        self._late: Callable[[], None] = lambda: None

    # --- where it is when it happens --------------------------------------------------------------------------

    def starting(self) -> None:
        """Have an attempt whose directory is there, and which no agent has heard of."""
        before = self.where / "before"
        before.mkdir()
        (before / "go1").touch()
        self._pool.submit(leave_one, str(before), gpus=2).results(50)  # now there is an agent
        agent = self._agent = self.first.agent()
        agent.send(signal.SIGSTOP)
        self._submit(talk)
        wait_for(self._directory.exists, "the attempt has a directory")
        self._late = lambda: agent.send(signal.SIGCONT)

    def meeting(self) -> None:
        """Have an attempt that waits for its other node."""
        uplink = self.other.uplink()
        uplink.send(signal.SIGSTOP)
        self._late = lambda: uplink.send(signal.SIGCONT)
        self._submit(talk)
        wait_for(self._has_offered, "it has said where it can be met")

    def running(self) -> None:
        """Have ranks that talk to each other."""
        self._submit(talk)
        for rank in (0, 1):
            wait_for((self.where / f"1.{rank}.met").exists, "they talk to each other")

    def returned(self) -> None:
        """Have a rank that returned, and waits for the other."""
        self._submit(leave_one)
        announced(self.where, "1.1")
        assert self.run is not None
        wait_for(lambda: self._directory.joinpath("results", "0.pkl").exists(), "rank 0 has returned")
        wait_for(self._has_returned, "rank 0 waits for the other one")

    def stopping(self) -> None:
        """Have ranks that were asked to end, and do not."""
        self._submit(endure)
        for rank in (0, 1):
            announced(self.where, f"1.{rank}")
        assert self.run is not None
        self.run.cancel()
        for rank in (0, 1):
            wait_for((self.where / f"1.{rank}.asked").exists, "it was asked to end")

    def _submit(self, function: Callable[..., object]) -> None:
        self.run = self._pool.submit(function, str(self.where), gpus=2, retries=1, grace=20)

    # --- what happens to it -----------------------------------------------------------------------------------

    def kill(self, victim: str) -> None:
        """Kill a process of the first node, or all that the attempt has there; then have its uplink there again."""
        for process in self._processes(victim):
            with contextlib.suppress(ProcessLookupError):  # one that was killed before has taken it along
                process.send(signal.SIGKILL)
        self._late()
        if victim in ("uplink", "node"):
            self.uplink.wait_gone()
            self.first.start()

    def _processes(self, victim: str) -> list[Process]:
        assert self.run is not None
        match victim:
            case "agent":
                return [self._agent or self.first.agent()]
            case "uplink":
                return [self.uplink]
            case "supervisor":
                return [self.first.supervisor(self.run.id)]
            case "stem":
                return [Process(announced(self.where, "1.0")[1])]
            case "rank":
                return [announced(self.where, "1.0")[0]]
            case _:
                found = [self.uplink, self._agent or self.first.agent()]
                if self._greeting() is not None:
                    found.append(self.first.supervisor(self.run.id))
                if (self.where / "1.0").exists():
                    rank, stem = announced(self.where, "1.0")
                    found += [Process(stem), rank]
                return found

    # --- what is seen of it -----------------------------------------------------------------------------------

    @property
    def _directory(self) -> Path:
        assert self.run is not None
        return self.first.home.attempt(self.run.id, 1)

    def _greeting(self) -> protocol.AttemptSnapshot | None:
        assert self.run is not None
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock, contextlib.suppress(OSError):
            sock.connect(str(self.first.home.sockets() / f"{self.run.id}.sock"))
            received = protocol.receive(Channel(sock))
            if received is not None and isinstance(received[0], protocol.AttemptSnapshot):
                return received[0]
        return None

    def _has_offered(self) -> bool:
        found = self._greeting()
        return found is not None and found.crew is not None and found.crew.offer is not None

    def _has_returned(self) -> bool:
        found = self._greeting()
        return found is not None and found.crew is not None and found.crew.returned

    def attempts(self) -> tuple[AttemptView, ...]:
        """Return its attempts."""
        assert self.run is not None
        return tuple(self._pool.ask("GET", f"/runs/{self.run.id}/attempts", answer=AttemptList).attempts)

    def moments(self, fence: int) -> list[int]:
        """Return when user code of an attempt ran, on whichever node."""
        return sorted(itertools.chain.from_iterable(beats(self.where, fence, rank) for rank in (0, 1)))


TABLE: dict[str, dict[str, Reason | None]] = {
    "starting": {"agent": None, "uplink": Reason.REFUSED, "node": Reason.REFUSED},
    "meeting": {
        "supervisor": Reason.SUPERVISOR_KILLED,
        "agent": GOES_ON,
        "uplink": GOES_ON,
        "node": Reason.SUPERVISOR_KILLED,
    },
    "running": {
        "supervisor": Reason.SUPERVISOR_KILLED,
        "agent": GOES_ON,
        "uplink": GOES_ON,
        "stem": Reason.RUNTIME_LOST,
        "rank": Reason.RANK_SIGNAL,
        "node": Reason.SUPERVISOR_KILLED,
    },
    "returned": {
        "supervisor": Reason.SUPERVISOR_KILLED,
        "agent": GOES_ON,
        "uplink": GOES_ON,
        "stem": GOES_ON,
        "rank": GOES_ON,
        "node": Reason.SUPERVISOR_KILLED,
    },
    "stopping": dict.fromkeys(("supervisor", "agent", "uplink", "stem", "rank", "node"), Reason.CANCELLED),
}
"""How the first attempt ends, by what it was in the middle of and by what was killed; None where it depends on whether
the agent had it: it goes on with the next agent, or is refused."""
QUICK = {("meeting", "uplink"), ("running", "supervisor"), ("running", "node")}
CELLS = [
    pytest.param(phase, victim, expected, marks=() if (phase, victim) in QUICK else pytest.mark.heavy)
    for phase, row in TABLE.items()
    for victim, expected in row.items()
]


@pytest.mark.parametrize(("phase", "victim", "expected"), CELLS)
def test_F15_what_is_killed_of_a_gang_is_told_and_tried_again_when_nothing_is_left_of_it(
    pool: Machines, tmp_path: Path, phase: str, victim: str, expected: Reason | None
) -> None:
    going = Going(pool, tmp_path)
    getattr(going, phase)()
    (tmp_path / "go2").touch()
    going.kill(victim)
    if expected in (None, GOES_ON, Reason.CANCELLED):
        (tmp_path / "go1").touch()
    run = going.run
    assert run is not None
    if expected is Reason.CANCELLED:
        with pytest.raises(RunCancelled):
            run.results(50)
    else:
        came, attempts = run.results(50), going.attempts()
        expected = expected or attempts[0].reason
        assert came == ([1, 1] if expected is GOES_ON else [2, 2])
    assert going.attempts()[0].reason is expected
    if phase in ("running", "returned", "stopping"):
        query = "SELECT json_extract(receipt_json, '$.gate') FROM crews WHERE run_id = ? AND fence = 1 AND crew = 1"
        ((gate,),) = wait_for(lambda: [] if (rows := pool.rows(query, run.id)) == [(None,)] else rows, "a receipt")
        assert gate.startswith("1 GPU verified free"), gate
    if expected in (Reason.SUPERVISOR_KILLED, Reason.RUNTIME_LOST, Reason.RANK_SIGNAL):
        ((why,),) = pool.rows("SELECT sentence FROM events WHERE run_id = ? AND state = 'QUEUED' AND fence = 1", run.id)
        assert f"on {FIRST}" in why and why.count("died") < 2, why
    first, second = going.moments(1), going.moments(2)
    assert not first or not second or first[-1] < second[0], "user code of two attempts ran at once"
    for node in pool.nodes.values():
        wait_for(lambda node=node: not held_locks(node.root), f"nothing is left on {node.name}")  # type: ignore[misc]  # mypy does not type a lambda's defaults
