"""Watchers: a slow one costs only its own output, one that is gone costs nothing."""

from __future__ import annotations

import os
import resource
import selectors
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from serverless_gpu.model.lifecycle.attempt import State
from serverless_gpu.node.base import protocol
from serverless_gpu.node.inside.channel import Channel
from serverless_gpu.node.output.attached_clients import WATCHERS_MAX, Watchers
from tests.support.golden import golden
from tests.support.node.watchers import read_all

SNAPSHOT = protocol.AttemptSnapshot(run_id="01m7", fence=1, state=State.RUNNING, pid=7)


@pytest.fixture
def audience(tmp_path: Path) -> Iterator[tuple[Watchers, selectors.BaseSelector, Path]]:
    path = tmp_path / "01m7.sock"
    with selectors.DefaultSelector() as selector:
        made = Watchers(path, selector, lambda: SNAPSHOT, lambda message, watcher: None)
        assert made.listen() == ""
        yield made, selector, path
        made.close()
        for key in list(selector.get_map().values()):
            selector.unregister(key.fileobj)
            cast(Channel, key.fileobj).close()


def knock(path: Path) -> Channel:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.connect(str(path))
    return Channel(sock)


def turn(selector: selectors.BaseSelector) -> None:
    for key, _ in selector.select(0.0):
        key.data()


def test_one_watcher_too_many_is_told_so_and_the_place_is_free_again_when_one_goes(
    audience: tuple[Watchers, selectors.BaseSelector, Path],
) -> None:
    made, selector, path = audience
    peers = []
    for _ in range(WATCHERS_MAX):
        peers.append(knock(path))
        turn(selector)
    late = knock(path)
    protocol.send(late, protocol.Cancel())
    turn(selector)
    received = protocol.receive(late)
    assert received is not None and isinstance(received[0], protocol.Refused)
    assert received[0].message == golden("node.watchers.64-others-connected")
    assert all(read_all_of(peer) == [SNAPSHOT] for peer in peers)
    peers[0].close()
    turn(selector)
    made.tend()
    again = knock(path)
    turn(selector)
    assert read_all_of(again) == [SNAPSHOT]
    for peer in (*peers, late, again):
        peer.close()


def read_all_of(peer: Channel) -> list[protocol.AnyMessage]:
    peer.sock.setblocking(False)
    return read_all(peer)


def test_a_process_without_descriptors_rests_between_two_looks_at_who_knocks(
    audience: tuple[Watchers, selectors.BaseSelector, Path],
) -> None:
    _, selector, path = audience
    peer = knock(path)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    spare = os.dup(0)
    os.close(spare)  # the lowest free number
    resource.setrlimit(resource.RLIMIT_NOFILE, (spare, before[1]))
    try:
        started = time.monotonic()
        for _ in range(4):
            turn(selector)
        assert time.monotonic() - started > 0.15
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    turn(selector)
    assert read_all_of(peer) == [SNAPSHOT], "it was not forgotten"
    peer.close()
