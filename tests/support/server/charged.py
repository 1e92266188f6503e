"""Charging, for tests that want it done."""

from __future__ import annotations

from serverless_gpu.server.billing.charging import Charging
from serverless_gpu.server.composition import Services

TICKS_MAX = 1_000


def charge_all(services: Services, charging: Charging | None = None) -> None:
    """Charge until nothing is due.

    Args:
        services: the server's.
        charging: a loop that is to remember what it did; a new one without it.
    """
    charging = charging or services.make(Charging)
    now_ns = services.clock.boottime_ns()
    for _ in range(TICKS_MAX):
        if charging.tick(now_ns) != now_ns:
            return
    raise AssertionError("charging does not end")
