"""Helpers of the tests of watchers that other tests use as well."""

from __future__ import annotations

from serverless_gpu.node.base import protocol
from serverless_gpu.node.inside.channel import Channel


def read_all(channel: Channel) -> list[protocol.AnyMessage]:
    read: list[protocol.AnyMessage] = []
    while True:
        try:
            received = protocol.receive(channel)
        except BlockingIOError:
            return read
        if received is None:
            return read
        read.append(received[0])
