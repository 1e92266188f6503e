"""Frames between a program in a run and the terminal of its user.

    one byte: type │ four bytes: length, big-endian │ payload

    user ─▶ program   INPUT bytes · SIZE rows and columns, two bytes each · END the input ends · SIGNAL number, one byte
    program ─▶ user   OUTPUT bytes · ERRORS bytes of standard error · EXIT status, four bytes, signed
                      NOTE a sentence for the user, UTF-8

A negative exit status is the number of the signal that ended the program, as in `subprocess`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

INPUT, SIZE, END, SIGNAL = b"I", b"Z", b"E", b"S"
OUTPUT, ERRORS, EXIT, NOTE = b"O", b"R", b"X", b"N"
PAYLOAD_BYTES_MAX = 1 << 20
_HEAD = struct.Struct(">cI")


def encode(kind: bytes, payload: bytes = b"") -> bytes:
    """Return a frame. `payload` has at most `PAYLOAD_BYTES_MAX` bytes."""
    return _HEAD.pack(kind, len(payload)) + payload


def size_frame(rows: int, columns: int) -> bytes:
    """Return a frame with the size of the user's terminal."""
    return encode(SIZE, struct.pack(">HH", min(rows, 65_535), min(columns, 65_535)))


def size_of(payload: bytes) -> tuple[int, int]:
    """Return rows and columns of a `SIZE` frame. Raises ValueError."""
    try:
        rows, columns = struct.unpack(">HH", payload)
    except struct.error:
        raise ValueError("a frame with a terminal size must have four bytes") from None
    return rows, columns


def exit_frame(status: int) -> bytes:
    """Return a frame with the exit status of a program."""
    return encode(EXIT, struct.pack(">i", status))


def status_of(payload: bytes) -> int:
    """Return the status of an `EXIT` frame. Raises ValueError."""
    try:
        return int(struct.unpack(">i", payload)[0])
    except struct.error:
        raise ValueError("a frame with an exit status must have four bytes") from None


class FrameReader:
    """Splits received bytes into frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Yield the type and payload of each complete frame. Raises ValueError for a frame that is too long."""
        self._buffer += data
        while len(self._buffer) >= _HEAD.size:
            kind, size = _HEAD.unpack_from(self._buffer)
            if size > PAYLOAD_BYTES_MAX:
                raise ValueError(f"a frame of {size} bytes is over the limit of {PAYLOAD_BYTES_MAX}")
            end = _HEAD.size + size
            if len(self._buffer) < end:
                return
            payload = bytes(self._buffer[_HEAD.size : end])
            del self._buffer[:end]
            yield kind, payload
