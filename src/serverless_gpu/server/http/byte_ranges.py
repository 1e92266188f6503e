"""Bytes with `Range`: the whole of something, or one range of it, as HTTP has it."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator

from starlette.responses import Response, StreamingResponse

from serverless_gpu.server.http.routing import BYTES

_RANGE = re.compile(r"bytes=([0-9]{1,18})-([0-9]{0,18})", re.ASCII)

Reader = Callable[[int, int], Iterator[bytes]]
"""Yields so many bytes from one on; called, and read, in a thread."""


def part_of(read: Reader, size: int, asked: str) -> Response:
    """Return the bytes that a request asks for.

    Args:
        read: where they come from.
        size: of the whole.
        asked: the request's `Range`; one that is not a single simple range means everything, as HTTP says.
    """
    headers = {"Accept-Ranges": "bytes", "Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
    match = _RANGE.fullmatch(asked.strip())
    if match is None:
        return _answer(read, 0, size, 200, headers)
    start = int(match[1])
    end = min(size, int(match[2]) + 1 if match[2] else size)
    if start >= size or start >= end:
        return Response(status_code=416, headers={**headers, "Content-Range": f"bytes */{size}"})
    headers["Content-Range"] = f"bytes {start}-{end - 1}/{size}"
    return _answer(read, start, end - start, 206, headers)


def _answer(read: Reader, start: int, length: int, status: int, headers: dict[str, str]) -> Response:
    headers["Content-Length"] = str(length)
    pieces = read(start, length)
    first = next(pieces, b"")  # now: what is not there is a problem that can still be said
    following = itertools.chain((first,), pieces)
    return StreamingResponse(following, status_code=status, headers=headers, media_type=BYTES)
