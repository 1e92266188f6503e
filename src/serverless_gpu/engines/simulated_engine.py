"""Simulates a cluster for tests: engine, agents, telemetry and injected faults.

    SimulatedEngine     passes the conformance suite like any other engine; counts capacity
    SimulatedAgent      one node, in process and on a test's clock. `step()` connects if needed, accepts orders,
    advances
                        its gangs to the current time, and reports
    SimulatedTelemetry  synthetic samples of one node, delivered to MLflow as on real nodes

The simulated engine and agents never sleep, start no process and open no socket. The simulation is deterministic. As in
a real cluster, reservations outlive the engine (`Reservations`). After `kill`, attempts and unacknowledged reports stay
on the node's simulated disk. `reboot` ends all attempts of a node. The times of events do not depend on the size of the
clock's steps.

Each agent records every execution of user code in `executions`, so that tests can verify the server's records.
Simulated agents give the same guarantees as real nodes. An agent executes each order once. A gang ends after
`partition_grace_s` without an answer from the server. An agent stops a stale gang, preserves the gang's files, and
never reports the gang again.

A test injects faults with the engine's `answers`, and with an agent's `kill`, `start`, `reboot` and
`forgets_to_acknowledge`. An agent's attributes `reaches` and `hears` each cut one direction of the connection.
`SimulatedWork` defines the behaviour of a gang.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec

from serverless_gpu.ambient import Clock
from serverless_gpu.engines.base import (
    Engine,
    EngineNode,
    Gang,
    Impossible,
    NodeLost,
    NodeUp,
    Placed,
    Request,
    Waiting,
)
from serverless_gpu.errors import NotFound, ServerUnavailable, StaleAttempt
from serverless_gpu.model.hardware import Device
from serverless_gpu.model.lifecycle.attempt import MEANINGS, Failure, Reason, State, StopReason
from serverless_gpu.model.telemetry import SECOND_NS, GpuSample, Header, HostSample, Sample, Sampled
from serverless_gpu.node.base.protocol import Stopped
from serverless_gpu.node.monitor.telemetry_file import TelemetryFile
from serverless_gpu.tracking.base import Tracker, TrackerRun
from serverless_gpu.tracking.delivery import DeliveryJob, MlflowDelivery
from serverless_gpu.tracking.metric_points import telemetry_path
from serverless_gpu.version import __version__
from serverless_gpu.wire.agents import (
    AgentHello,
    AgentWelcome,
    AttemptSeen,
    Ending,
    File,
    Heartbeat,
    HeartbeatAnswer,
    LogPiece,
    Order,
    OrdersTaken,
    Report,
    ReportAnswer,
    ReportNow,
    Start,
    Stop,
)
from serverless_gpu.wire.base import PROTOCOL

T = TypeVar("T")
CrewKey = tuple[str, int]

_STOPPED = {
    StopReason.CANCEL: Reason.CANCELLED,
    StopReason.PREEMPT: Reason.PREEMPTED,
    StopReason.TIMEOUT: Reason.TIMEOUT,
    StopReason.BUDGET: Reason.BUDGET,
    StopReason.DRAIN: Reason.DRAINED,
    StopReason.IDLE: Reason.IDLE,
}
_NONE = b"\x80\x04N."  # None as a pickle.


_MEMORY_BYTES = 40 << 30
_HOST_BYTES = 256 << 30
_TURN_S = 170  # Period of the synthetic sample curves in seconds.


class Reservations:
    """Reservations of a simulated cluster, which outlive the engine."""

    def __init__(self) -> None:
        self.gangs: dict[str, Gang] = {}


class SimulatedEngine(Engine):
    """An engine that tracks the free devices of simulated nodes."""

    def __init__(self, nodes: Sequence[EngineNode], reservations: Reservations | None = None) -> None:
        self._lock = threading.Lock()
        self._nodes = {node.name: node for node in nodes}
        self._lost: dict[str, str] = {}
        self._events: list[NodeUp | NodeLost] = [NodeUp(node=node) for node in nodes]
        self._reservations = reservations or Reservations()
        # Injected faults: answers that the next calls of `submit` return, in order.
        self.answers: list[Waiting | Impossible] = []

    def nodes(self) -> Sequence[EngineNode]:
        """Return the simulated nodes that are not lost."""
        with self._lock:
            return [node for name, node in self._nodes.items() if name not in self._lost]

    def has(self, node: str) -> bool:
        """Return True if a node belongs to the simulated cluster."""
        with self._lock:
            return node in self._nodes

    def plan(self, gang: Gang) -> Request:
        """Return the reservation that `submit` would make."""
        shares = ", ".join(f"{share.count} {share.gpu_type} on {share.node}" for share in gang.shares)
        return Request(gang=gang, text=f"reserve for {gang.id}: {shares}")

    def submit(self, request: Request) -> Placed | Waiting | Impossible:
        """Reserve a gang if every share fits on its node."""
        with self._lock:
            gang = request.gang
            if gang.id in self._reservations.gangs:
                return Placed(gang=self._reservations.gangs[gang.id])
            if self.answers:
                return self.answers.pop(0)
            refused = self._never(gang) or self._not_now(gang)
            if refused is not None:
                return refused
            self._reservations.gangs[gang.id] = gang
            return Placed(gang=gang)

    def release(self, gang: str) -> None:
        """Remove the reservation of a gang, if any."""
        with self._lock:
            self._reservations.gangs.pop(gang, None)

    def recover(self) -> Sequence[str]:
        """Return the gangs that have reservations."""
        with self._lock:
            return sorted(self._reservations.gangs)

    def events(self) -> Sequence[NodeUp | NodeLost]:
        """Return the node events since the last call."""
        with self._lock:
            events, self._events = self._events, []
            return events

    def close(self) -> None:
        """Do nothing, because reservations and agents outlive the engine."""

    def lose(self, node: str, sentence: str) -> None:
        """Simulate the loss of a node."""
        with self._lock:
            self._lost[node] = sentence
            self._events.append(NodeLost(node=node, sentence=sentence))

    def bring_back(self, node: str) -> None:
        """Simulate the return of a lost node."""
        with self._lock:
            if self._lost.pop(node, None) is not None:
                self._events.append(NodeUp(node=self._nodes[node]))

    def _never(self, gang: Gang) -> Impossible | None:
        for share in gang.shares:
            if share.node not in self._nodes:
                return Impossible(sentence=f"there is no node {share.node!r}")
            total = self._total(share.node)[share.gpu_type]
            if share.count > total:
                return Impossible(sentence=f"{share.node} has {total} {share.gpu_type}, not {share.count}")
        return None

    def _not_now(self, gang: Gang) -> Waiting | None:
        for share in gang.shares:
            if share.node in self._lost:
                return Waiting(sentence=f"{share.node} {self._lost[share.node]}")
            held = sum(
                other.count
                for holder in self._reservations.gangs.values()
                for other in holder.shares
                if (other.node, other.gpu_type) == (share.node, share.gpu_type)
            )
            free = self._total(share.node)[share.gpu_type] - held
            if share.count > free:
                return Waiting(sentence=f"{free} of {share.count} {share.gpu_type} are free on {share.node}")
        return None

    def _total(self, node: str) -> Counter[str]:
        return Counter(device.type for device in self._nodes[node].devices)


# --- agents -----------------------------------------------------------------------------------------------------------


class Control(Protocol):
    """Interface of the server for simulated agents: the requests of `wire/agents.py` as in-process calls."""

    def hello(self, hello: AgentHello) -> AgentWelcome:
        """Register a node with the server."""
        ...

    def heartbeat(self, node: str, heartbeat: Heartbeat) -> HeartbeatAnswer:
        """Send a node's heartbeat."""
        ...

    def orders(self, node: str) -> Sequence[Order]:
        """Return the orders that a node has not acknowledged."""
        ...

    def take(self, node: str, taken: OrdersTaken) -> None:
        """Acknowledge orders, so that the server does not send the orders again."""
        ...

    def report(self, token: str, gang: CrewKey, report: Report) -> ReportAnswer:
        """Report the state changes of an attempt."""
        ...


class Observer(Protocol):
    """Interface of an observer of a node's gangs, such as `SimulatedTelemetry`."""

    def began(self, start: Start, node: str, devices: Sequence[Device]) -> None:
        """Record the start of user code."""
        ...

    def seen(self, run_id: str, fence: int, until_ns: int) -> None:
        """Record that user code was still running at `until_ns`, in nanoseconds since 1970."""
        ...

    def ended(self, run_id: str, fence: int, reason: Reason) -> None:
        """Record the end of user code."""
        ...


class SimulatedWork(msgspec.Struct, frozen=True, kw_only=True):
    """Simulated behaviour of a gang."""

    start_s: float | None = 0.1  # Seconds from the order to the start of user code, or None if user code never starts.
    run_s: float | None = 1.0  # Seconds from the start of user code to its end, or None to run until a stop request.
    # Reason for the end of the gang. With a retryable reason, the gang ends before user code starts.
    reason: Reason = Reason.COMPLETED
    output: bytes = b""  # Output that rank 0 writes when user code starts.
    stop_s: float = 0.5  # Seconds from a stop request to the end of user code.
    gate_s: float = 0.1  # Seconds from the end of a gang to the release of the gang's devices.


class Execution(msgspec.Struct, kw_only=True):
    """One execution of user code, with start and end times by the simulated clock.

    `ended_ns` is None while user code runs.
    """

    run_id: str
    fence: int
    node: str
    count: int
    began_ns: int
    ended_ns: int | None = None


class _Attempt(msgspec.Struct, kw_only=True):
    """State of one attempt on the node's simulated disk."""

    start: Start
    work: SimulatedWork
    ordered_ns: int
    answered_ns: int
    state: State = State.STARTING
    execution: Execution | None = None
    ends: tuple[int, Reason] | None = None
    ended: tuple[int, Reason] | None = None
    logged: int = 0
    reported_ns: int | None = None
    heartbeat_s: float = 5.0
    sent: object = None
    settled: bool = False
    stale: bool = False


class SimulatedAgent:
    """Simulates the agent of one node."""

    def __init__(
        self,
        control: Control,
        *,
        name: str,
        devices: Sequence[Device],
        clock: Clock,
        work: Callable[[Start], SimulatedWork],
    ) -> None:
        self.control, self.name, self.devices = control, name, tuple(devices)
        self.node = ""  # Identifier of the node on the server, or "" before the first hello request.
        self.executions: list[Execution] = []  # Every execution of user code on this node.
        # `reaches` is True if requests arrive at the server. `hears` is True if answers arrive at the agent.
        self.reaches = self.hears = self.alive = True
        self.forgets_to_acknowledge = False  # True if the agent never acknowledges orders.
        # Stale gangs, which the agent has stopped. The agent preserves the files of a stale gang, and never reports the
        # gang again.
        self.kept: list[CrewKey] = []
        self.observer: Observer | None = None  # Observer of the node's gangs, for example telemetry.
        self.pool = ""
        self._clock, self._work = clock, work
        self._boots = 1
        self._connected = False
        self._beat_ns: int | None = None
        self._heartbeat_s = 5.0
        self._grace_s = 900.0
        self._attempts: dict[CrewKey, _Attempt] = {}

    @property
    def boot_id(self) -> str:
        """Return the identifier of the node's current boot."""
        return f"{self.name}-boot-{self._boots}"

    @property
    def gangs(self) -> list[CrewKey]:
        """Return the gangs whose final report the server has not acknowledged."""
        return [gang for gang, attempt in self._attempts.items() if not attempt.stale]

    def kill(self) -> None:
        """Simulate `kill -9` of the agent. The node's gangs continue without an agent."""
        self.alive = self._connected = False

    def start(self) -> None:
        """Restart the agent, which finds its gangs on the node's simulated disk."""
        self.alive = True

    def reboot(self) -> None:
        """Simulate a reboot of the machine, which ends all gangs."""
        now_ns = self._clock.boottime_ns()
        for attempt in self._attempts.values():
            self._live(attempt, now_ns)
            if attempt.execution is not None and attempt.execution.ended_ns is None:
                attempt.execution.ended_ns = now_ns
        self._attempts.clear()
        self._boots += 1
        self._connected = False
        self.alive = True

    def step(self) -> None:
        """Run one cycle of the agent: connect if necessary, accept orders, advance the gangs and send reports."""
        now_ns = self._clock.boottime_ns()
        for attempt in list(self._attempts.values()):
            self._live(attempt, now_ns)
        if not self.alive:
            return
        try:
            self._talk(now_ns)
        except ServerUnavailable:
            self._connected = False

    def _talk(self, now_ns: int) -> None:
        if not self._connected:
            welcome = self._ask(lambda: self.control.hello(self._hello()))
            self.node, self._heartbeat_s = welcome.node, welcome.heartbeat_s
            self._grace_s = welcome.partition_grace_s
            self._drop(welcome.stale, now_ns)
            self._connected, self._beat_ns = True, now_ns
        elif self._beat_ns is None or now_ns - self._beat_ns >= self._heartbeat_s * 1e9:
            beat = Heartbeat(devices=self.devices, attempts=self._seen())
            self._drop(self._ask(lambda: self.control.heartbeat(self.node, beat)).stale, now_ns)
            self._beat_ns = now_ns
        taken = [order.seq for order in self._ask(lambda: self.control.orders(self.node)) if self._obey(order, now_ns)]
        for attempt in list(self._attempts.values()):
            self._live(attempt, now_ns)
            self._report(attempt, now_ns)
        if taken and not self.forgets_to_acknowledge:
            self._ask(lambda: self.control.take(self.node, OrdersTaken(seqs=tuple(taken))))

    def _ask(self, request: Callable[[], T]) -> T:
        if not self.reaches:
            raise ServerUnavailable("the simulated request did not arrive")
        answer = request()
        if not self.hears:
            raise ServerUnavailable("the simulated answer did not arrive")
        return answer

    def _hello(self) -> AgentHello:
        return AgentHello(
            name=self.name,
            machine=f"machine-{self.name}",
            boot_id=self.boot_id,
            version=__version__,
            protocol=PROTOCOL,
            python="3.11",
            platform="linux-x86_64",
            pool=self.pool,
            devices=self.devices,
            attempts=self._seen(),
        )

    def _seen(self) -> tuple[AttemptSeen, ...]:
        return tuple(
            AttemptSeen(run_id=run_id, fence=fence, state=self._attempts[run_id, fence].state)
            for run_id, fence in self.gangs
        )

    def _obey(self, order: Order, now_ns: int) -> bool:
        gang = (order.run_id, order.fence)
        attempt = self._attempts.get(gang)
        if isinstance(order, ReportNow):
            return False  # The agent sends a report at each step, with or without a ReportNow order.
        if isinstance(order, Stop):
            if attempt is not None:
                self._stop(attempt, order.reason, now_ns)
            return True
        if attempt is None:
            self._attempts[gang] = _Attempt(start=order, work=self._work(order), ordered_ns=now_ns, answered_ns=now_ns)
        return True

    def _stop(self, attempt: _Attempt, why: StopReason, now_ns: int) -> None:
        if attempt.ended is None and attempt.state is not State.STOPPING:
            attempt.state = State.STOPPING
            attempt.ends = (now_ns + round(attempt.work.stop_s * 1e9), _STOPPED[why])

    def _live(self, attempt: _Attempt, now_ns: int) -> None:
        """Advance a gang to the current simulated time."""
        work, fence_ns = attempt.work, attempt.answered_ns + round(self._grace_s * 1e9)
        if attempt.ended is None and attempt.execution is None and work.start_s is not None and attempt.ends is None:
            begins_ns = attempt.ordered_ns + round(work.start_s * 1e9)
            if begins_ns <= min(now_ns, fence_ns):
                self._begin(attempt, begins_ns)
        if self.observer is not None and attempt.execution is not None and attempt.ended is None:
            # The observer records the gang until the current time or the gang's end, whichever is earlier.
            until_ns = now_ns if attempt.ends is None else min(now_ns, attempt.ends[0])
            late_ns = self._clock.wall_ns() - self._clock.boottime_ns()
            self.observer.seen(attempt.start.run_id, attempt.start.fence, until_ns + late_ns)
        if attempt.ended is None:
            due_ns, reason = attempt.ends or (now_ns + 1, Reason.COMPLETED)
            if fence_ns <= min(now_ns, due_ns):
                self._end(attempt, fence_ns, Reason.NODE_PARTITIONED)
            elif due_ns <= now_ns:
                self._end(attempt, due_ns, reason)

    def _begin(self, attempt: _Attempt, begins_ns: int) -> None:
        work, start = attempt.work, attempt.start
        if MEANINGS[work.reason].may_retry:
            attempt.ends = (begins_ns, work.reason)
            return
        attempt.state = State.RUNNING
        attempt.execution = Execution(
            run_id=start.run_id, fence=start.fence, node=self.name, count=start.world_size, began_ns=begins_ns
        )
        self.executions.append(attempt.execution)
        if self.observer is not None:
            self.observer.began(start, self.name, self.devices[: start.world_size])
        if work.run_s is not None:
            attempt.ends = (begins_ns + round(work.run_s * 1e9), work.reason)

    def _end(self, attempt: _Attempt, at_ns: int, reason: Reason) -> None:
        attempt.ended = (at_ns, reason)
        attempt.state = State.STOPPING
        if attempt.execution is not None:
            attempt.execution.ended_ns = at_ns
            if self.observer is not None:
                self.observer.ended(attempt.start.run_id, attempt.start.fence, reason)

    def _report(self, attempt: _Attempt, now_ns: int) -> None:
        if attempt.stale:
            return
        report = self._news(attempt, now_ns)
        said = msgspec.structs.replace(report, logs=())
        overdue = attempt.reported_ns is None or now_ns - attempt.reported_ns >= attempt.heartbeat_s * 1e9
        if not overdue and said == attempt.sent and not report.logs:
            return
        gang = (attempt.start.run_id, attempt.start.fence)
        try:
            answer = self._ask(lambda: self.control.report(attempt.start.token, gang, report))
        except (StaleAttempt, NotFound):
            answer = ReportAnswer(stale=True)
        if answer.stale:
            self._drop([f"{gang[0]}:{gang[1]}"], now_ns)
            return
        attempt.answered_ns, attempt.reported_ns, attempt.sent = now_ns, now_ns, said
        attempt.heartbeat_s = answer.heartbeat_s
        attempt.logged += sum(len(piece.data) for piece in report.logs)
        if answer.stop is not None:
            self._stop(attempt, answer.stop, now_ns)
        if report.receipt is not msgspec.UNSET:
            del self._attempts[gang]

    def _news(self, attempt: _Attempt, now_ns: int) -> Report:
        execution, work = attempt.execution, attempt.work
        unsent = work.output[attempt.logged :] if execution is not None else b""
        report = Report(
            state=attempt.state,
            world_size=attempt.start.world_size,
            exec_ns=None if execution is None else execution.began_ns,
            logs=(LogPiece(rank=0, stream="stdout", offset=attempt.logged, data=unsent),) if unsent else (),
        )
        if attempt.ended is None:
            return report
        at_ns, reason = attempt.ended
        settled = now_ns >= at_ns + round(work.gate_s * 1e9)
        state = MEANINGS[reason].state
        cause = None if state is State.SUCCEEDED else Failure(rank=None, reason=reason, at_ns=at_ns)
        stopped = msgspec.json.encode(Stopped(state=state, reason=reason, cause=cause, consequences=()))
        began = execution is not None
        ranks = range(attempt.start.world_size)
        files = tuple(File(name=f"results/{rank}.pkl", size=len(_NONE), inline=_NONE) for rank in ranks)
        return msgspec.structs.replace(
            report,
            ending=Ending(state=state, reason=reason, began=began, stopped=msgspec.Raw(stopped)),
            files=files if reason is Reason.COMPLETED else (),
            receipt=msgspec.Raw(b"{}") if settled else msgspec.UNSET,
        )

    def _drop(self, stale: Sequence[str], now_ns: int) -> None:
        for gang, attempt in list(self._attempts.items()):
            if f"{gang[0]}:{gang[1]}" in stale and not attempt.stale:
                if attempt.ended is None:
                    self._end(attempt, now_ns, Reason.CANCELLED)
                attempt.stale = True
                self.kept.append(gang)


# --- telemetry --------------------------------------------------------------------------------------------------------


class SimulatedTelemetry:
    """Produces synthetic telemetry for one simulated node, and delivers the samples to MLflow.

        SimulatedAgent ──began, seen, ended──▶ TelemetryFile (a file of samples per gang) ─▶ Delivery ─▶ tracker

    Each second of the simulated clock yields one sample. Threads deliver the samples, as on a real node. The tracker is
    `testing.mlflow.FakeMlflow` or a real MLflow server.
    """

    def __init__(
        self, directory: Path, *, node_rank: int, num_nodes: int, clock: Clock, tracker: Callable[[], Tracker]
    ) -> None:
        self.tracked: dict[str, TrackerRun] = {}
        self._directory = directory
        self._node_rank, self._num_nodes = node_rank, num_nodes
        self._clock = clock
        self._tracker = tracker
        self._gangs: dict[tuple[str, int], _GangTelemetry] = {}

    def began(self, start: Start, node: str, devices: Sequence[Device]) -> None:
        """Record the start of user code on a gang's devices."""
        directory = self._directory / start.run_id / str(start.fence)
        (directory / "logs").mkdir(parents=True, exist_ok=True)
        header = Header(
            run_id=start.run_id,
            fence=start.fence,
            node=node,
            node_rank=self._node_rank,
            origin_ns=start.submitted_ns,
            devices=tuple(Sampled(device.uuid, device.type, device.kind) for device in devices),
        )
        gang = _GangTelemetry(TelemetryFile(telemetry_path(directory, self._node_rank), header), self._clock.wall_ns())
        self._gangs[start.run_id, start.fence] = gang
        if start.spec.tracker is not None:
            job = DeliveryJob(
                run_id=start.run_id,
                fence=start.fence,
                node_rank=self._node_rank,
                num_nodes=self._num_nodes,
                spec=start.spec,
                called_ns=start.submitted_ns,
            )
            listener = _TrackingListener(self, start.run_id)
            gang.delivery = MlflowDelivery(directory, job, self._tracker(), listener, clock=self._clock)
            gang.thread = threading.Thread(target=gang.delivery.run, name=f"deliver {start.run_id}", daemon=True)
            gang.thread.start()

    def seen(self, run_id: str, fence: int, until_ns: int) -> None:
        """Write the samples of a gang for all seconds up to the given time."""
        gang = self._gangs.get((run_id, fence))
        while gang is not None and gang.next_ns <= until_ns:
            gang.recording.append(_made_up_sample(gang.next_ns, gang.recording.header, self._node_rank))
            gang.next_ns += SECOND_NS

    def ended(self, run_id: str, fence: int, reason: Reason) -> None:
        """Record the end of a gang and the release of the gang's devices."""
        gang = self._gangs.get((run_id, fence))
        if gang is not None:
            gang.recording.flush()
            if gang.delivery is not None:
                gang.delivery.ending(MEANINGS[reason].state, reason, MEANINGS[reason].sentence)
                gang.delivery.settled()

    def close(self, timeout_s: float) -> bool:
        """Wait until the tracker has received all samples. Return False on a timeout."""
        for gang in self._gangs.values():
            if gang.thread is not None:
                gang.thread.join(timeout_s)
        late = [gang for gang in self._gangs.values() if gang.thread is not None and gang.thread.is_alive()]
        for gang in late:
            if gang.delivery is not None:
                gang.delivery.stop()
        return not late


class _GangTelemetry(msgspec.Struct):
    recording: TelemetryFile
    next_ns: int
    delivery: MlflowDelivery | None = None
    thread: threading.Thread | None = None


class _TrackingListener:
    def __init__(self, telemetry: SimulatedTelemetry, run_id: str) -> None:
        self._telemetry, self._run_id = telemetry, run_id

    def tracked(self, tracked: TrackerRun) -> None:
        self._telemetry.tracked[self._run_id] = tracked

    def untracked(self, sentence: str, *, final: bool) -> None:
        """Do nothing: simulated gangs have no attached clients."""

    def said(self, sentence: str, *, note: bool) -> None:
        """Do nothing: simulated gangs have no attached clients."""


def _made_up_sample(at_ns: int, header: Header, node_rank: int) -> Sample:
    """Return a synthetic sample whose values follow a different curve for each device and node."""
    seconds = (at_ns - header.origin_ns) / SECOND_NS
    waves = [
        0.5 + 0.5 * math.sin(2 * math.pi * (seconds / _TURN_S + 0.11 * (place + 3 * node_rank)))
        for place in range(len(header.devices))
    ]
    gpus = tuple(
        GpuSample(
            busy_percent=round(70 + 28 * wave, 1),
            memory_bytes=round(_MEMORY_BYTES * (0.6 + 0.3 * wave)),
            memory_total_bytes=2 * _MEMORY_BYTES,
            power_watts=round(420 + 240 * wave, 1),
            power_limit_watts=700.0,
            temperature_celsius=round(52 + 14 * wave, 1),
        )
        for wave in waves
    )
    share = sum(waves) / max(1, len(waves))
    host = HostSample(
        cpu_percent=round(20 + 40 * share, 1),
        memory_bytes=round(_HOST_BYTES * (0.3 + 0.1 * share)),
        memory_total_bytes=_HOST_BYTES,
    )
    return Sample(at_ns, host, gpus)
