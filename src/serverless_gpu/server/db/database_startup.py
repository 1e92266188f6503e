"""Waits for a PostgreSQL that is still starting when the server starts.

After a reboot both start at once, and PostgreSQL may still replay its log. So a start tries again for `START_S` where
PostgreSQL does not answer yet, and says what it waits for. An answer that time does not change ends the start at once:
a wrong password, a database that does not exist.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from serverless_gpu.ambient import Clock
from serverless_gpu.errors import ServerUnavailable
from serverless_gpu.server.db.database import Database

START_S = 60.0
_PAUSE_S = 0.2
_PAUSE_S_MAX = 2.0
_FINAL = ("authentication failed", "does not exist", "no password supplied", "pg_hba.conf")
"""What PostgreSQL and its client library say where another try would get the same answer."""


def take_when_started(database: Database, *, clock: Clock, announce: Callable[[str], None]) -> None:
    """Make this server the only one of its database, once the database answers.

    Args:
        database: not used by anything yet.
        clock: measures the wait.
        announce: gets a line when the wait begins and one when it is over.

    Raises:
        ServerProblem: another server uses the database.
        ServerUnavailable: the database does not answer within `START_S`, or refuses this server.
    """
    until_ns = clock.boottime_ns() + round(START_S * 1e9)
    pause_s, waiting = _PAUSE_S, False
    while True:
        try:
            database.be_sole()
        except ServerUnavailable as error:
            if not is_temporary(error.message) or clock.boottime_ns() + pause_s * 1e9 > until_ns:
                raise
            if not waiting:
                waiting = True
                announce(f"{error.message}; waiting for it, {START_S:.0f} s at most")
            threading.Event().wait(pause_s)
            pause_s = min(2 * pause_s, _PAUSE_S_MAX)
        else:
            if waiting:
                announce("the database answers")
            return


def is_temporary(message: str) -> bool:
    """Return whether a database that cannot be used may only be starting."""
    return not any(words in message for words in _FINAL)
