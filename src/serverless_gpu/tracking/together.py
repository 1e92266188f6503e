"""State shared by deliveries of one run in one process: several of its attempts may be on their way."""

from __future__ import annotations

import threading
import weakref


class Together:
    """Shared state of a run's deliveries."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.asked_ns = 0


_guard = threading.Lock()
_of_runs: weakref.WeakValueDictionary[str, Together] = weakref.WeakValueDictionary()


def together(run_id: str) -> Together:
    """Return the shared state of a run's deliveries; it is dropped with the last of them."""
    with _guard:
        shared = _of_runs.get(run_id)
        if shared is None:
            shared = _of_runs[run_id] = Together()
        return shared
