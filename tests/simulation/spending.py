"""What people decide about money in a simulated world: prices, budgets and policies come, change and go meanwhile.

An operator asks, and asks again until the server has answered. At the end of a history everything that holds runs back
is taken away again, so that all of them can end; prices stay.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from serverless_gpu.errors import NotFound, ServerlessGpuError, ServerStorageFull
from serverless_gpu.model.policy import UsagePolicy
from serverless_gpu.model.spec import Priority
from serverless_gpu.server import attaching, pricing
from serverless_gpu.server.callers import Caller
from serverless_gpu.server.services import Services
from serverless_gpu.wire.prices import PriceRequest
from tests.simulation.plan import Step
from tests.simulation.storage import Killed
from tests.simulation.timeline import S

if TYPE_CHECKING:
    from tests.simulation.world import World

OPERATOR = Caller(name="operator", kind="user")
PROJECTS = ("llm", "vision")
REQUIRED: tuple[dict[str, tuple[str, ...]], ...] = ({}, {}, {"project": ()}, {"project": ("llm",)})
POLICIES = ("frugal", "other")
HOURLY = (3_600_000_000, 2_990_000, 1, 0, 98_765_432_109)
"""Micros of one H100 for one hour: a unit a second, what one costs, and what is rounded."""


def _asks(world: World, work: Callable[[Services], object]) -> None:
    """Have an operator ask for something until it is answered; what the server refuses is an answer."""

    def ask() -> None:
        if world.process is None:
            return
        try:
            world.process.serve(work)
        except (ServerlessGpuError, Killed) as error:
            if isinstance(error, Killed | ServerStorageFull) or error.retryable:
                world.time.after(5.0, ask)
            else:
                world.wrong.append(f"told an operator: {error!r}")

    ask()


def _set_price(world: World, step: Step) -> None:
    """A price of H100, in every pool or one's own, from now on or soon."""
    pool, later_s = ("", "", "default")[step.which % 3], (0.0, 0.0, 15.0)[step.which // 3 % 3]
    hourly = HOURLY[step.which // 9 % len(HOURLY)]

    def work(services: Services) -> None:
        from_ns = services.clock.wall_ns() + round(later_s * S)
        asked = PriceRequest(micros_per_hour=hourly, pool=pool, from_ns=from_ns)
        pricing.set_price(services, OPERATOR, "H100", asked)

    _asks(world, work)


def _end_price(world: World, step: Step) -> None:
    pool = ("", "default")[step.which % 2]

    def work(services: Services) -> None:
        with contextlib.suppress(NotFound):
            pricing.end_price(services, OPERATOR, "H100", pool=pool)

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
        attaching.put_policy(services, OPERATOR, name, policy)
        attaching.attach(services, OPERATOR, name, "user", "alice")

    _asks(world, work)


def _detach_policy(world: World, step: Step) -> None:
    name, is_deleted = POLICIES[step.which % 2], step.which % 4 < 2
    _asks(world, lambda services: _drop_policy(services, name, is_deleted=is_deleted))


def _drop_policy(services: Services, name: str, *, is_deleted: bool) -> None:
    with contextlib.suppress(NotFound):
        attaching.detach(services, OPERATOR, name, "user", "alice")
    if is_deleted:
        with contextlib.suppress(NotFound):
            attaching.delete_policy(services, OPERATOR, name)


def let_go(world: World) -> None:
    """Take away what holds runs back."""
    for name in POLICIES if world.plan.spends else ():
        _asks(world, partial(_drop_policy, name=name, is_deleted=True))


def _nothing(world: World, step: Step) -> None:
    pass


MONEY_STEPS: dict[str, Callable[[World, Step], None]] = {
    "set a price": _set_price,
    "end a price": _end_price,
    "set a budget": _nothing,
    "raise a budget": _nothing,
    "delete a budget": _nothing,
    "set a policy": _set_policy,
    "detach a policy": _detach_policy,
}
