"""A run of a server tells its client where it is tracked as soon as the server says it, once."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import msgspec
import pytest

from serverless_gpu.client.remote.event_stream import EventStream, Heard
from serverless_gpu.client.remote.remote_run import RemoteRun
from serverless_gpu.client.remote.server import RemoteServer
from serverless_gpu.client.runs.run_source import ConnectionNote
from serverless_gpu.model.lifecycle.attempt import State
from serverless_gpu.node.base import protocol
from serverless_gpu.wire.runs import AcceptedMessage, RunView, StateMessage
from tests.support.client.remote_tracked import VIEW

LINK = "http://127.0.0.1:5000/#/experiments/1/runs/m1"


class Said:
    """A stream that has said this, and says nothing more."""

    def __init__(self, *messages: Heard) -> None:
        self.messages = list(messages)

    def read(self, timeout_s: float | None) -> Heard | None:
        """Return the next."""
        return self.messages.pop(0) if self.messages else None


def links(tmp_path: Path, view: RunView, *messages: Heard) -> list[str]:
    """Return the links of which a client hears."""
    stream = cast(EventStream, Said(*messages))
    watched = RemoteRun(cast(RemoteServer, None), view, tmp_path, stream=stream)
    heard: list[protocol.AnyMessage | ConnectionNote] = []
    while (message := watched.receive(1.0)) is not None:
        heard.append(message)
    return [message.url for message in heard if isinstance(message, protocol.Tracked)]


def aside(tracked: str = "", sentence: str = "") -> StateMessage:
    return StateMessage(seq=0, fence=1, state=State.RUNNING, sentence=sentence, tracked=tracked)


@pytest.mark.parametrize(
    "messages",
    [
        (aside(LINK),),
        (aside(), aside(LINK), aside(LINK, "it runs on"), aside()),
        (AcceptedMessage(run=msgspec.structs.replace(VIEW, tracked=LINK)), aside(LINK)),
    ],
)
def test_the_link_is_said_once(tmp_path: Path, messages: tuple[Heard, ...]) -> None:
    assert links(tmp_path, VIEW, *messages) == [LINK]


def test_whoever_attaches_is_told_the_link_and_nobody_one_that_is_not_known(tmp_path: Path) -> None:
    assert links(tmp_path, msgspec.structs.replace(VIEW, tracked=LINK)) == [LINK]
    assert links(tmp_path, VIEW, aside(sentence="it runs")) == []
