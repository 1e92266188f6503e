"""The loop that removes runs that ended long ago, with their rows, their output and their results.

    an hour after the start, then every ten minutes:
        ended longer ago than `retention`  ─▶ rows removed, audit row (one transaction each)  ─▶ output removed
        output takes more than `logs_gib`  ─▶ audit row  ─▶ output of the oldest removed
        output of runs that were removed   ─▶ removed; of runs that the database lost: kept (`storage.py`)
        replaced secrets that no attempt has any more  ─▶ removed

A run is removed whole, and only when it is final and all of its attempts are settled and charged. Provisional entries
of the ledger are made final first (`charging.py`), and the ledger keeps them. Garbage collection (`environments.py`)
removes the parts of its results. A tick is small, so that the database has time for others. Output of runs that ended
within the last hour stays however large it is, because people read it. Running runs do not count, so one that floods
does not cost the others theirs.

Failure cases:
- Killed between the transaction and the removal of the output: the next round finds output without a run.
- The database is away: logged, and tried again.
- The clock was set back: ages are negative, nothing is removed.
- The clock is ahead, as after a lost battery: nothing is removed within an hour of a start, or of a logged step by more
  than a day.
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
"""How long after a start, or after the clock was set forward, it is taken to be right: by then it has been set."""
STEP_S = 86_400.0
EVERY_S = 600.0
AT_ONCE = 200
"""Runs of one tick; the next one follows after as long a pause."""
_log = logging.getLogger(__name__)


class Retention:
    """Removes runs and output that ended long ago."""

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
        """Remove some of what is due; return when to look again."""
        before_ns, self._ahead_ns = self._ahead_ns, self._ahead()
        if self._ahead_ns - before_ns > STEP_S * 1e9:
            _log.warning("the clock was set forward by more than a day; nothing is removed for an hour")
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
        """Return by how much the wall clock is ahead of the boottime clock, in nanoseconds."""
        return self._clock.wall_ns() - self._clock.boottime_ns()

    def _remove_old(self) -> int:
        """Remove runs that ended longer ago than they are kept; return how many went."""
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
            _log.info("%d runs that ended long ago were removed", removed)
        return removed

    def _trim_output(self) -> None:
        """Remove output without a run, and the oldest until the rest fits."""
        sizes = self._logs.run_sizes()  # before the database is asked: a run is there before its output
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
        _log.info("output of run %s was removed: %s", entry.run_id, format_bytes(entry.size_bytes))


def _remove_rows(connection: sa.Connection, run_id: str, *, at_ns: int) -> bool:
    """Return whether a run is gone; one whose charges are provisional is charged first, and goes in a later tick."""
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
