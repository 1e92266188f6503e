"""A server whose runs cost money: a node, a price, people; and what happens to a run on it."""

from __future__ import annotations

from typing import Any

from serverless_gpu.model.billing.budget import Period, ScopeKind
from serverless_gpu.model.billing.pricing import Price
from serverless_gpu.model.lifecycle.attempt import MEANINGS, Fact, FactKind, Reason, State
from serverless_gpu.model.spec import Command, Resources
from serverless_gpu.server.billing.charging import Charging
from serverless_gpu.server.budgets.budget_enforcer import BudgetEnforcer
from serverless_gpu.server.budgets.spend_alarms import SpendAlarms
from serverless_gpu.server.composition import Services, make_scheduler
from serverless_gpu.server.core.caller import Caller
from serverless_gpu.server.db.database import Database
from serverless_gpu.server.lifecycle import transitions
from serverless_gpu.server.records import attempts, events, facts, prices, runs
from serverless_gpu.server.records.runs import StoredRun
from serverless_gpu.testing import FakeClock
from serverless_gpu.wire.agents import AgentHello, Ending, Report
from serverless_gpu.wire.billing import BudgetRequest, BudgetView
from tests.support.server.agents import NODE, hello
from tests.support.server.charged import charge_all
from tests.support.server.stored import add_people
from tests.support.server.submitting import ALICE, request

ROOT = Caller(name="root", role="admin", token_id="t")
UNIT = 1_000_000
PER_SECOND = 3_600 * UNIT
"""A price of one unit of money for a device and second."""


class Spent:
    """A server in one thread, with eight H100 at one unit a second each.

    Args:
        database: migrated.
        services: on it.
        clock: its clock.
    """

    def __init__(self, database: Database, services: Services, clock: FakeClock, *, price: int | None = PER_SECOND):
        self.database, self.services, self.clock = database, services, clock
        add_people(database, "node", "alice", "bob", "root")
        if price is not None:
            row = Price(resource="H100", micros_per_hour=price, from_ns=0)
            database.write(lambda connection: prices.insert(connection, row, at_ns=0))
        self.agents = services.agents
        self.agents.hello(NODE, self._hello())
        self.scheduler, self.keeper, self.charging = (
            make_scheduler(services),
            services.make(BudgetEnforcer),
            services.make(Charging),
        )
        self.alarms = services.make(SpendAlarms)

    def _hello(self) -> AgentHello:
        return hello()

    def set(self, name: str = "llm", *, kind: ScopeKind = "everything", scope: str = "", **said: Any) -> BudgetView:
        asked = BudgetRequest(kind=kind, scope=scope, **{"period": Period.MONTH, **said})
        return self.services.budgets.put(ROOT, name, asked)

    def view(self, name: str = "llm") -> BudgetView:
        """Return how a budget stands now; a reader is told how it stood when somebody looked."""
        as_of = self.services.budget_admission.as_of()
        self.database.read(lambda connection: self.services.spending.look(connection, as_of))
        return self.services.budgets.view(ROOT, "all", name)

    def submit(self, who: Caller = ALICE, *, gpus: int = 1, gpu_type: str | None = "H100", **spec: Any) -> str:
        call = None if isinstance(spec.get("payload"), Command) else b"call"
        asked = request(call=call, resources=Resources(gpus=gpus, gpu_type=gpu_type), **spec)
        return self.services.submissions.submit(who, asked).id

    def tick(self) -> None:
        """Let the scheduler look, whoever keeps budgets, and whoever says that somebody spends more than usual."""
        self.scheduler.tick(self.clock.boottime_ns())
        self.keeper.tick(self.clock.boottime_ns())
        self.alarms.tick(self.clock.boottime_ns())

    def start(self, *run_ids: str) -> None:
        """Place runs, and let their user code begin."""
        self.tick()
        for run_id in run_ids:
            assert self.find(run_id).state is State.STARTING, self.services.sentences.of(run_id)
            self.hear(run_id, exec_ns=self.clock.wall_ns())

    def go_on(self, seconds: float, *run_ids: str) -> None:
        """Let time pass, with signs of life of nodes and runs, and look."""
        self.clock.advance(seconds)
        self.agents.hello(NODE, self._hello())
        for run_id in run_ids:
            self.hear(run_id)
        self.tick()

    def hear(self, run_id: str, state: State = State.RUNNING, **said: Any) -> None:
        fence = self.find(run_id).fence
        who = Caller(kind="attempt", attempt=(run_id, fence, 0))
        self.services.reports.receive(who, run_id=run_id, fence=fence, said=Report(state=state, **said))

    def end(self, run_id: str, reason: Reason = Reason.BUDGET, **said: Any) -> None:
        """Let a run end now, with its facts, and charge it; `said` goes into its ending."""
        attempt = self.find(run_id).attempt
        assert attempt is not None and attempt.started_ns is not None
        times = (attempt.started_ns, self.clock.wall_ns())
        written = [_fact(attempt, seq, kind, times[seq]) for seq, kind in enumerate((FactKind.EXEC, FactKind.FREED))]
        self.database.write(lambda connection: facts.add(connection, (run_id, attempt.fence, 0), written))
        ending = Ending(state=MEANINGS[reason].state, reason=reason, began=True, **said)
        self.hear(run_id, State.STOPPING, ending=ending)
        self.database.write(
            lambda connection: transitions.settle(
                connection, (run_id, attempt.fence, 0), receipt=None, at_ns=self.clock.wall_ns()
            )
        )
        charge_all(self.services, self.charging)

    def find(self, run_id: str) -> StoredRun:
        run = self.database.read(lambda connection: runs.find(connection, run_id))
        assert run is not None
        return run

    def told(self, run_id: str) -> list[tuple[State, str]]:
        """Return states and sentences of what happened to a run."""
        found = self.database.read(lambda connection: events.after(connection, run_id, 0))
        return [(event.state, event.sentence) for event in found]


def _fact(attempt: attempts.StoredAttempt, seq: int, kind: FactKind, at_ns: int) -> Fact:
    return Fact(
        attempt=attempt.gang,
        seq=seq,
        kind=kind,
        boot_id=attempt.crews[0].boot_id,
        boottime_ns=at_ns,
        wall_ns=at_ns,
        gpus=tuple(f"GPU-{index}" for index in range(attempt.world_size)),
        cpus=0,
        memory_bytes=0,
    )
