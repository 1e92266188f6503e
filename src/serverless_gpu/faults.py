"""Named places where a test can end this process, as a power cut or `kill -9` would.

    SGPU_FAULT=after_commit_before_launch sgpu up …

Server and node call `reach("name")` where they pass a place. Nothing happens unless the variable names it. Every name
has a row here, and `reach` knows no other, so that a test cannot wait for a place that is gone.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

VARIABLE = "SGPU_FAULT"
PLACES = (
    "after_commit_before_launch",  # server: the attempt and its order are durable, nobody has been told
    "after_launch_before_ack",  # node: the attempt runs, the server does not know that the order was taken
    "after_upload_before_state",  # server: results and logs are durable, the run's state is not
    "after_report_before_answer",  # server: the report is durable, its sender does not know
    "after_submit_before_answer",  # server: the run is durable, its client does not know
)


def _kill(place: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


crash: Callable[[str], None] = _kill
"""What happens at the place; tests in one process put an exception here."""


def reach(place: str) -> None:
    """Die here if `SGPU_FAULT` names this place."""
    if place not in PLACES:
        raise ValueError(f"there is no fault point {place!r}")
    if os.environ.get(VARIABLE) == place:
        crash(place)
