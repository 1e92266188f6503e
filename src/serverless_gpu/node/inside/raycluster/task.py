"""The node task: one process per node of a Ray cluster that starts Ray and the user's driver.

    supervisor ── "go" with "ray" ─▶ stem ─▶ rank process: the node task (one thread)
                                               ├─ init       of the family's pid namespace (`pid_namespace.py`)
                                               ├─ driver     a fork that imports Ray and then waits (`Driver`)
                                               ├─ ray start  --block --head … (`ray_start.py`)
                                               └─ monitor   Ray's metrics into a file (`metrics.py`)
    ready ─▶ driver ◀─ {"env": {…}}; function(*args) ─▶ exec enter returned failed, passed on ─▶ supervisor
    driver ends ─▶ family ends ─▶ task ends as the driver did; the supervisor keeps Ray's logs, removes the directory

The other nodes of a cluster have no driver (`cluster.py`). A node task reports to the supervisor like any rank. The
node task forwards SIGTERM and the stack signals to the driver. The node task and the driver share one memfd for Python
stacks. The driver's events pass through the node task, because only the node task knows whether Ray ended first.

Failure cases:

* If Ray does not start on all nodes before the driver has begun, the failure kind is `start_failed`. A `start_failed`
  failure can be retried safely, because no user code has run.
* If a required Ray process ends or another node is lost, the failure kind is `engine_head_lost`. The failure message
  names the node and the process. If the driver later raises an exception, the node task adds the exception to the
  failure as a note. If the driver hangs, the node task ends the driver after `_CONSEQUENCE_S` seconds.
* If the driver cannot import Ray, the import in the user's function raises the error.
* If the driver fails or ends without an event, the node task checks whether Ray has ended. If Ray still runs, the node
  task reports the driver's failure like the failure of any rank.
* If Ray ends after the driver has returned, the driver's result remains valid. After it has returned, the driver has
  `_FAREWELL_S` seconds to end.
* If no process can start or the disk has no space for the token, the node task reports `start_failed`.
* If the node task dies, the kernel ends the init process, the driver and Ray (PR_SET_PDEATHSIG).
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import importlib
import os
import signal
import time
import types
from collections.abc import Callable, Mapping
from typing import NamedTuple

from .. import command, linux, protocol
from ..channel import Channel, pair
from . import cluster, metrics, ray_installation, ray_start
from .cluster import RunCluster
from .pid_namespace import Family
from .ray_start import Ports, RayProcesses
from .share import ClusterShare, logs_of, metrics_file

_KIND = "engine_head_lost"
_NOT_STARTED = "start_failed"  # Kind of a failure before the driver has begun.
_CONSEQUENCE_S = 2.0  # Time limit in seconds for the driver to notice the end of Ray and report its own error.
_SUSPICION_S = 0.5  # Time limit in seconds to detect the end of Ray after the driver has failed.
_STRANGER_S = 0.1
# Time limit in seconds for a driver with a known outcome to end. Without Ray, the driver's shutdown may take a minute.
_FAREWELL_S = 10.0
_GATHER_S = 300.0  # Time limit in seconds for the other nodes to join after Ray's head has started.
_KILLED_S = 1.0  # Time limit in seconds for a killed driver to end. A hanging device call does not extend this limit.
# Ray connects automatically at the first task, actor or object, but not for cluster queries. The node task patches
# these query functions to connect first, so that `ray_launch` code needs no `ray.init()`.
_ASKED_FIRST = ("available_resources", "cluster_resources", "nodes", "timeline")


class RayTaskWork(NamedTuple):
    """Callbacks and paths that a node task uses for its rank."""

    directory: str
    environment: dict[str, str]  # Environment variables of the rank, from the caller and from this package.
    report: protocol.Report  # Function that sends an event to the supervisor.
    # Function that runs the user's function in the driver. `drive` takes an event reporting function and returns the
    # exit code.
    drive: Callable[[protocol.Report], int]
    finish: Callable[[], int]  # Function that reports None as the rank's result and returns the exit code.
    # Function that stores and reports an exception as the rank's failure and returns the exit code.
    fail: Callable[[BaseException], int]
    # Function that stores and reports a failure record without an exception and returns the exit code.
    lose: Callable[[protocol.Message], int]


def run(share: ClusterShare, work: RayTaskWork) -> int:
    """Run this node's part of the cluster until the driver has ended. Return the exit code."""
    try:
        version = ray_installation.ray_version(share.num_nodes)
    except (ModuleNotFoundError, RuntimeError) as error:
        return work.fail(error)
    try:
        task = _Task(share, work, version)
    except OSError as error:
        return work.lose(_record(_not_started(share, error), None, _NOT_STARTED))
    try:
        code = task.head() if share.node_rank == 0 else task.member()
    finally:
        task.cluster.done()
        task.family.end()
    return code if code >= 0 else command.end_of(-code)


class _Task:
    def __init__(self, share: ClusterShare, work: RayTaskWork, version: str) -> None:
        self.share = share
        self.work = work
        self.version = version
        self.tokens = ray_installation.knows_tokens(version)
        os.makedirs(share.directory, 0o700, exist_ok=True)
        if self.tokens:
            path = os.path.join(self.share.directory, ray_start.TOKEN_FILE)
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with open(fd, "w", encoding="ascii") as file:
                file.write(ray_start.token_of(self.share.secret))
        self.kept = logs_of(work.directory, share.node_rank)
        self.cluster = RunCluster(share, self.kept)
        kept = {**ray_start.default_variables(share), **ray_start.stripped_variables(work.environment)}
        self.environment = {**kept, **ray_start.cluster_variables(share, token=self.tokens)}
        self.without_metrics = metrics.missing()
        self.outcome = False  # True after the node task has reported the driver's outcome.
        self.begun = False  # True after a node without a driver has reported its start.
        self.family = Family()  # Create the family last, so that a failure in an earlier step leaves no process to end.
        self._say_what_is_missing()

    def head(self) -> int:
        """Start the Ray head and run the driver until it ends.

        Return the driver's exit code, or a negative signal number.
        """
        try:
            driver = Driver(
                self.family, {**ray_start.stripped_variables(dict(os.environ)), **self.environment}, self.work.drive
            )
        except OSError as error:
            return self._lose(_not_started(self.share, error), None, _NOT_STARTED)
        self._pass_signals_to(driver)
        try:
            self.cluster.listen()
            engine = self._start(driver)
            problem = self._gather(driver, engine)
        except (ray_start.RayStartFailed, OSError) as error:
            engine, problem = None, _not_started(self.share, error)
        if problem:
            driver.kill()
            return self._lose(problem, None, _NOT_STARTED)
        if engine is None or driver.has_ended():
            return driver.reap()
        address = ray_start.cluster_address(self.share, engine.ports)
        page = f"http://{ray_start.LOOPBACK}:{engine.ports.dashboard}" if self.share.dashboard else ""
        self._say(ray_start.ready_sentence(self.share, self.cluster.shares(), self.version, page))
        driver.begin(ray_start.port_variables(engine.ports, address))
        self._record_metrics(engine.ports, self.cluster.leave)
        return self._attend(driver)

    def member(self) -> int:
        """Run a node without a driver until the cluster's driver has ended.

        Return the exit code, or a negative signal number. The node reports its start only after joining the cluster. No
        user code starts on any node before all nodes have joined.
        """
        node = cluster.TaskNode(self.share, self.family, self.environment, self.kept)

        def record(found: Ports, leave: Callable[[], None]) -> None:
            self._begin()
            self._record_metrics(found, leave)

        lost = cluster.until_stopped(lambda: cluster.take_part(node, self._say, record))
        if lost is None:
            return -signal.SIGTERM
        if lost:
            return self._lose(lost, None, _KIND if self.begun else _NOT_STARTED)
        self._begin()  # The driver may have ended before all nodes had joined the cluster.
        self.family.end()
        return self.work.finish()

    def _begin(self) -> None:
        if not self.begun:
            self.begun = True
            self.work.report({"event": "exec", "stack": -1})

    def _start(self, driver: Driver) -> RayProcesses | None:
        share = self.share
        client = ray_installation.can_serve_clients()
        plan = ray_start.RayStartPlan(
            share.directory,
            lambda: ray_start.find_ports(ray_start.listens_at(share)),
            lambda found: {
                **self.environment,
                **ray_start.port_variables(found, ray_start.cluster_address(share, found)),
            },
            lambda found, temporary: ray_start.head_arguments(share, found, temporary, client=client),
        )
        return ray_start.start(self.family, plan, lambda: driver.has_ended() or bool(self.cluster.gone()), self._say)

    def _gather(self, driver: Driver, engine: RayProcesses | None) -> str:
        """Wait until the other nodes have joined the cluster. Return a failure reason, or "".

        If the driver ends, the function stops waiting and returns "".
        """
        if engine is not None:
            self.cluster.begin(engine, ray_start.cluster_address(self.share, engine.ports))
        until = time.monotonic() + _GATHER_S
        while not (gone := self.cluster.gone()) and self.cluster.missing() and not driver.has_ended():
            if (left_s := until - time.monotonic()) <= 0:
                numbers = ", ".join(map(str, self.cluster.missing()))
                return f"these nodes did not join the run's Ray cluster within {_GATHER_S:.0f} s: {numbers}"
            linux.readable([driver.pidfd, *self.cluster.fds()], left_s)
        return gone

    def _record_metrics(self, found: Ports, leave: Callable[[], None]) -> None:
        """Record this node's metrics (`metrics.py`) in a process of the family.

        `leave` closes the connections that the recording process must not hold.
        """
        path = metrics_file(self.work.directory, self.share.node_rank)

        def read() -> int:
            leave()
            return metrics.run(self.share.address, found.metrics, path)

        if not self.without_metrics:
            # If the metrics process cannot start, the run continues without Ray metrics.
            with contextlib.suppress(OSError):
                self.family.fork(read)

    def _attend(self, driver: Driver) -> int:
        """Forward the driver's events until the driver or Ray has ended."""
        talks = True
        while True:
            heard = [driver.channel.fileno()] if talks else []
            ready = linux.readable([*heard, driver.pidfd, *self.cluster.fds()], self.family.reap())
            if talks and driver.channel.fileno() in ready:
                event = driver.hear()
                if event is None:
                    talks = False
                elif (code := self._take(event, driver)) is not None:
                    return code
            elif driver.pidfd in ready:
                code = driver.reap()
                if not self.outcome and code and (gone := self.cluster.gone(_SUSPICION_S)):
                    return self._lose(gone, None)
                return code
            elif gone := self.cluster.gone():
                return self._cluster_gone(driver, gone)

    def _take(self, event: protocol.Message, driver: Driver) -> int | None:
        """Forward a driver's event to the supervisor.

        Return the exit code if the end of Ray explains the driver's failure.
        """
        if event.get("event") == "failed":
            failure = event.get("failure")
            record = failure if isinstance(failure, dict) else {}
            suspicious = "ray" in str(record.get("traceback", "")) or record.get("peer_lost") is True
            if gone := self.cluster.gone(_SUSPICION_S if suspicious else _STRANGER_S):
                driver.kill()
                return self._lose(gone, record)
        self.outcome |= event.get("event") in ("returned", "failed")
        self.work.report(event)
        return None

    def _cluster_gone(self, driver: Driver, gone: str) -> int:
        """Wait for the driver's outcome until a deadline, then end the driver and report the failure."""
        if self.outcome:
            return self._without_ray(driver)
        until = time.monotonic() + _CONSEQUENCE_S
        consequence: protocol.Message | None = None
        while (left_s := until - time.monotonic()) > 0 and linux.readable([driver.channel.fileno()], left_s):
            event = driver.hear()
            if event is None:
                break
            if event.get("event") == "returned":
                self.outcome = True
                self.work.report(event)
                return self._without_ray(driver)
            if event.get("event") == "failed":
                failure = event.get("failure")
                consequence = failure if isinstance(failure, dict) else None
                break
            self.work.report(event)
        driver.kill()
        return self._lose(gone, consequence)

    def _without_ray(self, driver: Driver) -> int:
        """Wait until a driver with a known outcome ends. The driver's exit code does not change the outcome."""
        self.cluster.done()  # Without the message "done", other nodes would treat the end of their Ray as a loss.
        linux.readable([driver.pidfd], _FAREWELL_S)
        driver.kill()
        driver.reap()
        return 0

    def _lose(self, text: str, consequence: protocol.Message | None, kind: str = _KIND) -> int:
        self.outcome = True
        return self.work.lose(_record(text, consequence, kind))

    def _pass_signals_to(self, driver: Driver) -> None:
        def terminate(_number: int, _frame: types.FrameType | None) -> None:
            if not self.outcome:  # After an outcome, Ray's SIGTERM handler would interrupt the driver's shutdown.
                driver.end(signal.SIGTERM)

        def look(number: int, _frame: types.FrameType | None) -> None:
            driver.look(number)

        faulthandler.unregister(protocol.STACK_SIGNAL)
        # The stack file contains the driver's last stack. If this process receives the signal again, it must not add
        # its own stack.
        faulthandler.disable()
        signal.signal(signal.SIGTERM, terminate)
        for number in protocol.LOOK_SIGNALS:
            signal.signal(number, look)

    def _say_what_is_missing(self) -> None:
        if not self.tokens:
            self._say(
                f"Ray {self.version} has no token authentication, so any process on this machine can use the "
                "run's cluster. Use Ray 2.52 or later"
            )
        # A parent with pid 1 is the stem of a sandbox, whose pid namespace contains this run only.
        if self.family.refused and os.getppid() != 1:
            self._say(
                f"the run's Ray has no separate pid namespace ({self.family.refused}), so a `ray stop` in the "
                "run would also end your other Ray processes on this machine"
            )
        if self.without_metrics:
            self._say(self.without_metrics)

    def _say(self, text: str) -> None:
        self.work.report({"event": "say", "text": text, "note": True})


def _not_started(share: ClusterShare, error: Exception) -> str:
    return f"Ray could not be started on node {share.host}: {error}"


def _record(text: str, consequence: protocol.Message | None, kind: str) -> protocol.Message:
    """Return the record of a failure that occurred outside the user's function.

    The record contains the function's later error as a note.
    """
    record: protocol.Message = {
        "type": "EngineHeadLost" if kind == _KIND else "RunError",
        "module": "serverless_gpu.errors",
        "message": text,
        "notes": [],
        "traceback": "",
        "kind": kind,
        "exit_code": None,
        "peer_lost": False,
        "gpu_oom": False,
    }
    if consequence is not None:
        said = f"{consequence.get('type', 'an exception')}: {consequence.get('message', '')}"
        record["notes"] = [f"the function then raised {said}"]
        record["traceback"] = consequence.get("traceback", "")
    return record


class Driver:
    """The process on node 0 that runs the user's function.

    `variables` is the driver's environment while it imports Ray, because Ray reads some variables on import. `drive`
    receives an event reporting function, runs the user's function and returns the exit code.
    """

    def __init__(self, family: Family, variables: Mapping[str, str], drive: Callable[[protocol.Report], int]) -> None:
        self.channel, theirs = pair()

        def be() -> int:
            self.channel.close()
            return _be_driver(theirs, variables, drive)

        self.pid = family.fork(be)  # The driver runs in the node task's pid namespace.
        theirs.close()
        self.pidfd = os.pidfd_open(self.pid)  # The pidfd becomes readable when the driver ends.

    def begin(self, variables: Mapping[str, str]) -> None:
        """Start the user's function in the driver, with additional environment variables."""
        # If the driver has ended, `_attend` detects the end through the pidfd.
        with contextlib.suppress(OSError):
            self.channel.send(protocol.encode({"env": dict(variables)}))

    def hear(self) -> protocol.Message | None:
        """Return the driver's next event, or None if the driver sends no more events."""
        try:
            received = self.channel.receive()
        except OSError:
            return None
        return None if received is None else protocol.decode(received[0])

    def has_ended(self) -> bool:
        """Return whether the driver has ended, even if not yet reaped."""
        return bool(linux.readable([self.pidfd], 0))

    def end(self, number: int) -> None:
        """Send a signal to the driver unless the driver has ended.

        The pidfd ensures that the signal never reaches another process with the same pid.
        """
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(self.pidfd, number)

    def kill(self) -> None:
        """Kill the driver and wait for its end, so that the driver cannot overwrite later files."""
        self.end(signal.SIGKILL)
        linux.readable([self.pidfd], _KILLED_S)

    def reap(self) -> int:
        """Wait for the driver's end and reap the driver.

        Return the driver's exit code, or a negative signal number.
        """
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def look(self, number: int) -> None:
        """Forward a stack signal to the driver's main thread, which writes its stack."""
        # The kernel has not reused the driver's pid, because only this thread reaps the driver.
        if not self.has_ended():
            with contextlib.suppress(OSError):
                linux.signal_main_thread(self.pid, number)


def _be_driver(channel: Channel, variables: Mapping[str, str], drive: Callable[[protocol.Report], int]) -> int:
    linux.set_name("sgpu-driver")
    # With a separate process group, `os.killpg(0, ...)` in user code reaches only the driver's own processes.
    os.setpgid(0, 0)
    os.environ.clear()
    os.environ.update(variables)
    with contextlib.suppress(Exception):
        ray = importlib.import_module("ray")
        for name in _ASKED_FIRST:  # Without the patch, these Ray functions would require an explicit `ray.init()`.
            if (function := getattr(ray, name, None)) is not None:
                setattr(ray, name, _connected(ray, function))
        # A driver must react to SIGTERM like any rank. Ray's SIGTERM handler would raise SystemExit, even in a function
        # that checks for a stop itself. `ray.init` would replace a SIGTERM handler that the function has installed. A
        # SIGTERM handler installed after `ray.init` would call Ray's handler.
        utilities = importlib.import_module("ray._private.utils")
        if hasattr(utilities, "set_sigterm_handler"):
            vars(utilities)["set_sigterm_handler"] = lambda _handler: None
    received = channel.receive()
    if received is None:
        return 1
    more = protocol.decode(received[0]).get("env")
    os.environ.update(more if isinstance(more, dict) else {})

    def report(event: protocol.Message) -> None:
        with contextlib.suppress(OSError):
            channel.send(protocol.encode({**event, "at": protocol.now_ns()}))

    return drive(report)


def _connected(ray: types.ModuleType, function: Callable[..., object]) -> Callable[..., object]:
    @functools.wraps(function)
    def connected(*args: object, **kwargs: object) -> object:
        if not ray.is_initialized():
            ray.init()
        return function(*args, **kwargs)

    return connected
