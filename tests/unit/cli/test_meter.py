"""The line that says how far a capture is: rate, what remains, a terminal and a file."""

from __future__ import annotations

import errno
import io
import os
import pty
import threading

from serverless_gpu.cli.environments.progress_meter import Meters, ProgressMeter
from serverless_gpu.environment.documents import Phase, ProgressPoint
from serverless_gpu.testing import FakeClock
from tests.support.golden import golden

SECOND = 1_000_000_000


def at(done: int, *, phase: Phase = "capture", name: str = "torch 2.13.0") -> ProgressPoint:
    return ProgressPoint(
        phase=phase, bytes_done=done, bytes_total=1_400_000_000, files_done=12, files_total=29_911, name=name
    )


def test_bytes_files_rate_remaining_and_what_it_is_at() -> None:
    meter = ProgressMeter("capture", 0)
    meter.note(at(100_000_000), SECOND)
    meter.note(at(400_000_000), 2 * SECOND)
    assert meter.line(2 * SECOND) == golden("cli.meter.capturing-400-mb")


def test_nothing_is_foretold_in_the_first_second_or_without_a_total() -> None:
    meter = ProgressMeter("capture", 0)
    meter.note(at(100_000_000), SECOND // 2)
    assert meter.line(SECOND // 2) == golden("cli.meter.capturing-100-mb")
    unknown = ProgressMeter("scan", 0)
    unknown.note(ProgressPoint(phase="scan", files_done=1200), 2 * SECOND)
    assert unknown.line(2 * SECOND) == "looking: 1,200 files"


def test_the_rate_is_that_of_the_last_seconds() -> None:
    meter = ProgressMeter("fetch", 0)
    meter.note(at(1_000_000_000, phase="fetch"), SECOND)
    for second in range(2, 12):
        meter.note(at(1_000_000_000 + second, phase="fetch"), second * SECOND)
    assert " · 1 B/s · " in meter.line(11 * SECOND)


def test_a_report_of_a_slower_thread_does_not_turn_it_back() -> None:
    meter = ProgressMeter("capture", 0)
    meter.note(at(200), SECOND)
    meter.note(at(100), SECOND)
    assert meter.line(SECOND).startswith("capturing: 200 B of ")


def test_work_that_stands_still_says_no_rate() -> None:
    meter = ProgressMeter("capture", 0)
    meter.note(at(0), SECOND)
    assert "/s" not in meter.line(9 * SECOND) and "left" not in meter.line(9 * SECOND)


def test_a_file_gets_a_line_every_five_seconds() -> None:
    clock, stream = FakeClock(), io.StringIO()
    with Meters(stream, clock) as meters:
        for _ in range(12):
            clock.advance(1)
            meters.report(at(100))
    assert len(stream.getvalue().splitlines()) == 2
    assert "\r" not in stream.getvalue() and "\x1b" not in stream.getvalue()


def test_a_terminal_gets_one_line_that_is_redrawn_and_gone_at_the_end() -> None:
    ours, theirs = pty.openpty()
    clock = FakeClock()
    with os.fdopen(theirs, "w") as stream:
        with Meters(stream, clock) as meters:
            for done in (100, 200, 200):
                clock.advance(0.06)
                meters.report(at(done, name="evil\x1b]0;title\x07"))
        written = os.read(ours, 65536).decode()
        while not written.endswith("\r\x1b[K"):  # what was written at two times may come at two times
            written += os.read(ours, 65536).decode()
    os.close(ours)
    assert written == golden("cli.meter.capturing-200-gb")


def test_a_narrow_terminal_is_not_overflowed() -> None:
    ours, theirs = pty.openpty()
    clock = FakeClock()
    with os.fdopen(theirs, "w") as stream:
        with Meters(stream, clock) as meters:
            clock.advance(1)
            meters.report(at(100, name="x" * 500))
        first = os.read(ours, 65536).decode().split("\x1b[K")[0]
    os.close(ours)
    assert len(first.lstrip("\r")) == 79


class Full(io.StringIO):
    """A stream on a full disk."""

    tried = 0

    def write(self, text: str) -> int:
        self.tried += 1
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_stream_that_fails_ends_the_drawing_and_not_the_work() -> None:
    clock, stream = FakeClock(), Full()
    with Meters(stream, clock) as meters:
        for _ in range(3):
            clock.advance(6)
            meters.report(at(100))
    assert stream.tried == 1


def test_reports_of_many_threads_are_whole_lines() -> None:
    clock, stream = FakeClock(), io.StringIO()
    with Meters(stream, clock) as meters:

        def work() -> None:
            for _ in range(200):
                clock.advance(5)
                meters.report(at(100))

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert {line.partition(":")[0] for line in stream.getvalue().splitlines()} == {"capturing"}
