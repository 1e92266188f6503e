"""Files that a person named for what a command or a call writes: a report, a picture, a result, a copy of the audit.

Failure cases: something is there that is no file (a device, a pipe, a directory: left alone, `InvalidValue`); a link
(what it leads to is written, the link stays); killed or out of room in the middle (what was there stays as it was).
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from serverless_gpu.errors import InvalidValue


def refuse_other(path: Path) -> None:
    """Refuse a place at which there is something that is no regular file.

    Raises:
        InvalidValue: there is. Nobody's device or pipe becomes a file.
    """
    if os.path.exists(path) and not os.path.isfile(path):
        hint = "give the path of a file, or one at which there is nothing yet"
        raise InvalidValue(f"{path} is there and is no file: it is left as it is", hint=hint)


@contextlib.contextmanager
def whole(path: Path, *, mode: int = 0o666) -> Iterator[Path]:
    """Yield a new, empty file to write to, which takes its place when all of it is written.

    Args:
        path: where the file is to be.
        mode: who may use a new file, as the umask allows.

    Raises:
        InvalidValue: what is there is no regular file.
        OSError: it cannot be written.
    """
    refuse_other(path)
    place = path.resolve()
    beside = place.with_name(f".part-{secrets.token_hex(8)}")
    os.close(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode))
    try:
        yield beside
        beside.replace(place)
    finally:
        beside.unlink(missing_ok=True)
