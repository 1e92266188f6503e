"""A whole server and a cluster in one process, on one clock that the test moves.

    world.run_for(60, step_s=1)     agents step, scheduler and reconciler tick, time passes
    world.kill_server()             nobody is answered
    world.start_server()            another server on the same database: it remembers nothing else

What is proved with it is read from `executions`, which the cluster writes and no server.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from serverless_gpu.ambient import new_run_id
from serverless_gpu.engines.base import Engine, EngineNode
from serverless_gpu.engines.simulated_engine import (
    CrewKey,
    Execution,
    Reservations,
    SimulatedAgent,
    SimulatedEngine,
    SimulatedWork,
)
from serverless_gpu.errors import ServerUnavailable
from serverless_gpu.model.hardware import parse_fake
from serverless_gpu.model.lifecycle.attempt import StopReason
from serverless_gpu.model.lifecycle.run_lifecycle import StopAsked
from serverless_gpu.model.spec import Resources
from serverless_gpu.server.composition import Services, make_scheduler
from serverless_gpu.server.core.caller import Caller
from serverless_gpu.server.core.hub import RECONCILER, SCHEDULER, node_key
from serverless_gpu.server.core.loops import Tick
from serverless_gpu.server.core.server_key import parse_attempt_token, sha256
from serverless_gpu.server.db.database import Database
from serverless_gpu.server.lifecycle import transitions
from serverless_gpu.server.lifecycle.transitions import Note, TransitionResult
from serverless_gpu.server.records import events, runs
from serverless_gpu.server.records.runs import StoredRun
from serverless_gpu.server.scheduling.reconciler import Reconciler
from serverless_gpu.testing import FakeClock
from serverless_gpu.wire.agents import (
    AgentHello,
    AgentWelcome,
    Heartbeat,
    HeartbeatAnswer,
    Order,
    OrdersTaken,
    Report,
    ReportAnswer,
    Start,
)
from tests.support.server.made import made_services
from tests.support.server.stored import add_people, new_run

T = TypeVar("T")
NODE = Caller(name="node", kind="service", role="agent")


class Crash(BaseException):
    """The server was killed at a fault point."""


class InProcess:
    """What agents say, given to the server that runs now, if one does."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._empty_since: tuple[int, int] | None = None

    def hello(self, hello: AgentHello) -> AgentWelcome:
        """Introduce a node."""
        return self._world.asked(lambda services: services.agents.hello(NODE, hello))

    def heartbeat(self, node: str, heartbeat: Heartbeat) -> HeartbeatAnswer:
        """Say that a node is there."""
        return self._world.asked(lambda services: services.agents.heartbeat(NODE, node, heartbeat))

    def orders(self, node: str) -> Sequence[Order]:
        """Return what the node is to do; as a stream does, looks only when there is something new."""

        def look(services: Services) -> Sequence[Order]:
            version = (id(services), services.hub.version(node_key(node)))
            if self._empty_since == version:
                return []
            waiting = services.agents.waiting(NODE, node)
            self._empty_since = None if waiting else version
            return waiting

        return self._world.asked(look)

    def take(self, node: str, taken: OrdersTaken) -> None:
        """Say what was taken."""
        self._world.asked(lambda services: services.agents.take(NODE, node, taken.seqs))

    def report(self, token: str, gang: CrewKey, report: Report) -> ReportAnswer:
        """Report with the attempt's own token, which is looked at as the gate does."""

        def apply(services: Services) -> ReportAnswer:
            run = services.database.read(lambda connection: runs.find(connection, gang[0]))
            assert parse_attempt_token(token) == (*gang, 0)
            if run is not None and run.attempt is not None and run.fence == gang[1]:
                assert run.attempt.crews[0].token_sha256 == sha256(token)
            who = Caller(kind="attempt", attempt=(*gang, 0))
            return services.reports.receive(who, run_id=gang[0], fence=gang[1], said=report)

        return self._world.asked(apply)


class World:
    """A server, nodes, and time."""

    def __init__(self, database: Database, home: Path, nodes: Mapping[str, str], **settings: Any) -> None:
        self.clock = FakeClock()
        self.work: Callable[[Start], SimulatedWork] = lambda start: SimulatedWork()
        self.database, self._home, self._settings = database, home, settings
        self._reservations = Reservations()
        self._engine_nodes = [EngineNode(name=name, devices=parse_fake(text)) for name, text in nodes.items()]
        self.services: Services | None = None
        add_people(database, "node", "alice")
        self.start_server()
        self.agents = {node.name: self._agent(node) for node in self._engine_nodes}
        self.run_for(1)

    def start_server(self, **settings: Any) -> None:
        """Start a server on what there is, with other settings if that is said."""
        self.services = made_services(self.database, self._home, clock=self.clock, **{**self._settings, **settings})
        self.engine: Engine = SimulatedEngine(self._engine_nodes, self._reservations)
        self.scheduler = make_scheduler(self.services, engine=self.engine)
        self.reconciler = self.services.make(Reconciler, scheduler=self.scheduler, engine=self.engine)
        self._due: dict[str, tuple[int, int]] = {}

    def kill_server(self) -> None:
        """End the server where it stands."""
        self.services = None

    def asked(self, request: Callable[[Services], T]) -> T:
        """Return what the server answers."""
        if self.services is None:
            raise ServerUnavailable("the server was killed")
        try:
            return request(self.services)
        except Crash:
            self.kill_server()
            raise ServerUnavailable("the server was killed") from None

    def run_for(self, seconds: float, *, step_s: float = 1.0) -> None:
        """Let time pass."""
        for _ in range(max(1, round(seconds / step_s))):
            self.clock.advance(step_s)
            self.turn()

    def turn(self) -> None:
        """Let everybody do what is due now."""
        for agent in self.agents.values():
            agent.step()
        if self.services is None:
            return
        try:
            ticked = self._tick(SCHEDULER, self.scheduler.tick) | self._tick(RECONCILER, self.reconciler.tick)
        except Crash:
            self.kill_server()
            return
        for agent in self.agents.values() if ticked else ():
            agent.step()

    def _tick(self, key: str, tick: Tick) -> bool:
        """Do what a loop would do: tick when it was rung, or is due; return whether it did."""
        now_ns, version = self.clock.boottime_ns(), self._there().hub.version(key)
        seen, due_ns = self._due.get(key, (-1, 0))
        if seen == version and now_ns < due_ns:
            return False
        self._due[key] = (version, tick(now_ns) or now_ns + 10**18)
        return True

    def submit(self, gpus: int = 1, gpu_type: str = "H100", **spec: Any) -> str:
        """Write a run that waits."""
        services = self._there()
        new = new_run(new_run_id(), resources=Resources(gpus=gpus, gpu_type=gpu_type), **spec)
        new = msgspec.structs.replace(new, context_sealed=services.sealer.seal(b"{}", about=new.id))
        at_ns = self.clock.wall_ns()
        self.database.write(lambda connection: runs.insert(connection, new, at_ns=at_ns))
        services.hub.touch(SCHEDULER)
        return new.id

    def stop(self, run_id: str, why: StopReason = StopReason.CANCEL) -> None:
        """Ask a run to stop."""
        note = Note(at_ns=self.clock.wall_ns())

        def work(connection: Any) -> TransitionResult:
            run = runs.find(connection, run_id)
            assert run is not None
            return transitions.apply(connection, run, StopAsked(why=why), note=note)

        self._there().announcer.announce(self.database.write(work))

    def run(self, run_id: str) -> StoredRun:
        """Return a run as it is written down."""
        run = self.database.read(lambda connection: runs.find(connection, run_id))
        assert run is not None
        return run

    def states(self, run_id: str) -> list[str]:
        """Return the states of a run in order, as its events tell them."""
        told = self.database.read(lambda connection: events.after(connection, run_id, 0))
        return [event.state.value for event in told]

    def executions(self, run_id: str = "") -> list[Execution]:
        """Return every stretch of user code, in time."""
        found = [one for agent in self.agents.values() for one in agent.executions if run_id in ("", one.run_id)]
        return sorted(found, key=lambda one: one.began_ns)

    def assert_sound(self) -> None:
        """Nothing ran twice at once, and no node had more ranks than devices."""
        for node in self._engine_nodes:
            self._assert_fits(node)
        for run_id in {one.run_id for one in self.executions()}:
            own = self.executions(run_id)
            fences = [one.fence for one in own]
            assert len(set(fences)) == len(fences), f"an attempt of {run_id} ran twice"
            for one, following in pairwise(own):
                assert one.ended_ns is not None, f"two attempts of {run_id} at once"
                assert one.ended_ns <= following.began_ns, f"two attempts of {run_id} at once"

    def _assert_fits(self, node: EngineNode) -> None:
        here = [one for one in self.executions() if one.node == node.name]
        for moment in [one.began_ns for one in here]:
            at_once = [one for one in here if one.began_ns <= moment < (one.ended_ns or moment + 1)]
            assert sum(one.count for one in at_once) <= len(node.devices), f"{node.name} had too much at {moment}"

    def _agent(self, node: EngineNode) -> SimulatedAgent:
        return SimulatedAgent(
            InProcess(self),
            name=node.name,
            devices=node.devices,
            clock=self.clock,
            work=lambda start: self.work(start),
        )

    def _there(self) -> Services:
        assert self.services is not None
        return self.services
