"""When what is known of an attempt is due to be told."""

from __future__ import annotations

from serverless_gpu.model.lifecycle.attempt import Reason, State
from serverless_gpu.node.base.protocol import Stopped
from serverless_gpu.node.uplink.reporter import BEGUN_S, RECEIPT_S, SOON_S, PendingReport
from serverless_gpu.testing import FakeClock


def test_22C9_that_user_code_began_goes_with_the_ending_of_a_short_run() -> None:
    clock = FakeClock()
    news = PendingReport(clock)
    news.learn(BEGUN_S, begun=True, state=State.RUNNING)
    clock.advance(SOON_S)
    assert not news.wait(0), "no report of its own yet"
    news.learn(RECEIPT_S, ending=Stopped(state=State.SUCCEEDED, reason=Reason.COMPLETED, cause=None, consequences=()))
    clock.advance(RECEIPT_S)
    assert news.wait(0) and news.known.begun and news.known.ending is not None
    assert not news.wait(0), "both are told"


def test_22C9_that_user_code_began_is_told_of_a_run_that_goes_on() -> None:
    clock = FakeClock()
    news = PendingReport(clock)
    news.learn(BEGUN_S, begun=True, state=State.RUNNING)
    clock.advance(BEGUN_S)
    assert news.wait(0) and news.known.state is State.RUNNING
