"""Writing large objects past the page cache, where the file system lets us.

A pack is made durable at once, so the kernel's cache would only be one more copy of it: that copy costs more time than
the disk (measured: 0.9 s of a core for 390 MB, against 0.02 s), and it would drive out what the user's programs have
there. What does not fit the rules of direct writing (whole blocks of the disk, from aligned memory) is written as
usual.

Failure cases: a file system without direct writing (tmpfs, some network and FUSE ones) refuses it at the first step or
at the first write; both mean 0 bytes here, and the caller goes on as usual. A full disk is an `OSError` as always.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os

SIZE_MIN = 1024 * 1024
"""Below this the usual way costs nothing to speak of."""
_STEP = 4 * 1024 * 1024
_BLOCK = 4096
_DIRECT = getattr(os, "O_DIRECT", 0)  # not on macOS
_REFUSED = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS)


def write_direct(fd: int, data: memoryview) -> int:
    """Write the start of an empty file past the page cache.

    Args:
        fd: open for writing, at its beginning.
        data: the whole content, as bytes.

    Returns:
        How many bytes were written; the rest is for the caller to write, from there on.
    """
    if not _DIRECT or len(data) < SIZE_MIN:
        return 0
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | _DIRECT)
    except OSError:
        return 0
    try:
        return _write(fd, data, len(data) - len(data) % _BLOCK)
    finally:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags)


def _write(fd: int, data: memoryview, end: int) -> int:
    done = 0
    with mmap.mmap(-1, min(_STEP, end)) as aligned:  # memory from mmap starts at a page
        while done < end:
            size = min(len(aligned), end - done)
            aligned[:size] = data[done : done + size]
            with memoryview(aligned) as whole, whole[:size] as part:
                try:
                    written = os.write(fd, part)
                except OSError as error:
                    if error.errno in _REFUSED:
                        return done
                    raise
            done += written
            if written % _BLOCK:
                return done  # cut short, as before a full disk: the usual way finds out
    return done
