"""Ctrl-C while a call blocks an event loop, and SIGTERM while a call waits.

`asyncio.run` and an IPython kernel that runs an `async` cell take SIGINT for themselves: their handler only asks the
current task to be cancelled when it next awaits, so a blocking call would not stop. During a wait, SIGINT raises
`KeyboardInterrupt` again, and SIGTERM acts like Ctrl-C: `on_interrupt` decides about the run, then the process ends of
SIGTERM. Otherwise a killed caller would leave a run in the queue that it alone waited for. Handlers of the user's stay.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
import threading
from collections.abc import Iterator

_LOOPS = ("asyncio", "ipykernel", "IPython", "tornado")


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Let Ctrl-C raise `KeyboardInterrupt` in this block also where an event loop has taken it."""
    handler: object = signal.getsignal(signal.SIGINT)
    while isinstance(handler, functools.partial):
        handler = handler.func
    is_of_loop = str(getattr(handler, "__module__", "")).partition(".")[0] in _LOOPS
    if threading.current_thread() is not threading.main_thread() or not is_of_loop:
        yield
        return
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """Let SIGTERM raise `KeyboardInterrupt` in this block, then end the process; user handlers stay."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    received: list[int] = []

    def receive(number: int, _frame: object) -> None:
        received.append(number)
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, receive)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if received:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(Exception):  # closed, or replaced by the user
                    stream.flush()
            os.kill(os.getpid(), signal.SIGTERM)
