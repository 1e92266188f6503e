"""What a person sees: whole lines tagged with their rank, our own sentences on stderr."""

from __future__ import annotations

import sys

import pytest

from serverless_gpu.client.display import TerminalDisplay
from serverless_gpu.model.hardware import DeviceKind
from serverless_gpu.model.ledger import Receipt, Segments

Captured = pytest.CaptureFixture[str]


def test_lines_are_tagged_and_go_where_they_were_written(capsys: Captured) -> None:
    display = TerminalDisplay(quiet=False)
    display.output(0, "stdout", "a\nb\n")
    display.output(1, "stderr", "c\n")
    assert capsys.readouterr() == ("[rank 0] a\n[rank 0] b\n", "[rank 1] c\n")


def test_a_line_is_printed_when_it_is_whole(capsys: Captured) -> None:
    display = TerminalDisplay(quiet=False)
    display.output(0, "stdout", "lo")
    display.output(1, "stdout", "other\n")
    display.output(0, "stderr", "err")
    assert capsys.readouterr() == ("[rank 1] other\n", "")
    display.output(0, "stdout", "ss\nne")
    assert capsys.readouterr() == ("[rank 0] loss\n", "")
    display.finish()
    display.finish()
    assert capsys.readouterr() == ("[rank 0] ne\n", "[rank 0] err\n")


def test_empty_lines_are_lines(capsys: Captured) -> None:
    TerminalDisplay(quiet=False).output(3, "stdout", "\n\n")
    assert capsys.readouterr().out == "[rank 3] \n[rank 3] \n"


@pytest.mark.parametrize(("quiet", "said"), [(False, "serverless-gpu: waiting\n"), (True, "")])
def test_our_own_sentences_can_be_left_out(capsys: Captured, quiet: bool, said: str) -> None:
    display = TerminalDisplay(quiet=quiet)
    display.say("waiting")
    display.output(0, "stdout", "still shown\n")
    assert capsys.readouterr() == ("[rank 0] still shown\n", said)


def test_without_a_terminal_nothing_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    display = TerminalDisplay(quiet=False)
    display.output(0, "stdout", "x\n")
    display.say("y")


def test_a_receipt_is_said_line_by_line(capsys: Captured) -> None:
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
    assert (out, err) == ("", "".join(f"serverless-gpu: {line}\n" for line in receipt.text().splitlines()))
    TerminalDisplay(quiet=True).receipt(receipt)
    assert capsys.readouterr() == ("", "")
