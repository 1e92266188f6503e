"""The one place that says where zstd comes from: the standard library from Python 3.14 on, its backport before."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from serverless_gpu.errors import EnvironmentRejected

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

LEVEL_LOCAL = 1
"""For the local disk: 14 % more bytes than level 3 in 30 % less time."""
LEVEL_REMOTE = 3
"""For a network, which is slower than the compressor."""

PIECE_BYTES = 256 * 1024
"""What `pieces` gives at once: less than a core's cache, so that hashing and writing it find it there."""


def compress(data: bytes | bytearray | memoryview, level: int = LEVEL_LOCAL, *, checksum: bool = True) -> bytes:
    """Return data as one zstd frame.

    What has a digest of its own needs no checksum.
    """
    parameter = zstd.CompressionParameter
    return zstd.compress(data, options={parameter.compression_level: level, parameter.checksum_flag: int(checksum)})


class Compressor:
    """Makes frames one after another; its memory is asked for once. For one thread at a time."""

    def __init__(self, level: int) -> None:
        parameter = zstd.CompressionParameter
        self._inner = zstd.ZstdCompressor(options={parameter.compression_level: level, parameter.checksum_flag: 0})

    def compress(self, data: bytes | bytearray | memoryview) -> bytes:
        """Return data as one zstd frame without a checksum, the same that `compress` returns."""
        return self._inner.compress(data, zstd.ZstdCompressor.FLUSH_FRAME)


def decompress(frame: bytes | memoryview, size_max: int) -> bytes:
    """Return the content of one zstd frame, never more than a bound.

    Raises EnvironmentRejected: it is no such frame, ends early, goes on after its end, or holds more.
    """
    decompressor = zstd.ZstdDecompressor()
    try:
        # One byte more than allowed is enough to know that there is more.
        data = decompressor.decompress(bytes(frame), max_length=size_max + 1)
    except (zstd.ZstdError, EOFError) as error:
        raise EnvironmentRejected(f"a compressed block cannot be read: {error}") from None
    if len(data) > size_max:
        raise EnvironmentRejected(f"a compressed block holds more than the {size_max} bytes it says")
    if not decompressor.eof or decompressor.unused_data:
        raise EnvironmentRejected("a compressed block ends early, or is followed by something else")
    return data


def pieces(frame: bytes | memoryview, size: int) -> Iterator[bytes]:
    """Yield the content of one zstd frame, a piece at a time.

    Raises EnvironmentRejected: it is no such frame, ends early, goes on after its end, or does not hold exactly
    `size` bytes; pieces that were given before are of no use then.
    """
    decompressor, left = zstd.ZstdDecompressor(), size
    data: bytes | memoryview = frame
    while not decompressor.eof:
        try:
            # One byte more than there should be is enough to know that there is more.
            piece = decompressor.decompress(data, max_length=min(PIECE_BYTES, left + 1))
        except (zstd.ZstdError, EOFError) as error:
            raise EnvironmentRejected(f"a compressed block cannot be read: {error}") from None
        data = b""
        left -= len(piece)
        if left < 0:
            raise EnvironmentRejected(f"a compressed block holds more than the {size} bytes it says")
        if piece:
            yield piece
        elif not decompressor.eof:
            break
    if not decompressor.eof or decompressor.unused_data:
        raise EnvironmentRejected("a compressed block ends early, or is followed by something else")
    if left:
        raise EnvironmentRejected(f"a compressed block holds {size - left} bytes instead of {size}")
