"""Ctrl-C while a call blocks an event loop.

`asyncio.run` and an IPython kernel that runs an `async` cell take SIGINT for themselves: their handler only asks the
current task to be cancelled, which happens when that task next awaits. A blocking call in it would go on to its end,
with a stop button that does nothing. While we wait, SIGINT raises `KeyboardInterrupt` again. Handlers of the user's are
left alone.
"""

from __future__ import annotations

import contextlib
import functools
import signal
import threading
from collections.abc import Iterator

_LOOPS = ("asyncio", "ipykernel", "IPython", "tornado")


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Let Ctrl-C raise `KeyboardInterrupt` in this block also where an event loop has taken it."""
    if threading.current_thread() is not threading.main_thread() or not _of_a_loop(signal.getsignal(signal.SIGINT)):
        yield
        return
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _of_a_loop(handler: object) -> bool:
    while isinstance(handler, functools.partial):
        handler = handler.func
    return str(getattr(handler, "__module__", "")).partition(".")[0] in _LOOPS
