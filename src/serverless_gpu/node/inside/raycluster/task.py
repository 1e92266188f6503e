"""The node task, one process per node of a Ray cluster, and on node 0 its driver, which runs the function.

    supervisor ── "go" with "ray" ─▶ stem ─▶ rank process: the node task (one thread)
                                               ├─ init       of the family's pid namespace (`pid_namespace.py`)
                                               ├─ driver     a fork that imports Ray meanwhile and waits (`Driver`)
                                               ├─ ray start  --block --head … (`ray_start.py`)
                                               └─ monitor   Ray's metrics into a file (`metrics.py`)
    ready ─▶ driver ◀─ {"env": {…}}; function(*args) ─▶ exec enter returned failed, passed on ─▶ supervisor
    driver ends ─▶ family ends ─▶ ends as the driver did; the supervisor keeps Ray's logs and removes the directory

On the other nodes of a cluster there is no driver (`cluster.py`). It speaks to the supervisor as any rank does. SIGTERM
goes to the driver, and so do the signals by which a rank is asked where it is; the memfd for the answer is the same
file in both. The driver's events go through the node task because only that one knows whether Ray died first.

Failure cases:
- Ray does not come up, or not on all nodes, before the driver has begun: the failure is `start_failed`: nothing of the
  user's ran, so the run may begin again;
- one of its processes without which it is no cluster ends, or another node is lost: the failure is `engine_head_lost`
  and names node and process. What the driver raises then is a consequence of it, told as a note. A driver that hangs is
  given `_CONSEQUENCE_S` and ended;
- the driver cannot import Ray: the function's own import says so;
- the driver fails, or ends without a word (even before its start): told as for any rank, after a look whether Ray is
  gone;
- Ray ends after the driver has returned: nothing, the result is there; the driver is given `_FAREWELL_S` to end;
- there is no room for the token, or no process can be had: the failure says so, as where Ray does not come up;
- this process dies: init, driver and Ray follow (PR_SET_PDEATHSIG).
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
_NOT_STARTED = "start_failed"  # the driver has not begun
_CONSEQUENCE_S = 2.0  # for the driver to notice by itself that Ray is gone, and to say where it was
_SUSPICION_S = 0.5  # for a death of Ray's to show that the driver may have noticed first
_STRANGER_S = 0.1
_FAREWELL_S = 10.0  # for a driver whose outcome is known: without Ray it may try to say goodbye for a minute
_GATHER_S = 300.0  # for the other nodes to join once Ray's head is up
_KILLED_S = 1.0  # for a killed driver to end; one in the middle of a device call may take longer, and is left
# Ray connects by itself at the first task, actor or object, but not when it is asked for what a cluster has. A function
# of `ray_launch` needs no `ray.init()`, whatever it does first.
_ASKED_FIRST = ("available_resources", "cluster_resources", "nodes", "timeline")


class RayTaskWork(NamedTuple):
    """Work of a node task for its rank."""

    directory: str
    environment: dict[str, str]  # the rank's variables, the caller's and ours
    report: protocol.Report  # sends an event to the supervisor
    # called in the driver: runs the function, given a way to report; returns the exit code
    drive: Callable[[protocol.Report], int]
    finish: Callable[[], int]  # stores and reports None as what the rank returned; returns the exit code
    fail: Callable[[BaseException], int]  # stores and reports an exception as the rank's failure; returns the exit code
    lose: Callable[[protocol.Message], int]  # the same for a failure that is not an exception, from its record


def run(share: ClusterShare, work: RayTaskWork) -> int:
    """Run this node's part of the cluster until the driver has ended; return the exit code."""
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
        self.outcome = False  # whether how the driver ended has been said
        self.begun = False  # whether a node without a driver has said that it runs
        self.family = Family()  # last: what can fail comes before there is anything to end
        self._say_what_is_missing()

    def head(self) -> int:
        """Start the head, then run the driver to its end; return how it ended, a signal as a negative number."""
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
        """Run a node without a driver until the driver has ended; return how this ends.

        It reports that it runs once it has joined: before that, none of the user's code has begun anywhere.
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
        self._begin()  # also where the driver ended before all had joined
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
        """Wait for the other nodes; return what went wrong, "" also where the driver has ended."""
        if engine is not None:
            self.cluster.begin(engine, ray_start.cluster_address(self.share, engine.ports))
        until = time.monotonic() + _GATHER_S
        while not (gone := self.cluster.gone()) and self.cluster.missing() and not driver.has_ended():
            if (left_s := until - time.monotonic()) <= 0:
                numbers = ", ".join(map(str, self.cluster.missing()))
                return f"after {_GATHER_S:.0f} s these nodes of the run's Ray cluster had not joined: {numbers}"
            linux.readable([driver.pidfd, *self.cluster.fds()], left_s)
        return gone

    def _record_metrics(self, found: Ports, leave: Callable[[], None]) -> None:
        """Have this node's metrics read (`metrics.py`) for as long as the family lives.

        `leave` closes what the process that reads them must not hold.
        """
        path = metrics_file(self.work.directory, self.share.node_rank)

        def read() -> int:
            leave()
            return metrics.run(self.share.address, found.metrics, path)

        if not self.without_metrics:
            with contextlib.suppress(OSError):  # no process can be had: the run goes on without
                self.family.fork(read)

    def _attend(self, driver: Driver) -> int:
        """Pass on what the driver says until it has ended or Ray has."""
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
        """Pass an event on; return the exit code where it is a failure that Ray's end explains."""
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
        """Let the driver report its outcome, unless it has, end it, and report the failure."""
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
        """Let a driver end whose outcome has been said; how it does without Ray says nothing of the function."""
        self.cluster.done()  # other nodes would take their Ray's end for a loss
        linux.readable([driver.pidfd], _FAREWELL_S)
        driver.kill()
        driver.reap()
        return 0

    def _lose(self, text: str, consequence: protocol.Message | None, kind: str = _KIND) -> int:
        self.outcome = True
        return self.work.lose(_record(text, consequence, kind))

    def _pass_signals_to(self, driver: Driver) -> None:
        def terminate(_number: int, _frame: types.FrameType | None) -> None:
            if not self.outcome:  # Ray's own handler would break into the tidying up of a driver that is through
                driver.end(signal.SIGTERM)

        def look(number: int, _frame: types.FrameType | None) -> None:
            driver.look(number)

        faulthandler.unregister(protocol.STACK_SIGNAL)
        faulthandler.disable()  # the driver's last stack is in that file; a signal that is repeated here must add none
        signal.signal(signal.SIGTERM, terminate)
        for number in protocol.LOOK_SIGNALS:
            signal.signal(number, look)

    def _say_what_is_missing(self) -> None:
        if not self.tokens:
            self._say(
                f"Ray {self.version} has no token authentication, so any process on this machine can use the run's "
                f"cluster; Ray 2.52 and later have it"
            )
        if self.family.refused:
            self._say(
                f"the run's Ray has no pid namespace of its own ({self.family.refused}): a `ray stop` in the run would "
                f"end your other Rays on this machine, too"
            )
        if self.without_metrics:
            self._say(self.without_metrics)

    def _say(self, text: str) -> None:
        self.work.report({"event": "say", "text": text, "note": True})


def _not_started(share: ClusterShare, error: Exception) -> str:
    return f"Ray could not be started on node {share.host}: {error}"


def _record(text: str, consequence: protocol.Message | None, kind: str) -> protocol.Message:
    """Return the record of a failure that is not the function's, with the function's consequent error."""
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
    """The process the function runs in, on node 0.

    `variables` is its environment while it imports Ray, which reads some of it then. `drive` runs the function with a
    way to report, and returns the exit code.
    """

    def __init__(self, family: Family, variables: Mapping[str, str], drive: Callable[[protocol.Report], int]) -> None:
        self.channel, theirs = pair()

        def be() -> int:
            self.channel.close()
            return _be_driver(theirs, variables, drive)

        self.pid = family.fork(be)  # in the node task's namespace
        theirs.close()
        self.pidfd = os.pidfd_open(self.pid)  # readable when it has ended

    def begin(self, variables: Mapping[str, str]) -> None:
        """Let it run the function, with some more variables."""
        with contextlib.suppress(OSError):  # it has ended: its watcher reports that
            self.channel.send(protocol.encode({"env": dict(variables)}))

    def hear(self) -> protocol.Message | None:
        """Return its next event, or None when it will say nothing more."""
        try:
            received = self.channel.receive()
        except OSError:
            return None
        return None if received is None else protocol.decode(received[0])

    def has_ended(self) -> bool:
        """Return whether it has ended; it may still be to be reaped."""
        return bool(linux.readable([self.pidfd], 0))

    def end(self, number: int) -> None:
        """Send it a signal, unless it has ended; a reused pid is never signalled."""
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(self.pidfd, number)

    def kill(self) -> None:
        """End it and wait for that: what it is writing would else be there after what is written next."""
        self.end(signal.SIGKILL)
        linux.readable([self.pidfd], _KILLED_S)

    def reap(self) -> int:
        """Return how it ended, a signal as a negative number; waits for that."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def look(self, number: int) -> None:
        """Pass on a signal by which a rank is asked where it is: its main thread answers."""
        if not self.has_ended():  # before that the pid is its own: it is reaped by this thread only
            with contextlib.suppress(OSError):
                linux.signal_main_thread(self.pid, number)


def _be_driver(channel: Channel, variables: Mapping[str, str], drive: Callable[[protocol.Report], int]) -> int:
    linux.set_name("sgpu-driver")
    os.setpgid(0, 0)  # `os.killpg(0, ...)` in user code reaches the driver's own processes only
    os.environ.clear()
    os.environ.update(variables)
    with contextlib.suppress(Exception):
        ray = importlib.import_module("ray")
        for name in _ASKED_FIRST:  # functions that would otherwise ask for a `ray.init()` first
            if (function := getattr(ray, name, None)) is not None:
                setattr(ray, name, _connected(ray, function))
        # SIGTERM is to a driver what it is to any rank. Ray would have it raise SystemExit, also in a function that has
        # asked whether it is to stop: before `ray.init`, whose handler would take that one's place, or after that, when
        # the later handler calls the one before.
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
