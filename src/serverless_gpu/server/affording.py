"""Is there money, or time, for a run? Asked where it is asked for, where it waits and where it is placed.

submit, estimate ─▶ `refuse`   a budget is used up for this period: refused, with its name and who can raise it
estimate         ─▶ `left`     what is left, in words
each tick        ─▶ `rooms`    what is left, counted down in the order of the queue
placed           ─▶ `Spending.enter`, in the same transaction
"""

from __future__ import annotations

import sqlalchemy as sa

from serverless_gpu.model import access
from serverless_gpu.model import budget as decisions
from serverless_gpu.model.access import Reach, Resource
from serverless_gpu.model.admitting import Candidate
from serverless_gpu.model.budget import NOTHING, Subject, Use
from serverless_gpu.model.pricing import UNPRICED, Tariff
from serverless_gpu.server import prices
from serverless_gpu.server.allowing import Allowed
from serverless_gpu.server.budget_book import Rooms
from serverless_gpu.server.callers import Caller
from serverless_gpu.server.floor import Floor
from serverless_gpu.server.services import Services
from serverless_gpu.server.spending import AsOf

LEFT_MAX = 20
"""So many budgets are said to somebody who asks what a run would cost."""


def as_of(services: Services) -> AsOf:
    """Return what a look at budgets needs to know, now; to be asked before its transaction reads anything."""
    clock = services.clock
    return AsOf(
        wall_ns=clock.wall_ns(),
        boot_ns=clock.boottime_ns(),
        moment=services.spending.moment(),
        leases=services.leases,
        currency=services.settings.currency,
    )


def refuse(connection: sa.Connection, services: Services, allowed: Allowed, who: Caller) -> None:
    """Refuse a run that a budget has nothing left for in this period; what others only hold, it waits for.

    Args:
        connection: of the transaction that writes it down, or of one that reads.
        services: the server's.
        allowed: the run, under its usage policy.
        who: asks for it, and will own it.

    Raises:
        BudgetExhausted: a budget that it counts for is used up.
    """
    if not services.spending.standings():
        return
    spec, currency = allowed.spec, services.settings.currency
    hold = NOTHING
    gpus, gpu_type = spec.resources.gpus, spec.resources.gpu_type
    if gpus is not None and gpu_type is not None:
        tariff = prices.tariff(connection, gpu_type, allowed.pool, services.clock.wall_ns(), currency)
        hold = _hold(spec.grace_s, gpus, tariff)
    services.spending.refuse(_subject(allowed, who), hold, currency=currency)


def left(services: Services, allowed: Allowed, who: Caller) -> tuple[str, ...]:
    """Return in words what is left of the budgets that a run would count for; amounts of those that its owner may see.

    Args:
        services: the server's.
        allowed: the run, under its usage policy.
        who: asks, and would own it.
    """
    sees_all = access.reach(who.role, Resource.BUDGETS, write=False, scopes=who.scopes) is Reach.ALL
    subject, currency = _subject(allowed, who), services.settings.currency
    return services.spending.left(subject, currency=currency, sees_all=sees_all)[:LEFT_MAX]


def _subject(allowed: Allowed, who: Caller) -> Subject:
    spec = allowed.spec
    return Subject(owner=who.name, team=spec.team or "", pool=allowed.pool, policy=spec.policy or "", tags=spec.tags)


def rooms(connection: sa.Connection, services: Services, there: Floor, now: AsOf) -> Rooms | None:
    """Return what budgets have left, to be counted down for one tick; None where there are no budgets.

    Args:
        connection: of the transaction that reads the queue.
        services: the server's.
        there: what there is to give.
        now: from before it read anything.
    """
    if not services.spending.look(connection, now):
        return None
    types = sorted({device.type for node in there.nodes for device in node.hello.devices})
    gpus_max = max((len(node.hello.devices) for node in there.nodes), default=1)
    known: dict[tuple[str, str], Tariff] = {}

    def tariff(gpu_type: str, pool: str) -> Tariff:
        key = (gpu_type, pool)
        if key not in known:
            known[key] = prices.tariff(connection, gpu_type, pool, now.wall_ns, now.currency)
        return known[key]

    def tariff_of(candidate: Candidate) -> Tariff:
        """Return what a run would pay; the dearest where it takes whatever there is."""
        wanted = [candidate.gpu_type] if candidate.gpu_type is not None else types
        found = [tariff(gpu_type, candidate.subject.pool) for gpu_type in wanted]
        return max(found, key=lambda one: one.gpu_micros_per_hour or 0, default=UNPRICED)

    return services.spending.rooms(tariff_of, gpus_max=max(1, gpus_max))


def _hold(grace_s: float, gpus: int, tariff: Tariff) -> Use:
    rate = tariff.gpu_micros_per_hour
    return decisions.first_hold(grace_s, gpus=gpus, micros_per_hour=None if rate is None else rate * gpus)
