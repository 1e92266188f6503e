"""From the bytes of a packet to a message: what cannot be one leaves nothing open, and is said in one way."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from serverless_gpu.node.inside.channel import close_all

T = TypeVar("T")


def decoded(decoder: msgspec.json.Decoder[T], received: tuple[bytes, tuple[int, ...]]) -> T:
    """Return the message in a packet; its descriptors are closed where there is none.

    Args:
        decoder: of the messages that may come.
        received: what `Channel.receive` returned.

    Raises:
        msgspec.MsgspecError: the peer speaks another language.
    """
    try:
        return decoder.decode(received[0])
    except (msgspec.MsgspecError, RecursionError) as error:
        close_all(received[1])
        raise msgspec.DecodeError(str(error)) from None
