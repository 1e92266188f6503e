"""Controls one attempt on this node, from the device reservation to the receipt.

    agent ──Assign, Stem──▶ supervisor ◀──events── stem, ranks
                              │  ▲
    client ◀──messages────────┘  └── pipes: output of ranks

The supervisor is a clean interpreter without user code, forked ahead of time (`nursery.py`). The supervisor runs one
event loop in one thread. The event loop passes events to `model/lifecycle/attempt_lifecycle.py` and executes the
returned instructions. The supervisor never unpickles data.

Failure cases:

If the agent or the client exits, a new agent and `sgpu attach` find the supervisor by its socket.

If the supervisor dies, the stem reads end of file and kills every rank at once. The stem's copies of the lock
descriptors keep the devices locked until the ranks have ended.

If the stem dies, its ranks die too. After the death of its stem, an attempt fails as `runtime_lost`.

If no stem connects, the attempt fails as `start_failed` or with the environment's reason. The failure message contains
the zygote's output.

If a device fails, the attempt ends when the device's rank ends, or after a minute. The supervisor quarantines a failed
device.

If the client exits or cancels before it has confirmed the environment, the attempt ends without user code.

If the server does not answer before the lease expires, the supervisor stops the attempt. After the lease has expired,
the server may start another attempt on another node.

If the agent assigns the attempt twice, only one supervisor gets the attempt's lock. An ended attempt never starts
again.

If the kernel cannot end a process (D state), the supervisor ends the attempt after a minute, although the process
remains (`ProcessDrain`). The final device check takes remaining processes into account.

For ranks on other nodes, see `rendezvous.py`.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from serverless_gpu.ambient import Clock, SystemClock, created_wall_ns
from serverless_gpu.errors import AgentUnavailable, IsolationUnavailable, ServerlessGpuError, SessionEnded, StorageError
from serverless_gpu.model.hangs.hang_report import ranks_text
from serverless_gpu.model.hardware import Device
from serverless_gpu.model.lifecycle.attempt import (
    MEANINGS,
    TERMINAL,
    Attempt,
    Event,
    FactKind,
    GangPlaced,
    Hang,
    LeaseExpired,
    Preparing,
    RankExecuting,
    RanksNotStarted,
    Reason,
    State,
    StemLost,
    StopReason,
    StopRequested,
    Tick,
    TreeEmpty,
    stop_word,
)
from serverless_gpu.model.lifecycle.attempt_lifecycle import AttemptInstruction, IllegalAttemptTransition, advance
from serverless_gpu.node.attempt import secret_files
from serverless_gpu.node.attempt.claim import first_of, take_attempt
from serverless_gpu.node.attempt.usage_account import AttemptAccount
from serverless_gpu.node.base import protocol
from serverless_gpu.node.base.home import Home
from serverless_gpu.node.base.network import NoPort
from serverless_gpu.node.base.protocol import Stopped
from serverless_gpu.node.devices.gpu_gate import GatePolicy, Verdict, verify
from serverless_gpu.node.devices.inventory import Provider
from serverless_gpu.node.devices.reservation import BorrowedDevices, DeviceReservation
from serverless_gpu.node.inside.channel import Channel
from serverless_gpu.node.output.attached_clients import Watcher, Watchers
from serverless_gpu.node.output.logs import RankLog, cut_output, hidden_tails
from serverless_gpu.node.processes.process_tree import AttemptSegments, ProcessIdentity
from serverless_gpu.node.spawner.client import find_spawner
from serverless_gpu.node.supervisor.attempt_files import attempt_files
from serverless_gpu.node.supervisor.gang import HostStem, LocalGang
from serverless_gpu.node.supervisor.gang_network import GangNetwork
from serverless_gpu.node.supervisor.hang_watchdog import Watchdogs
from serverless_gpu.node.supervisor.monitor_link import MonitorLink
from serverless_gpu.node.supervisor.outcome_redaction import result_notes
from serverless_gpu.node.supervisor.ray_cluster import NoDirectory
from serverless_gpu.node.supervisor.rendezvous import Peers

_RETRY_S = 0.05  # Seconds between two attempts to reserve devices that were in use.
_TURN_S = 5.0

Callback = Callable[[], None]


class Supervisor:
    """Controls one attempt.

    The supervisor receives the stem's socket on the channel `agent`.
    """

    def __init__(self, assign: protocol.Assign, agent: Channel, home: Home, sockets: Path, machine: Provider) -> None:
        launch = self._launch = assign.launch
        self._directory = Path(launch.directory)
        self._agent = agent
        self._home = home
        self._sockets = sockets
        self._machine = machine
        self._files = attempt_files(
            launch, assign.checkpoints, uid=assign.uid, user_home=assign.user_home, account=assign.account
        )
        self._clock: Clock = SystemClock()
        self._attempt = first_of(launch)
        self._account = AttemptAccount(launch, self._clock)
        self._account.mark("asked", assign.asked_ns)
        self._selector = selectors.DefaultSelector()
        self._audience = Watchers(
            sockets / f"{launch.run_id}.sock", self._selector, self._greet, self._obey, self._connect
        )
        self._watchdogs = Watchdogs(launch, home, self._clock, self._say, self._account.notes)
        self._monitor = MonitorLink(launch, sockets, self._clock, self._selector, self._audience.tell)
        self._monitor.on_seen = self._watchdogs.idleness.seen
        self._reservation: DeviceReservation | BorrowedDevices | None = None
        self._gang: LocalGang | None = None
        self._peers = Peers(launch, assign.checkpoints, self._clock, self._selector, self._audience.tell)
        self._gang_network = GangNetwork(launch, assign.uid, self._clock, find_spawner(os.environ))
        self._watchdogs.judged_by(self._peers)
        self._waiting = ""
        self._preparing = ""
        self._begin_pending = False
        self._confirmed = launch.confirmed
        self._client: Watcher | None = None
        self._process_drain = ProcessDrain(self._clock, self._say)
        self._segments = AttemptSegments()
        self._lease_ns = launch.lease_ns
        self._done = False

    def serve(self, client: Channel) -> None:
        """Serve the attempt until it ends.

        `client` is the first attached client.
        """
        refused: protocol.Refused | None = None
        try:
            if problem := take_attempt(self._directory):
                refused = protocol.Refused(code=AgentUnavailable.code, message=problem)
        except StorageError as error:
            refused = protocol.Refused(code=error.code, message=error.message, hint=error.hint)
        if refused is not None:
            for channel in (self._agent, client):
                with contextlib.suppress(OSError):
                    protocol.send(channel, refused)
            return
        self._account.prepare()
        if self._launch.egress_problem:
            self._account.notes.append(f"the run had no network rules: {self._launch.egress_problem}")
        problem = self._audience.listen()
        if problem:  # If the socket cannot be opened, the run continues without attached clients.
            self._account.notes.append(problem)
        self._watch(self._agent.fileno(), self._hear_agent)
        if self._watchdogs.gpus.fd is not None:
            self._watch(self._watchdogs.gpus.fd, self._hear_gpus)
        self._client = self._audience.add(client)
        self._monitor.begin()
        self._reserve()
        while not self._done:
            for key, _ in self._selector.select(self._pause_s()):
                callback: Callback = key.data
                # An earlier callback in this event loop iteration may have ended the attempt and closed the descriptor.
                if not self._done:
                    callback()
            if not self._done:
                self._look()

    # --- agent messages ------------------------------------------------------------------------------------------

    def _hear_agent(self) -> None:
        try:
            received = protocol.receive(self._agent)
        except (OSError, msgspec.MsgspecError):
            received = None
        if received is None:
            self._unwatch(self._agent.fileno())
            self._agent.close()
            if self._gang is None and self._attempt.state in (State.QUEUED, State.STARTING):
                # The client sends the launch to the next agent, because no supervisor has accepted the launch yet.
                if self._reservation is not None:
                    self._reservation.close()
                (self._directory / "facts.jsonl").unlink(missing_ok=True)
                self._leave()
        elif isinstance(received[0], protocol.Stem):
            self._meet_stem(received[0], received[1])
        elif isinstance(received[0], protocol.PreparingNote):
            self._preparing = received[0].sentence
            self._audience.tell(protocol.WaitingNote(sentence=self._preparing, passing=True))
            self._apply(Preparing())

    def _meet_stem(self, message: protocol.Stem, fds: tuple[int, ...]) -> None:
        self._audience.tell(protocol.Accepted(pid=os.getpid()))
        if message.problem or not fds:
            self._apply(RanksNotStarted(message.reason, message.problem))
            return
        self._account.warm = (message.warm, message.warm_reason)
        self._account.environment = message.environment
        self._gang = LocalGang(
            self._launch,
            Channel.adopt(fds[0]),
            self._account,
            message.context,
            stem=HostStem(message.pid, message.cgroups),
            files=self._files,
        )
        self._gang.on_said = lambda said: self._audience.tell(protocol.WaitingNote(sentence=said, lasting=True))
        self._watch(fds[0], self._hear_gang)

    # --- devices and start ---------------------------------------------------------------------------------------

    def _reserve(self) -> None:
        try:
            if self._launch.session:
                self._reservation = BorrowedDevices(self._launch, self._home, self._sockets, self._machine)
            else:
                self._reservation = DeviceReservation(self._launch, self._home, self._clock, self._machine)
        except ServerlessGpuError as error:
            self._refuse_start(error)
        else:
            self._try_devices()

    def _refuse_start(self, error: ServerlessGpuError) -> None:
        ended = isinstance(error, SessionEnded)
        self._apply(RanksNotStarted(Reason.SESSION_ENDED if ended else Reason.START_FAILED, error.message))

    def _try_devices(self) -> None:
        if self._reservation is None or self._attempt.state is not State.QUEUED:
            return
        try:
            sentence = self._reservation.try_take()
        except ServerlessGpuError as error:
            self._refuse_start(error)
            return
        if sentence is None:
            self._fact(FactKind.RESERVED)
            self._account.mark("reserved")
            if self._gang is None or not self._gang.standby:
                self._fact(FactKind.HYDRATING)  # The reserved devices wait for the environment.
            self._apply(GangPlaced())
        elif sentence != self._waiting:
            self._waiting = sentence
            self._audience.tell(protocol.WaitingNote(sentence=sentence, queued_ns=created_wall_ns(self._launch.run_id)))

    def _begin(self) -> None:
        """Start the ranks once devices, stem, other nodes and environment are ready."""
        if not self._begin_pending or self._gang is None or not self._gang.standby or self._reservation is None:
            return
        try:
            if not self._peers.met() or not self._confirmed or self._monitor.hold_ns is not None:
                return
            self._begin_pending = False
            self._gang_network.open(self._peers.addresses)
            self._account.starting(self._devices)
            self._gang.environment.tracked = self._monitor.environ
            self._gang.start(self._reservation.devices, self._peers.network(), self._reservation.fds, self._audience)
        except NoPort as error:
            self._apply(RanksNotStarted(Reason.RENDEZVOUS, str(error)))
            return
        except IsolationUnavailable as error:
            hint = f" ({error.hint})" if error.hint else ""
            self._apply(RanksNotStarted(Reason.START_FAILED, f"{error.message}{hint}"))
            return
        except OSError as error:
            told = "" if isinstance(error, NoDirectory) else "cannot start the ranks through their parent process: "
            self._apply(RanksNotStarted(Reason.START_FAILED, f"{told}{error}"))
            return
        for log in self._gang.logs.values():
            for fd, drain in log.readers():
                self._watch(fd, lambda fd=fd, drain=drain: self._drain(fd, drain))  # type: ignore[misc]  # mypy does not type a lambda's defaults

    def _hear_gang(self) -> None:
        assert self._gang is not None
        met, forked = self._gang.standby, bool(self._gang.pids)
        try:
            events = self._gang.hear()
        except (OSError, ValueError) as error:
            events = [StemLost(detail=f"a message of the ranks' parent process is not valid: {error}")]
        if events is None:
            self._unwatch(self._gang.channel.fileno())
            events = [] if met else [StemLost(detail="the ranks' parent process ended before it could start the ranks")]
        if self._gang.standby and not met:
            self._watch(self._gang.stem_pidfd, self._stem_ended)
            self._begin()
        if self._gang.pids and not forked:
            self._monitor.ranks(self._gang.devices, self._gang.pids, self._gang.cgroup)
        for event in events:
            if isinstance(event, RankExecuting) and "exec" not in self._account.marks:
                self._account.mark("exec")
                self._fact(FactKind.EXEC)
                self._audience.tell(protocol.Started(at_ns=self._account.marks["exec"]))
            self._watchdogs.heard(event)
            try:
                self._apply(event)
            except IllegalAttemptTransition as error:
                self._apply(
                    StemLost(
                        detail=f"a message of the ranks' parent process does not fit the state of the attempt: {error}"
                    )
                )

    def _stem_ended(self) -> None:
        assert self._gang is not None
        self._unwatch(self._gang.stem_pidfd)
        if self._process_drain.since_ns is not None:
            self._look_for_empty()
        else:
            out_of_memory = self._gang.out_of_memory()
            detail = self._gang.memory_text() if out_of_memory else ""
            self._apply(StemLost(detail=detail, out_of_memory=out_of_memory))

    # --- lifecycle -----------------------------------------------------------------------------------------------

    def _apply(self, event: Event) -> None:
        try:
            self._attempt, instructions = advance(self._attempt, event, self._clock.boottime_ns())
        except IllegalAttemptTransition:
            if self._attempt.state in TERMINAL:
                return  # A rank's late message does not change the attempt's outcome.
            raise
        if self._attempt.state is State.STOPPING:
            self._account.stopping(self._attempt, self._devices)
        self._peers.watch(self._attempt)
        for instruction in instructions:
            match instruction:
                case AttemptInstruction.START_RANKS:
                    self._begin_pending = True
                    self._begin()
                case AttemptInstruction.RELEASE_RANKS if self._gang is not None:
                    self._gang.release()
                case AttemptInstruction.TERMINATE_RANKS if self._gang is not None:
                    self._gang.terminate(stop_word(self._attempt.reason))
                case AttemptInstruction.KILL_TREE:
                    self._begin_pending = False
                    self._look_at_segments()
                    kill_ns = self._process_drain.begin(self._gang)
                    if self._attempt.killed:
                        self._account.notes.append(killed_text(self._attempt, kill_ns))
                case AttemptInstruction.CONCLUDE:
                    self._conclude()

    def _hear_gpus(self) -> None:
        """Read the driver's reports before the supervisor judges a rank's death.

        The driver's reports may explain the rank's death.
        """
        for event in self._watchdogs.faults(self._attempt, self._devices):
            if self._attempt.state not in TERMINAL:
                self._apply(event)

    def _look(self) -> None:
        """Run the periodic checks that no descriptor triggers."""
        if not self._confirmed and self._client is not None and self._client.gone:
            self._leave_unconfirmed()
        self._audience.tend()
        self._monitor.tend()
        self._peers.tend()
        if problem := self._gang_network.renew():
            self._account.notes.append(problem)
        if self._gang is not None:
            self._gang.tend()
        self._begin()
        if self._attempt.state is State.QUEUED:
            self._try_devices()
        self._hear_gpus()
        if self._process_drain.since_ns is not None and self._attempt.state is State.STOPPING:
            self._look_for_empty()
        if self._lease_ns is not None and self._clock.boottime_ns() > self._lease_ns:
            self._lease_ns = None  # An answer of the server after the lease has no effect.
            if self._attempt.state not in TERMINAL:
                self._account.notes.append("the server did not answer before the run's lease ended")
                self._apply(LeaseExpired())
        if self._attempt.state not in TERMINAL:
            self._apply(Tick())
        for event in self._watchdogs.look(self._attempt, self._gang):
            if self._attempt.state not in TERMINAL:
                self._apply(event)
        # The user does not pay for time after a device failure.
        if self._attempt.state is State.RUNNING and self._attempt.fault_ns is None:
            self._account.alive(self._devices)
            if self._segments.is_due(self._clock.boottime_ns()):
                self._look_at_segments()

    def _look_at_segments(self) -> None:
        """Record the attempt's shared-memory segments while its processes still use them."""
        if self._gang is not None and "exec" in self._account.marks:
            self._segments.look(self._exec_wall_ns(), self._gang.processes)

    def _exec_wall_ns(self) -> int:
        return self._clock.wall_ns() - (self._clock.boottime_ns() - self._account.marks["exec"])

    def _look_for_empty(self) -> None:
        self._hear_gpus()
        if self._process_drain.is_over(self._gang):
            self._apply(TreeEmpty())

    def _conclude(self) -> None:
        """Report the outcome, release the verified devices and send the receipt."""
        self._account.mark("exited")
        gang = self._gang
        proven = gang is None or gang.proven or self._reservation is None or not self._reservation.devices
        # The user does not pay for failed devices or for devices that a process still uses. The supervisor does not
        # release failed devices or devices in use.
        lost_ns = self._attempt.fault_ns if self._attempt.reason is Reason.GPU_LOST else None
        if "exec" in self._account.marks:
            self._fact(FactKind.EXITED, lost_ns or (None if proven else self._process_drain.since_ns))
        left = gang.left() if gang is not None and not proven else ()
        if left:
            self._account.notes.append(
                f"{left_text(left)} of this run cannot be ended. "
                "The run's devices stay reserved until the remaining processes end"
            )
        if gang is not None:
            self._unwatch_gang(gang)
            gang.close()
        secret_files.remove(self._directory)
        logs = gang.logs if gang is not None else {}
        dropped_bytes = None if self._launch.spec.remote else self._audience.dropped_bytes
        self._account.notes += cut_output(list(logs.values()), dropped_bytes)
        self._peers.close()
        stopped = make_stopped(self._attempt, logs, self._watchdogs.ended(), self._watchdogs.gpus.hint, proven=proven)
        self._account.ended(stopped)
        self._audience.tell(stopped)
        self._monitor.ending(stopped.state, stopped.reason, stopped_sentence(stopped))
        if proven and "exec" in self._account.marks:
            self._segments.remove(self._exec_wall_ns())
        self._hand_back(proven=proven, left=left)
        self._audience.drain()
        self._leave()

    def _leave(self) -> None:
        self._monitor.close()
        self._audience.close()
        self._done = True

    def _hand_back(self, *, proven: bool, left: tuple[ProcessIdentity, ...]) -> None:
        reservation = self._reservation
        devices = self._devices
        verdicts: dict[str, Verdict] = {}
        quarantined: tuple[str, ...] = ()
        if reservation is not None and devices:
            verdicts = verdicts_of(reservation, self._watchdogs.gpus.verdicts(devices), proven=proven, left=left)
            self._account.mark("freed")
            if proven and self._attempt.reason is not Reason.GPU_LOST:
                # The supervisor writes the fact before it releases the devices, so that no device is in two accounts.
                self._fact(FactKind.FREED)
            quarantined = reservation.give_back(verdicts, left)
        elif reservation is not None:
            self._account.mark("freed")
            reservation.close()
        self._monitor.linger()  # The supervisor waits for the last sample and the tracking link of a short run.
        self._account.observed(self._monitor.uses, self._monitor.url, self._monitor.receipt_notes())
        if self._gang is not None and self._gang.redactor is not None:
            self._account.notes += result_notes(self._directory, self._launch.numbers, self._gang.redactor)
        receipt = self._account.receipt(self._attempt, devices, verdicts, quarantined)
        self._audience.tell(protocol.Finished(receipt=receipt))
        self._monitor.settled(self._home.tracking)

    # --- clients and output --------------------------------------------------------------------------------------

    def _greet(self) -> protocol.AttemptSnapshot:
        self._watchdogs.idleness.heard()  # An attaching client counts as use of the run.
        return protocol.AttemptSnapshot(
            run_id=self._launch.run_id,
            fence=self._launch.fence,
            state=self._attempt.state,
            pid=os.getpid(),
            waiting={State.QUEUED: self._waiting, State.STARTING: self._preparing}.get(self._attempt.state)
            or self._watchdogs.said,
            tracked=self._monitor.told,
            crew=self._peers.news,
        )

    def _obey(self, message: protocol.AnyMessage, watcher: Watcher) -> None:
        if isinstance(message, protocol.Cancel) and self._attempt.state not in TERMINAL:
            self._apply(StopRequested(message.reason))
        elif isinstance(message, protocol.Lease):
            if self._lease_ns is not None:
                self._lease_ns = message.deadline_ns
            if self._peers.are_awaited and self._attempt.state is State.STARTING:
                self._apply(Preparing())  # The server limits the time in which the other nodes prepare.
        elif isinstance(message, protocol.GangNews):
            for event in self._peers.hear(message):
                if self._attempt.state not in TERMINAL:
                    self._apply(event)
            self._begin()
        elif isinstance(message, protocol.Confirm) and watcher is self._client and not self._confirmed:
            self._confirmed = True
            self._account.mark("confirmed")
            self._begin()

    def _connect(self, message: protocol.OpenEndpoint, fd: int) -> None:
        """Connect a user's socket to a target in the attempt, or write the reason for a refusal to the socket."""
        problem = "" if self._attempt.state is State.RUNNING else f"the run is {self._attempt.state}"
        if not problem and self._gang is not None:
            self._watchdogs.idleness.heard()  # A connecting user counts as use of the run.
            try:
                self._gang.open_endpoint(message.target, fd)
                return
            except OSError as error:
                problem = f"the run's processes do not answer: {error.strerror}"
        with contextlib.suppress(OSError):
            os.write(fd, f"-{problem}\n".encode())

    def _leave_unconfirmed(self) -> None:
        """End an attempt whose client disconnected before it confirmed the environment."""
        self._client = None
        if self._attempt.state not in (State.QUEUED, State.STARTING):
            return
        if self._lease_ns is not None:
            self._apply(RanksNotStarted(Reason.REFUSED, "the node's uplink ended before the server confirmed the run"))
            return
        self._account.notes.append("no user code ran, because the caller ended before it confirmed the environment")
        self._apply(StopRequested(StopReason.CANCEL))

    def _say(self, sentence: str) -> None:
        self._audience.tell(protocol.WaitingNote(sentence=sentence))

    def _drain(self, fd: int, drain: Callable[[], bool]) -> None:
        self._watchdogs.heard()
        if not drain():
            self._unwatch(fd)

    @property
    def _devices(self) -> tuple[Device, ...]:
        return self._reservation.devices if self._reservation is not None else ()

    def _fact(self, kind: FactKind, at_ns: int | None = None) -> None:
        self._account.fact(kind, self._devices, at_ns)

    def _pause_s(self) -> float:
        if self._attempt.state is State.QUEUED:
            ahead = self._reservation.ahead if self._reservation is not None else 0
            return _RETRY_S * min(20, 1 + ahead)
        if self._process_drain.since_ns is not None:
            return DRAIN_LOOK_S
        behind = self._audience.waiting or (self._gang is not None and self._gang.behind)
        pauses = [_RETRY_S if behind else min(_TURN_S, self._watchdogs.gpus.pause_s)]
        hold_ns = self._monitor.hold_ns if self._begin_pending else None
        for wake_ns in (
            self._attempt.wake_ns,
            self._watchdogs.hangs.wake_ns,
            self._lease_ns,
            self._monitor.wake_ns,
            self._peers.wake_ns,
            hold_ns,
        ):
            if wake_ns is not None:
                pauses.append(max(0.0, (wake_ns - self._clock.boottime_ns()) / 1e9))
        return min(pauses)

    def _watch(self, fd: int, callback: Callback) -> None:
        self._selector.register(fd, selectors.EVENT_READ, callback)

    def _unwatch_gang(self, gang: LocalGang) -> None:
        """Stop watching the gang's descriptors, because the kernel reuses the numbers of closed descriptors."""
        outputs = (fd for log in gang.logs.values() for fd, _ in log.readers())
        for fd in (gang.channel.fileno(), gang.stem_pidfd, *outputs):
            self._unwatch(fd)

    def _unwatch(self, fd: int) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(fd)


_LEFT_NAMED = 3


def make_stopped(
    attempt: Attempt, logs: Mapping[int, RankLog], hang: Hang | None, hint: str = "", *, proven: bool = True
) -> Stopped:
    """Return the message for clients after all ranks have ended.

    `hint` is the driver's explanation of failed user code. `proven` is True if no process of the attempt remains.
    """
    assert attempt.reason is not None
    cause = attempt.cause
    blamed = logs.get(cause.rank) if cause is not None and cause.rank is not None else None
    failed = (failure.rank for failure in (cause, *attempt.failures) if failure is not None)
    first = [rank for rank in failed if rank is not None]
    return Stopped(
        state=attempt.state,
        reason=attempt.reason,
        cause=cause,
        consequences=tuple(failure for failure in attempt.failures if failure is not cause),
        log_tail=blamed.tail() if blamed is not None else "",
        tails=hidden_tails(logs, first) if attempt.state is State.FAILED else {},
        hang=hang if attempt.reason is Reason.COLLECTIVE_HANG else None,
        proven=proven,
        hint=hint if attempt.state is State.FAILED and attempt.reason is not Reason.GPU_LOST else "",
        killed=attempt.killed,
    )


def stopped_sentence(stopped: Stopped) -> str:
    """Return the reason for the attempt's end as one sentence, or "" if the attempt completed."""
    if stopped.reason is Reason.COMPLETED:
        return ""
    detail = stopped.cause.detail if stopped.cause is not None else ""
    meaning = MEANINGS[stopped.reason].sentence
    return f"{meaning}: {detail}" if detail and stopped.state is State.FAILED else meaning


def verdicts_of(
    reservation: DeviceReservation | BorrowedDevices,
    known: Mapping[str, Verdict],
    *,
    proven: bool,
    left: Sequence[ProcessIdentity] = (),
) -> dict[str, Verdict]:
    """Return a verdict for each device. Devices with a verdict in `known` need no check.

    `proven` is True if no process of the attempt remains. If processes remain, `left` contains some of them.
    """
    uuids = [device.uuid for device in reservation.devices]
    if not proven:
        why = f"{left_text(left)} could not be ended" if left else ""
        return dict.fromkeys(uuids, Verdict(False, why or "a process of the run may still exist"))
    asked = [uuid for uuid in uuids if uuid not in known]
    return {**known, **verify(reservation.provider, asked, reservation.before, GatePolicy(), time.sleep)}


def killed_text(attempt: Attempt, kill_ns: int) -> str:
    """Describe the ranks that the supervisor killed after the grace period."""
    still = sorted(set(attempt.numbers) - attempt.exited)
    grace_s = (kill_ns - (attempt.stop_ns or 0)) / 1e9
    return f"{ranks_text(still)} did not stop in {grace_s:.1f} s and {'was' if len(still) == 1 else 'were'} killed"


def left_text(left: Sequence[ProcessIdentity]) -> str:
    """Describe the remaining processes for a message."""
    names = [f"{each.pid} ({each.name})" for each in left[:_LEFT_NAMED]]
    more = f" and {len(left) - _LEFT_NAMED} more" if len(left) > _LEFT_NAMED else ""
    return f"process{'es' if len(left) > 1 else ''} {', '.join(names)}{more}"


DRAIN_LOOK_S = 0.002
"""Seconds between two checks of a process tree that is being killed."""
_DRAIN_LIMIT_S = 60.0
_DRAIN_TOLD_S = 10.0


class ProcessDrain:
    """Waits until all processes of a killed attempt have ended."""

    def __init__(self, clock: Clock, say: Callable[[str], None]) -> None:
        self.since_ns: int | None = None  # Boottime at which the processes were killed, or None.
        self._clock = clock
        self._say = say
        self._told = False

    def begin(self, gang: LocalGang | None) -> int:
        """Kill all processes of the attempt. Return the boottime of the kill."""
        self.since_ns = self._clock.boottime_ns()
        if gang is not None:
            gang.kill()
        return self.since_ns

    def is_over(self, gang: LocalGang | None) -> bool:
        """Return True once no process of the attempt remains or the time limit has passed."""
        assert self.since_ns is not None
        waited_s = (self._clock.boottime_ns() - self.since_ns) / 1e9
        if gang is None or gang.empty() or waited_s > _DRAIN_LIMIT_S:
            return True
        if waited_s > _DRAIN_TOLD_S and not self._told:
            self._told = True
            self._say(f"{left_text(gang.left())} did not end after it was killed")
        return False
