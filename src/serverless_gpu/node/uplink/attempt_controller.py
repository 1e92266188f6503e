"""Starts, follows, reports and stops one attempt on this node for its server.

    order ──▶ AttemptController ──Launch──▶ agent ──▶ supervisor        one thread listens: Started, Stopped, Finished …
                │ ▲                           │
                │ └──── the socket ───────────┘
                └─ PendingReport ─▶ Reporter ─▶ server       one thread reports; answers become Lease, Confirm, Cancel

A restarted uplink finds the attempt by its directory and `remote.json`. A restarted uplink reconnects to the
supervisor's socket. Without the supervisor's socket, the attempt's lock shows if a supervisor runs. If no supervisor
runs, the uplink writes `stopped.json` and the receipt itself (`settle_orphan`). Every attempt therefore has a
`stopped.json` and a receipt at its end.

Failure cases:

If the node cannot start the attempt, the attempt ends as `refused` without running user code.

If the agent dies before a supervisor has accepted the launch, the uplink launches the attempt again, at most three
times. A new launch is safe because an attempt without facts has not run.

If the supervisor is killed, the attempt ends as `supervisor_killed`, or as `supervisor_lost` if the kernel reports a
machine failure. The attempt ends once none of its processes holds a device. A process that survives SIGKILL keeps the
attempt in state STOPPING.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec

from serverless_gpu import faults
from serverless_gpu.ambient import Clock
from serverless_gpu.environment.service_messages import StoreLocation
from serverless_gpu.errors import ServerlessGpuError
from serverless_gpu.model.lifecycle.attempt import Reason, State, StopReason
from serverless_gpu.node.agent.connection import connect
from serverless_gpu.node.attempt import secret_files
from serverless_gpu.node.attempt.claim import has_begun, may_have_begun, try_lock
from serverless_gpu.node.attempt.history import first_facts, read_ending, read_receipt
from serverless_gpu.node.attempt.server_attempt_record import ServerAttempt, write_remote
from serverless_gpu.node.attempt.supervisor_loss import LostAttempt, settle_loss
from serverless_gpu.node.base import protocol
from serverless_gpu.node.base.home import Home
from serverless_gpu.node.base.lock_files import held_note
from serverless_gpu.node.devices.locks import MACHINE_DIRECTORIES, holder_run_id
from serverless_gpu.node.inside.channel import Channel
from serverless_gpu.node.isolation.egress import NodeEgress
from serverless_gpu.node.spawner.client import find_spawner
from serverless_gpu.node.spawner.ownership import reclaim, written_files
from serverless_gpu.node.uplink import attempt_launch
from serverless_gpu.node.uplink.delivery import stopped_without_ranks
from serverless_gpu.node.uplink.reporter import (
    AT_ONCE_S,
    BEGUN_S,
    FIRST_OF_GANG_S,
    RECEIPT_S,
    SOME_TIME_S,
    SOON_S,
    PendingReport,
    Reporter,
)
from serverless_gpu.node.uplink.server import Credential, UplinkServer
from serverless_gpu.wire.agents import AttemptSeen, ReportNow, Start

LAUNCHES_MAX = 3
_LOOK_S = 0.05
LOOK_S_MAX = 2.0
_RESTARTED = "the node's uplink ended before it launched the run"


class AttemptController:
    """Controls one attempt for the uplink.

    `say` writes a line to the uplink's log.
    """

    def __init__(
        self,
        home: Home,
        directory: Path,
        remote: ServerAttempt,
        *,
        server: UplinkServer,
        clock: Clock,
        say: Callable[[str], None],
    ) -> None:
        self.remote = remote
        self.directory = directory
        self._home = home
        self._server = server
        self._clock = clock
        self._say = say
        self.news = PendingReport(clock)
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        self._channel: Channel | None = None
        self._confirmed = False
        self._gang = protocol.GangNews()  # Latest gang state from the server.
        self._abandoned = False
        self._launch: protocol.Launch | None = None
        self._launches = 0
        self._connections = 0
        self._seen_ns: int | None = None  # Boottime at which a process of the attempt was last seen.
        self._agent_pid = 0
        self._detail = _RESTARTED
        self._of_itself = ""  # Latest status message from the run.
        self._reported = threading.Event()
        self._threads: list[threading.Thread] = []

    # --- public interface ----------------------------------------------------------------------------------------

    def start(self, order: Start, egress: NodeEgress) -> None:
        """Start the attempt in its own threads, after `egress` has applied the order's network policy."""
        first_s = FIRST_OF_GANG_S if len(order.crews) > 1 else AT_ONCE_S
        self._run_threads(lambda: self._begin(order, egress), fresh=True, first_s=first_s)

    def adopt(self) -> None:
        """Continue an attempt that an earlier uplink started."""
        begun = has_begun(first_facts(self.directory))
        self.news.learn(AT_ONCE_S, begun=begun, state=State.RUNNING if begun else State.STARTING)
        self._run_threads(lambda: None, fresh=False, first_s=AT_ONCE_S)

    def stop(self, reason: StopReason) -> None:
        """Stop the attempt gracefully. A later call may replace the reason with a stronger reason."""
        if self.news.known.stop is not reason:
            self.news.learn(SOON_S, stop=reason)
            self._tell(protocol.Cancel(reason=reason))

    def look(self, order: ReportNow) -> None:
        """Forward the order's gang state, if any, to the supervisor and schedule a report."""
        news = protocol.GangNews(
            offers=order.offers, chosen=order.chosen, release=order.release, peer_failed=order.peer_failed
        )
        self.pass_on(news)
        self.news.learn(AT_ONCE_S if news == protocol.GangNews() else SOME_TIME_S)

    def seen(self) -> AttemptSeen:
        """Return the attempt's entry for a heartbeat."""
        known = self.news.known
        state = known.state if known.ending is None else State.STOPPING
        return AttemptSeen(run_id=self.remote.run_id, fence=self.remote.fence, state=state)

    def is_over(self) -> bool:
        """Return True once this controller has completed all tasks for the attempt."""
        return not any(thread.is_alive() for thread in self._threads)

    def abandon(self) -> None:
        """Stop an attempt that the server has given up. The attempt's files stay on the node."""
        if self._abandoned:
            return
        self._abandoned = True
        self._say(f"the server has given up attempt {self.remote.gang}, but its files stay in {self.directory}")
        self.stop(StopReason.CANCEL)
        self._write_stale()

    # --- server answers ------------------------------------------------------------------------------------------

    def renew(self, deadline_ns: int, stop: StopReason | None) -> None:
        """Extend the lease and forward a stop request. The first call of `renew` lets user code start."""
        if not self._confirmed:
            faults.reach("after_answer_before_confirm")
        self._tell(protocol.Lease(deadline_ns=deadline_ns))
        if stop is not None:
            self.stop(stop)
        elif not self._confirmed:
            self._confirmed = True
            self._tell(protocol.Confirm())

    def pass_on(self, news: protocol.GangNews) -> None:
        """Send the server's gang state to the supervisor if the state has changed."""
        if news not in (self._gang, protocol.GangNews()):
            self._gang = news
            self._tell(news)

    def heard(self, deadline_ns: int) -> None:
        """Extend the lease of a confirmed attempt. `heard` never confirms an attempt."""
        if self._confirmed:
            self._tell(protocol.Lease(deadline_ns=deadline_ns))

    def settled(self) -> None:
        """Record that the server has all data of the attempt."""
        faults.reach("after_ending_before_settled")
        self._write_down(standing="settled")

    # --- listening thread ----------------------------------------------------------------------------------------

    def _run_threads(self, begin: Callable[[], None], *, fresh: bool, first_s: float) -> None:
        credential = Credential(self.remote.token, lambda token: self._write_down(token=token))
        self._server.credentials.add(self.remote.gang, credential)
        reporter = Reporter(
            self.directory, self.remote, self.news, server=self._server, clock=self._clock, say=self._say
        )

        def listen() -> None:
            begin()
            self._listen()

        def report() -> None:
            reporter.run(self, fresh=fresh, first_s=first_s)
            self._reported.set()
            self._write_stale()

        gang = self.remote.gang
        self._threads = [
            threading.Thread(target=listen, name=f"listen {gang}", daemon=True),
            threading.Thread(target=report, name=f"report {gang}", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def _begin(self, order: Start, egress: NodeEgress) -> None:
        """Launch the attempt of an order. Convert a launch failure to the attempt's final state."""
        try:
            line = self._server.line(order.token)
            try:
                attempt_launch.write_call(order, self.directory, line.get())
            finally:
                line.close()
            # The agent may start user code of the principal, for example of its environment, before the ranks.
            egress_problem = None if order.egress is None else egress.require(order.egress)
            channel, greeting = connect(self._home)
            profile = self._server.profile
            store = StoreLocation(f"sgpu+{profile.url}", self._server.session.token(), profile.ca)
            try:
                now_ns = self._server.time.wall_ns(self._clock.boottime_ns()) or self._clock.wall_ns()
                # The submission time and the present time come from the server's clock.
                waited_ns = now_ns - order.submitted_ns if order.submitted_ns else 0
                launch = attempt_launch.make_launch(
                    order, self.directory, greeting, clock=self._clock, waited_ns=waited_ns, store=store
                )
                launch = msgspec.structs.replace(launch, egress_problem=egress_problem)
                launch = attempt_launch.with_secrets(order, launch)
                if order.secrets:
                    faults.reach("after_secrets_before_launch")
                attempt_launch.write_run(launch)
                self._agent_pid = greeting.pid
                self._launch = launch
            except BaseException:
                channel.close()
                raise
            self._send(channel)
        except (ServerlessGpuError, OSError) as error:
            self._detail = str(error)

    def _send(self, channel: Channel) -> None:
        assert self._launch is not None
        self._launches += 1
        try:
            protocol.send(channel, msgspec.structs.replace(self._launch, confirmed=self._confirmed))
        except OSError:
            channel.close()
            return  # After the agent's exit, `_look` launches the attempt again.
        self._take(channel)

    def _take(self, channel: Channel) -> None:
        """Use a new connection to the attempt's supervisor or agent, and send pending messages on it."""
        with self._lock:
            self._channel = channel
        if self._confirmed:
            self._tell(protocol.Confirm())
        if self._gang != protocol.GangNews():
            self._tell(self._gang)
        stop = self.news.known.stop
        if stop is not None:
            self._tell(protocol.Cancel(reason=stop))

    def _listen(self) -> None:
        """Process messages until the attempt has a final state and a receipt."""
        while True:
            if self._channel is not None:
                self._hear(self._channel)
            if not self._look():
                break
            self._connections += 1
        # A killed supervisor may have left secret files and files of the principal.
        secret_files.remove(self.directory)
        reclaim(find_spawner(os.environ), written_files(self.directory, None))
        self._write_stale()

    def _write_stale(self) -> None:
        """Record that this node no longer reports an abandoned attempt.

        The record changes only after the attempt has ended, because the next uplink does not end a stale attempt. The
        server must also have the attempt's facts.
        """
        if self._abandoned and self.news.known.finished and self._reported.is_set():
            self._write_down(standing="stale")

    def _write_down(self, **changes: str) -> None:
        """Update the attempt's record for the next uplink. Two threads may call `_write_down` concurrently."""
        with self._writing, contextlib.suppress(OSError):
            self.remote = msgspec.structs.replace(self.remote, **changes)
            write_remote(self.directory, self.remote)

    def _hear(self, channel: Channel) -> None:
        while True:
            try:
                received = protocol.receive(channel)
            except (OSError, msgspec.MsgspecError):
                received = None
            if received is None:
                break
            for fd in received[1]:
                os.close(fd)
            self._understand(received[0])
        self._seen_ns = self._clock.boottime_ns()
        with self._lock:
            self._channel = None
            channel.close()

    def _understand(self, message: protocol.AnyMessage) -> None:
        match message:
            case protocol.Output() | protocol.Skipped():
                self.news.learn(SOON_S)
            case protocol.WaitingNote(sentence=sentence, lasting=lasting):
                self._of_itself = sentence if lasting else self._of_itself
                self.news.learn(SOME_TIME_S, sentence=sentence)
            case protocol.Started():
                within_s = AT_ONCE_S if self._is_awaited() else BEGUN_S
                self.news.learn(within_s, begun=True, state=State.RUNNING, sentence=self._of_itself)
            case protocol.Tracked(url=url):
                self.news.learn(SOON_S, tracked=url)
            case protocol.CrewNews() as crew:
                self.news.learn(AT_ONCE_S, crew=crew)
            case protocol.AttemptSnapshot(state=state, waiting=waiting, tracked=tracked, crew=crew_news):
                for word in (tracked, crew_news):
                    if word is not None:
                        self._understand(word)
                begun = state not in (State.QUEUED, State.STARTING) and has_begun(first_facts(self.directory))
                self.news.learn(
                    SOME_TIME_S, begun=begun, state=State.RUNNING if begun else State.STARTING, sentence=waiting
                )
            case protocol.Stopped() as stopped:
                self.news.learn(RECEIPT_S, ending=stopped)
            case protocol.Finished():
                self.news.learn(AT_ONCE_S, finished=True)
            case protocol.Refused(message=text):
                self._detail = text
            case _:
                pass

    def _is_awaited(self) -> bool:
        """Return True if ranks on other nodes wait for rank 0 on this node."""
        return self._launch is not None and len(self._launch.crews) > 1 and self._launch.crew == 0

    def _look(self) -> bool:
        """Connect to the process that controls the attempt. Return False once the attempt is finished."""
        pause_s = _LOOK_S
        if self._connections and not self._is_finished():
            self._pause(pause_s)  # The pause prevents a busy loop if a peer accepts and disconnects at once.
        while not self._is_finished():
            channel = self._supervisor()
            if channel is not None:
                self._take(channel)
                return True
            lock = self._lock_free()
            if lock >= 0:
                try:
                    again = self._should_launch_again()
                    if not again:
                        self.write_ending()
                        return False
                finally:
                    os.close(lock)
                if self._launch_again():
                    return True
            self._pause(pause_s)
            pause_s = min(2 * pause_s, LOOK_S_MAX)
        return False

    def _is_finished(self) -> bool:
        if self.news.known.finished:
            return True
        stopped = read_ending(self.directory)
        if stopped is None or read_receipt(self.directory) is None:
            return False
        self.news.learn(AT_ONCE_S, ending=stopped, finished=True)
        return True

    def _lock_free(self) -> int:
        try:
            return try_lock(self.directory)
        except (FileNotFoundError, NotADirectoryError) as error:  # The attempt's directory was deleted.
            self.news.learn(
                AT_ONCE_S,
                ending=stopped_without_ranks(Reason.REFUSED, f"{self._detail}; {error}", self._clock),
                finished=True,
            )
            return -1
        # On a full or broken disk, the node cannot determine which process controls the attempt.
        except OSError as error:
            self.news.learn(SOME_TIME_S, sentence=f"cannot check the attempt's lock: {error}")
            return -1

    def _should_launch_again(self) -> bool:
        """Return True if the agent died before a supervisor accepted the attempt.

        The caller holds the attempt's lock.
        """
        if self._launch is None or self._launches >= LAUNCHES_MAX or self.news.known.stop is not None:
            return False
        nothing = not first_facts(self.directory) and not (self.directory / "stopped.json").exists()
        return nothing and not os.path.exists(f"/proc/{self._agent_pid}")

    def _launch_again(self) -> bool:
        try:
            channel, greeting = connect(self._home)
        except ServerlessGpuError as error:
            self._detail = str(error)
            self._launches += 1
            return False
        self._agent_pid = greeting.pid
        self._send(channel)
        return True

    def write_ending(self) -> None:
        """Write the missing `stopped.json` and receipt once no process of the attempt holds a device.

        The caller holds the attempt's lock. The wait has no time limit, because the server may start another attempt as
        soon as it receives the final state.
        """
        pause_s = _LOOK_S
        while still_held(self._home, self.directory):
            self._seen_ns = self._clock.boottime_ns()
            sentence = "the run's supervisor has ended, but a process of the run still uses a device"
            self.news.learn(SOME_TIME_S, state=State.STOPPING, sentence=sentence)
            self._pause(pause_s)
            pause_s = min(2 * pause_s, LOOK_S_MAX)
        begun = may_have_begun(first_facts(self.directory))
        stopped = settle_orphan(self.directory, self.remote, self._detail, self._clock, seen_ns=self._seen_ns)
        self.news.learn(AT_ONCE_S, begun=self.news.known.begun or begun, ending=stopped, finished=True)

    def _supervisor(self) -> Channel | None:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            sock.connect(str(self._home.sockets() / f"{self.remote.run_id}.sock"))
        except (OSError, ServerlessGpuError):
            sock.close()
            return None
        return Channel(sock)

    def _tell(self, message: protocol.Message) -> None:
        with self._lock:
            if self._channel is not None:
                with contextlib.suppress(OSError):  # The listening thread detects a closed connection.
                    protocol.send(self._channel, message)

    @staticmethod
    def _pause(seconds: float) -> None:
        threading.Event().wait(seconds)


def still_held(home: Home, directory: Path) -> bool:
    """Return True while a process of the attempt holds one of the attempt's devices."""
    run_id = directory.parent.name
    uuids = {uuid for fact in first_facts(directory) for uuid in fact.gpus}
    for base in (home.locks, *MACHINE_DIRECTORIES):
        for uuid in uuids:
            note = held_note(base / f"{uuid}.lock")
            if note is not None and holder_run_id(note) in (run_id, ""):
                return True
    return False


def settle_orphan(
    directory: Path, remote: ServerAttempt, detail: str, clock: Clock, *, seen_ns: int | None = None
) -> protocol.Stopped:
    """Write `stopped.json` and receipt of an attempt without a supervisor. Return the final state.

        no facts                        refused: no user code ran or will run
        facts, even damaged ones        supervisor lost; the devices' locks show when the attempt's processes have ended
        `stopped.json` but no receipt   a receipt of the known facts

    The caller holds the attempt's lock. `detail` is the reason why the attempt never started. `seen_ns` is the boottime
    at which a process of the attempt was last seen, or None.
    """
    # User code may have begun if the record is damaged, or if facts exist without a record.
    begun = first_facts(directory) or remote.recovered or (directory / "facts.jsonl").exists()
    stopped = None if begun else stopped_without_ranks(Reason.REFUSED, detail, clock)
    lost = LostAttempt(
        run_id=remote.run_id,
        fence=remote.fence,
        gpu_type=remote.gpu_type,
        world_size=remote.world_size,
        tariff=remote.tariff,
    )
    return settle_loss(directory, clock, seen_ns=seen_ns, stopped=stopped, lost=lost)
