"""Duration history: queries for usage, durations and preemptions of earlier attempts, for predictions.

The server queries the duration history at its start, for new runs, and after runs of the same name. Each query of the
history has a bounded cost. An index of successful runs finds the last runs of a name. `LearnedDurations` caches the
longest durations for budgets.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import msgspec
import sqlalchemy as sa

from serverless_gpu.model.billing.budget import share_team
from serverless_gpu.model.lifecycle.attempt import Reason, State
from serverless_gpu.model.scheduling import duration_estimates
from serverless_gpu.model.scheduling.fairness import charged
from serverless_gpu.model.scheduling.values import Used
from serverless_gpu.server.db.database import in_chunks
from serverless_gpu.server.db.tables import attempts, crews, runs
from serverless_gpu.server.records.attempts import COLUMNS, JOINED, StoredAttempt, from_row, whole

HALF_LIVES = 8
"""Maximum age of usage in half-lives, because older usage weighs less than 1 in 250."""
_decode_teams = msgspec.json.Decoder(tuple[str, ...]).decode
# Number of intervals per half-life, with an error of at most 1.3 % because usage counts at an interval's middle.
_PARTS = 28
# The literal must equal the index condition, because SQLite would not use the index with a query parameter.
_SUCCEEDED = runs.c.state == sa.literal_column("'SUCCEEDED'")
_CURRENT = sa.and_(attempts.c.run_id == runs.c.id, attempts.c.fence == runs.c.fence)


KEPT_S = 60.0
KEPT_MAX = 10_000


def used(connection: sa.Connection, *, now_ns: int, half_life_s: float) -> Used:
    """Return the decayed usage of teams and users, from ended attempts only."""
    part_ns = max(1, round(half_life_s * 1e9 / _PARTS))
    took_ns = crews.c.ended_ns - attempts.c.created_ns
    part = ((now_ns - attempts.c.created_ns - took_ns // 2) // part_ns).label("part")
    device_ms = took_ns // 1_000_000 * crews.c.gpus
    own = sa.and_(crews.c.run_id == attempts.c.run_id, crews.c.fence == attempts.c.fence)
    since_ns = now_ns - round(HALF_LIVES * half_life_s * 1e9)
    query = (
        sa.select(runs.c.team, runs.c.member_of_json, runs.c.owner, attempts.c.gpu_type, part, sa.func.sum(device_ms))
        .select_from(attempts.join(runs, runs.c.id == attempts.c.run_id).join(crews, own))
        .where(crews.c.ended_ns > since_ns)
        .group_by(runs.c.team, runs.c.member_of_json, runs.c.owner, attempts.c.gpu_type, sa.text("part"))
    )
    teams: dict[str, float] = defaultdict(float)
    users: dict[tuple[str, str], float] = defaultdict(float)
    for named, member_of, owner, gpu_type, number, sum_ms in connection.execute(query):
        team = share_team(named, _decode_teams(member_of or "[]")) or f"~{owner}"
        decayed = charged(gpu_type, 1) * max(0.0, float(sum_ms) / 1e3) * 0.5 ** (max(0.0, float(number) + 0.5) / _PARTS)
        teams[team] += decayed
        users[team, owner] += decayed
    return Used(at_ns=now_ns, teams=dict(teams), users=dict(users))


def expected_s(connection: sa.Connection, owner: str, name: str) -> float | None:
    """Return the expected device time of a run in seconds, from earlier runs of the same owner and name."""
    return duration_estimates.expected_s(durations_s(connection, owner, name)) if name else None


def longest_s(connection: sa.Connection, owner: str, name: str) -> float | None:
    """Return the longest device time in seconds of recent runs of an owner and name, or None if unknown."""
    return duration_estimates.longest_s(durations_s(connection, owner, name)) if name else None


def durations_s(connection: sa.Connection, owner: str, name: str) -> list[float]:
    """Return the device times of the last successful runs of an owner and name, latest first."""
    query = (
        sa.select(attempts.c.ended_ns - attempts.c.created_ns)
        .select_from(runs.join(attempts, _CURRENT))
        .where(runs.c.owner == owner, runs.c.name == name, _SUCCEEDED, attempts.c.ended_ns.is_not(None))
        .order_by(runs.c.id.desc())
        .limit(duration_estimates.SAMPLES_MAX)
    )
    return [max(0, took_ns) / 1e9 for took_ns in connection.scalars(query)]


def preemptions(connection: sa.Connection, run_ids: Sequence[str]) -> dict[str, int]:
    """Return the number of preemptions of each run, without runs that had no preemption."""
    counted: dict[str, int] = {}
    query = sa.select(attempts.c.run_id, sa.func.count()).where(attempts.c.reason == Reason.PREEMPTED.value)
    for some in in_chunks(run_ids):
        theirs = query.where(attempts.c.run_id.in_(some)).group_by(attempts.c.run_id)
        counted |= {run_id: number for run_id, number in connection.execute(theirs)}
    return counted


def latest_of_name(connection: sa.Connection, owner: str, name: str, *, limit: int) -> list[StoredAttempt]:
    """Return the last attempts of the latest successful runs of a name, newest first."""
    last = sa.and_(runs.c.id == attempts.c.run_id, runs.c.fence == attempts.c.fence)
    query = sa.select(*COLUMNS).select_from(JOINED.join(runs, last))
    query = query.where(runs.c.owner == owner, runs.c.name == name, runs.c.state == State.SUCCEEDED.value)
    rows = connection.execute(query.order_by(runs.c.id.desc()).limit(limit))
    return whole(connection, [from_row(row) for row in rows])


class LearnedDurations:
    """Caches the longest device times of recent runs by owner and name."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], tuple[float | None, int]] = {}

    def longest_s(self, connection: sa.Connection, owner: str, name: str, now_ns: int) -> float | None:
        """Return the longest device time of recent runs in seconds, or None if unknown."""
        found = self._known.get((owner, name))
        if found is None or abs(now_ns - found[1]) > KEPT_S * 1e9:
            if len(self._known) >= KEPT_MAX:
                self._known.clear()
            found = self._known[owner, name] = longest_s(connection, owner, name), now_ns
        return found[0]
