"""What travels comes out as it went in: every kind of message of a run's stream and of an attempt's report."""

from __future__ import annotations

import msgspec
import pytest

from serverless_gpu.model.lifecycle.attempt import Reason, State
from serverless_gpu.wire.agents import Ending, File, LogPiece, Report
from serverless_gpu.wire.runs import EndedMessage, FileView, GapMessage, LogMessage, SettledMessage, StreamMessage

RAW = msgspec.Raw(b'{"a":[1,null]}')


@pytest.mark.parametrize(
    "message",
    [
        LogMessage(fence=1, rank=0, stream="stdout", offset=3, data=b"\xff\x00"),
        GapMessage(fence=1, rank=0, stream="stderr", offset=3, size=9),
        EndedMessage(seq=3, fence=1, state=State.SUCCEEDED, reason=Reason.COMPLETED, ending=RAW),
        EndedMessage(
            seq=3, fence=1, state=State.LOST, reason=Reason.NODE_GONE, files=(FileView(name="a", size=1, inline=b"x"),)
        ),
        SettledMessage(receipt=RAW),
        SettledMessage(),
    ],
    ids=lambda message: type(message).__name__,
)
def test_a_message_of_a_stream_arrives_as_it_was_sent(message: StreamMessage) -> None:
    sent = msgspec.json.encode(message)
    arrived: StreamMessage = msgspec.json.decode(sent, type=StreamMessage)
    assert type(arrived) is type(message) and msgspec.json.encode(arrived) == sent


@pytest.mark.parametrize("stopped", [RAW, msgspec.UNSET])
def test_a_report_arrives_as_it_was_sent(stopped: msgspec.Raw | msgspec.UnsetType) -> None:
    report = Report(
        state=State.RUNNING,
        logs=(LogPiece(rank=0, stream="stdout", offset=0, data=b"x"),),
        files=(File(name="results/0.pkl", size=1, inline=b"x"),),
        ending=Ending(state=State.FAILED, reason=Reason.RANK_RAISED, began=True, stopped=stopped),
        receipt=stopped,
    )
    arrived = msgspec.json.decode(msgspec.json.encode(report), type=Report)
    assert msgspec.json.encode(arrived) == msgspec.json.encode(report)
    assert (arrived.receipt is msgspec.UNSET) is (stopped is msgspec.UNSET)
