"""Uploads large payloads in parts named by their content, so that a broken upload resumes.

    call.pkl ──▶ parts of 16 MiB, BLAKE3 each ──▶ which are missing? ──▶ these are sent ──▶ BlobReference

Each part is retried while patience lasts; a part that arrives damaged is sent once more.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path

import blake3

from serverless_gpu.client.remote.server import RemoteServer
from serverless_gpu.errors import HashMismatch
from serverless_gpu.model.spec import BLOB_PART_BYTES, BlobReference

_TRIES = 2


def upload(server: RemoteServer, path: Path) -> BlobReference:
    """Upload a file of at least one byte and return its reference in the server's store."""
    size = path.stat().st_size
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        parts = tuple(blake3.blake3(part).hexdigest() for part in _parts(content, size))
        missing = set(server.missing(tuple(dict.fromkeys(parts))))
        for digest, part in zip(parts, _parts(content, size), strict=True):
            if digest in missing:
                missing.discard(digest)
                _put(server, digest, part)
    return BlobReference(size=size, parts=parts)


def _parts(content: mmap.mmap, size: int) -> Iterator[bytes]:
    for start in range(0, size, BLOB_PART_BYTES):
        yield content[start : start + BLOB_PART_BYTES]


def _put(server: RemoteServer, digest: str, part: bytes) -> None:
    for attempt in range(_TRIES):
        try:
            return server.put_part(digest, part)
        except HashMismatch:
            if attempt + 1 == _TRIES:
                raise
