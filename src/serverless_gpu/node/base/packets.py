"""Decoding of packets: an invalid packet leaves no descriptor open."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from serverless_gpu.node.inside.channel import close_all

T = TypeVar("T")


def decoded(decoder: msgspec.json.Decoder[T], received: tuple[bytes, tuple[int, ...]]) -> T:
    """Return the message in a packet; on MsgspecError its descriptors are closed."""
    try:
        return decoder.decode(received[0])
    except (msgspec.MsgspecError, RecursionError) as error:
        close_all(received[1])
        raise msgspec.DecodeError(str(error)) from None
