"""Writes large request bodies to the disk, and exposes each complete body as memory.

    request ── pieces ─▶ up to 1 MiB in memory ─▶ a file without a name ── complete ─▶ memoryview ─▶ check, store

A slow sender therefore occupies no server memory. A killed server leaves no files behind, because the spool file has no
name. Routes never receive an incomplete body. A separate thread pool waits for disks and stores, so that a slow bucket
does not delay heartbeats.

Failure cases:

* If the disk is full, the sender receives ServerStorageFull. If the size is known, the sender receives the error before
  the first byte.

* If the sender disconnects or sends more than the route accepts, the server deletes the incomplete file.
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
    """Stores request bodies on the disk, and runs store operations in a separate thread pool."""

    def __init__(self, directory: Path, *, kept_free_bytes: int = KEPT_FREE_BYTES) -> None:
        self._directory = directory
        self._threads = CapacityLimiter(THREADS_MAX)
        self._kept_free_bytes = kept_free_bytes

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Run a disk or store operation in the thread pool, and return its result."""
        return await to_thread.run_sync(work, limiter=self._threads)

    @contextlib.asynccontextmanager
    async def whole(self, body: AsyncIterable[bytes], size: int | None = None) -> AsyncIterator[memoryview]:
        """Yield a request body after its last byte has arrived, and delete the file afterwards."""
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
        # Free the disk space now, because a stored traceback could keep the file open.
        with contextlib.suppress(BufferError):  # The store may still use a part of the mapped memory.
            view.release()
            mapped.close()
