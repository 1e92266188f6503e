"""Everything put together: one server at a time, three nodes, clients; a plan is done to them, then all is mended, and
then everything that was begun has to end, and everything that was said has to be true.

    world = World(plan, directory, DO);  world.run()          raises `Failed`, with what was wrong and all that happened
"""

from __future__ import annotations

import contextlib
import logging
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from unittest import mock

import sqlalchemy as sa

from serverless_gpu import ambient, faults
from serverless_gpu.engines.base import EngineNode
from serverless_gpu.engines.simulated_engine import Reservations, SimulatedEngine
from serverless_gpu.model.hardware import Device, parse_fake
from serverless_gpu.model.isolation import NONE
from serverless_gpu.model.lifecycle.attempt import TERMINAL
from serverless_gpu.server import audit
from serverless_gpu.server.core.caller import Caller
from serverless_gpu.server.db import tables
from serverless_gpu.server.invariants.invariant_inputs import Violation
from serverless_gpu.server.invariants.run_invariants import History, Stretch
from serverless_gpu.server.invariants.self_check import check
from serverless_gpu.server.lifecycle import rendezvous
from serverless_gpu.server.records.audit import Action
from serverless_gpu.server.runs import retention
from serverless_gpu.server.storage.environment_store import EnvironmentStore
from serverless_gpu.wire.agents import Start
from tests.e2e.simulation import caps, supervisor
from tests.e2e.simulation.client import SECRET, Client, Wrong
from tests.e2e.simulation.crew import Crew
from tests.e2e.simulation.network import Network
from tests.e2e.simulation.node import Node
from tests.e2e.simulation.plan import Plan, Step
from tests.e2e.simulation.server import Process
from tests.e2e.simulation.spending import let_go
from tests.e2e.simulation.storage import Disk, Killed
from tests.e2e.simulation.supervisor import Work
from tests.e2e.simulation.timeline import S, Timeline, TooMuch, WrongClock
from tests.support.reckoning import wrongs

NODES = {"n1": "H100:8", "n2": "H100:4", "n3": "H100:2"}
OF_THE_ENGINE = ("n1", "n2")
ROOT = Caller(name="root", role="admin")
MARGIN_S = 3.0
SETTLE_S = 1_500.0
"""How long after the last trouble everything has to have ended."""
_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"


class Failed(AssertionError):
    """A simulation in which something was wrong.

    Attributes:
        invariants: which ones.
        trace: what happened.
    """

    def __init__(self, plan: Plan, found: list[str], trace: list[str]) -> None:
        lines = "\n  ".join(found[:10])
        steps = plan.asked or len(plan.steps)
        super().__init__(
            f"SIM_SEED={plan.seed} SIM_STEPS={steps}\n  {lines}\n"
            f"again: python -m tests.e2e.simulation --seed {plan.seed} --steps {steps} --trace"
        )
        self.invariants = {line.split()[0] for line in found}
        self.trace = trace


class World:
    """One simulation.

    Args:
        plan: what is done.
        directory: for the server's files.
        steps: what each step does (`steps.py`).

    Attributes:
        long: runs that work for a while.
        traps: what is done to the node that is the next one at a moment; whether it was done.
    """

    def __init__(self, plan: Plan, directory: Path, steps: Mapping[str, Callable[[World, Step], None]]) -> None:
        self.plan, self._home, self._steps = plan, directory, steps
        rng = random.Random(f"world {plan.seed}")
        self.time = Timeline(rng, epoch_s=plan.epoch_s)
        self.disk = Disk(self.time)
        self.disk.mixes = plan.mixes
        self.clock = WrongClock(self.time)
        self.process: Process | None = None
        self.network = Network(self.time, lambda: self.process)
        self.ran: list[supervisor.Stretch] = []
        self.clients: list[Client] = []
        self.wrong: list[str] = []
        self.mended = False
        self._ids = random.Random(f"identifiers {plan.seed}")
        self._reservations = Reservations()
        self._engine_nodes = [EngineNode(name=name, devices=parse_fake(NODES[name])) for name in OF_THE_ENGINE]
        self.engine = SimulatedEngine(self._engine_nodes, self._reservations)
        self.grace_s = plan.grace_s
        self.nodes: list[Node] = []
        self._gangs: dict[supervisor.Gang, list[Crew]] = {}
        self.long: set[str] = set()
        self.traps: dict[str, Callable[[Node, str], bool]] = {}

    def run(self) -> None:
        """Do it.

        Raises:
            Failed: something was wrong.
        """
        with self._played():
            try:
                self._all()
            except (Wrong, TooMuch, AssertionError) as error:
                self.wrong.append(f"told {type(error).__name__}: {error}")
        if self.wrong:
            raise Failed(self.plan, self.wrong, self.time.trace)

    def _all(self) -> None:
        self.disk.read(_add_people)
        self.start_server()
        for name, text in NODES.items():
            devices = parse_fake(text)
            self.join(name, devices)
        at_s = 0.2
        for step in self.plan.steps:
            at_s += step.after_s
            self.time.after(at_s, partial(self._do, step))
        self.time.run_until(round((at_s + 1) * S))
        self.mend()
        self._check()
        end_ns = self.time.now_ns + round(SETTLE_S * S)
        while self.time.now_ns < end_ns and not self._is_calm() and not self.wrong:
            self.time.run_until(self.time.now_ns + 10 * S)
        self._check()
        self._check_over()

    def join(self, name: str, devices: Sequence[Device]) -> None:
        """Have a machine."""
        node = Node(self.time, self.network, name=name, devices=devices, ran=self.ran, work=self._work)
        node.reached = self._reached
        node.machine.gangs = self._gangs
        self.nodes.append(node)

    # --- what is done ------------------------------------------------------------------------------------------------

    def start_server(self) -> None:
        """Start the server, if it does not run."""
        if self.process is not None and self.process.lives:
            return
        settings = {
            "partition_grace_s": self.grace_s,
            "partition_margin_s": MARGIN_S,
            "soft_expiry_s": 8.0,
            "heartbeat_s": 4.0,
            "retention_s": self.plan.retention_s,
        }
        self.time.note(f"server starts, grace {self.grace_s:.0f} s")
        self.engine = SimulatedEngine(self._engine_nodes, self._reservations)
        self.process = Process(self.disk, self._home, engine=self.engine, clock=self.clock, settings=settings)
        self.fill_disk()

    def kill_server(self, down_s: float) -> None:
        """Kill the server, and start it after a while."""
        if self.process is not None:
            self.process.kill()
        self.time.after(down_s, self.start_server)

    def _do(self, step: Step) -> None:
        self.time.note(str(step))
        self._steps[step.what](self, step)

    def mend(self) -> None:
        """Take everything back that was done to machines and network."""
        self.time.note("all is mended")
        self.mended = True
        disk, network = self.disk, self.network
        disk.slow_s, disk.full, disk.away, disk.dies, disk.mixes = 0.0, False, False, None, False
        self.fill_disk()
        network.lost = network.doubled = network.late_s = 0.0
        self.place = ""
        for link in (*(node.link for node in self.nodes), *(client.link for client in self.clients)):
            link.up, link.down, link.late_s, link.answers_late_s = True, True, 0.0, 0.0
        for node in list(self.nodes):
            node.machine.unreached.clear()
            node.start_uplink()
            if node.destroyed and self.plan.gangs:  # somebody buys another one, or large runs wait for ever
                self.join(f"n{len(self.nodes) + 1}", node.devices)
        for name in OF_THE_ENGINE:
            self.engine.bring_back(name)
        self.start_server()
        let_go(self)

    def lasting(self, seconds: float, over: Callable[[], None]) -> None:
        """Let something end after a while, unless all was mended before."""
        self.time.after(seconds, lambda: None if self.mended else over())

    def new_run_id(self) -> str:
        """Return an identifier, the same ones for the same seed."""
        value = (1_800_000_000_000 + self.time.now_ns // 1_000_000) << 80 | self._ids.getrandbits(80)
        return "".join(_ALPHABET[value >> shift & 31] for shift in range(125, -1, -5))

    def _work(self, start: Start) -> Work:
        return supervisor.drawn_of(start, long=start.run_id in self.long)

    def _reached(self, node: Node, moment: str, run_id: str) -> None:
        trap = self.traps.get(moment)
        if trap is not None and not self.mended and trap(node, run_id):
            self.time.note(f"{node.name} {moment}")
            del self.traps[moment]

    def fill_disk(self) -> None:
        if self.process is not None:
            self.process.services.logs._kept_free_bytes = 1 << 60 if self.disk.full else 0

    place = ""

    def _reach(self, place: str) -> None:
        if place == self.place and not self.mended:
            self.place = ""
            self.time.note(f"server dies at {place}")
            self.time.after(3.0, self.start_server)
            raise Killed

    # --- what has to be true -----------------------------------------------------------------------------------------

    def history(self) -> History:
        """Return what everybody saw."""
        return History(
            acknowledged=frozenset(client.run_id for client in self.clients if client.acknowledged),
            ends={client.run_id: client.end for client in self.clients if client.end and not client.expired},
            stretches=[
                Stretch(
                    run_id=one.run_id,
                    fence=one.fence,
                    crew=one.crew,
                    node=one.node,
                    devices=one.devices,
                    began_ns=one.began_ns,
                    ended_ns=one.ended_ns,
                    freed_ns=one.freed_ns,
                )
                for one in self.ran
            ],
            changed={
                (action, client.run_id): 1
                for client in self.clients
                for action, is_said in ((Action.RUN_CREATE, client.acknowledged), (Action.RUN_STOP, client.cancelled))
                if is_said
            },
            secrets=(SECRET,),
        )

    def _check(self) -> None:
        found: tuple[Violation, ...] = check(self.disk.read, history=self.history()).violations
        self.wrong += [str(one) for one in found]
        self.wrong += wrongs(self.disk.read, is_over=False)

    def _is_calm(self) -> bool:
        states = self.disk.read(lambda connection: connection.execute(_OPEN).all())
        due = self.disk.read(lambda connection: connection.execute(_DUE).all())
        waits = [client for client in self.clients if not client.is_over]
        is_left = self.engine.recover() or any(self._left(node) for node in self.nodes)
        return not states and not due and not waits and not is_left

    def _left(self, node: Node) -> list[str]:
        return [f"{run_id}:{fence}" for (run_id, fence), kept in node.kept.items() if not kept.abandoned]

    def _check_over(self) -> None:
        """Everything has ended, everybody was told, and nothing is left."""
        for run_id, state in self.disk.read(lambda connection: connection.execute(_OPEN).all()):
            self.wrong.append(f"ends run {run_id} is {state}, {SETTLE_S:.0f} s after the last trouble")
        self.wrong += wrongs(self.disk.read)
        for run_id in self.disk.read(lambda connection: connection.scalars(_BY_A_PEER).all()):
            self.wrong.append(f"cause run {run_id} ended because a rank lost its peer, and the peer had a reason")
        there = self.disk.read(lambda connection: connection.scalars(sa.select(tables.runs.c.id)).all())
        for client in self.clients:
            if not client.is_over:
                self.wrong.append(f"ends the client of {client.run_id} waits")
        asked = {client.run_id for client in self.clients}
        for run_id in there:
            if run_id not in asked:
                self.wrong.append(f"ends run {run_id} is there, and nobody asked for it")
        for node in self.nodes:
            if self._left(node):
                self.wrong.append(f"ends {node.name} has something of {self._left(node)}")
            if not node.destroyed and len(node.machine.free) != len(node.devices):
                self.wrong.append(f"ends {node.name} has {len(node.machine.free)} of {len(node.devices)} devices free")
        if self.engine.recover():
            self.wrong.append(f"ends reserved for {self.engine.recover()}")

    @contextlib.contextmanager
    def _played(self) -> Iterator[None]:
        """Let what asks for identifiers and crashes ask here; what the server logs as its own mistake is wrong."""
        handler = _Listening(self)
        log = logging.getLogger("serverless_gpu.server")
        before = (log.level, log.propagate)
        log.addHandler(handler)
        log.setLevel(logging.ERROR)
        log.propagate = False
        with (
            mock.patch.object(ambient, "new_run_id", self.new_run_id),
            mock.patch.object(faults, "reach", self._reach),
            mock.patch.object(retention, "FIRST_S", 20.0),
            mock.patch.object(retention, "EVERY_S", 20.0),
            mock.patch.object(audit, "EVERY_S", 5.0),
            mock.patch.object(EnvironmentStore, "need", lambda _self, _snapshot: None),
            mock.patch.object(rendezvous, "COME_S", 40.0),
            mock.patch.object(rendezvous, "MEET_S", 20.0),
            mock.patch.object(rendezvous, "TOTAL_S", 120.0),
            caps.watched(self.wrong),
        ):
            try:
                yield
            finally:
                log.removeHandler(handler)
                log.setLevel(before[0])
                log.propagate = before[1]


class _Listening(logging.Handler):
    """Takes what the server calls an error."""

    def __init__(self, world: World) -> None:
        super().__init__(logging.ERROR)
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        if isinstance(record.args, tuple) and record.args and isinstance(record.args[0], Violation):
            self._world.wrong.append(str(record.args[0]))
            return
        text = record.getMessage()
        if record.exc_info is not None and record.exc_info[1] is not None:
            text += f": {record.exc_info[1]!r}"
        self._world.wrong.append(f"log {text}")


_OPEN = sa.select(tables.runs.c.id, tables.runs.c.state).where(
    sa.or_(
        tables.runs.c.state.not_in([state.value for state in TERMINAL]),
        tables.runs.c.settled_ns.is_(None),
    )
)
_BY_A_PEER = sa.select(tables.attempts.c.run_id).where(tables.attempts.c.reason == supervisor.LOST_PEER.value)
_DUE = sa.select(tables.crews.c.run_id).where(tables.crews.c.uncharged)


def _add_people(connection: sa.Connection) -> None:
    rows = [{"name": name, "kind": "user", "role": role, "created_ns": 0} for name, role in _PEOPLE]
    connection.execute(tables.principals.insert(), rows)
    pool = {"name": "default", "kind": "on-demand", "created_ns": 0, "isolation": NONE}
    connection.execute(tables.pools.insert(), pool)  # its runs are alice's, who is not the first administrator


_PEOPLE = (("alice", "member"), ("node", "member"), ("root", "admin"))
