"""What people decide about money in a simulated world: prices, budgets and policies come, change and go meanwhile.

An operator asks, and asks again until the server has answered. At the end of a history everything that holds runs back
is taken away again, so that all of them can end; prices stay.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from serverless_gpu.errors import NotFound
from serverless_gpu.server import pricing
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
HOURLY = (3_600_000_000, 2_990_000, 1, 0, 98_765_432_109)
"""Micros of one H100 for one hour: a unit a second, what one costs, and what is rounded."""


def _asks(world: World, work: Callable[[Services], object]) -> None:
    """Have an operator ask for something until it is answered; what the server refuses is an answer."""

    def ask() -> None:
        if world.process is None:
            return
        try:
            world.process.serve(work)
        except (Exception, Killed):  # noqa: BLE001 - the operator asks again, whatever it was
            world.time.after(5.0, ask)

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


def _nothing(world: World, step: Step) -> None:
    pass


MONEY_STEPS: dict[str, Callable[[World, Step], None]] = {
    "set a price": _set_price,
    "end a price": _end_price,
    "set a budget": _nothing,
    "raise a budget": _nothing,
    "delete a budget": _nothing,
    "set a policy": _nothing,
    "detach a policy": _nothing,
}
