"""One attempt, controlled by this node for its server: started, listened to, reported, stopped.

    order ──▶ AttemptController ──Launch──▶ agent ──▶ supervisor        one thread listens: Started, Stopped, Finished …
                │ ▲                           │
                │ └──── the socket ───────────┘
                └─ PendingReport ─▶ Reporter ─▶ server       another one reports; answers become Lease, Confirm, Cancel

A restarted uplink has the directory and `remote.json`: it connects to the supervisor's socket and goes on. Without a
supervisor's socket, the attempt's lock shows whether one lives; if none does, the uplink writes what a supervisor would
have written (`settle_orphan`). So each attempt gets an ending and a receipt.

Failure cases: the node cannot start the attempt (an ending `refused`, nothing of the user's ran); the agent dies with
the launch in its queue (launched again, three times at most: no facts, so nothing has run); the supervisor is killed
(`supervisor_killed`, or `supervisor_lost` where the kernel says that the machine failed, as soon as none of its
processes holds a device; one that cannot be ended keeps it STOPPING).
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
_RESTARTED = "the node's uplink ended before the run was launched"


class AttemptController:
    """The uplink's control of one attempt; `say` takes a line for the log."""

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
        self._gang = protocol.GangNews()  # what the server said of it last
        self._abandoned = False
        self._launch: protocol.Launch | None = None
        self._launches = 0
        self._connections = 0
        self._seen_ns: int | None = None  # boottime at which a process of it was seen last
        self._agent_pid = 0
        self._detail = _RESTARTED
        self._of_itself = ""  # what the run says of itself
        self._reported = threading.Event()
        self._threads: list[threading.Thread] = []

    # --- from outside --------------------------------------------------------------------------------------------

    def start(self, order: Start) -> None:
        """Start the attempt, in threads of its own."""
        first_s = FIRST_OF_GANG_S if len(order.crews) > 1 else AT_ONCE_S
        self._run_threads(lambda: self._begin(order), fresh=True, first_s=first_s)

    def adopt(self) -> None:
        """Go on with an attempt that an earlier uplink started."""
        begun = has_begun(first_facts(self.directory))
        self.news.learn(AT_ONCE_S, begun=begun, state=State.RUNNING if begun else State.STARTING)
        self._run_threads(lambda: None, fresh=False, first_s=AT_ONCE_S)

    def stop(self, reason: StopReason) -> None:
        """Have the attempt stopped in order; a later reason may be a stronger one."""
        if self.news.known.stop is not reason:
            self.news.learn(SOON_S, stop=reason)
            self._tell(protocol.Cancel(reason=reason))

    def look(self, order: ReportNow) -> None:
        """Pass on the order's news, and have the attempt reported: at once if the answer brings the news."""
        news = protocol.GangNews(
            offers=order.offers, chosen=order.chosen, release=order.release, peer_failed=order.peer_failed
        )
        self.pass_on(news)
        self.news.learn(AT_ONCE_S if news == protocol.GangNews() else SOME_TIME_S)

    def seen(self) -> AttemptSeen:
        """Return what a heartbeat says of it."""
        known = self.news.known
        state = known.state if known.ending is None else State.STOPPING
        return AttemptSeen(run_id=self.remote.run_id, fence=self.remote.fence, state=state)

    def is_over(self) -> bool:
        """Return whether there is nothing left to be done for it."""
        return not any(thread.is_alive() for thread in self._threads)

    def abandon(self) -> None:
        """Stop an attempt that is over for the server, and keep its files."""
        if self._abandoned:
            return
        self._abandoned = True
        self._say(f"attempt {self.remote.gang} is over for the server; its files stay in {self.directory}")
        self.stop(StopReason.CANCEL)
        self._write_stale()

    # --- answers of the server -----------------------------------------------------------------------------------

    def renew(self, deadline_ns: int, stop: StopReason | None) -> None:
        """Extend the lease (boottime), and stop the attempt if asked; the first call lets user code start."""
        if not self._confirmed:
            faults.reach("after_answer_before_confirm")
        self._tell(protocol.Lease(deadline_ns=deadline_ns))
        if stop is not None:
            self.stop(stop)
        elif not self._confirmed:
            self._confirmed = True
            self._tell(protocol.Confirm())

    def pass_on(self, news: protocol.GangNews) -> None:
        """Tell the supervisor what the server says of the gang; what it has heard before it is not told again."""
        if news not in (self._gang, protocol.GangNews()):
            self._gang = news
            self._tell(news)

    def heard(self, deadline_ns: int) -> None:
        """Let an attempt that was confirmed go on until then; one that was not does not start for that."""
        if self._confirmed:
            self._tell(protocol.Lease(deadline_ns=deadline_ns))

    def settled(self) -> None:
        """Note that the server has everything."""
        faults.reach("after_ending_before_settled")
        self._write_down(standing="settled")

    # --- the listening thread ------------------------------------------------------------------------------------

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

    def _begin(self, order: Start) -> None:
        """Launch what an order asks for; what cannot be is an ending, not an exception."""
        try:
            line = self._server.line(order.token)
            try:
                attempt_launch.write_call(order, self.directory, line.get())
            finally:
                line.close()
            channel, greeting = connect(self._home)
            profile = self._server.profile
            store = StoreLocation(f"sgpu+{profile.url}", profile.token, profile.ca)
            try:
                now_ns = self._server.time.wall_ns(self._clock.boottime_ns()) or self._clock.wall_ns()
                waited_ns = now_ns - order.submitted_ns if order.submitted_ns else 0  # both by the server's clock
                launch = attempt_launch.make_launch(
                    order, self.directory, greeting, clock=self._clock, waited_ns=waited_ns, store=store
                )
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
            return  # the agent is gone; who looks next launches again
        self._take(channel)

    def _take(self, channel: Channel) -> None:
        """Adopt a connection to the attempt's supervisor or agent; send the messages that wait for one."""
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
        """Hear what happens until the attempt has an ending and a receipt."""
        while True:
            if self._channel is not None:
                self._hear(self._channel)
            if not self._look():
                break
            self._connections += 1
        secret_files.remove(self.directory)  # a killed process may have left them
        self._write_stale()

    def _write_stale(self) -> None:
        """Record that nothing of an abandoned attempt is reported any more.

        Only once it has ended, or the next uplink would not end it, and once its facts were reported.
        """
        if self._abandoned and self.news.known.finished and self._reported.is_set():
            self._write_down(standing="stale")

    def _write_down(self, **changes: str) -> None:
        """Change what the next uplink finds; two threads may have something to change."""
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
        """Return whether the ranks of other nodes begin once those of this one have."""
        return self._launch is not None and len(self._launch.crews) > 1 and self._launch.crew == 0

    def _look(self) -> bool:
        """Find the process that controls the attempt now; return False once none needs to."""
        pause_s = _LOOK_S
        if self._connections and not self._is_finished():
            self._pause(pause_s)  # who answers and hangs up at once is not asked again at once
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
        except (FileNotFoundError, NotADirectoryError) as error:  # the directory was deleted
            self.news.learn(
                AT_ONCE_S,
                ending=stopped_without_ranks(Reason.REFUSED, f"{self._detail}; {error}", self._clock),
                finished=True,
            )
            return -1
        except OSError as error:  # a disk that is full or broken: that says nothing about who has the attempt
            self.news.learn(SOME_TIME_S, sentence=f"its lock cannot be looked at: {error}")
            return -1

    def _should_launch_again(self) -> bool:
        """Return whether the agent died before anybody had the attempt; its lock is held."""
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
        """Write what is missing, once none of the attempt's processes holds a device; its lock is held.

        However long that takes: the server may begin another attempt as soon as it learns of the ending.
        """
        pause_s = _LOOK_S
        while still_held(self._home, self.directory):
            self._seen_ns = self._clock.boottime_ns()
            sentence = "its supervisor is gone; a process of it still has a device"
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
                with contextlib.suppress(OSError):  # its end is heard by who listens
                    protocol.send(self._channel, message)

    @staticmethod
    def _pause(seconds: float) -> None:
        threading.Event().wait(seconds)


def still_held(home: Home, directory: Path) -> bool:
    """Return whether a process of an attempt still holds one of its devices."""
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
    """Write the missing ending and receipt, the attempt's lock being held; return how it ended.

        no facts                        refused: nothing of the user's ran, and nothing will
        facts, even damaged ones        its supervisor was lost; its devices' locks say when its processes are gone
        an ending, and no receipt       a receipt that says what is known

    `detail` is why it never started, if so. `seen_ns` is the boottime at which something of it was seen last; None if
    unwatched.
    """
    # A damaged record, or a file of facts without one, is no proof that nothing began.
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
