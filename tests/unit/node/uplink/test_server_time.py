"""F30: what time it is on the server, by this node's boottime; its wall clock takes no part."""

from __future__ import annotations

from serverless_gpu.node.uplink.server import ServerTime
from serverless_gpu.testing import FakeClock
from serverless_gpu.wire.agents import ClockReading, clock_text, is_off
from tests.support.golden import golden

S = 1_000_000_000
SERVER_NS = 1_700_000_000 * S


def asked(time: ServerTime, clock: FakeClock, at_ns: int, *, took_s: float) -> None:
    """Ask the server, whose answer takes so long; it says what time it is half-way."""
    before_ns = clock.boottime_ns()
    clock.advance(took_s)
    time.heard(at_ns, asked_ns=before_ns, answered_ns=clock.boottime_ns())


def test_nothing_is_known_before_an_answer_nor_from_a_server_that_does_not_say() -> None:
    time, clock = ServerTime(), FakeClock()
    asked(time, clock, 0, took_s=1)
    assert time.wall_ns(clock.boottime_ns()) is None and time.reading(clock) is None


def test_the_quickest_answer_counts_and_the_wall_clock_of_the_node_does_not() -> None:
    time, clock = ServerTime(), FakeClock()
    start_ns = clock.boottime_ns()
    asked(time, clock, SERVER_NS + S, took_s=2)
    asked(time, clock, SERVER_NS + 2 * S + S // 100, took_s=0.02)
    asked(time, clock, SERVER_NS + 2 * S + S // 2, took_s=4)
    assert time.wall_ns(start_ns) == SERVER_NS
    clock.step_wall(3600)
    assert time.wall_ns(start_ns) == SERVER_NS


def test_a_server_whose_clock_was_set_is_believed_at_once() -> None:
    time, clock = ServerTime(), FakeClock()
    start_ns = clock.boottime_ns()
    asked(time, clock, SERVER_NS, took_s=0.01)
    asked(time, clock, SERVER_NS + 86_400 * S, took_s=2)
    known_ns = time.wall_ns(start_ns)
    assert known_ns is not None and abs(known_ns - SERVER_NS - 86_400 * S) <= 2 * S


def test_a_measurement_of_long_ago_gives_way_to_a_worse_one_of_now() -> None:
    time, clock = ServerTime(), FakeClock()
    asked(time, clock, SERVER_NS, took_s=0)
    clock.advance(700)
    asked(time, clock, SERVER_NS + 701 * S, took_s=2)
    reading = time.reading(clock)
    assert reading is not None and reading.error_ns == S


def test_F30_a_clock_that_is_certainly_off_is_named_and_one_that_may_be_is_not() -> None:
    hour, second = ClockReading(ahead_ns=3600 * S, error_ns=S), ClockReading(ahead_ns=S, error_ns=S)
    assert is_off(hour) and clock_text(hour) == golden("node.server_time.clock-00-min")
    assert clock_text(ClockReading(ahead_ns=-600 * S, error_ns=0)) == golden("node.server_time.clock-10-min")
    assert not is_off(second) and clock_text(second) == "" and not is_off(None)


def test_F30_the_reading_is_the_wall_clock_of_now_however_it_jumped() -> None:
    time, clock = ServerTime(), FakeClock(wall_ns=SERVER_NS)
    asked(time, clock, SERVER_NS, took_s=0)
    for seconds in (3600, -3600, -600):
        clock.step_wall(seconds)
        reading = time.reading(clock)
        assert reading is not None and reading.ahead_ns == clock.wall_ns() - SERVER_NS
