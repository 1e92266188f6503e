"""A server whose disk is full: attempts that it hears of go on, and those that it may have given up do not."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from serverless_gpu.ambient import SystemClock
from serverless_gpu.model.lifecycle.attempt import StopReason
from serverless_gpu.model.spec import RunSpec
from serverless_gpu.node.attempt.server_attempt_record import ServerAttempt
from serverless_gpu.node.base.home import Home
from serverless_gpu.node.base.protocol import GangNews
from serverless_gpu.node.uplink import server as server_module
from serverless_gpu.node.uplink.node_key_file import NodeKeyFile
from serverless_gpu.node.uplink.reporter import AT_ONCE_S, PendingReport, Reporter
from serverless_gpu.node.uplink.server import Credential, UplinkServer
from serverless_gpu.testing import FakeClock
from tests.support.local.observe import wait_for
from tests.support.node.agent_server import AgentServer

GRACE_S = 60.0


class Attended:
    """Notes what the reporter lets the attempt do."""

    def __init__(self) -> None:
        self.deadlines: list[int] = []
        self.heard_until: list[int] = []
        self.is_abandoned = False

    def renew(self, deadline_ns: int, _stop: StopReason | None) -> None:
        """The server has answered."""
        self.deadlines.append(deadline_ns)

    def pass_on(self, _news: GangNews) -> None:
        """The server has said nothing of a gang."""

    def heard(self, deadline_ns: int) -> None:
        """The server has heard of it, and had no room."""
        self.heard_until.append(deadline_ns)

    def settled(self) -> None:
        """The server has everything."""

    def abandon(self) -> None:
        """It is over for the server."""
        self.is_abandoned = True


class Reported:
    """An attempt that is reported, on a clock that stands still.

    Args:
        server: to whom.
        directory: of the attempt.
    """

    def __init__(self, server: AgentServer, directory: Path) -> None:
        self.clock = FakeClock()
        self.attended = Attended()
        self.seen = server.order(RunSpec(name="call"), None, b"{}", partition_grace_s=GRACE_S)
        self._news = PendingReport(SystemClock())
        start = self.seen.start
        remote = ServerAttempt(
            run_id=start.run_id,
            fence=start.fence,
            profile=str(server.profile),
            token=start.token,
            gpu_type="H100",
            world_size=1,
            partition_grace_s=GRACE_S,
        )
        there = UplinkServer(server.profile, SystemClock(), NodeKeyFile(Home(server.home)))
        there.credentials.add(remote.gang, Credential(start.token, lambda _token: None))
        (directory / "facts.jsonl").touch()  # of one that has none, nothing more is told once it is over
        reporter = Reporter(directory, remote, self._news, server=there, clock=self.clock, say=lambda _line: None)
        self._thread = threading.Thread(target=lambda: reporter.run(self.attended, fresh=True), daemon=True)
        self._thread.start()

    def report(self) -> None:
        """Have it say something, wait until the server has answered that, and what came of the answer."""
        count = self.seen.asked
        wait_for(lambda: self._asked() >= count + 3, "it has reported, and gone on to the next report")

    def end(self) -> None:
        """Refuse it, so that it ends."""
        self.seen.stale, self.seen.no_room = True, False
        wait_for(lambda: self._asked() and not self._thread.is_alive(), "it ends")

    def _asked(self) -> int:
        self._news.learn(AT_ONCE_S)
        return self.seen.asked


@pytest.fixture
def reported(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Reported]:
    """Yield an attempt whose first report was answered."""
    monkeypatch.setattr(server_module, "PAUSE_S_MAX", 0.05)
    with AgentServer(home) as server:
        reported = Reported(server, tmp_path)
        wait_for(lambda: reported.attended.deadlines, "the first report is answered")
        yield reported
        reported.end()


def test_F36_an_attempt_that_a_full_server_hears_of_goes_on(reported: Reported) -> None:
    reported.seen.no_room = True
    for passed_s in (30.0, 60.0, 90.0):
        reported.clock.advance(30.0)
        reported.report()
        first_ns = reported.attended.deadlines[0]
        assert reported.attended.heard_until[-1] == first_ns + round(passed_s * 1e9)


def test_F18_F36_an_attempt_that_a_full_server_may_have_given_up_does_not_go_on(reported: Reported) -> None:
    """It was frozen, or cut off, for longer than its lease: the write that says so is what finds no room."""
    first_ns = reported.attended.deadlines[0]
    reported.seen.no_room = True
    reported.report()
    assert reported.attended.heard_until
    reported.clock.advance(GRACE_S + 1)
    reported.report()
    assert max(reported.attended.heard_until) == first_ns
    reported.seen.no_room = False  # it was not given up
    reported.report()
    assert reported.attended.deadlines[-1] == reported.clock.boottime_ns() + round(GRACE_S * 1e9)


def test_F18_F36_an_attempt_that_is_over_does_not_go_on_because_a_disk_is_full(reported: Reported) -> None:
    reported.seen.over = True
    reported.report()
    assert reported.attended.is_abandoned
    reported.seen.no_room = True
    heard = len(reported.attended.heard_until)
    reported.report()
    assert len(reported.attended.heard_until) == heard
