"""The collector: parts and environments that nothing refers to are removed, in two steps that are far apart.

    a while after the start, then every six hours:   parts of payloads and outputs  ─▶ blobs.collect
                                                     captured environments          ─▶ environments.collect

What runs refer to is read from the database after the store was listed, and whatever is young or was asked about stays
(`blobs.py`, `environment/stores/collection.py`), so nobody has to wait for this. A snapshot that a run had within the
last month stays, though it may have been captured long before: its user will call again.

Failure cases: a store that does not answer (said in the log; the next time goes on where this one was); another
collection at work in the same store (nothing is done this time); the server stops in the middle (likewise).
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from serverless_gpu.ambient import Clock
from serverless_gpu.environment.stores.collection import KEEP_S
from serverless_gpu.errors import EnvironmentProblem, ServerProblem, StorageError
from serverless_gpu.server.db.database import Transactions
from serverless_gpu.server.records.runs import references
from serverless_gpu.server.storage.blobs import GRACE_S, Blobs
from serverless_gpu.server.storage.environment_store import Environments
from serverless_gpu.units import format_bytes

FIRST_S = 600.0
"""A server that has just started has better things to do."""
EVERY_S = 6 * 3600.0
_log = logging.getLogger(__name__)


class Collector:
    """Removes what nothing refers to."""

    def __init__(self, *, clock: Clock, database: Transactions, blobs: Blobs, environments: Environments) -> None:
        self._clock = clock
        self._database = database
        self._blobs = blobs
        self._environments = environments
        self._due_ns = clock.boottime_ns() + round(FIRST_S * 1e9)

    def tick(self, now_ns: int) -> int | None:
        """Collect when it is time; return when it is again.

        Args:
            now_ns: boottime, nanoseconds.
        """
        if now_ns >= self._due_ns:
            self._due_ns = now_ns + round(EVERY_S * 1e9)
            for name, collect in (("parts", self._collect_parts), ("environments", self._collect_environments)):
                self._safely(name, collect)
        return self._due_ns

    def _safely(self, name: str, collect: Callable[[], str]) -> None:
        try:
            done = collect()
        except (EnvironmentProblem, ServerProblem, StorageError) as error:
            _log.warning("%s were not collected: %s", name, error.message)
        else:
            _log.info("%s collected: %s", name, done)

    def _collect_parts(self) -> str:
        done = self._blobs.collect(lambda: self._database.read(references.parts_in_use), grace_s=GRACE_S)
        freed = format_bytes(done.deleted_bytes)
        return f"{done.kept} kept, {done.condemned} condemned, {done.deleted} deleted ({freed})"

    def _collect_environments(self) -> str:
        since_ns = self._clock.wall_ns() - KEEP_S * 10**9
        in_use = self._database.read(lambda connection: references.snapshots_in_use(connection, since_ns=since_ns))
        done = self._environments.collect(in_use)
        if done.busy:
            return "another collection is at work, nothing was done"
        kept, condemned, deleted = (format_bytes(part.bytes) for part in (done.kept, done.condemned, done.deleted))
        return f"{kept} kept, {condemned} condemned, {deleted} deleted"
