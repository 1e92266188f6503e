"""A copy of the audit outside of the server: JSON lines, one entry each, checked whenever it is opened.

    {"number":1,"seq":1,"at_ns":…,"principal":"ada","action":"run.create","subject":"01m…","detail":{…},"sha256":"…", …}

Failure cases: killed while writing (the torn last line is cut off the next time); no room (an OSError; what was written
stays good); two exports at once (the second is refused); a changed line (`AuditBroken`, which names it).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

import msgspec

from serverless_gpu.client.runs.result_files import refuse_other
from serverless_gpu.errors import AuditBroken, InvalidValue
from serverless_gpu.model.access.audit_chain import ChainedEntry, ChainHead, follow
from serverless_gpu.node.base.filesystems import lock_error

LINE_BYTES_MAX = 1 << 20
_decode = msgspec.json.Decoder(ChainedEntry).decode


def read(path: Path) -> Iterator[ChainedEntry]:
    """Yield the entries of a copy, unchecked; raise InvalidValue at a malformed line."""
    with path.open("rb") as file:
        yield from _links(file, path)


def whole(path: Path, *, after: ChainHead = ChainHead()) -> ChainHead:  # noqa: B008 - it cannot change
    """Return where a copy ends; raise AuditBroken unless its chain is intact."""
    head, problem = follow(read(path), after=after)
    if problem:
        raise AuditBroken(f"{path}: {problem}", hint="compare it with another copy")
    return head


@contextlib.contextmanager
def opened(path: Path) -> Iterator[tuple[IO[bytes], ChainHead]]:
    """Yield a copy under an exclusive lock, created if needed, and where it ends; AuditBroken if altered."""
    refuse_other(path)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "r+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InvalidValue(
                f"another process exports into {path}", hint="wait for it, or name another file"
            ) from None
        except OSError as error:
            raise lock_error(path, error.strerror or str(error), is_home=False) from error
        _cut_torn_line(file)
        head = whole(path)
        file.seek(0, os.SEEK_END)
        yield file, head


def add(file: IO[bytes], links: Iterable[ChainedEntry]) -> None:
    """Write entries so that a power cut does not take them."""
    file.write(b"".join(msgspec.json.encode(link) + b"\n" for link in links))
    file.flush()
    os.fsync(file.fileno())


def _links(file: IO[bytes], path: Path) -> Iterator[ChainedEntry]:
    for number, line in enumerate(iter(lambda: file.readline(LINE_BYTES_MAX), b""), start=1):
        if not line.endswith(b"\n"):
            raise InvalidValue(
                f"{path}: line {number} is torn or too long", hint="`sgpu audit export` mends a torn end"
            )
        try:
            yield _decode(line)
        except msgspec.DecodeError as error:
            raise InvalidValue(f"{path}: line {number} is no entry of an audit: {error}") from error


def _cut_torn_line(file: IO[bytes]) -> None:
    size = file.seek(0, os.SEEK_END)
    start = max(0, size - LINE_BYTES_MAX)
    file.seek(start)
    end = file.read().rfind(b"\n") + 1 + start
    if end < size and (end > start or start == 0):
        file.truncate(end)
