"""What people decide about money in a simulated world: prices, budgets and policies come, change and go meanwhile.

An operator asks, and asks again until the server has answered. At the end of a history everything that holds runs back
is taken away again, so that all of them can end; prices stay.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from serverless_gpu.errors import InvalidValue, NotFound, ServerlessGpuError, ServerStorageFull
from serverless_gpu.model.billing.budget import Period, ScopeKind
from serverless_gpu.model.spec import Priority
from serverless_gpu.model.usage_policy import UsagePolicy
from serverless_gpu.server.composition import Services
from serverless_gpu.server.core.caller import Caller
from serverless_gpu.wire.billing import BudgetRequest, PriceRequest
from tests.e2e.simulation.plan import Step
from tests.e2e.simulation.storage import Killed
from tests.e2e.simulation.timeline import S

if TYPE_CHECKING:
    from tests.e2e.simulation.world import World

OPERATOR = Caller(name="operator", kind="user")
PROJECTS = ("llm", "vision")
REQUIRED: tuple[dict[str, tuple[str, ...]], ...] = ({}, {}, {"project": ()}, {"project": ("llm",)})
SCOPES: tuple[tuple[ScopeKind, str], ...] = (
    ("everything", ""),
    ("user", "alice"),
    ("tag", "project=llm"),
    ("pool", "default"),
    ("policy", "frugal"),
)
POLICIES = ("frugal", "other")
HOURLY = (3_600_000_000, 2_990_000, 1, 0, 98_765_432_109)
"""Micros of one H100 for one hour: a unit a second, what one costs, and what is rounded."""


def _asks(world: World, work: Callable[[Services], object]) -> None:
    """Have an operator ask for something until it is answered; what the server refuses is an answer.

    What was asked for before everything was mended, and is not answered by then, is given up: else a budget would come
    back that was taken away at the end.
    """
    before = world.mended

    def ask() -> None:
        if world.process is None or world.mended != before:
            return
        try:
            world.process.serve(work)
        except (ServerlessGpuError, Killed) as error:
            if isinstance(error, Killed | ServerStorageFull) or error.retryable:
                world.time.after(5.0, ask)
            elif not isinstance(error, InvalidValue):  # that is an answer: the policy of a budget is gone by now
                world.wrong.append(f"told an operator: {error!r}")

    ask()


def _set_price(world: World, step: Step) -> None:
    """A price of H100, in every pool or one's own, from now on or soon."""
    pool, later_s = ("", "", "default")[step.which % 3], (0.0, 0.0, 15.0)[step.which // 3 % 3]
    hourly = HOURLY[step.which // 9 % len(HOURLY)]

    def work(services: Services) -> None:
        from_ns = services.clock.wall_ns() + round(later_s * S)
        asked = PriceRequest(micros_per_hour=hourly, pool=pool, from_ns=from_ns)
        services.prices.set(OPERATOR, "H100", asked)

    _asks(world, work)


def _end_price(world: World, step: Step) -> None:
    pool = ("", "default")[step.which % 2]

    def work(services: Services) -> None:
        with contextlib.suppress(NotFound):
            services.prices.end(OPERATOR, "H100", pool=pool)

    _asks(world, work)


def _set_policy(world: World, step: Step) -> None:
    """A policy of alice's, one of two: with both, her runs have to say which, and are refused."""
    name, number = POLICIES[step.which % 5 == 4], step.which // 5
    policy = UsagePolicy(
        required_tags=REQUIRED[number % len(REQUIRED)],
        default_tags=({}, {"project": "vision"}, {"cost": "c-1"})[number // 4 % 3],
        gpus_per_run=(None, 2, 4, 8)[number // 12 % 4],
        gpus_at_once=(None, 2, 4, 9)[number // 48 % 4],
        priorities=((), (Priority.BEST_EFFORT,))[number // 192 % 2],
    )

    def work(services: Services) -> None:
        services.policies.put(OPERATOR, name, policy)
        services.policies.attach(OPERATOR, name, "user", "alice")

    _asks(world, work)


def _detach_policy(world: World, step: Step) -> None:
    name, is_deleted = POLICIES[step.which % 2], step.which % 4 < 2
    _asks(world, lambda services: _drop_policy(services, name, is_deleted=is_deleted))


def _drop_policy(services: Services, name: str, *, is_deleted: bool) -> None:
    with contextlib.suppress(NotFound):
        services.policies.detach(OPERATOR, name, "user", "alice")
    if is_deleted:
        with contextlib.suppress(NotFound):
            services.policies.delete(OPERATOR, name)


def _set_budget(world: World, step: Step) -> None:
    """A budget of some scope, mostly one that a few runs use up; the limit is another one when it is there already."""
    (kind, scope), number = SCOPES[step.which % len(SCOPES)], step.which // len(SCOPES)
    amount = (30, 120, 600, 5_000)[round(step.amount * 3)]
    is_money = number % 3 < 2
    asked = BudgetRequest(
        kind=kind,
        scope=scope,
        period=tuple(Period)[number // 3 % 3],
        limit_micros=amount * 1_000_000 if is_money else None,
        limit_gpu_ms=None if is_money else amount * 1_000,
        hard=number // 9 % 3 < 2,
    )
    _asks(world, lambda services: services.budgets.put(OPERATOR, f"b-{kind}", asked))


def _delete_budget(world: World, step: Step) -> None:
    kind, _ = SCOPES[step.which % len(SCOPES)]
    _asks(world, partial(_drop_budget, name=f"b-{kind}"))


def _drop_budget(services: Services, name: str) -> None:
    with contextlib.suppress(NotFound):
        services.budgets.delete(OPERATOR, name)


def let_go(world: World) -> None:
    """Take away what holds runs back."""
    if world.plan.spends:
        for name in POLICIES:
            _asks(world, partial(_drop_policy, name=name, is_deleted=True))
        for kind, _ in SCOPES:
            _asks(world, partial(_drop_budget, name=f"b-{kind}"))


MONEY_STEPS: dict[str, Callable[[World, Step], None]] = {
    "set a price": _set_price,
    "end a price": _end_price,
    "set a budget": _set_budget,
    "delete a budget": _delete_budget,
    "set a policy": _set_policy,
    "detach a policy": _detach_policy,
}
