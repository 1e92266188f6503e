"""Reads a growing file of samples from an offset; the file is the buffer of the delivery.

    logs/<node rank>.telemetry   header, sample, sample, header, sample, …  ─▶ Samples.read() ─▶ (header, sample), …
                                                     ▲ offset: a cursor that survives its reader

A missing file has nothing to read. Half a line is read when it is whole, and skipped when its writer was killed. A
reader that begins in the middle finds the header that applies there.
"""

from __future__ import annotations

import os
from pathlib import Path

from serverless_gpu.model.telemetry.samples import Header, Line, Sample, decode

_CHUNK_BYTES = 1 << 20


class Samples:
    """Reader of one file, from an earlier reader's offset on."""

    def __init__(self, path: Path, offset: int = 0) -> None:
        self._path = path
        self._offset = offset
        self._header = _header_before(path, offset)

    @property
    def offset(self) -> int:
        """Return where reading goes on."""
        return self._offset

    @property
    def backlog(self) -> int:
        """Return how many bytes have not been read."""
        try:
            return max(0, os.stat(self._path).st_size - self._offset)
        except OSError:
            return 0

    def read(self, limit: int = _CHUNK_BYTES) -> list[tuple[Header, Sample]]:
        """Return the next samples with their headers, from `limit` bytes at most; a longer line is skipped."""
        data = _bytes(self._path, self._offset, limit)
        lines, used = decode(data)
        self._offset += used if used or len(data) < limit else len(data)
        return self._paired(lines)

    def _paired(self, lines: list[Line]) -> list[tuple[Header, Sample]]:
        paired: list[tuple[Header, Sample]] = []
        for line in lines:
            if isinstance(line, Header):
                self._header = line
            elif self._header is not None:
                paired.append((self._header, line))
        return paired


def _header_before(path: Path, offset: int) -> Header | None:
    """Return the last header that stands before an offset."""
    found: Header | None = None
    at = 0
    while at < offset:
        data = _bytes(path, at, min(_CHUNK_BYTES, offset - at))
        end = data.rfind(b"\n") + 1
        headers = b"\n".join(line for line in data[:end].splitlines() if line.startswith(b"{"))
        for line in decode(headers + b"\n")[0]:
            found = line if isinstance(line, Header) else found
        if not end:
            break
        at += end
    return found


def _bytes(path: Path, offset: int, limit: int) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(limit)
    except OSError:
        return b""
