"""What a cell shows of a run: lines as text, one status that is updated, the receipt; and never an error of its own."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from tests.support.client.notebook_display import Cell
from tests.support.golden import golden
from tests.support.model.ledger import FULL

Captured = pytest.CaptureFixture[str]


def test_lines_are_tagged_and_go_to_the_stream_they_were_written_to(capsys: Captured) -> None:
    cell = Cell()
    cell.display.output(0, "stdout", "a\nb")
    cell.display.output(1, "stderr", "c\n")
    assert capsys.readouterr() == ("[rank 0] a\n", "[rank 1] c\n")
    cell.display.finish()
    assert capsys.readouterr() == ("[rank 0] b\n", "")


def test_23B7_a_run_from_its_queue_to_its_receipt_which_is_an_output_of_its_own() -> None:
    cell = Cell()
    cell.display.state("QUEUED", "")
    assert cell.screen.plain == []
    cell.display.say("waiting for 2 H100: 2 are used by run 01j")
    cell.display.state("QUEUED", "waiting for 2 H100: 2 are used by run 01j")
    cell.pass_time(1)
    cell.display.state("RUNNING", "")
    cell.pass_time(2)
    cell.display.state("SUCCEEDED", "")
    cell.display.finish()
    cell.display.receipt(FULL)
    assert cell.screen.plain == [
        golden("client.notebook_display.queued-waiting-h100"),
        "RUNNING for 0 s",
        "RUNNING for 1 s",
        "RUNNING for 2 s",
        "SUCCEEDED after 2.0 s",
    ]
    assert cell.account.shown == [{"text/plain": "\n".join(FULL.brief()), "text/html": FULL.brief_html()}]


def test_the_receipt_stands_whatever_comes_after_it() -> None:
    cell = Cell()
    cell.display.state("SUCCEEDED", "")
    cell.display.finish()
    cell.display.receipt(FULL)
    cell.display.finish()
    cell.display.state("SUCCEEDED", "late")
    cell.pass_time(1)
    assert cell.account.plain == ["\n".join(FULL.brief())]


def test_a_run_that_starts_at_once_shows_no_queue() -> None:
    cell = Cell()
    cell.display.state("QUEUED", "")
    cell.display.state("RUNNING", "")
    assert cell.screen.plain == ["RUNNING for 0 s"]


def test_a_run_that_waits_without_a_word_is_shown_as_queued() -> None:
    cell = Cell()
    cell.display.state("QUEUED", "")
    cell.pass_time(0.25)
    assert cell.screen.plain == ["QUEUED"]


def test_the_status_changes_four_times_a_second_at_most() -> None:
    cell = Cell()
    cell.display.state("RUNNING", "")
    for percent in range(100):
        cell.clock.advance(0.01)
        cell.display.output(0, "stderr", f"\r{percent}%")
    assert cell.screen.plain == [
        "RUNNING for 0 s",
        golden("client.notebook_display.running-rank-24"),
        golden("client.notebook_display.running-rank-49"),
        golden("client.notebook_display.running-rank-74"),
        golden("client.notebook_display.running-rank-99"),
    ]


def test_nothing_is_sent_when_nothing_changed() -> None:
    cell = Cell()
    cell.display.state("QUEUED", "why")
    cell.pass_time(60)
    assert cell.screen.plain == ["QUEUED why"]


def test_progress_is_bounded_escaped_and_without_control_characters(capsys: Captured) -> None:
    cell = Cell()
    cell.display.state("RUNNING", "")
    for rank in range(20):
        cell.display.output(rank, "stderr", f"\r\x1b[32m<b>{rank}</b>\x1b[0m\x07" + "x" * 500)
    cell.pass_time(0.25)
    lines = cell.screen.plain[-1].splitlines()
    assert len(lines) == 1 + 16 + 1
    assert lines[1].startswith("rank 0  <b>0</b>xxx") and len(lines[1]) == 200
    assert lines[-1] == "… and 4 more ranks"
    assert "&lt;b&gt;0&lt;/b&gt;" in cell.screen.shown[-1]["text/html"]
    assert "<b>0" not in cell.screen.shown[-1]["text/html"]
    assert capsys.readouterr() == ("", "")


def test_a_finished_progress_bar_is_a_line(capsys: Captured) -> None:
    cell = Cell()
    cell.display.output(0, "stderr", "\r 50%\r100%\n")
    cell.pass_time(0.75)
    assert capsys.readouterr() == ("", "[rank 0] 100%\n")


def test_what_is_said_of_a_run_that_runs_stays_as_text(capsys: Captured) -> None:
    cell = Cell()
    cell.display.state("RUNNING", "")
    cell.display.say("rank 0 returned 60 s ago")
    cell.display.state("RUNNING", "rank 0 returned 60 s ago")
    cell.pass_time(1)
    assert capsys.readouterr() == ("", golden("client.notebook_display.serverless-gpu-rank"))
    assert cell.screen.plain[-1] == golden("client.notebook_display.running-rank-returned")


def test_what_is_said_after_an_interrupt_stays_as_text_also_when_nothing_ran(capsys: Captured) -> None:
    cell = Cell()
    cell.display.state("QUEUED", "why")
    cell.display.finish()
    cell.display.say("run 01j goes on")
    cell.display.state("CANCELLED", "")
    assert capsys.readouterr() == ("", golden("client.notebook_display.serverless-gpu-run"))
    assert cell.screen.plain == ["QUEUED why", "CANCELLED after 0 ms"]


def test_missing_output_and_last_lines_of_other_ranks_are_text(capsys: Captured) -> None:
    cell = Cell()
    cell.display.state("FAILED", "")
    cell.display.output(1, "stdout", "half a li")
    cell.display.skipped(1, "stdout", 1_200_000, False)
    cell.display.skipped(1, "stdout", 5, True)
    cell.display.failure({3: "one\ntwo"})
    out, err = capsys.readouterr()
    assert out == golden("client.notebook_display.rank-half-li")
    assert err.splitlines() == [
        golden("client.notebook_display.rank-mb-shown"),
        "[rank 1] — 5 B dropped —",
        golden("client.notebook_display.serverless-gpu-last"),
        "[rank 3] one",
        "[rank 3] two",
    ]


def test_quiet_shows_rank_lines_only(capsys: Captured) -> None:
    cell = Cell(quiet=True)
    cell.display.state("RUNNING", "")
    cell.display.output(0, "stdout", "line\n")
    cell.display.say("word")
    cell.pass_time(1)
    cell.display.finish()
    cell.display.receipt(FULL)
    assert (cell.screen.shown, cell.account.shown) == ([], [])
    assert capsys.readouterr() == ("[rank 0] line\n", "")


def test_a_front_end_that_is_gone_costs_nothing_and_the_receipt_becomes_text(capsys: Captured) -> None:
    cell = Cell()
    cell.screen.error = cell.account.error = RuntimeError("no front end")
    cell.display.state("RUNNING", "")
    cell.display.output(0, "stdout", "line\n")
    cell.pass_time(1)
    cell.display.finish()
    cell.display.receipt(FULL)
    out, err = capsys.readouterr()
    assert out == "[rank 0] line\n"
    assert err.splitlines() == [f"serverless-gpu: {line}" for line in FULL.brief()]


class Refusing:
    """A stream somebody put in place of stdout."""

    def write(self, text: str) -> int:
        raise TypeError(text)


def nobody() -> None:
    return None


@pytest.mark.parametrize("make", [Refusing, nobody], ids=["raises", "None"])
def test_a_stdout_that_was_replaced_costs_nothing(monkeypatch: pytest.MonkeyPatch, make: Callable[[], object]) -> None:
    cell = Cell()
    monkeypatch.setattr(sys, "stdout", make())
    monkeypatch.setattr(sys, "stderr", make())
    cell.display.output(0, "stdout", "line\n")
    cell.display.state("RUNNING", "")
    cell.display.say("word")
    cell.display.finish()
