"""Watchers: a slow one costs only its own output, one that is gone costs nothing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from serverless_gpu.model.lifecycle.attempt import Reason, State
from serverless_gpu.node.base import protocol
from serverless_gpu.node.inside.channel import Channel, pair
from serverless_gpu.node.output import attached_clients
from serverless_gpu.node.output.attached_clients import Watcher
from tests.support.node.watchers import read_all

CHARACTERS_MAX = 200_000
STOPPED = protocol.Stopped(state=State.SUCCEEDED, reason=Reason.COMPLETED, cause=None, consequences=())


def output(number: int, size: int = 10) -> protocol.Output:
    return protocol.Output(rank=0, stream="stdout", text=f"{number}:" + "x" * size)


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Watcher, Channel]]:
    monkeypatch.setattr(attached_clients, "QUEUED_CHARACTERS_MAX", CHARACTERS_MAX)
    ours, theirs = pair()
    theirs.sock.setblocking(False)
    yield Watcher(ours), theirs
    ours.close()
    theirs.close()


def read_slowly(watcher: Watcher, channel: Channel) -> list[protocol.AnyMessage]:
    """Read until nothing is queued any more."""
    read: list[protocol.AnyMessage] = []
    while watcher.waiting:
        read += read_all(channel)
        watcher.flush()
    return read + read_all(channel)


def ignore(_message: protocol.AnyMessage, _fds: tuple[int, ...]) -> None:
    pass


def fill(watcher: Watcher) -> int:
    """Talk until the peer takes no more; return how many messages were sent or queued."""
    count = 0
    while not watcher.waiting:
        watcher.show(output(count, 40_000), 7, lost=False)
        count += 1
    return count


def test_what_is_said_arrives_in_order(ends: tuple[Watcher, Channel]) -> None:
    watcher, peer = ends
    said: list[protocol.Sendable] = [protocol.Accepted(pid=7), output(1), STOPPED]
    for message in said:
        watcher.send(message)
    assert read_all(peer) == said
    assert (watcher.waiting, watcher.gone, watcher.dropped_bytes) == (False, False, 0)


def test_who_does_not_read_is_waited_for_without_blocking(ends: tuple[Watcher, Channel]) -> None:
    watcher, peer = ends
    count = fill(watcher)
    read = read_all(peer)
    assert watcher.waiting
    watcher.flush()
    assert not watcher.waiting
    assert [*read, *read_all(peer)] == [output(number, 40_000) for number in range(count)]


def test_F49_output_is_left_out_first_and_everything_else_is_kept(ends: tuple[Watcher, Channel]) -> None:
    watcher, peer = ends
    count = fill(watcher)  # one of them is queued
    for number in range(80):
        watcher.show(output(count + number, 8_000), 8_000, lost=False)
    dropped = watcher.dropped_bytes
    assert dropped > 8_000
    watcher.send(STOPPED)
    read = read_slowly(watcher, peer)
    assert read[-1] == STOPPED
    told = sum(message.bytes for message in read if isinstance(message, protocol.Skipped))
    assert 0 < told == watcher.dropped_bytes < dropped, "how it ended is shown after all"
    assert isinstance(read[-2], protocol.Output)


def test_a_peer_that_is_gone_is_forgotten_with_what_it_was_to_hear(ends: tuple[Watcher, Channel]) -> None:
    watcher, peer = ends
    fill(watcher)
    peer.close()
    watcher.flush()
    assert (watcher.gone, watcher.waiting) == (False, False), "its last words may still be there"
    watcher.send(STOPPED)
    assert not watcher.waiting
    assert not watcher.receive(ignore)


def test_last_words_are_waited_for_but_not_for_ever(ends: tuple[Watcher, Channel]) -> None:
    watcher, peer = ends
    fill(watcher)
    watcher.send(STOPPED)
    watcher.drain(0.01)
    assert not watcher.waiting
    assert STOPPED not in read_all(peer)


def test_last_words_reach_a_peer_that_reads(ends: tuple[Watcher, Channel]) -> None:
    watcher, peer = ends
    watcher.send(output(1))
    watcher.drain(1.0)
    assert read_all(peer) == [output(1)]


# --- what watchers say -----------------------------------------------------------------------------------------------


def test_what_a_watcher_says_is_passed_on(ends: tuple[Watcher, Channel]) -> None:
    watcher, peer = ends
    heard: list[protocol.AnyMessage] = []
    assert watcher.receive(lambda message, fds: heard.append(message))
    protocol.send(peer, protocol.Cancel())
    protocol.send(peer, protocol.Cancel())
    assert [watcher.receive(lambda message, fds: heard.append(message)) for _ in range(3)] == [True, True, True]
    assert heard == [protocol.Cancel(), protocol.Cancel()]


@pytest.mark.parametrize(
    "body",
    [b"", b"hello", b"{}", b'{"type":"invented"}', b'{"type":"waiting"}', b"\xff\xfe", b"[1]"],
    ids=repr,
)
def test_nonsense_ends_the_conversation_and_nothing_else(ends: tuple[Watcher, Channel], body: bytes) -> None:
    watcher, peer = ends
    peer.send(body)
    heard: list[protocol.AnyMessage] = []
    assert not watcher.receive(lambda message, fds: heard.append(message))
    assert heard == []


def test_a_packet_that_is_no_message_ends_the_conversation_and_nothing_else(ends: tuple[Watcher, Channel]) -> None:
    watcher, peer = ends
    peer.sock.send(b"?")
    assert not watcher.receive(ignore)


def test_a_closed_watcher_is_heard_as_gone(ends: tuple[Watcher, Channel]) -> None:
    watcher, peer = ends
    peer.close()
    assert not watcher.receive(ignore)


# --- who comes by the socket -----------------------------------------------------------------------------------------
