"""Checks runs against budgets: at submission and estimate, while they wait, and before placement.

    submit, estimate ─▶ `refuse`   refused if a budget is used up for this period; the error names the remedy
    estimate         ─▶ `left`     the remaining amounts, as text
    each tick        ─▶ `rooms`    the remaining amounts, counted down in the order of the queue
    placed           ─▶ `Spending.enter`, in the same transaction

All checks use the budget standings in memory (`spending.py`).
"""

from __future__ import annotations

import sqlalchemy as sa

from serverless_gpu.ambient import Clock
from serverless_gpu.model import access_control
from serverless_gpu.model.access_control import AccessReach, Resource
from serverless_gpu.model.billing import pricing
from serverless_gpu.model.billing.budget import NOTHING, BudgetUse, Subject, first_hold
from serverless_gpu.model.billing.pricing import Tariff
from serverless_gpu.model.hardware import CPU, matches
from serverless_gpu.model.scheduling.concurrency_limits import WaitingRun
from serverless_gpu.server.budgets.spending import BudgetsLeft, LookInputs, Spending, rate_of, subject_of
from serverless_gpu.server.core.caller import Caller
from serverless_gpu.server.core.settings import Settings
from serverless_gpu.server.lifecycle.liveness import Leases
from serverless_gpu.server.nodes.capacity import CapacitySnapshot
from serverless_gpu.server.policies import AdmittedRun
from serverless_gpu.server.records import prices

LEFT_MAX = 20
"""The maximum number of budgets in the answer to an estimate."""


class BudgetAdmission:
    """Checks runs against the budgets that apply to them."""

    def __init__(self, *, settings: Settings, clock: Clock, leases: Leases, spending: Spending) -> None:
        self._settings = settings
        self._clock = clock
        self._leases = leases
        self._spending = spending

    def as_of(self) -> LookInputs:
        """Return the inputs for budget standings. Call `as_of` before the transaction reads the database."""
        clock = self._clock
        return LookInputs(
            wall_ns=clock.wall_ns(),
            boot_ns=clock.boottime_ns(),
            moment=self._spending.moment(),
            leases=self._leases,
            currency=self._settings.currency,
        )

    def refuse(self, connection: sa.Connection, allowed: AdmittedRun, who: Caller) -> None:
        """Refuse a run if a budget is used up for this period. Budget holds of other runs only delay the run."""
        if not self._spending.standings():
            return
        spec, currency = allowed.spec, self._settings.currency
        hold = NOTHING
        gpus, gpu_type = spec.resources.gpus, spec.resources.gpu_type
        if gpus is not None and gpu_type is not None:
            tariff = prices.tariff(connection, gpu_type, allowed.pool, self._clock.wall_ns(), currency)
            rate = rate_of(tariff, gpu_type, gpus, spec)
            longest_s = self._spending.longest_s(connection, who.name, spec.name, self._clock.wall_ns())
            hold = first_hold(spec.grace_s, gpus=gpus, micros_per_hour=rate, longest_s=longest_s)
        self._spending.refuse(_subject(allowed, who), hold, currency=currency)

    def left(self, allowed: AdmittedRun, who: Caller) -> tuple[str, ...]:
        """Return the remaining amounts of a run's budgets as text, limited to what its owner may see."""
        sees_all = access_control.reach(who.role, Resource.BUDGETS, write=False, scopes=who.scopes) is AccessReach.ALL
        subject = _subject(allowed, who)
        return self._spending.left(subject, currency=self._settings.currency, sees_all=sees_all)[:LEFT_MAX]

    def rooms(self, connection: sa.Connection, there: CapacitySnapshot) -> BudgetsLeft | None:
        """Return the remaining amounts of all budgets for one scheduler tick; None without budgets."""
        if not self._spending.standings():
            return None
        at_ns, currency = self._clock.wall_ns(), self._settings.currency
        places = {
            (device.type, node.pool, node.hello.own_types) for node in there.nodes for device in node.hello.devices
        }
        gpus_max = max((len(node.hello.devices) for node in there.nodes), default=1)
        known: dict[tuple[str | None, str], list[tuple[str, Tariff]]] = {}

        def pays(wanted: str | None, pool: str) -> list[tuple[str, Tariff]]:
            """Return the GPU types that a run may use, with their prices."""
            if (wanted, pool) not in known:
                may = {
                    (gpu_type, there)
                    for gpu_type, there, own in places
                    if (matches(wanted, gpu_type, own) if wanted is not None else gpu_type != CPU)
                    and pool in ("", there)
                } or ({(wanted, pool)} if wanted is not None else set())
                known[wanted, pool] = [
                    (gpu_type, prices.tariff(connection, gpu_type, there, at_ns, currency))
                    for gpu_type, there in sorted(may)
                ]
            return known[wanted, pool]

        def hold(one: WaitingRun) -> BudgetUse:
            """Return the first hold of a run, priced for the most expensive devices that the run may use."""
            gpus = one.gpus or max(1, gpus_max)
            rates = [
                pricing.rate(tariff, gpu_type=gpu_type, gpus=gpus, cpus=one.cpus, memory_bytes=one.memory_bytes)
                for gpu_type, tariff in pays(one.gpu_type, one.subject.pool)
            ]
            dearest = max((rate for rate in rates if rate is not None), default=None)
            longest_s = self._spending.longest_s(connection, one.subject.owner, one.name, at_ns)
            return first_hold(one.grace_s, gpus=gpus, micros_per_hour=dearest, longest_s=longest_s)

        return self._spending.rooms(hold)


def _subject(allowed: AdmittedRun, who: Caller) -> Subject:
    return subject_of(who.name, allowed.spec, team=allowed.spec.team or "", pool=allowed.pool, member_of=who.teams)
