"""Estimates the start time and the cost of a run, without storing an estimate.

    spec, target ─▶ valid? ─▶ usage policy ─▶ a run without a row ─▶ its demand ─▶ `Planner.estimate`
                                                                      └▶ prices of the possible devices ─▶ cost

An estimate fails with the same errors as a submission of the run. A run waits even on free devices if the server is
drained or the owner is suspended. An exhausted policy limit or budget also delays a run. The estimate contains the
reason for a delay.
"""

from __future__ import annotations

import msgspec
import sqlalchemy as sa

from serverless_gpu.ambient import Clock, new_run_id
from serverless_gpu.errors import InvalidValue
from serverless_gpu.model.scheduling.values import StartEstimate
from serverless_gpu.model.spec import Command, Function, Kernel, check_command
from serverless_gpu.server.billing import run_costs
from serverless_gpu.server.billing.run_costs import CostRequest
from serverless_gpu.server.budgets.budget_admission import BudgetAdmission
from serverless_gpu.server.core.caller import Caller
from serverless_gpu.server.core.settings import Settings
from serverless_gpu.server.db.database import Transactions
from serverless_gpu.server.http.routing import Call, Routes, writing
from serverless_gpu.server.identity import uid_sharing
from serverless_gpu.server.lifecycle import owner_suspension
from serverless_gpu.server.lifecycle.liveness import Leases
from serverless_gpu.server.nodes import capacity, drain
from serverless_gpu.server.policies import AdmittedRun, PolicyAdmission
from serverless_gpu.server.records import duration_history, pools, principals, runs
from serverless_gpu.server.records.runs import NewRun, StoredRun
from serverless_gpu.server.runs import submission
from serverless_gpu.server.scheduling import queue_snapshot
from serverless_gpu.server.scheduling.queue_snapshot import Past, queued_run
from serverless_gpu.server.scheduling.wait_reasons import WaitReasons
from serverless_gpu.wire.runs import EstimateRequest, EstimateView, estimate_view


class EstimateService:
    """Estimates the start time and the cost of a run."""

    def __init__(
        self,
        *,
        settings: Settings,
        clock: Clock,
        database: Transactions,
        leases: Leases,
        sentences: WaitReasons,
        budget_admission: BudgetAdmission,
        policy_admission: PolicyAdmission,
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._database = database
        self._leases = leases
        self._sentences = sentences
        self._budget_admission = budget_admission
        self._policy_admission = policy_admission

    def make(self, who: Caller, request: EstimateRequest) -> EstimateView:
        """Return the expected start time and cost of a run, as if the client submitted the run now."""
        submission.check_spec(request.spec, who)
        submission.check_target(request.target)
        match request.spec.payload:
            case Kernel():
                raise InvalidValue(
                    "notebook kernels cannot run on a server yet",
                    hint="submit a function or a command instead of a kernel",
                )
            case Command() as command:
                check_command(command)
            case Function():
                pass
        now_ns = self._clock.wall_ns()

        def work(connection: sa.Connection) -> tuple[AdmittedRun, StoredRun, str, Past]:
            allowed = self._policy_admission.allow(connection, request.spec, who)
            self._budget_admission.refuse(connection, allowed, who)
            run = _imagined(who, request, allowed, now_ns)
            held_back = self._held_back(connection, run)
            serves = uid_sharing.Isolation.of(pools.every(connection), principals.first_administrator(connection))
            expected_s = duration_history.expected_s(connection, who.name, request.spec.name)
            return allowed, run, held_back, Past(expected_s=expected_s, second_principal=serves.is_second(who.name))

        allowed, run, held_back, before = self._database.read(work)
        expected_s = before.expected_s
        asked = queued_run(run, before, now_ns=now_ns)
        found = StartEstimate(at_ns=None, basis=held_back) if held_back else self._sentences.estimate(asked)
        limit = "timeout"
        if allowed.spec.is_capped:
            by = [each.name for each in allowed.policies if each.policy.max_run_s == allowed.spec.max_run_s]
            limit = f"the longest time of policy {by[0]!r}" if by else "max_run"
        wish = CostRequest(
            spec=allowed.spec,
            pool=allowed.pool,
            node=found.node or next(iter(found.nodes), ""),
            several_nodes=asked.several_nodes,
            expected_s=expected_s,
            limit=limit,
        )
        currency = self._settings.currency
        cost = self._database.read(
            lambda connection: run_costs.estimate(connection, wish, now_ns=now_ns, currency=currency)
        )
        return msgspec.structs.replace(
            estimate_view(found, now_ns),
            cost=cost,
            policy=allowed.spec.policy or "",
            budgets=self._budget_admission.left(allowed, who),
        )

    def _held_back(self, connection: sa.Connection, run: StoredRun) -> str:
        """Return the reason why a run could not start now even on free devices, or ""."""
        server_drain = drain.find(connection)
        if server_drain is not None:
            return server_drain.sentence
        if run.owner in owner_suspension.suspended_owners(connection, run.owner):
            return f"{run.owner} may not start runs now"
        there = capacity.load(connection, self._leases)
        return queue_snapshot.why_not(connection, run, self._budget_admission.rooms(connection, there), there.freed)


def _imagined(who: Caller, request: EstimateRequest, allowed: AdmittedRun, now_ns: int) -> StoredRun:
    """Return the row that the server would store for a submitted run."""
    new = NewRun(
        id=new_run_id(),
        owner=who.name,
        spec=allowed.spec,
        target=request.target,
        request_sha256="",
        context_sealed=b"",
        pool=allowed.pool,
        snapshot="0" * 64 if request.snapshot else "",
        member_of=who.teams,
    )
    return runs.described(new, at_ns=now_ns)


routes = Routes("estimates")
SPEC_BYTES_MAX = 1 << 20


# A caller who may submit runs may also request estimates. Callers in other roles can read prices and the queue through
# other routes.
@routes.post("/estimates", needs=writing("runs"), limit=SPEC_BYTES_MAX)
def make_estimate(call: Call, estimates: EstimateService, body: EstimateRequest) -> EstimateView:
    """Estimate the start time and the cost of a run, without storing the run."""
    return estimates.make(call.who, body)
