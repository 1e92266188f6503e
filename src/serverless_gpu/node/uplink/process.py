"""The uplink process: one process per home and server, with outgoing connections only.

    main thread      session ─▶ hello ─▶ heartbeat, heartbeat …   (hello again after a lost connection)
    orders           stream ─▶ Start: directory, AttemptController │ Stop: to its controller   (again after a break)
    acknowledging    sends acknowledgements in batches
    network rules    applies the pool's network policy, and resolves its names again once a minute
    devices          keeps the latest measured values of the node's GPUs for heartbeats (`device_watch.py`)
    two per attempt  one listens to the supervisor, one reports (`attempt_controller.py`, `reporter.py`)

The uplink joins the server with an agent token and the key of the node (`node_session.py`). The uplink makes no
decisions about a run. The server sends the orders that the supervisor executes. The uplink outlives the process that
started it (`start_stop.py`). A run needs the uplink only for its reports and its lease.

Failure cases:

If the uplink is killed, runs continue. The next uplink finds runs by `remote.json` and by their sockets. The next
uplink sends the data that the server does not have.

If the server does not answer, the uplink retries with exponential backoff of up to 5 s. Unsent data stays on the node's
disk.

If the server restarts with another port or token, the uplink reads the profile again.

If an attempt's token expires while the server is unreachable, the next heartbeat returns another token (`server.py`).

If the server refuses the session's token, the uplink opens another session. If the server knows another key of the
node, the log names the remedy.

If two uplinks start at once, the uplink that does not acquire the lock exits.

If an administrator has not approved the node yet, or another process uses its identity, the log names the remedy. The
uplink repeats its hello message until the server accepts the node.

If the server repeats a refused order before it has received the refusal, the uplink refuses the order again.

Without attempts and without an answer from the server, the uplink exits after ten minutes.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import sys
import threading
from pathlib import Path
from typing import NoReturn
from urllib.parse import quote

from serverless_gpu import faults
from serverless_gpu.ambient import SystemClock, format_moment
from serverless_gpu.errors import IsolationUnavailable, NotAllowed, NotAuthenticated, NotFound, ServerlessGpuError
from serverless_gpu.model.egress import EgressPolicy
from serverless_gpu.model.hardware import DeviceKind
from serverless_gpu.model.isolation import NONE
from serverless_gpu.model.lifecycle.attempt import MEANINGS, Reason, State
from serverless_gpu.node.attempt.server_attempt_record import ServerAttempt, open_attempts
from serverless_gpu.node.base.home import Home
from serverless_gpu.node.base.lock_files import hold
from serverless_gpu.node.base.protocol import GangNews
from serverless_gpu.node.canary.examination import Examination, examine
from serverless_gpu.node.canary.targets import server_address
from serverless_gpu.node.inside import linux
from serverless_gpu.node.isolation.egress import NodeEgress
from serverless_gpu.node.isolation.machine_egress import REFRESH_S
from serverless_gpu.node.spawner.client import find_spawner
from serverless_gpu.node.uplink import attempt_launch
from serverless_gpu.node.uplink.attempt_controller import AttemptController
from serverless_gpu.node.uplink.device_watch import DeviceWatch
from serverless_gpu.node.uplink.node_key_file import NodeKeyFile
from serverless_gpu.node.uplink.presence import NodePresence
from serverless_gpu.node.uplink.server import Backoff, UplinkServer
from serverless_gpu.node.uplink.start_stop import lock_path
from serverless_gpu.node.uplink.tunnels import NodeTunnels
from serverless_gpu.version import __version__
from serverless_gpu.wire.agents import (
    AgentWelcome,
    CanaryResult,
    Ending,
    HeartbeatAnswer,
    OpenTunnel,
    OrdersTaken,
    Report,
    ReportAnswer,
    ReportNow,
    RunCanary,
    Start,
    Stop,
    StreamedOrder,
)
from serverless_gpu.wire.connection import Connection

IDLE_S = 600.0
_HEARTBEAT_S = 5.0
_ACKNOWLEDGED_AT_ONCE = 500
_ACKNOWLEDGED_AFTER_S = 0.25
"""Delay of acknowledgements in seconds. A batch of acknowledgements saves a request and a database commit during a
short run."""


def main(home: str, profile: str, environ: dict[str, str]) -> NoReturn:
    """Run the uplink until it is idle.

    `environ` may declare the devices that the node offers.
    """
    if os.fork():
        os._exit(0)  # The uplink's parent exits here, because the starter may exit before or after the uplink.
    os.setsid()
    linux.set_name("sgpu-uplink")
    linux.outlive_ranks()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.update(environ)
    place = Home(Path(home))
    if hold(lock_path(place, Path(profile)), f"{os.getpid()} {__version__}") is None:
        os._exit(0)
    # The next uplink repeats all steps that this uplink leaves incomplete.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    code = 0
    try:
        uplink = Uplink(place, Path(profile))
        signal.signal(signal.SIGTERM, lambda *_: uplink.end())
        uplink.serve()
    except ServerlessGpuError as error:
        say(f"it ends: {error}")
        code = 1
    sys.stdout.flush()
    os._exit(code)  # Attempts continue. The exit does not join threads that wait for the network.


class Uplink:
    """The uplink's threads and their shared state. Raises InvalidValue for an unreadable profile."""

    def __init__(self, home: Home, profile: Path) -> None:
        self._home = home
        self._clock = SystemClock()
        self._server = UplinkServer(profile, self._clock, NodeKeyFile(home))
        self._presence = NodePresence(home)
        self._egress = NodeEgress(
            home.root,
            os.environ,
            self._clock,
            find_spawner(os.environ, "network"),
            server_url=lambda: self._server.profile.url,
            say=say,
        )
        if self._presence.level.level == NONE:
            self._egress.problem = "the node isolates no principals"
        self._devices = DeviceWatch(home, self._clock)
        self._tunnels = NodeTunnels(home, self._server, say)
        self._offered: queue.SimpleQueue[tuple[EgressPolicy, int]] = queue.SimpleQueue()
        self._controllers: dict[str, AttemptController] = {}
        self._lock = threading.Lock()
        self._wake = self._server.credentials.wanted
        self._node = ""
        self._joined = threading.Event()
        self._heartbeat_s = _HEARTBEAT_S
        self._taken: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._error = ""
        self._canary = ""  # Identifier of the last canary that the server requested.
        self._refused: dict[str, str] = {}
        self._refusing: set[str] = set()

    def serve(self) -> None:
        """Run until the uplink is idle."""
        for directory, remote in open_attempts(self._home.runs, str(self._server.path)):
            controller = AttemptController(
                self._home, directory, remote, server=self._server, clock=self._clock, say=say
            )
            self._controllers[remote.gang] = controller
            say(f"continues attempt {remote.gang}")
            controller.adopt()
        for work in (self._follow_orders, self._acknowledge, self._keep_egress, self._devices.follow):
            threading.Thread(target=work, name=work.__name__, daemon=True).start()
        backoff = Backoff()
        line = self._server.line()
        while not self._is_idle():
            try:
                self._server.session.renew()
                self._be_present(line.get())
            except ServerlessGpuError as error:
                self._away(error)
                pause_s = backoff.next_s()
            else:
                backoff.reset()
                self._server.answered()
                self._error = ""
                pause_s = self._heartbeat_s
            self._wake.wait(pause_s)
            self._wake.clear()
        self._egress.leave()

    def end(self) -> NoReturn:
        """End the process, and remove the node's network rules unless attempts continue without the uplink."""
        if not self._controllers:
            self._egress.leave()
        os._exit(0)

    # --- presence ------------------------------------------------------------------------------------------------

    def _be_present(self, connection: Connection) -> None:
        ended: list[ServerAttempt] = []
        with self._lock:
            for gang in [gang for gang, controller in self._controllers.items() if controller.is_over()]:
                ended.append(self._controllers.pop(gang).remote)
                self._server.credentials.remove(gang)
            seen = tuple(controller.seen() for controller in self._controllers.values())
        for attempt in ended:
            self._tunnels.end(attempt.run_id, attempt.fence)
        if not self._joined.is_set():
            hello = self._presence.hello(
                self._server.profile, seen, keys=self._server.session.keys, egress_problem=self._egress.problem
            )
            asked_ns = self._clock.boottime_ns()
            welcome = connection.ask("POST", "/agents", hello, answer=AgentWelcome)
            self._server.time.heard(welcome.at_ns, asked_ns=asked_ns, answered_ns=self._clock.boottime_ns())
            self._heartbeat_s = welcome.heartbeat_s
            self._node = welcome.node
            self._joined.set()
            if any(device.kind is not DeviceKind.CPU for device in hello.devices):
                self._devices.want()
            self._abandon(welcome.stale)
            key = self._server.session.keys.fingerprint
            say(f"joined {self._server.profile.url} as node {welcome.node} with the key {key}")
            return
        path = f"/agents/{self._node}/heartbeat"
        beat = self._presence.heartbeat(
            seen,
            renew=self._server.credentials.to_renew(),
            clock=self._server.time.reading(self._clock),
            egress=None if self._egress.problem else self._egress.digest,
            samples=self._devices.latest(),
        )
        asked_ns = self._clock.boottime_ns()
        answer = connection.ask("POST", path, beat, answer=HeartbeatAnswer)
        self._server.time.heard(answer.at_ns, asked_ns=asked_ns, answered_ns=self._clock.boottime_ns())
        self._server.credentials.take(answer.tokens)
        self._abandon(answer.stale)
        if answer.egress is not None:
            self._offered.put((answer.egress, asked_ns))
        if answer.rotate:
            self._server.session.rotate(connection)
            say(f"replaced the key of this node with {self._server.session.keys.fingerprint}")

    def _keep_egress(self) -> None:
        """Apply offered network policies, and refresh the network rules, in an endless loop.

        A name server that does not answer must not delay heartbeats.
        """
        while True:
            try:
                policy, asked_ns = self._offered.get(timeout=REFRESH_S)
            except queue.Empty:
                self._egress.refresh()
            else:
                known = self._egress.problem
                self._egress.offer(policy, asked_ns=asked_ns)
                if self._egress.problem != known:
                    self._joined.clear()  # The next hello tells the server that the node enforces no policies.

    def _abandon(self, gangs: tuple[str, ...]) -> None:
        for gang in gangs:
            with self._lock:
                controller = self._controllers.get(gang)
            if controller is not None:
                controller.abandon()

    def _away(self, error: ServerlessGpuError) -> None:
        """Record that the server does not answer, and read its profile again."""
        if isinstance(error, NotFound | NotAuthenticated):
            self._joined.clear()
        if isinstance(error, NotAuthenticated):
            self._server.session.drop()
        text = f"{type(error).__name__}: {error.message}"
        if isinstance(error, NotAllowed):  # An operator must approve the node or replace its token.
            text += f" ({error.hint})" if error.hint else ""
        if text != self._error:  # Log only the first of several equal errors.
            say(text)
        self._error = text
        self._server.look_again()

    def _is_idle(self) -> bool:
        with self._lock:
            return not self._controllers and self._server.silent_s() > IDLE_S

    # --- orders --------------------------------------------------------------------------------------------------

    def _follow_orders(self) -> None:
        """Process the server's stream of orders in an endless loop.

        After the order stream breaks, the server repeats unacknowledged orders.
        """
        backoff = Backoff()
        line = self._server.line()
        query = {"instance": self._presence.instance, "process": self._presence.process}
        while True:
            self._joined.wait()
            node = self._node
            try:
                for order in line.get().stream("GET", f"/agents/{node}/orders", answer=StreamedOrder, query=query):
                    backoff.reset()
                    self._server.answered()
                    self._obey(order)
            except ServerlessGpuError as error:
                say(f"orders: {type(error).__name__}: {error.message}")
                self._server.look_again()
            # The node sends its hello message again, because another server process may answer after the stream breaks.
            self._joined.clear()
            self._wake.set()
            threading.Event().wait(backoff.next_s())

    def _obey(self, order: StreamedOrder) -> None:
        if isinstance(order, RunCanary):
            self._start_canary(order)
            return
        if isinstance(order, OpenTunnel):
            self._tunnels.open(self._node, order)
            return
        gang = f"{order.run_id}:{order.fence}"
        with self._lock:
            controller = self._controllers.get(gang)
        match order:
            case Stop(reason=reason):
                if controller is not None and order.released:
                    # The supervisor gets the release before the stop request, because all ranks have returned.
                    controller.pass_on(GangNews(release=True))
                if controller is not None:
                    controller.stop(reason)
                self._taken.put(order.seq)
            case ReportNow():
                if controller is not None:
                    controller.look(order)
            case Start():
                if controller is not None:
                    self._taken.put(order.seq)
                elif gang in self._refused:
                    self._refuse(order, gang)
                else:
                    self._start(order, gang)

    def _start(self, order: Start, gang: str) -> None:
        try:
            order = attempt_launch.opened(order, self._server.session)
            taken = attempt_launch.take_order(self._home, order, self._server.path)
        # If the disk cannot show whether the attempt already runs on this node, the server must repeat the order.
        except OSError as error:
            say(f"cannot check attempt {gang}: {error}")
            return
        except ServerlessGpuError as error:
            say(f"cannot accept attempt {gang}: {error}")
            self._refused[gang] = str(error)
            self._refuse(order, gang)
            return
        if taken is None:
            self._taken.put(order.seq)
            return
        faults.reach("after_directory_before_launch")
        controller = AttemptController(self._home, *taken, server=self._server, clock=self._clock, say=say)
        with self._lock:
            self._controllers[gang] = controller
        controller.start(order, self._egress)
        faults.reach("after_launch_before_ack")
        self._taken.put(order.seq)

    def _start_canary(self, order: RunCanary) -> None:
        """Run the canary in a thread, unless this process has already started it."""
        if self._canary == order.id:
            return
        self._canary = order.id
        threading.Thread(target=lambda: self._run_canary(order), name=f"canary {order.id}", daemon=True).start()

    def _run_canary(self, order: RunCanary) -> None:
        services = {**server_address(self._server.profile.url), **order.services}
        problem = None
        if order.egress is not None:
            try:
                problem = self._egress.require(order.egress)
            except IsolationUnavailable as error:
                problem = error.message  # The report shows what runs without rules could reach.
        wanted = Examination(self._node, order.isolation, services, problem)
        report = examine(self._home, self._clock, wanted, os.environ)
        line = self._server.line()
        try:
            path = f"/agents/{self._node}/canary"
            line.get().ask("POST", path, CanaryResult(id=order.id, report=report), answer=type(None))
        except ServerlessGpuError as error:
            say(f"report of the canary: {error}")
        finally:
            line.close()

    def _refuse(self, order: Start, gang: str) -> None:
        """Report in a thread that the node refused an attempt.

        The server repeats the refused order until it has received the report. The uplink never starts a refused
        attempt, even if the node could run the attempt later. The server may receive the refusal at any moment and
        place the run on another node.
        """
        with self._lock:
            if gang in self._refusing:
                return
            self._refusing.add(gang)
        detail = self._refused[gang]
        threading.Thread(
            target=lambda: self._report_refusal(order, gang, detail), name=f"refuse {gang}", daemon=True
        ).start()

    def _report_refusal(self, order: Start, gang: str, detail: str) -> None:
        reason = Reason.REFUSED
        ending = Ending(state=MEANINGS[reason].state, reason=reason, began=False)
        report = Report(state=State.STOPPING, sentence=detail, world_size=order.world_size, ending=ending)
        line = self._server.line(order.token)
        try:
            path = f"/attempts/{quote(order.run_id, safe='')}/{order.fence}/report"
            line.get().ask("POST", path, report, answer=ReportAnswer)
        except ServerlessGpuError as error:
            say(f"report of {gang}: {error}")
        else:
            self._taken.put(order.seq)
        finally:
            line.close()
            with self._lock:
                self._refusing.discard(gang)

    def _acknowledge(self) -> None:
        """Acknowledge orders to the server. The server repeats an order whose acknowledgement is lost."""
        line = self._server.line()
        while True:
            taken = [self._taken.get()]
            threading.Event().wait(_ACKNOWLEDGED_AFTER_S)
            with contextlib.suppress(queue.Empty):
                while len(taken) < _ACKNOWLEDGED_AT_ONCE:
                    taken.append(self._taken.get_nowait())
            node = self._node
            with contextlib.suppress(ServerlessGpuError):
                line.get().ask("POST", f"/agents/{node}/orders/ack", OrdersTaken(seqs=tuple(taken)), answer=type(None))


def say(line: str) -> None:
    """Write a line to the uplink's log. If the disk is full, the uplink drops the line and continues."""
    with contextlib.suppress(OSError):
        print(f"{format_moment(SystemClock().wall_ns())} uplink: {line}", flush=True)
