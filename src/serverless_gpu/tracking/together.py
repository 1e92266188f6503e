"""What deliveries of one run in one process have to know of each other: its attempts may all be on their way."""

from __future__ import annotations

import threading
import weakref


class Together:
    """Shared by the deliveries of a run.

    Attributes:
        lock: held from a look at the MLflow run to what is done about it.
        asked_ns: when one of them last asked for the MLflow run without an answer yet, nanoseconds since 1970, or 0.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.asked_ns = 0


_guard = threading.Lock()
_of_runs: weakref.WeakValueDictionary[str, Together] = weakref.WeakValueDictionary()


def together(run_id: str) -> Together:
    """Return what the deliveries of a run share; it is forgotten with the last of them."""
    with _guard:
        shared = _of_runs.get(run_id)
        if shared is None:
            shared = _of_runs[run_id] = Together()
        return shared
