"""Starting a thread, where a container or a user may be at the limit of processes and threads.

Failure cases: the limit is reached (a HardwareError; Python itself says "can't start new thread").
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from serverless_gpu.errors import HardwareError

_PYTHONS_WORDS = "can't start new thread"


def start_thread(work: Callable[[], object], name: str) -> None:
    """Start a daemon thread.

    Args:
        work: what it does.
        name: of the thread.

    Raises:
        HardwareError: no thread can be started.
    """
    try:
        threading.Thread(target=work, name=name, daemon=True).start()
    except RuntimeError as error:
        if not is_thread_limit(error):
            raise
        raise thread_limit() from None


def is_thread_limit(error: BaseException) -> bool:
    """Return whether an error says that no thread can be started."""
    return isinstance(error, RuntimeError) and _PYTHONS_WORDS in str(error)


def thread_limit() -> HardwareError:
    """Return the error a person gets where no thread can be started."""
    return HardwareError(
        "no thread can be started: the limit of processes and threads is reached",
        hint="raise it: `ulimit -u`, in a container `docker run --pids-limit=…` (Kubernetes: podPidsLimit of the node)",
    )
