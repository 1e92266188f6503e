"""Both ends of a tunnel over a relay that loses, repeats and delays messages."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serverless_gpu.model.endpoint import PortTarget
from serverless_gpu.model.tunnel_end import (
    PIECE_BYTES,
    STREAMS_MAX,
    WINDOW_BYTES,
    Close,
    Data,
    End,
    Open,
    TunnelEnd,
    TunnelMessage,
    Window,
)

TARGET = PortTarget(port=6006)


class Relay:
    """Two ends with the messages that are under way between them, and what each application has received."""

    def __init__(self) -> None:
        self.user, self.node = TunnelEnd(opens=True), TunnelEnd(opens=False)
        self.boxes: dict[TunnelEnd, list[TunnelMessage]] = {self.user: [], self.node: []}
        self.came: dict[TunnelEnd, dict[int, bytes]] = {self.user: defaultdict(bytes), self.node: defaultdict(bytes)}
        self.ended: dict[TunnelEnd, set[int]] = {self.user: set(), self.node: set()}

    def other(self, end: TunnelEnd) -> TunnelEnd:
        return self.node if end is self.user else self.user

    def send(self, end: TunnelEnd) -> None:
        self.boxes[self.other(end)].append(end.next_message())

    def deliver(self, end: TunnelEnd) -> None:
        if self.boxes[end]:
            self.give(end, self.boxes[end].pop(0))

    def give(self, end: TunnelEnd, message: TunnelMessage) -> None:
        for frame in end.receive(message):
            match frame:
                case Data(stream=stream, data=data):
                    self.came[end][stream] += data
                    end.use(stream, len(data))
                case End(stream=stream) | Close(stream=stream):
                    self.ended[end].add(stream)

    def connect(self, end: TunnelEnd) -> None:
        """The end's stream broke: what is under way to it is lost, and both ends send again, as the server asks."""
        other = self.other(end)
        self.boxes[end] = [TunnelMessage(received=other.received, again=True)]
        self.boxes[other].append(TunnelMessage(received=end.received, again=True))

    def settle(self) -> None:
        """Let everything arrive."""
        for end in (self.user, self.node):
            self.connect(end)
        for _ in range(200):
            for end in (self.user, self.node):
                self.send(end)
                while self.boxes[end]:
                    self.deliver(end)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["open", "send", "end", "message", "deliver", "connect", "repeat"]),
        st.booleans(),
        st.integers(0, 3),
        st.binary(max_size=40),
    ),
    max_size=80,
)


@given(STEPS)
def test_29_every_byte_arrives_once_and_in_order_over_a_connection_that_breaks(
    steps: list[tuple[str, bool, int, bytes]],
) -> None:
    relay = Relay()
    sent: dict[TunnelEnd, dict[int, bytes]] = {relay.user: defaultdict(bytes), relay.node: defaultdict(bytes)}
    ended: dict[TunnelEnd, set[int]] = {relay.user: set(), relay.node: set()}
    streams: list[int] = []
    for kind, at_user, number, data in steps:
        end = relay.user if at_user else relay.node
        stream = streams[number % len(streams)] if streams else 0
        match kind:
            case "open":
                streams.append(relay.user.open(TARGET))
            case "send" if end.room(stream) >= len(data):
                end.send(stream, data)
                if end.room(stream):
                    sent[end][stream] += data
            case "end" if end.room(stream):
                end.end(stream)
                ended[end].add(stream)
            case "message":
                relay.send(end)
            case "deliver":
                relay.deliver(end)
            case "connect":
                relay.connect(end)
            case "repeat" if relay.boxes[end]:
                relay.boxes[end].append(relay.boxes[end][0])
    relay.settle()
    for end in (relay.user, relay.node):
        there = relay.other(end)
        assert {stream: data for stream, data in relay.came[there].items() if data} == {
            stream: data for stream, data in sent[end].items() if data
        }
        assert relay.ended[there] == ended[end]
    assert not relay.user.has_news and not relay.node.has_news


def test_29_a_stream_that_nobody_reads_stops_at_its_window_and_others_go_on() -> None:
    relay = Relay()
    first, second = relay.user.open(TARGET), relay.user.open(TARGET)
    relay.user.send(first, bytes(WINDOW_BYTES))
    assert relay.user.room(first) == 0
    with pytest.raises(ValueError, match="window"):
        relay.user.send(first, b"x")
    for _ in range(40):
        for frame in relay.node.receive(relay.user.next_message()):
            assert isinstance(frame, Open | Data)
    assert relay.user.room(second) == WINDOW_BYTES
    relay.node.use(first, WINDOW_BYTES // 2)
    relay.give(relay.user, relay.node.next_message())
    assert relay.user.room(first) == WINDOW_BYTES // 2


def test_29_large_data_is_cut_into_frames_and_messages_have_a_bound() -> None:
    end = TunnelEnd(opens=True)
    stream = end.open(TARGET)
    end.send(stream, bytes(10 * PIECE_BYTES))
    frames = end.next_message().frames
    assert [type(frame) for frame in frames] == [Open, *[Data] * 10]
    assert all(len(frame.data) <= PIECE_BYTES for frame in frames if isinstance(frame, Data))


@pytest.mark.parametrize(
    "message",
    [
        TunnelMessage(received=5),
        TunnelMessage(frames=(Open(stream=1, target=TARGET), Open(stream=1, target=TARGET))),
        TunnelMessage(frames=(Open(stream=1, target=TARGET), Data(stream=1, data=bytes(PIECE_BYTES)))),
        TunnelMessage(frames=(Open(stream=1, target=TARGET), End(stream=1), Data(stream=1, data=b"late"))),
    ],
    ids=["confirms too much", "opens twice", "beyond the window", "data after the end"],
)
def test_29_an_end_that_breaks_the_protocol_is_refused(message: TunnelMessage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serverless_gpu.model.tunnel_end.WINDOW_BYTES", PIECE_BYTES - 1)
    with pytest.raises(ValueError, match="the other end"):
        list(TunnelEnd(opens=False).receive(message))


def test_29_only_the_user_opens_streams() -> None:
    with pytest.raises(ValueError, match="may not open"):
        list(TunnelEnd(opens=True).receive(TunnelMessage(frames=(Open(stream=1, target=TARGET),))))


def test_29_an_end_that_was_started_again_is_noticed() -> None:
    relay = Relay()
    relay.user.open(TARGET)
    relay.send(relay.user)
    relay.deliver(relay.node)
    relay.send(relay.node)
    relay.deliver(relay.user)
    with pytest.raises(ValueError, match="lost the state"):
        list(relay.user.receive(TunnelMessage(received=0, again=True)))


def test_29_the_number_of_streams_has_a_bound() -> None:
    relay = Relay()
    opened = [relay.user.open(TARGET) for _ in range(STREAMS_MAX + 1)]
    relay.settle()
    assert relay.ended[relay.user] == {opened[-1]}


def test_29_a_window_for_a_closed_stream_is_ignored() -> None:
    end = TunnelEnd(opens=True)
    stream = end.open(TARGET)
    end.close(stream)
    assert list(end.receive(TunnelMessage(frames=(Window(stream=stream, size=10),)))) == []
    assert end.room(stream) == 0
