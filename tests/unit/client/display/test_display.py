"""What a person sees: whole lines tagged with their rank, our own sentences on stderr, bars redrawn on a terminal."""

from __future__ import annotations

import contextlib
import io
import sys
import types
from pathlib import Path

import pytest

from serverless_gpu.client.display import run_display as display
from serverless_gpu.client.display.run_display import LIVE_ROWS_MAX, TerminalDisplay, make_display
from serverless_gpu.model.hardware import DeviceKind
from serverless_gpu.model.receipt import Receipt, Segments
from serverless_gpu.testing import FakeClock
from tests.support.client.display import Terminal
from tests.support.client.screen import NESTED
from tests.support.golden import golden

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    made = Terminal()
    # Not sys.stdout itself: pytest puts its own back between a fixture and its test.
    monkeypatch.setattr(display, "standard_stream", lambda stream: made)
    monkeypatch.setenv("TERM", "xterm")
    return made


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


def test_lines_are_tagged_and_go_where_they_were_written(capsys: Captured) -> None:
    made = TerminalDisplay(quiet=False)
    made.output(0, "stdout", "a\nb\n")
    made.output(1, "stderr", "c\n")
    assert capsys.readouterr() == (golden("client.display.rank-rank"), "[rank 1] c\n")


def test_a_line_is_printed_when_it_is_whole(capsys: Captured) -> None:
    made = TerminalDisplay(quiet=False)
    made.output(0, "stdout", "lo")
    made.output(1, "stdout", "other\n")
    made.output(0, "stderr", "err")
    assert capsys.readouterr() == ("[rank 1] other\n", "")
    made.output(0, "stdout", "ss\nne")
    assert capsys.readouterr() == ("[rank 0] loss\n", "")
    made.finish()
    made.finish()
    assert capsys.readouterr() == ("[rank 0] ne\n", "[rank 0] err\n")


def test_F28_a_full_disk_is_said_once_and_a_reader_that_went_away_is_not(
    monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    with open("/dev/full", "w", encoding="utf-8") as full:
        monkeypatch.setattr(sys, "stdout", full)
        made = TerminalDisplay(quiet=True, logs=Path("/runs/x/logs"))
        for _ in range(3):
            made.output(0, "stdout", "lost\n")
        made.output(0, "stderr", "shown\n")
        with contextlib.suppress(OSError):
            full.close()
    told = "serverless-gpu: cannot write to stdout: No space left on device; all output is in /runs/x/logs\n"
    assert capsys.readouterr().err == told + "[rank 0] shown\n"

    class Gone(io.StringIO):
        def flush(self) -> None:
            raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr(sys, "stdout", Gone())
    TerminalDisplay(quiet=True).output(0, "stdout", "unread\n")
    assert capsys.readouterr().err == ""


def test_a_long_line_that_breaks_off_does_not_say_how_long_it_is(capsys: Captured) -> None:
    made = TerminalDisplay(quiet=False)
    made.output(0, "stdout", "x" * 70_000)
    made.skipped(0, "stdout", 98_000_000, lost=False)
    assert capsys.readouterr().out == golden("client.display.rank-more-line", value="x" * 65_536)


def test_empty_lines_are_lines(capsys: Captured) -> None:
    TerminalDisplay(quiet=False).output(3, "stdout", "\n\n")
    assert capsys.readouterr().out == "[rank 3] \n[rank 3] \n"


@pytest.mark.parametrize(("quiet", "said"), [(False, "serverless-gpu: waiting\n"), (True, "")])
def test_our_own_sentences_can_be_left_out(capsys: Captured, quiet: bool, said: str) -> None:
    made = TerminalDisplay(quiet=quiet)
    made.say("waiting")
    made.output(0, "stdout", "still shown\n")
    assert capsys.readouterr() == ("[rank 0] still shown\n", said)


def test_how_far_something_is_goes_into_a_file_now_and_then(capsys: Captured, clock: FakeClock) -> None:
    display = TerminalDisplay(quiet=False, clock=clock)
    for second in range(25):
        display.progress(f"fetching {second} of 25")
        clock.advance(1)
    assert capsys.readouterr().err == golden("client.display.serverless-gpu-fetching")
    quiet = TerminalDisplay(quiet=True, clock=clock)
    clock.advance(11)
    quiet.progress("fetching")
    assert capsys.readouterr().err == ""


def test_what_a_sentence_quotes_does_nothing_to_a_terminal(terminal: Terminal) -> None:
    TerminalDisplay(quiet=False).say("MLflow answers 400: x\x1b]0;owned\x07\x1b[2J\x08y")
    text = terminal.getvalue()
    assert text.startswith("serverless-gpu: MLflow answers 400: x")
    assert [piece for piece in ("\x1b]", "\x07", "\x1b[2J", "\x08") if piece in text] == []


def test_without_a_terminal_nothing_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    made = TerminalDisplay(quiet=False)
    made.output(0, "stdout", "x\n")
    made.say("y")


def test_23B7_a_receipt_is_said_in_brief(capsys: Captured) -> None:
    receipt = Receipt(
        run_id="r",
        fence=1,
        state="SUCCEEDED",
        reason=None,
        gpu_type="CPU",
        gpus=("CPU-0",),
        kind=DeviceKind.CPU,
        segments=Segments(
            environment_ms=1, start_ms=2, first_line_ms=3, run_ms=4, stop_ms=5, gate_ms=6, queued_ms=None
        ),
        gpu_ms=4,
        micros=None,
        currency="USD",
        peak_memory_bytes=None,
        warm=True,
        warm_reason="",
        gate="1 CPU slot free: no process of the run is left",
        quarantined=(),
        tags={},
        facts=4,
        world_size=1,
    )
    TerminalDisplay(quiet=False).receipt(receipt)
    out, err = capsys.readouterr()
    assert (out, err) == ("", "".join(f"serverless-gpu: {line}\n" for line in receipt.brief()))
    TerminalDisplay(quiet=True).receipt(receipt)
    assert capsys.readouterr() == ("", "")


# --- into a file or a pipe -------------------------------------------------------------------------------------------


def test_F50_text_goes_into_a_file_as_it_is(capsys: Captured) -> None:
    TerminalDisplay(quiet=False).output(0, "stdout", "\x1b[31mred \x1b]52;c;x\x07\u202e\n")
    assert capsys.readouterr().out == "[rank 0] \x1b[31mred \x1b]52;c;x\x07\u202e\n"


def test_F50_a_bar_in_a_file_is_its_final_state(capsys: Captured, clock: FakeClock) -> None:
    made = TerminalDisplay(quiet=False, clock=clock)
    for percent in range(101):
        made.output(0, "stderr", f"\r{percent:3d}%")
        made.tick()
    assert capsys.readouterr().err == ""
    made.output(0, "stderr", "\n")
    clock.advance(0.3)
    made.tick()
    assert capsys.readouterr().err == "[rank 0] 100%\n"
    assert made.tick_s is None


def test_F50_a_long_bar_in_a_file_is_shown_every_ten_seconds(capsys: Captured, clock: FakeClock) -> None:
    made = TerminalDisplay(quiet=False, clock=clock)
    for second in range(25):
        made.output(0, "stderr", f"\r{second} s")
        assert made.tick_s == 1.0
        made.tick()
        clock.advance(1)
    made.finish()
    assert capsys.readouterr().err == golden("client.display.rank-10-rank")


def test_F50_bars_below_each_other_in_a_file(capsys: Captured, clock: FakeClock) -> None:
    made = TerminalDisplay(quiet=False, clock=clock)
    for character in NESTED:
        made.output(0, "stderr", character)
        made.tick()
    made.finish()
    assert capsys.readouterr().err == golden("client.display.rank-epochs-100")


def test_a_stream_that_cannot_encode_a_character_gets_it_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="latin-1"))
    TerminalDisplay(quiet=False).output(0, "stdout", "ä █\nnext\n")
    assert raw.getvalue() == b"[rank 0] \xe4 \\u2588\n[rank 0] next\n"


# --- on a terminal ---------------------------------------------------------------------------------------------------


def test_F50_lines_on_a_terminal_keep_colours_only(terminal: Terminal) -> None:
    TerminalDisplay(quiet=False).output(0, "stdout", "\x1b[31mred\x1b]52;c;x\x07\u202e\n\x07\n")
    assert terminal.getvalue() == golden("client.display.rank-31mred-u202e")


def test_F50_a_bar_is_redrawn_in_place_below_all_lines(terminal: Terminal, clock: FakeClock) -> None:
    made = TerminalDisplay(quiet=False, clock=clock)
    for percent in range(0, 101, 10):
        clock.advance(1)
        made.output(0, "stderr", f"\r{percent}%")
        made.output(1, "stdout", f"line at {percent}\n")
    lines = [f"[rank 1] line at {percent}" for percent in range(0, 101, 10)]
    assert terminal.rows() == [*lines, "[rank 0] 100%"]
    made.say("a sentence")
    assert terminal.rows() == [*lines, "serverless-gpu: a sentence", "[rank 0] 100%"]
    made.output(0, "stderr", "\n")
    made.finish()
    assert terminal.rows() == [*lines, "serverless-gpu: a sentence", "[rank 0] 100%", ""]


def test_F50_one_bar_that_moves_is_one_carriage_return_and_no_line(terminal: Terminal, clock: FakeClock) -> None:
    made = TerminalDisplay(quiet=False, clock=clock)
    made.output(0, "stderr", "\r44%")
    clock.advance(1)
    made.output(0, "stderr", "\r45%")
    assert terminal.getvalue() == golden("client.display.rank-44-rank")


def test_F50_bars_below_each_other_on_a_terminal(terminal: Terminal, clock: FakeClock) -> None:
    made = TerminalDisplay(quiet=False, clock=clock)
    seen = set()
    for character in NESTED:
        clock.advance(0.01)
        made.output(0, "stderr", character)
        seen.add(tuple(row[9:21] for row in terminal.rows()))
    assert ("epochs:   0%", "steps:  50%|") in seen
    made.finish()
    assert terminal.rows() == ["[rank 0] epochs: 100%|█| 2/2 [00:00<00:00, 4894.1", "[rank 0] done", ""]


def test_how_far_something_is_is_redrawn_on_a_terminal_and_leaves_no_row(terminal: Terminal, clock: FakeClock) -> None:
    display = TerminalDisplay(quiet=False, clock=clock)
    for second in range(3):
        display.progress(f"fetching {second} of 3")
        clock.advance(1)
    assert terminal.rows() == ["serverless-gpu: fetching 2 of 3"]
    display.state("RUNNING", "")
    display.finish()
    assert terminal.rows() == [""]


def test_a_bar_that_is_cleared_leaves_no_row(terminal: Terminal, clock: FakeClock) -> None:
    made = TerminalDisplay(quiet=False, clock=clock)
    made.output(0, "stderr", "\router\n\rinner\x1b[A")
    assert terminal.rows() == ["[rank 0] outer", "[rank 0] inner"]
    clock.advance(1)
    made.output(0, "stderr", "\n\r     \r\x1b[A")
    assert terminal.rows() == ["[rank 0] outer"]


def test_text_without_a_newline_is_seen_at_once(terminal: Terminal) -> None:
    made = TerminalDisplay(quiet=False)
    made.output(0, "stdout", "loading …")
    assert terminal.rows() == ["[rank 0] loading …"]
    made.output(0, "stdout", " done\n")
    assert terminal.rows() == ["[rank 0] loading … done", ""]


def test_redrawing_is_not_done_for_every_piece(terminal: Terminal, clock: FakeClock) -> None:
    made = TerminalDisplay(quiet=False, clock=clock)
    for number in range(1000):
        made.output(0, "stderr", f"\r{number}")
    assert terminal.getvalue().count("[rank 0]") == 1
    assert made.tick_s is not None
    clock.advance(made.tick_s)
    made.tick()
    assert terminal.rows() == ["[rank 0] 999"]
    assert made.tick_s is None, "nothing more is due"


def test_F50_a_live_row_fits_the_terminal(terminal: Terminal) -> None:
    TerminalDisplay(quiet=False).output(0, "stderr", "\r\x1b[32m" + "日" * 100)
    assert terminal.getvalue() == "\r[rank 0] \x1b[32m" + "日" * 35 + "\x1b[0m\x1b[K"


def test_the_ranks_that_wrote_last_have_the_live_rows(terminal: Terminal, clock: FakeClock) -> None:
    made = TerminalDisplay(quiet=False, clock=clock)
    for rank in range(20):
        clock.advance(1)
        made.output(rank, "stderr", f"\rbar of {rank}")
    assert terminal.rows() == [f"[rank {rank}] bar of {rank}" for rank in range(20 - LIVE_ROWS_MAX, 20)]
    made.finish()
    assert len(terminal.rows()) == 21, "the others are printed at the end, too"


def test_a_dumb_terminal_is_not_redrawn(terminal: Terminal, monkeypatch: pytest.MonkeyPatch, clock: FakeClock) -> None:
    monkeypatch.setenv("TERM", "dumb")
    made = TerminalDisplay(quiet=False, clock=clock)
    made.output(0, "stderr", "\r10%\r20%\x07\n")
    made.finish()
    assert terminal.getvalue() == "[rank 0] 20%\\x07\n"


def test_a_bar_on_stderr_while_stdout_is_a_file(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.StringIO()
    monkeypatch.setattr(display, "standard_stream", lambda stream: file if stream == "stdout" else terminal)
    made = TerminalDisplay(quiet=False)
    made.output(0, "stderr", "\r10%")
    made.output(0, "stdout", "partial")
    assert (terminal.rows(), file.getvalue()) == (["[rank 0] 10%"], "")
    made.output(0, "stdout", " whole\x07\n")
    assert file.getvalue() == "[rank 0] partial whole\x07\n"


# --- what is missing, and what was hidden ----------------------------------------------------------------------------


@pytest.mark.parametrize("quiet", [False, True])
def test_F49_missing_output_is_said_where_it_is_missing(capsys: Captured, quiet: bool) -> None:
    made = TerminalDisplay(quiet=quiet, logs=Path("/run/logs"))
    made.output(0, "stdout", "whole\ncut o")
    made.skipped(0, "stdout", 3_100_000_000, False)
    made.skipped(0, "stdout", 41_200_000_000, True)
    made.output(0, "stdout", "next\n")
    assert capsys.readouterr() == (
        golden("client.display.rank-whole-rank"),
        golden("client.display.rank-gb-shown"),
    )


def test_hidden_ranks_are_shown_when_the_run_failed(capsys: Captured) -> None:
    made = TerminalDisplay(quiet=False, logs=Path("/run/logs"))
    made.failure({3: "first\nlast", 1: "other"})
    assert capsys.readouterr().err == golden("client.display.serverless-gpu-last")


def test_the_notebooks_display_is_for_kernels_only(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("IPython")
    monkeypatch.setitem(sys.modules, "IPython", module)
    monkeypatch.setattr(module, "get_ipython", lambda: None, raising=False)
    assert type(make_display(quiet=True, logs=Path("logs"))) is TerminalDisplay
    monkeypatch.setattr(module, "get_ipython", lambda: object())
    assert type(make_display(quiet=True, logs=Path("logs"))) is TerminalDisplay
