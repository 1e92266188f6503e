"""Receives large request bodies in pieces on the disk, and exposes complete bodies as memory.

    request ── pieces ─▶ up to 1 MiB in memory ─▶ a file without a name ── complete ─▶ memoryview ─▶ check, store

A slow sender uses no memory. A killed server leaves no files behind, because the spool file has no name. No reader sees
an incomplete body. Only threads of a separate pool wait for disks and stores. A bucket that takes half a minute per
request therefore does not delay heartbeats.

Failure cases:

* The disk is full: the sender receives ServerStorageFull, before the first byte if the size is known.

* The sender disconnects or sends more than the route accepts: reading the body raises, and the server removes the file.
"""

from __future__ import annotations

import contextlib
import mmap
import tempfile
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import IO, TypeVar

from anyio import CapacityLimiter, to_thread

from serverless_gpu.server.core.disk_space import (
    FULL,
    KEPT_FREE_BYTES,
    check_room,
    free_bytes,
    full_reason,
    storage_full,
)

PIECE_BYTES = 1 << 20
THREADS_MAX = 32

T = TypeVar("T")


class UploadSpool:
    """Stores bodies until they are complete, and processes bodies in separate threads."""

    def __init__(self, directory: Path, *, kept_free_bytes: int = KEPT_FREE_BYTES) -> None:
        self._directory = directory
        self._threads = CapacityLimiter(THREADS_MAX)
        self._kept_free_bytes = kept_free_bytes

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Run work on disks or stores in a thread of the separate pool, and return its result."""
        return await to_thread.run_sync(work, limiter=self._threads)

    @contextlib.asynccontextmanager
    async def whole(self, body: AsyncIterable[bytes], size: int | None = None) -> AsyncIterator[memoryview]:
        """Yield a body once it is complete, and delete the body afterwards."""
        if size is not None and size > PIECE_BYTES:
            await self.in_thread(lambda: self._check_room(size))
        pieces: list[bytes] = []
        held, file = 0, None
        try:
            async for piece in body:
                pieces.append(piece)
                held += len(piece)
                if held >= PIECE_BYTES:
                    file = await self._written(file, pieces)
                    pieces, held = [], 0
            if file is None:
                yield memoryview(b"".join(pieces))
                return
            await self._written(file, pieces)
            with _mapped(file) as view:
                yield view
        finally:
            if file is not None:
                file.close()

    def _check_room(self, size: int) -> None:
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_room(size, free_bytes(self._directory), kept_free_bytes=self._kept_free_bytes)

    async def _written(self, file: IO[bytes] | None, pieces: list[bytes]) -> IO[bytes]:
        return await self.in_thread(lambda: self._write(file, pieces))

    def _write(self, file: IO[bytes] | None, pieces: list[bytes]) -> IO[bytes]:
        self._check_room(sum(map(len, pieces)))
        try:
            if file is None:
                file = tempfile.TemporaryFile(dir=self._directory, buffering=0)  # noqa: SIM115 - `whole` closes the file
            for piece in pieces:
                view = memoryview(piece)
                while view:
                    view = view[file.write(view) :]
        except OSError as error:
            if error.errno in FULL:
                raise storage_full(full_reason(self._directory, error)) from error
            raise
        return file


@contextlib.contextmanager
def _mapped(file: IO[bytes]) -> Iterator[memoryview]:
    mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    view = memoryview(mapped)
    try:
        yield view
    finally:
        # Free the disk space now. Otherwise, a stored traceback could keep the file open.
        with contextlib.suppress(BufferError):  # The store may still use a part of the view for a moment.
            view.release()
            mapped.close()
