"""The double of a server takes what a node sends as the server does."""

from __future__ import annotations

import msgspec

from serverless_gpu.model.lifecycle.attempt import State
from serverless_gpu.model.spec import RunSpec
from serverless_gpu.wire.agents import LogPiece, Report, Start
from tests.support.node.agent_server import SeenAttempt


def report(offset: int, data: bytes) -> Report:
    piece = LogPiece(rank=0, stream="stdout", offset=offset, data=data)
    return Report(state=State.RUNNING, logs=(piece,))


def test_F17_output_whose_answer_was_lost_goes_on_where_the_server_has_it() -> None:
    start = Start(
        seq=1, run_id="r", fence=1, token="t", spec=RunSpec(), gpu_type="", world_size=1, context=msgspec.Raw()
    )
    attempt = SeenAttempt(start)
    assert not attempt.take(report(0, b"before\n")).offsets
    assert not attempt.take(report(0, b"before\nafter\n")).offsets
    assert attempt.take(report(20, b"later")).offsets == {"0.stdout": 13}
    assert attempt.logs == {"0.stdout": b"before\nafter\n"}
