"""Stops runs whose owner is disabled or has a role without permission to start runs.

    suspended ─▶ no new submits; streams end within seconds, because the server rechecks tokens
             ├─ queued runs wait outside the queue order until an administrator enables the owner
             ├─ finish   running attempts continue to their end; a retry waits
             └─ stop     the server stops running and queued runs, up to 200 in each pass

When an administrator changes the owner, the server chooses the policy `finish` or `stop` for the owner's runs. The
transaction that changes the owner also stores the policy. After a restart, the server uses the stored policy, even if
the default policy has changed.
"""

from __future__ import annotations

import sqlalchemy as sa

from serverless_gpu.ambient import Clock
from serverless_gpu.errors import AlreadyFinished, InvalidValue, StaleAttempt
from serverless_gpu.model.access_control import ROLES, AccessReach, reach
from serverless_gpu.model.lifecycle.attempt import TERMINAL, State, StopReason
from serverless_gpu.server.db.database import Transactions
from serverless_gpu.server.db.tables import principals, runs
from serverless_gpu.server.lifecycle import transitions
from serverless_gpu.server.lifecycle.transitions import Announcer, TransitionResult
from serverless_gpu.server.records import audit
from serverless_gpu.wire.access import OnDisabled, PrincipalView

AT_ONCE = 200
_WITHOUT = tuple(role for role in ROLES if reach(role, "runs", write=True) is AccessReach.NONE)
_SHUT_OUT = sa.or_(principals.c.disabled_ns.is_not(None), principals.c.role.in_(_WITHOUT))
_GOES_ON = tuple(state.value for state in State if state not in TERMINAL)


def may_start(principal: PrincipalView) -> bool:
    """Return True if a principal may start runs."""
    return not principal.disabled and principal.role not in _WITHOUT


def suspended_owners(connection: sa.Connection, name: str | None = None) -> frozenset[str]:
    """Return the names of principals that may not start runs.

    With `name`, check only the principal of this name.
    """
    query = sa.select(principals.c.name).where(_SHUT_OUT)
    return frozenset(connection.scalars(query if name is None else query.where(principals.c.name == name)))


def decide_for_runs(
    connection: sa.Connection,
    before: PrincipalView,
    after: PrincipalView,
    *,
    wanted: OnDisabled | None,
    otherwise: OnDisabled,
) -> str:
    """Choose and store the policy for the runs of a principal that has changed.

    Args:
        connection: connection of the transaction that changes the principal.
        before: the principal before the change.
        after: the principal after the change.
        wanted: the policy that the request names, or None.
        otherwise: the policy to use if the request names none.

    Returns:
        The policy that this change stored, or "".
    """
    if may_start(after):
        if wanted is not None:
            raise InvalidValue(
                f"{after.name} may start runs, which therefore continue",
                hint="disable the principal or change its role before you choose a policy for its runs",
            )
        _write(connection, after.name, None)
        return ""
    policy = wanted or (otherwise if may_start(before) else None)
    if policy is not None:
        _write(connection, after.name, policy)
    return policy or ""


class OwnerSuspension:
    """Stops runs whose owners may no longer start runs."""

    def __init__(self, *, clock: Clock, database: Transactions, announcer: Announcer) -> None:
        self._clock = clock
        self._database = database
        self._announcer = announcer

    def stop_some(self) -> int:
        """Stop up to `AT_ONCE` runs of suspended owners with the policy `stop`, and return their number."""
        found = self._database.read(_to_stop)
        for run_id, owner in found:
            told = self._stop(run_id, owner)
            if told is not None:
                self._announcer.announce(told)
        return len(found)

    def _stop(self, run_id: str, owner: str) -> TransitionResult | None:
        at_ns, because = self._clock.wall_ns(), f"{owner} may no longer start runs"

        def work(connection: sa.Connection) -> TransitionResult | None:
            if owner not in suspended_owners(connection, owner):
                return None  # An administrator has enabled the owner since the query.
            return transitions.ask_to_stop(
                connection, run_id, who=audit.SERVER, why=StopReason.CANCEL, at_ns=at_ns, because=because
            )

        try:
            return self._database.write(work)
        except (AlreadyFinished, StaleAttempt):
            return None


def _to_stop(connection: sa.Connection) -> list[tuple[str, str]]:
    query = (
        sa.select(runs.c.id, runs.c.owner)
        .select_from(runs.join(principals, principals.c.name == runs.c.owner))
        .where(principals.c.runs == "stop", _SHUT_OUT, runs.c.state.in_(_GOES_ON))
        .where(sa.or_(runs.c.stop.is_(None), runs.c.stop != StopReason.CANCEL.value))
        .order_by(runs.c.id)
        .limit(AT_ONCE)
    )
    return [(row.id, row.owner) for row in connection.execute(query)]


def _write(connection: sa.Connection, name: str, policy: OnDisabled | None) -> None:
    connection.execute(sa.update(principals).where(principals.c.name == name).values(runs=policy))
