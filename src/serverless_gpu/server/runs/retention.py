"""Periodically deletes runs that ended long ago, with their rows, output and results.

    one hour after the start, then every ten minutes:
        ended longer ago than `retention`  ─▶ rows removed, audit row (one transaction each)  ─▶ output removed
        output uses more than `logs_gib`  ─▶ audit row  ─▶ output of the oldest removed
        output of runs that were removed   ─▶ removed, but kept if the database lost the run (`server_stores.py`)
        replaced secrets without an attempt  ─▶ removed

The loop deletes a run only after the server has settled and charged all its attempts. Before the deletion, the loop
makes provisional ledger entries final (`charging.py`). Ledger entries are never deleted. Garbage collection
(`environments.py`) later deletes the blobs of the results. Each tick deletes a limited number of runs, so that other
transactions are not delayed. The loop keeps the output of runs that ended within the last hour, because users still
read recent output. The limit `logs_gib` does not count the output of running runs. A running run with much output
therefore never causes the deletion of other runs' output.

Failure cases:

- The server is killed between the transaction and the deletion of the output. The next tick of the loop deletes the
  orphaned output.

- The database is unavailable. The loop logs the error and retries in the next tick.

- An operator sets the clock back. The loop deletes no runs, because the ages of runs are negative after the step back.

- The clock is ahead, for example after a battery failure. The loop pauses for an hour after each server start and after
  each clock step of more than a day.
"""

from __future__ import annotations

import functools
import logging

import sqlalchemy as sa

from serverless_gpu import faults
from serverless_gpu.ambient import Clock
from serverless_gpu.model.calendars import HOUR_NS
from serverless_gpu.model.lifecycle.retention import Policy, RunDirectory, to_delete
from serverless_gpu.server.core.settings import Settings
from serverless_gpu.server.db.database import Transactions
from serverless_gpu.server.records import attempts, audit, charges, events, facts, files, orders, runs
from serverless_gpu.server.records.audit import Action
from serverless_gpu.server.secrets import SecretService
from serverless_gpu.server.storage.logs import Logs
from serverless_gpu.units import format_bytes

FIRST_S = 3600.0
"""Seconds for which the loop pauses after a start or a large forward step of the wall clock."""
STEP_S = 86_400.0
EVERY_S = 600.0
AT_ONCE = 200
"""Maximum number of runs that one tick deletes.

After a tick that reaches the maximum, the next tick follows immediately.
"""
_log = logging.getLogger(__name__)


class Retention:
    """Deletes old runs and their output."""

    def __init__(
        self, *, settings: Settings, clock: Clock, database: Transactions, logs: Logs, secrets: SecretService
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._database = database
        self._logs = logs
        self._secrets = secrets
        self._due_ns = clock.boottime_ns() + round(FIRST_S * 1e9)
        self._ahead_ns = self._ahead()

    def tick(self, now_ns: int) -> int | None:
        """Delete some expired runs and outputs, and return the time of the next tick."""
        before_ns, self._ahead_ns = self._ahead_ns, self._ahead()
        if self._ahead_ns - before_ns > STEP_S * 1e9:
            _log.warning("retention pauses for an hour, because the clock jumped forward by more than a day")
            self._due_ns = now_ns + round(FIRST_S * 1e9)
        if now_ns < self._due_ns:
            return self._due_ns
        if self._remove_old() == AT_ONCE:
            return now_ns
        self._due_ns = now_ns + round(EVERY_S * 1e9)
        self._trim_output()
        self._secrets.remove_replaced()
        return self._due_ns

    def _ahead(self) -> int:
        """Return the difference between the wall clock and the boottime clock in nanoseconds."""
        return self._clock.wall_ns() - self._clock.boottime_ns()

    def _remove_old(self) -> int:
        """Delete runs that ended before the retention period, and return the number of deleted runs."""
        before_ns = self._clock.wall_ns() - round(self._settings.retention_s * 1e9)
        old = self._database.read(lambda connection: runs.over(connection, ended_before_ns=before_ns, limit=AT_ONCE))
        removed = 0
        for run_id in old:
            remove_rows = functools.partial(_remove_rows, run_id=run_id, at_ns=self._clock.wall_ns())
            if self._database.write(remove_rows):
                faults.reach("after_rows_before_output")
                self._logs.remove(run_id)
                removed += 1
        if removed:
            _log.info("deleted %d runs after the end of their retention period", removed)
        return removed

    def _trim_output(self) -> None:
        """Delete orphaned output without a run. Then delete the oldest output until the size limit is met."""
        # Read the directory before the database, because the server creates a run's row before its output.
        sizes = self._logs.run_sizes()
        ended = self._database.read(lambda connection: runs.endings(connection, list(sizes)))
        gone = sizes.keys() - ended.keys()
        for run_id in self._database.read(lambda connection: runs.removed(connection, sorted(gone))):
            self._logs.remove(run_id)
        entries = [RunDirectory(run_id=run_id, ended_ns=ended[run_id], size_bytes=sizes[run_id]) for run_id in ended]
        policy = Policy(age_ns=None, size_bytes_max=self._settings.logs_bytes_max, spared_ns=HOUR_NS)
        for entry in to_delete(entries, policy, self._clock.wall_ns())[:AT_ONCE]:
            self._remove_output(entry)

    def _remove_output(self, entry: RunDirectory) -> None:
        at_ns = self._clock.wall_ns()

        def note(connection: sa.Connection) -> None:
            detail = {"bytes": entry.size_bytes}
            audit.record(
                connection,
                who=audit.SERVER,
                action=Action.RUN_LOGS_EXPIRE,
                subject=entry.run_id,
                now_ns=at_ns,
                detail=detail,
            )

        self._database.write(note)
        self._logs.remove(entry.run_id)
        _log.info("deleted the output of run %s: %s", entry.run_id, format_bytes(entry.size_bytes))


def _remove_rows(connection: sa.Connection, run_id: str, *, at_ns: int) -> bool:
    """Delete the rows of a run. Return False if the run still has provisional charges."""
    run = runs.find(connection, run_id)
    if run is None:
        return True
    if charges.is_provisional(connection, run_id):
        charges.charge_again(connection, run_id)
        return False
    for room in (events, files, facts, orders, attempts):
        room.remove(connection, run_id)
    if runs.remove(connection, run_id):
        detail = {"owner": run.owner, "name": run.name, "state": run.state, "ended_ns": run.ended_ns}
        audit.record(
            connection, who=audit.SERVER, action=Action.RUN_EXPIRE, subject=run_id, now_ns=at_ns, detail=detail
        )
    return True
