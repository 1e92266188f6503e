"""The server's process: its parts on a disk that outlives it, its loops, the requests it serves; killed, started."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from serverless_gpu.ambient import Clock
from serverless_gpu.engines.simulated_engine import SimulatedEngine
from serverless_gpu.server.audit import AuditChainWriter
from serverless_gpu.server.billing.charging import Charging
from serverless_gpu.server.billing.usage_rollup import UsageRollup
from serverless_gpu.server.budgets.budget_enforcer import BudgetEnforcer
from serverless_gpu.server.budgets.spend_alarms import SpendAlarms
from serverless_gpu.server.composition import (
    Services,
    make_scheduler,
    make_self_check,
)
from serverless_gpu.server.core.hub import (
    ALARMS,
    AUDIT,
    BUDGETS,
    COLLECTOR,
    LEDGER,
    RECONCILER,
    RETENTION,
    SCHEDULER,
    SELF_CHECK,
    USAGE,
)
from serverless_gpu.server.core.loops import Loop, Tick
from serverless_gpu.server.environments import GarbageCollector
from serverless_gpu.server.runs.retention import Retention
from serverless_gpu.server.scheduling.reconciler import Reconciler
from tests.e2e.simulation.storage import Disk, Killed, Storage
from tests.e2e.simulation.timeline import Timeline
from tests.support.server.made import made_services

T = TypeVar("T")
_TICK_AGAIN_S = 0.02


class Process:
    """One life of the server.

    Args:
        disk: what it works on.
        home: directory of its files.
        engine: what it knows of the cluster.
        clock: the machine's.
        settings: fields of `Settings`.
    """

    def __init__(self, disk: Disk, home: Path, *, engine: SimulatedEngine, clock: Clock, settings: Any) -> None:
        self._time: Timeline = disk.time
        self.lives = True
        storage = Storage(disk, lambda: self.lives)
        self.services: Services = made_services(storage, home, clock=clock, **settings)
        scheduler = make_scheduler(self.services, engine=engine)
        reconciler = self.services.make(Reconciler, scheduler=scheduler, engine=engine)
        ticks: dict[str, Tick] = {
            SCHEDULER: scheduler.tick,
            RECONCILER: reconciler.tick,
            COLLECTOR: self.services.make(GarbageCollector).tick,
            RETENTION: self.services.make(Retention).tick,
            BUDGETS: self.services.make(BudgetEnforcer).tick,
            ALARMS: self.services.make(SpendAlarms).tick,
            AUDIT: self.services.make(AuditChainWriter).tick,
            LEDGER: self.services.make(Charging).tick,
            USAGE: self.services.make(UsageRollup).tick,
            SELF_CHECK: make_self_check(self.services).tick,
        }
        for key, tick in ticks.items():
            _Driven(self, key, tick, clock=clock)

    def serve(self, request: Callable[[Services], T]) -> T:
        """Return what a request is answered.

        Raises:
            Killed: the process ended before it could answer.
            ServerlessGpuError: the answer is that.
        """
        if not self.lives:
            raise Killed
        try:
            answer = request(self.services)
        except Killed:
            self.kill()
            raise
        if not self.lives:
            raise Killed
        return answer

    def kill(self) -> None:
        """End it where it stands."""
        if self.lives:
            self._time.note("server is dead")
        self.lives = False


class _Driven:
    """One loop of the server, with its own code for what follows from a tick, and virtual time for when."""

    def __init__(self, process: Process, key: str, tick: Tick, *, clock: Clock) -> None:
        self._process, self._time = process, process._time
        self._loop = Loop(key, tick, clock=clock)
        self._clock = clock
        self._working = False
        self._number = 0
        self._rung = False
        process.services.hub.listen(key, self._ring)
        self._plan(0.0)

    def _ring(self) -> None:
        self._rung = True
        if not self._working:
            self._plan(_TICK_AGAIN_S)

    def _plan(self, seconds: float) -> None:
        self._number += 1
        number = self._number
        self._time.after(seconds, lambda: self._turn(number))

    def _turn(self, number: int) -> None:
        if number != self._number or self._working or not self._process.lives:
            return
        self._working, self._rung = True, False
        try:
            pause_s = self._loop._turn(self._clock.boottime_ns())
        except Killed:
            self._process.kill()
            return
        finally:
            self._working = False
        self._plan(_TICK_AGAIN_S if self._rung else max(_TICK_AGAIN_S, pause_s))
