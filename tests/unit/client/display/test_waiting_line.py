"""What a person is told of a wait: one row that changes in place on a terminal, and few lines elsewhere."""

from __future__ import annotations

import pytest

from serverless_gpu.client.display import run_display
from serverless_gpu.client.display.run_display import WAIT_ROWS_MAX, TerminalDisplay, WaitingLine, waited_text
from serverless_gpu.testing import FakeClock
from tests.support.client.display import Terminal
from tests.support.client.notebook_display import Cell
from tests.support.golden import golden

S = 1_000_000_000
NEEDS = "needs 8 H100 on one node; 5 free on n3; alice/bert-ft holds 3 until 14:20 at the latest; you are {}th"


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    made = Terminal()
    monkeypatch.setattr(run_display, "standard_stream", lambda stream: made)
    monkeypatch.setenv("TERM", "xterm")
    return made


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-3.0, "0 s"),
        (59.9, "59 s"),
        (60.0, "1 min"),
        (3_599.0, "59 min"),
        (7_500.0, "2 h 5 min"),
        (200_000.0, "2 d 7 h"),
    ],
)
def test_how_long_it_is_waited_is_said_in_few_words(seconds: float, text: str) -> None:
    assert waited_text(seconds) == text


def test_in_a_file_the_first_sentence_is_a_line_at_once_and_later_ones_now_and_then(
    capsys: pytest.CaptureFixture[str], clock: FakeClock
) -> None:
    made = TerminalDisplay(quiet=False, clock=clock)
    for second in range(3_600):  # its place changes every second
        made.waits(NEEDS.format(9_000 - second), None)
        clock.advance(1)
        made.tick()
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "serverless-gpu: " + NEEDS.format(9_000)
    assert [lines[number].rpartition(" ")[2] for number in (1, 2, 3)] == ["8991th", "8971th", "8931th"]
    assert len(lines) == 16


def test_the_last_sentence_is_said_in_the_end_also_when_nothing_comes_after_it(
    capsys: pytest.CaptureFixture[str], clock: FakeClock
) -> None:
    made = TerminalDisplay(quiet=False, clock=clock)
    made.waits("first", None)
    made.waits("second", None)
    assert capsys.readouterr().err == "serverless-gpu: first\n"
    assert made.tick_s is not None and 9 < made.tick_s <= 10
    clock.advance(made.tick_s)
    made.tick()
    assert capsys.readouterr().err == "serverless-gpu: second\n"
    assert made.tick_s is None


def test_a_wait_that_is_over_is_not_said_any_more(capsys: pytest.CaptureFixture[str], clock: FakeClock) -> None:
    made = TerminalDisplay(quiet=False, clock=clock)
    made.waits("first", None)
    made.waits("second", None)
    clock.advance(4)
    made.state("RUNNING", "")
    clock.advance(60)
    made.tick()
    assert capsys.readouterr().err == "serverless-gpu: first\n" and made.tick_s is None


def test_a_long_wait_that_is_over_is_said(capsys: pytest.CaptureFixture[str], clock: FakeClock) -> None:
    made = TerminalDisplay(quiet=False, clock=clock)
    made.waits("first", clock.wall_ns() - 3_600 * S)
    clock.advance(300)
    made.state("STARTING", "")
    made.state("RUNNING", "")
    assert capsys.readouterr().err.splitlines()[1:] == [golden("client.waiting_line.serverless-gpu-starts")]
    made.waits("first", None)
    clock.advance(60)
    made.state("CANCELLED", "")
    assert "it starts" not in capsys.readouterr().err


def test_on_a_terminal_it_is_one_place_that_changes(terminal: Terminal, clock: FakeClock) -> None:
    made = TerminalDisplay(quiet=False, clock=clock)
    for place in range(9, 1, -1):
        made.waits(NEEDS.format(place), None)
        for _ in range(30):
            assert made.tick_s is not None and made.tick_s <= 1
            clock.advance(1)
            made.tick()
    assert terminal.rows() == [
        golden("client.waiting_line.serverless-gpu-queued"),
        golden("client.waiting_line.alice-bert-ft"),
    ]
    made.say("a word beside it")
    assert terminal.rows()[0] == golden("client.waiting_line.serverless-gpu-word") and len(terminal.rows()) == 3
    made.state("STARTING", "")
    said = ["serverless-gpu: a word beside it", "serverless-gpu: the run starts after 4 min in the queue"]
    assert terminal.rows() == [*said, ""]


def test_a_wait_that_ends_at_once_leaves_nothing_on_a_terminal(terminal: Terminal, clock: FakeClock) -> None:
    made = TerminalDisplay(quiet=False, clock=clock)
    made.waits("needs 1 H100", None)
    clock.advance(1)
    made.state("RUNNING", "")
    made.finish()
    assert terminal.rows() == [""] and made.tick_s is None


def test_what_others_call_their_runs_does_nothing_to_a_terminal(terminal: Terminal, clock: FakeClock) -> None:
    TerminalDisplay(quiet=False, clock=clock).waits("mallory/\x1b]0;owned\x07\x1b[2J holds 3", None)
    assert [piece for piece in ("\x1b]", "\x07", "\x1b[2J") if piece in terminal.getvalue()] == []


def test_a_sentence_without_end_takes_no_more_rows_than_a_few() -> None:
    line = WaitingLine()
    line.tell("word " * 2_000, since_ns=0)
    rows = line.rows(0, 80)
    assert len(rows) == WAIT_ROWS_MAX and rows[-1].endswith(" …") and max(map(len, rows)) < 80


def test_quiet_says_nothing(capsys: pytest.CaptureFixture[str], clock: FakeClock) -> None:
    made = TerminalDisplay(quiet=True, clock=clock)
    made.waits("first", None)
    clock.advance(60)
    made.state("RUNNING", "")
    assert capsys.readouterr().err == ""


def test_a_notebook_shows_for_how_long_and_for_what() -> None:
    cell = Cell()
    cell.display.waits("needs 2 H100; you are 2nd", cell.clock.wall_ns() - 90 * S)
    cell.pass_time(31)
    cell.display.waits("needs 2 H100; you are 1st", cell.clock.wall_ns() - 121 * S)
    cell.pass_time(1)
    cell.display.state("RUNNING", "")
    cell.clock.advance(60)
    cell.display.waits("needs 2 H100; you are 1st", None)
    assert cell.screen.plain == [
        golden("client.waiting_line.queued-min-needs"),
        golden("client.waiting_line.queued-min-needs-h100"),
        golden("client.waiting_line.queued-min-needs-h100-2"),
        "RUNNING for 0 s",
        golden("client.waiting_line.queued-needs-h100"),
    ]
