"""The rank's side of an actor: creates an object and calls its methods for the caller.

    rank                                         caller (a Unix socket in its own private directory)
    connect, HELLO {rank, world_size}   ──▶
    create the object, call its setup()
    READY                               ──▶
                                        ◀──      (method, args, kwargs), pickled
    (true, value) or (false, failure)   ──▶      … until the caller closes the socket; then the rank returns

A frame consists of the payload's size in 8 bytes and the payload.

Failure cases:

* If the object's constructor raises an exception, the run fails.
* If an actor's method raises an `Exception`, the rank sends the exception as the answer and continues.
* If an actor's method raises `SystemExit` or another `BaseException`, the rank fails.
* If the caller exits, `serve_actor` returns.
* If the rank cannot pickle an answer, it sends a failure as the answer.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import cast

from . import payload
from .call import fill_rank
from .failure import describe, pickle_exception, tell_of_torch

_SIZE = struct.Struct("!Q")


@payload.portable
def serve_actor(
    address: str,
    make: Callable[..., object],
    args: Sequence[object],
    kwargs: Mapping[str, object],
    rank: int,
    world_size: int,
) -> None:
    """Create the actor's object, then answer method calls until the caller closes the socket.

    `address` is the path of the caller's socket. If the class accepts `rank` and `world_size`, the function adds them
    to `kwargs`.
    """
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(address)
        send_frame(sock, payload.dumps((rank, world_size)))
        actor = make(*args, **fill_rank(make, args, kwargs, rank, world_size))
        setup = getattr(actor, "setup", None)
        if callable(setup):
            setup(**fill_rank(setup, (), {}, rank, world_size))
        send_frame(sock, payload.dumps("ready"))
        while (request := receive_frame(sock)) is not None:
            send_frame(sock, _answer(actor, request, rank, world_size))


def _answer(actor: object, request: bytes, rank: int, world_size: int) -> bytes:
    try:
        loaded = cast("tuple[str, tuple[object, ...], dict[str, object]]", payload.loads(request))
        method = getattr(actor, loaded[0])
        return payload.dumps((True, method(*loaded[1], **fill_rank(method, loaded[1], loaded[2], rank, world_size))))
    except Exception as error:  # noqa: BLE001 - the caller gets every exception that user code raises
        tell_of_torch(error, os.environ)
        return payload.dumps((False, (describe(error), pickle_exception(error))))


def send_frame(sock: socket.socket, data: bytes) -> None:
    """Send one frame. Raises OSError if the peer has closed the socket."""
    sock.sendall(_SIZE.pack(len(data)))
    sock.sendall(data)


def receive_frame(sock: socket.socket) -> bytes | None:
    """Return the payload of the next frame, or None if the peer has closed the socket."""
    head = _receive(sock, _SIZE.size)
    return None if head is None else _receive(sock, _SIZE.unpack(head)[0])


def _receive(sock: socket.socket, size: int) -> bytes | None:
    data = bytearray(size)
    view, got = memoryview(data), 0
    while got < size:
        try:
            count = sock.recv_into(view[got:])
        except ConnectionError:
            return None
        if not count:
            return None
        got += count
    return bytes(data)
