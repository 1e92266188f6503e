"""The agent of one home directory: keeps interpreters warm and assigns a supervisor to each run.

    client ──connect──▶ agent ──▶ Greeting (inventory)
           ──Launch───▶       ──▶ a standby supervisor gets the client's socket, a standby stem follows
                              ──▶ next: the agent prepares another supervisor and another stem

After the hand-over, client and supervisor communicate directly. The supervisor, not the agent, makes all decisions
about the run. The agent has one thread with one event loop. The event loop blocks for at most about 2 ms, for example
to check a zygote's files. Once a minute, the event loop blocks longer to inspect the GPUs.

Attempts continue after an operator kills the agent. Zygotes and standby processes end with the agent. The next call
starts a new agent, which finds running attempts by their sockets. If two agents start at once, only one agent acquires
the lock. If a supervisor dies, the agent writes the missing `stopped.json` and receipt. The agent queues runs beyond
the maximum number of attempts. The agent sends each waiting client the queue position of its run.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import select
import selectors
import signal
import socket
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import msgspec

from serverless_gpu.ambient import SystemClock
from serverless_gpu.errors import IsolationUnavailable
from serverless_gpu.model.isolation import NONE
from serverless_gpu.model.lifecycle.attempt import MEANINGS, STOPPED_BY
from serverless_gpu.node.agent.attempts import Attempts, StemOwners, SupervisorLink, combined
from serverless_gpu.node.agent.environments import EnvironmentWaiter, RestoredEnvironment, RestoredEnvironments
from serverless_gpu.node.agent.zygote_pool import ZygotePool
from serverless_gpu.node.agent.zygotes import ZygoteRequest
from serverless_gpu.node.attempt import secret_files
from serverless_gpu.node.attempt.history import read_ending
from serverless_gpu.node.attempt.retention import RetentionSchedule
from serverless_gpu.node.attempt.usage_account import write_json
from serverless_gpu.node.base import protocol
from serverless_gpu.node.base.home import Home
from serverless_gpu.node.devices.inventory import Inventory
from serverless_gpu.node.inside import linux
from serverless_gpu.node.inside.channel import Channel, close_all
from serverless_gpu.node.isolation import SPAWNER
from serverless_gpu.node.isolation.principals import Principal, PrincipalMap
from serverless_gpu.node.isolation.sweeper import SweepSchedule
from serverless_gpu.node.monitor.start_stop import MonitorConnection, preparation
from serverless_gpu.node.processes.process_tree import AGENT, find_cgroup_root
from serverless_gpu.node.processes.spawn import bound_log, clean_process, open_log
from serverless_gpu.node.spawner.client import find_spawner
from serverless_gpu.node.spawner.ownership import reclaim, written_files
from serverless_gpu.node.supervisor.gpu_faults import NodeFaults
from serverless_gpu.node.supervisor.ray_cluster import ClusterSweeper
from serverless_gpu.version import __version__

ATTEMPTS_MAX = 64
QUEUED_MAX = 4_096
CLIENTS_MAX = 512
IDLE_S = 600.0
# Delay in seconds before the agent replaces a used standby process, so that new ranks get the CPU cores first.
_REFILL_S = 0.1
_TURN_S = 5.0
_IDLE_WORK_S = 10.0  # Idle seconds before the agent compiles the modules of restored environments.
_BREATH_S = 0.05


def main(home: str, sockets: str, ready_fd: int, environ: dict[str, str]) -> NoReturn:
    """Run the agent until it is idle for ten minutes.

    The agent closes `ready_fd` when it is ready for connections.
    """
    if os.fork():
        os._exit(0)  # The kernel reparents the agent to init, which reaps the agent after its end.
    linux.set_name(AGENT)
    linux.outlive_ranks()  # Supervisors inherit this protection from the OOM killer.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    lock = os.open(
        protocol.agent_socket(Path(sockets)).with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600
    )
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os._exit(0)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # The agent needs a file descriptor for each queued run.
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 65_536)), hard))
    os.ftruncate(lock, 0)
    os.write(lock, str(os.getpid()).encode())  # Clients print this pid if the agent does not answer.
    agent = Agent(Home(Path(home)), Path(sockets), environ)
    os.close(ready_fd)
    agent.serve()
    os._exit(0)


class Agent:
    """Event loop of the agent, with the state of all processes that the agent controls."""

    def __init__(self, home: Home, sockets: Path, environ: dict[str, str]) -> None:
        self._home = home
        self._sockets = sockets
        self._environ = environ
        self._clock = SystemClock()
        self._log = open_log(home.agent_log)
        self._selector = selectors.DefaultSelector()
        self._cgroups = find_cgroup_root(f"serverless_gpu-{os.getuid()}-{sockets.name}", environ)
        self._inventory = Inventory(home)
        self._spawner = find_spawner(environ)
        self._attempts = Attempts(home, sockets, self._log, environ, self._selector, self._clock)
        self._monitoring = MonitorConnection(home, sockets, environ, self._selector, self._clock)
        zygotes = self._zygotes = ZygotePool(home, self._log, self._cgroups, self._selector, self._clock, self._spawner)
        self._environments = RestoredEnvironments(home, self._log, environ, self._selector, zygotes.leave_environments)
        retention, rays = "serverless_gpu.node.attempt.retention", "serverless_gpu.node.supervisor.ray_cluster"
        self._retention = RetentionSchedule(
            self._clock,
            lambda fd: clean_process(retention, (str(home.root), fd), fds=(fd,), log=self._log, environ=environ),
        )
        self._rays = ClusterSweeper(
            self._clock, lambda: clean_process(rays, (), fds=(), log=self._log, environ=environ)
        )
        self._secrets = secret_files.SecretSweeper(self._clock)
        self._faults = NodeFaults(home, self._clock)
        self._stem_owners = StemOwners()
        known, sweeper = PrincipalMap(environ), "serverless_gpu.node.spawner.sweeper_process"
        self._sweeps = SweepSchedule(
            self._clock, known, lambda: clean_process(sweeper, (), fds=(), log=self._log, environ=environ)
        )
        zygotes.on_stranger = self._spawner.findings
        self._clients: dict[int, Channel] = {}
        self._inside: dict[int, str] = {}  # Owners of the attempts in which clients run, by client descriptor.
        self._queue: deque[tuple[protocol.Launch, Channel]] = deque()
        self._refill_ns: int | None = None
        self._used_ns = self._clock.boottime_ns()
        self._retired = False
        self._cgroups.sweep()
        self._attempts.adopt()
        self._listener = self._listen()
        self._attempts.prepare()

    def serve(self) -> None:
        """Serve clients until the agent exceeds its idle limit or a client sends `Retire`."""
        while not self._retired:
            is_idle = not self._attempts.count() and not self._queue
            if is_idle and self._clock.boottime_ns() - self._used_ns > IDLE_S * 1e9:
                break
            pause_s = _BREATH_S if self._zygotes.ending else _TURN_S
            if self._refill_ns is not None:
                pause_s = max(0.0, (self._refill_ns - self._clock.boottime_ns()) / 1e9)
            for key, _ in self._selector.select(pause_s):
                callback: Callable[[], None] = key.data
                callback()
            self._tend()
        self._listener.close()
        protocol.agent_socket(self._sockets).unlink(missing_ok=True)
        self._zygotes.close()
        self._monitoring.close()
        if not self._attempts.count():
            self._cgroups.close()

    # --- clients -------------------------------------------------------------------------------------------------

    def _listen(self) -> socket.socket:
        path = protocol.agent_socket(self._sockets)
        path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(str(path))
        listener.listen(128)
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        return listener

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:
            # The pause avoids a busy loop while `accept` fails for lack of free descriptors.
            select.select([], [], [], _BREATH_S)
            return
        channel = Channel(sock)
        if len(self._clients) >= CLIENTS_MAX:
            message = (
                f"the agent of this node already has {CLIENTS_MAX} idle clients, the maximum. End a waiting "
                "client and try again"
            )
            self._refuse(channel, protocol.Refused(code="agent_unavailable", message=message))
            return
        sock.settimeout(1.0)  # The timeout prevents a stopped client from blocking the agent.
        fd = channel.fileno()
        self._clients[fd] = channel
        self._inside[fd] = self._stem_owners.owner_of(sock)
        self._selector.register(fd, selectors.EVENT_READ, lambda: self._hear_client(channel))
        self._inventory.refresh()
        self._answer(channel, self._inventory.greeting(__version__))

    def _hear_client(self, channel: Channel) -> None:
        try:
            received = protocol.receive(channel)
        except (OSError, msgspec.MsgspecError) as error:
            self._answer(channel, protocol.Refused(code="agent_unavailable", message=f"invalid message: {error}"))
            received = None
        if received is None:
            self._drop(channel)
            return
        self._used_ns = self._clock.boottime_ns()
        close_all(received[1])  # The agent accepts no descriptors from clients.
        match received[0]:
            case protocol.Launch() as launch:
                owner = combined(launch.owner, self._inside[channel.fileno()])
                self._forget(channel)
                self._launch(msgspec.structs.replace(launch, owner=owner), channel)
            case protocol.Prewarm(context=context, ranks=ranks, environment=wanted, tracker=tracker):
                self._monitoring.want(preparation(tracker, context))
                self._prewarm(ZygoteRequest(context, owner=self._inside[channel.fileno()]), ranks, wanted)
            case protocol.StatusRequest():
                self._answer(channel, self._status())
            case protocol.Retire():
                self._retired = True
                self._drop(channel)
            case _:
                self._drop(channel)

    def _status(self) -> protocol.Status:
        return protocol.Status(
            pid=os.getpid(),
            zygotes=self._zygotes.statuses(),
            attempts=self._attempts.statuses(),
            queued=tuple(launch.run_id for launch, _ in self._queue),
            cgroups=str(self._cgroups.path or ""),
            cgroups_problem=self._cgroups.problem,
            environments=self._environments.statuses(),
        )

    def _answer(self, channel: Channel, message: protocol.Message) -> None:
        try:
            protocol.send(channel, message)
        except OSError:
            self._drop(channel)

    def _forget(self, channel: Channel) -> None:
        """Stop reading from a client without closing its socket."""
        self._inside.pop(channel.fileno(), None)
        if self._clients.pop(channel.fileno(), None) is not None:
            self._selector.unregister(channel.fileno())

    def _drop(self, channel: Channel) -> None:
        if channel.fileno() >= 0:
            self._forget(channel)
            channel.close()

    # --- runs ----------------------------------------------------------------------------------------------------

    def _launch(self, launch: protocol.Launch, client: Channel) -> None:
        if len(self._queue) >= QUEUED_MAX:
            self._refuse(
                client,
                protocol.Refused(
                    code="agent_unavailable",
                    message=f"the agent already has {QUEUED_MAX} queued runs, the maximum. Try again later",
                ),
            )
        elif self._attempts.count() >= ATTEMPTS_MAX:
            self._enqueue(launch, client)
        else:
            self._start(launch, client)

    def _enqueue(self, launch: protocol.Launch, client: Channel) -> None:
        """Queue a run, which the client may cancel or leave queued after disconnecting."""
        entry = (launch, client)
        ahead = len(self._queue) + ATTEMPTS_MAX
        self._queue.append(entry)
        self._selector.register(client, selectors.EVENT_READ, lambda: self._hear_queued(entry))
        with contextlib.suppress(OSError):
            protocol.send(client, protocol.WaitingNote(sentence=f"{ahead} runs of this home are ahead of this run"))

    def _hear_queued(self, entry: tuple[protocol.Launch, Channel]) -> None:
        client = entry[1]
        self._selector.unregister(client)
        try:
            received = protocol.receive(client)
        except (OSError, msgspec.MsgspecError):
            received = None
        if received is not None and isinstance(received[0], protocol.Confirm | protocol.Lease):
            word = received[0]
            changes = {"confirmed": True} if isinstance(word, protocol.Confirm) else {"lease_ns": word.deadline_ns}
            changed = (msgspec.structs.replace(entry[0], **changes), client)
            self._queue[self._queue.index(entry)] = changed
            self._selector.register(client, selectors.EVENT_READ, lambda: self._hear_queued(changed))
            return
        if received is None and not entry[0].confirmed:
            self._queue.remove(entry)  # The client disconnected before it confirmed the run.
            client.close()
            return
        if received is None or not isinstance(received[0], protocol.Cancel):
            return  # The run of the disconnected client keeps its position in the queue.
        self._queue.remove(entry)
        reason = STOPPED_BY[received[0].reason]
        stopped = protocol.Stopped(state=MEANINGS[reason].state, reason=reason, cause=None, consequences=())
        write_json(Path(entry[0].directory) / "stopped.json", stopped)
        with contextlib.suppress(OSError):
            protocol.send(client, stopped)
        client.close()

    def _start(self, launch: protocol.Launch, client: Channel) -> None:
        asked_ns = self._clock.boottime_ns()
        try:
            principal = self._spawner.principal(launch.owner, self._home.root) if launch.isolation != NONE else None
            if principal is not None and launch.egress_problem == "":
                self._spawner.admit(principal.uid, ())
        except IsolationUnavailable as error:
            self._refuse(client, protocol.Refused(code=error.code, message=error.message, hint=error.hint))
            return
        try:
            # The supervisor starts first, to reserve devices while the agent checks the zygote's files.
            checkpoints = str(self._inventory.checkpoints)
            assign = protocol.Assign(launch=launch, asked_ns=asked_ns, checkpoints=checkpoints)
            if principal is not None:
                own = {"uid": principal.uid, "user_home": principal.home, "account": principal.account}
                assign = msgspec.structs.replace(assign, **own)
            supervisor = self._attempts.assign(assign, client)
        except OSError as error:
            message = f"could not start the run on this node: {error}"
            self._refuse(client, protocol.Refused(code="agent_unavailable", message=message))
            return
        client.close()
        self._monitoring.want(preparation(launch.spec.tracker, launch.context))
        if launch.idle_timeout_s is not None:
            request = ZygoteRequest(launch.context, owner=launch.owner, principal=principal, level=launch.isolation)
            self._prewarm(request, launch.world_size, launch.environment, supervisor)
        elif launch.environment is None:
            self._give_stem(launch, supervisor, principal)
        else:
            waiter = EnvironmentWaiter(
                ready=lambda environment, fetched: self._give_stem(
                    launch, supervisor, principal, environment, fetched=fetched
                ),
                failed=lambda reason, message: supervisor.give_problem(message, reason),
                told=supervisor.tell,
            )
            self._environments.have(launch.environment, launch.context.environ, waiter, self._zygotes.is_entered)
        self._refill_ns = asked_ns + int(_REFILL_S * 1e9)

    def _give_stem(
        self,
        launch: protocol.Launch,
        supervisor: SupervisorLink,
        principal: Principal | None,
        environment: RestoredEnvironment | None = None,
        *,
        fetched: bool = False,
    ) -> None:
        """Provide a stem to a run's supervisor, in the caller's environment or a restored environment."""
        context, said = launch.context, "live"
        if environment is not None:
            context, said = environment.context(context), environment.text(fetched=fetched)

        def give(stem: protocol.Stem, fd: int) -> None:
            self._stem_owners.note(stem.pid, launch.owner)
            moved = context if environment is not None else None
            supervisor.stem_pid = stem.pid
            supervisor.give_stem(msgspec.structs.replace(stem, context=moved, environment=said), fd)
            if supervisor.ended_ns is not None:  # The stem came too late for its attempt.
                self._zygotes.attempt_ended(stem.pid, _ending_of(supervisor))

        try:
            request = ZygoteRequest(context, environment, launch.owner, principal, launch.isolation)
            ranks = launch.spec.processes(launch.world_size)
            self._zygotes.give_stem(request, ranks, give, supervisor.give_problem)
        except OSError as error:
            supervisor.give_problem(f"could not start {context.python}: {error}")

    def _prewarm(
        self,
        asked: ZygoteRequest,
        ranks: int,
        wanted: protocol.EnvironmentRequest | None,
        keeper: SupervisorLink | None = None,
    ) -> None:
        """Keep an interpreter warm until its session ends.

        If the interpreter cannot start, the session's first run reports the problem.
        """

        def warm(environment: RestoredEnvironment | None = None, _fetched: bool = False) -> None:
            own = asked.context if environment is None else environment.context(asked.context)
            request = ZygoteRequest(own, environment, asked.owner, asked.principal, asked.level)
            if keeper is not None:
                keeper.key = request.key
            with contextlib.suppress(OSError):
                self._zygotes.prewarm(request, ranks)

        if wanted is None:
            warm()
            return
        waiter = EnvironmentWaiter(ready=warm, failed=lambda _reason, _message: None, told=lambda _sentence: None)
        self._environments.have(wanted, asked.context.environ, waiter, self._zygotes.is_entered)

    def _refuse(self, client: Channel, message: protocol.Refused) -> None:
        with contextlib.suppress(OSError):
            protocol.send(client, message)
        client.close()

    # --- event loop tasks ----------------------------------------------------------------------------------------

    def _tend(self) -> None:
        now_ns = self._clock.boottime_ns()
        settled = self._attempts.tend()
        ended = [supervisor.directory for supervisor in settled if supervisor.directory is not None]
        for directory in ended:  # A killed supervisor has left files of the principal.
            reclaim(self._spawner, written_files(directory, self._inventory.checkpoints))
        for supervisor in settled:
            self._zygotes.attempt_ended(supervisor.stem_pid, _ending_of(supervisor))
        if ended:
            self._used_ns = self._refill_ns = now_ns  # A client that received a result may send the next call at once.
        while self._queue and self._attempts.count() < ATTEMPTS_MAX:
            launch, client = self._queue.popleft()
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(client)
            self._start(launch, client)
        if self._zygotes.became_ready and self._refill_ns is None:
            self._refill_ns = now_ns
        self._zygotes.became_ready = False
        if self._refill_ns is not None and now_ns >= self._refill_ns:
            self._refill_ns = None
            # If the process cannot start now, the next run tries again and reports the error.
            with contextlib.suppress(OSError):
                self._attempts.prepare()
            self._zygotes.refill()
        self._zygotes.tend(self._attempts.kept())
        self._monitoring.tend(busy=self._attempts.count() > 0)
        self._environments.tend(idle=not self._attempts.count() and now_ns - self._used_ns > _IDLE_WORK_S * 1e9)
        self._retention.tend([launch.run_id for launch, _ in self._queue])
        self._rays.tend(ended=bool(ended))
        if os.geteuid() == 0 or self._environ.get(SPAWNER):  # Only root sees what principals have left.
            self._sweeps.tend()
        self._faults.look(self._inventory.devices)
        self._secrets.tend((Path(launch.directory) for launch, _ in self._queue), ended=bool(ended))
        bound_log(self._log)


def _ending_of(supervisor: SupervisorLink) -> protocol.Stopped | None:
    """Return the end of a settled attempt, or None if its directory does not contain the end."""
    return None if supervisor.directory is None else read_ending(supervisor.directory)
