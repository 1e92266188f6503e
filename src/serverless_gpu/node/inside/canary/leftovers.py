"""Attempts to leave something on the node after the end of the run.

The node searches for the remains afterwards.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from .base import Attempt, Targets, check, libc, system_call

_LEFT_S = 60
_IPC_CREAT = 0o1000


def _process(_: Targets) -> None:
    """Leave a process that has no parent, terminal or group of the run. The process ends by itself."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            null = os.open(os.devnull, os.O_RDWR)
            for fd in range(3):
                os.dup2(null, fd)
            os.closerange(3, 1024)
            libc.sleep(_LEFT_S)
        os._exit(0)
    os.wait()


def _file_in(place: str) -> Attempt:
    def attempt(targets: Targets) -> None:
        os.close(os.open(f"{place}/{targets.text('mark')}", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))

    return attempt


def _shared_memory(targets: Targets) -> None:
    check(libc.shmget(targets.number("left_key"), 4096, _IPC_CREAT | 0o600))


def _message_queue(targets: Targets) -> None:
    name = targets.text("mark").encode()
    os.close(check(system_call("mq_open", name, os.O_RDWR | os.O_CREAT, 0o600, None)))


ATTEMPTS: Mapping[str, Attempt] = {
    "leave-process": _process,
    "leave-file": _file_in("/tmp"),
    "leave-segment": _file_in("/dev/shm"),
    "leave-shared-memory": _shared_memory,
    "leave-message-queue": _message_queue,
    "leave-timer": lambda targets: _leave_timer(targets.texts("timers")),
}


def _leave_timer(places: list[str]) -> None:
    """Create a file without a name in a directory of timers. The file starts nothing and leaves nothing."""
    last: OSError | None = None
    for place in places:
        try:
            os.close(os.open(place, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o600))
        except OSError as error:
            last = error
        else:
            return
    if last is not None:
        raise last
