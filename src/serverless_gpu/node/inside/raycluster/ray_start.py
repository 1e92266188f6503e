"""Runs `ray start` on this node: its ports, environment and arguments, and its processes until one is gone.

    node task ── fork, exec ─▶ ray start --block ─┬─ gcs_server   the head's: without it the cluster is lost
                  output: ray-start.log           ├─ raylet       without it this node is
                                                  └─ agents, monitor, …   Ray starts those again, or goes with them

Ray is ready when the node's agents have left their ports in files: the raylet makes itself known to the head right
after that. Rays that leave none say so in the output of `ray start`. It is gone when `ray start`, the raylet or the
head's gcs_server is: all three are watched by pidfd, for `ray start --block` looks once a second, and takes a SIGTERM
to one of them for a wish.

Ports: all are named, so that clusters on one machine do not meet. Ray's defaults are fixed numbers, or numbers one of
its processes chooses. Here each is tested by binding it, outside of the kernel's ephemeral range, in which any
connection could take it between the test and Ray's start.

Environment: the caller's shell may belong to another Ray, whose address, token or temporary directory would tie this
cluster to it. So everything that begins with ``RAY_`` goes, except tuning of libraries. torch's world goes too, which
the supervisor announces to every rank: a driver is in none, and Ray Train makes worlds of its own.

Failure cases: one of the three ends before Ray is ready, because another process took a port, or agents took longer
than the 15 s that a raylet gives them (tried again, `_TRIES_MAX` times in all); Ray is not ready in `START_S`; both are
a `RayStartFailed` with what Ray wrote last.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import random
import re
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from .. import linux
from . import ray_installation
from .pid_namespace import Family
from .share import SPILL, ClusterShare

# --- arguments --------------------------------------------------------------------------------------------------------


def head_arguments(share: ClusterShare, ports: Ports, temporary: str, *, client: bool) -> list[str]:
    """Return the arguments that start the head, which is a node with devices, too.

    `temporary` is Ray's directory for sessions. `client` says that this Ray can serve `ray://` connections: it then
    uses a fixed port unless it gets another one; a Ray that cannot refuses the option.
    """
    arguments = [
        "--head",
        f"--port={ports.gcs}",
        *_common_arguments(share, ports, temporary),
        f"--include-dashboard={'true' if share.dashboard else 'false'}",
        f"--dashboard-host={LOOPBACK}",
        f"--dashboard-port={ports.dashboard}",
    ]
    return arguments + ([f"--ray-client-server-port={ports.client_server}"] if client else [])


def worker_arguments(share: ClusterShare, ports: Ports, temporary: str, address: str) -> list[str]:
    """Return the arguments that start a node which joins the head at `address`.

    `temporary` is Ray's directory for sessions.
    """
    return [f"--address={address}", *_common_arguments(share, ports, temporary)]


def cluster_address(share: ClusterShare, ports: Ports) -> str:
    """Return what a driver has as RAY_ADDRESS, and other nodes join."""
    return f"{LOOPBACK if share.num_nodes == 1 else share.address}:{ports.gcs}"


def listens_at(share: ClusterShare) -> str:
    """Return the address at which Ray listens on a node, "" for all that its machine has."""
    return LOOPBACK if share.num_nodes == 1 else ""


def ready_sentence(share: ClusterShare, shares: Sequence[ClusterShare], version: str, page: str) -> str:
    """Return the sentence for a ready cluster; `page` is the dashboard's address, or ""."""
    devices, cpus = sum(one.devices for one in shares), sum(one.cpus for one in shares)
    nodes = "1 node" if len(shares) == 1 else f"{len(shares)} nodes"
    gpus = f"{devices} {share.accelerator}, " if share.accelerator and devices else ""
    store = f"object store {share.object_store_bytes / 1e9:.1f} GB" + (" on each" if len(shares) > 1 else "")
    sentence = f"Ray {version}: {nodes}, {gpus}{cpus} CPUs, {store}"
    return f"{sentence}, dashboard {page}" if page else sentence


def _common_arguments(share: ClusterShare, ports: Ports, temporary: str) -> list[str]:
    arguments = [
        "--block",
        f"--object-manager-port={ports.object_manager}",
        f"--node-manager-port={ports.node_manager}",
        f"--runtime-env-agent-port={ports.runtime_env_agent}",
        f"--dashboard-agent-grpc-port={ports.agent_grpc}",
        f"--dashboard-agent-listen-port={ports.agent_http}",
        f"--metrics-export-port={ports.metrics}",
        "--min-worker-port=0",  # the kernel's choice: it gives out only free ports
        "--max-worker-port=0",
        f"--num-cpus={share.cpus}",
        f"--num-gpus={share.devices if share.accelerator else 0}",
        f"--object-store-memory={share.object_store_bytes}",
        f"--temp-dir={temporary}",
        f"--object-spilling-directory={os.path.join(share.directory, SPILL)}",
        "--disable-usage-stats",
        "--log-style=record",
        "--log-color=false",
    ]
    if share.accelerator and share.devices:  # 1 however many there are, as Ray itself has it
        arguments.append("--resources=" + json.dumps({f"accelerator_type:{share.accelerator}": 1}))
    if share.num_nodes > 1:
        arguments.append(f"--node-ip-address={share.address}")
    return arguments


# --- environment ------------------------------------------------------------------------------------------------------


TOKEN_FILE = "token"
START_S = 180
"""Time for Ray to start: its first import from a slow disk takes most of it."""
LOOPBACK = "127.0.0.1"

_WORLD_VARIABLES = frozenset(
    {
        "GROUP_RANK",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "NODE_RANK",
        "RANK",
        "TORCHELASTIC_RUN_ID",
        "WORLD_SIZE",
    }
)
# They tune what user code sees of a library, and say nothing of where a cluster is or who may enter it.
_KEPT_VARIABLES = frozenset(
    {
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO",
        "RAY_BACKEND_LOG_LEVEL",
        "RAY_CHDIR_TO_TRIAL_DIR",
        "RAY_COLOR_PREFIX",
        "RAY_DEDUP_LOGS",
        "RAY_DEDUP_LOGS_AGG_WINDOW_S",
        "RAY_DEDUP_LOGS_ALLOW_REGEX",
        "RAY_DEDUP_LOGS_SKIP_REGEX",
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV",
        "RAY_IGNORE_UNHANDLED_ERRORS",
        "RAY_PROFILING",
        "RAY_TQDM",
        "RAY_memory_monitor_refresh_ms",
        "RAY_memory_usage_threshold",
        "RAY_verbose_spill_logs",
    }
)
# Ray Train asks the state API for its controller once a second. The dashboard's process serves that, so without one the
# relay of workers' lines would have this once a second, too.
_REPEATED_LOG_LINE = "Failed to query Ray Train Controller actor state"
_KEPT_PREFIXES = ("RAY_AIR_", "RAY_CGRAPH_", "RAY_DATA_", "RAY_EXPERIMENTAL_NOSET_", "RAY_TRAIN_", "RAY_TUNE_")
_METRIC_PORT_VARIABLES = frozenset({"AUTOSCALER_METRIC_PORT", "DASHBOARD_METRIC_PORT"})


def stripped_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Return variables without those of another Ray cluster and of torch's world."""
    return {
        name: value
        for name, value in variables.items()
        if name not in _WORLD_VARIABLES
        and name not in _METRIC_PORT_VARIABLES
        and (not name.startswith("RAY_") or name in _KEPT_VARIABLES or name.startswith(_KEPT_PREFIXES))
    }


def default_variables(share: ClusterShare) -> dict[str, str]:
    """Return what is set unless the caller's variables say otherwise."""
    return {} if share.dashboard else {"RAY_DEDUP_LOGS_SKIP_REGEX": _REPEATED_LOG_LINE}


def cluster_variables(share: ClusterShare, *, token: bool) -> dict[str, str]:
    """Return the environment of every process of the cluster: Ray's own, workers, driver.

    Ray reads some of it when it is imported. `token` says that this Ray knows tokens.
    """
    variables = {
        "RAY_USAGE_STATS_ENABLED": "0",  # they are on by default, and would call out
        "RAY_raylet_start_wait_time_s": str(START_S),  # 30 by default, which a busy machine takes
    }
    if share.num_nodes == 1:
        # "No cluster of several machines": the one way to have every process of Ray's listen on loopback only.
        variables["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    if token:
        variables["RAY_AUTH_MODE"] = "token"
        variables["RAY_AUTH_TOKEN_PATH"] = os.path.join(share.directory, TOKEN_FILE)
    return variables


def port_variables(ports: Ports, address: str) -> dict[str, str]:
    """Return what is known of a cluster once its ports are, for all of its processes.

    A task asks for the address, too: Ray Train's actors do.
    """
    return {
        "RAY_ADDRESS": address,
        # Ports that `ray start` has no argument for.
        "AUTOSCALER_METRIC_PORT": str(ports.autoscaler_metrics),
        "DASHBOARD_METRIC_PORT": str(ports.dashboard_metrics),
    }


def token_of(secret: str) -> str:
    """Return the token of a run's cluster, the same on all its nodes and of no use for anything else."""
    return hmac.new(secret.encode(), b"the token of the run's Ray cluster", hashlib.sha256).hexdigest()


# --- ports ------------------------------------------------------------------------------------------------------------


_LOWEST_PORT, _HIGHEST_PORT = 11_000, 30_000  # below, services have their own; above, Kubernetes gives some away
_PORT_RANGE_FILE = "/proc/sys/net/ipv4/ip_local_port_range"
_PORT_RANGE_MIN = 1_000
_PORT_TRIES_MAX = 2_000


class Ports(NamedTuple):
    """The ports of the Ray processes of one node; some are used on the head only."""

    gcs: int  # the head's, the address of the cluster
    object_manager: int  # the raylet's, for objects
    node_manager: int  # the raylet's, for work
    runtime_env_agent: int  # of the agent that makes environments of tasks
    agent_grpc: int
    agent_http: int
    metrics: int  # of this node, with ``ray[default]``
    client_server: int  # the head's, for `ray://` connections
    autoscaler_metrics: int
    dashboard_metrics: int
    dashboard: int  # the head's web page, where asked for


def find_ports(address: str = LOOPBACK, range_file: str = _PORT_RANGE_FILE) -> Ports:
    """Return free ports at `address` ("" for all addresses of this machine); raises OSError.

    `range_file` holds the kernel's ephemeral range.
    """
    lowest, highest = _port_range(range_file)
    chosen: list[int] = []
    with contextlib.ExitStack() as held:  # all at once, so that none is found twice
        for _ in range(_PORT_TRIES_MAX):
            port = random.SystemRandom().randint(lowest, highest)
            sock = held.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                sock.bind((address, port))  # also refused where a process listens on all addresses
                chosen.append(port)
            if len(chosen) == len(Ports._fields):
                return Ports(*chosen)
    raise OSError(f"no {len(Ports._fields)} free ports between {lowest} and {highest}")


def _port_range(range_file: str) -> tuple[int, int]:
    try:
        with open(range_file, encoding="ascii") as file:
            low, high = (int(word) for word in file.read().split())
    except (OSError, ValueError):
        low, high = 32_768, 60_999
    if low - _LOWEST_PORT >= _PORT_RANGE_MIN:
        return _LOWEST_PORT, min(low - 1, _HIGHEST_PORT)
    if 65_535 - high >= _PORT_RANGE_MIN:
        return high + 1, 65_535
    return _LOWEST_PORT, 65_535  # it takes nearly all of them: then the tries have to do


# --- processes --------------------------------------------------------------------------------------------------------


OUTPUT_FILE = "ray-start.log"

_TRIES_MAX = 3
_LOOK_S = 0.02
_LAST_BYTES = 64_000
_LAST_LINES = 8
_WATCHED = frozenset({"gcs_server", "raylet"})
_AGENTS = ("dashboard_agent_listen_port_", "runtime_env_agent_port_")
_STARTED = "Ray runtime started"
_SLOW = "it was not ready"
# Where Ray says why one of its processes ended, and how such a line begins.
_LOGS = ("raylet.err", "raylet.out", "gcs_server.err", "gcs_server.out")
_FATAL = re.compile(r"^\[[^\]]* C \d+ \d+\].*", re.M)
_FATAL_CHARACTERS_MAX = 600
# What `ray start` prints for a user at a terminal: how to connect and how to stop.
_PLAIN = re.compile(r"^\S+ \S+\s+(INFO|SUCC)\s")


class RayStartFailed(Exception):
    """Ray did not come up on this node; the text says what it wrote last."""


class RayProcesses(NamedTuple):
    """Ray's processes on this node, once they are ready."""

    pid: int  # of `ray start`
    watched: dict[int, str]  # pidfd → name, of all processes that this node's Ray depends on
    ports: Ports
    temporary: str  # Ray's directory for sessions

    def gone(self, timeout_s: float = 0.0) -> str:
        """Return the name of what has ended, or "", after waiting for it for `timeout_s`."""
        ended = linux.readable(self.watched, timeout_s)
        # `ray start` ends because of another: that one is to be named.
        names = sorted((self.watched[fd] for fd in ended), key=lambda name: name not in _WATCHED)
        return names[0] if names else ""

    def last_words(self) -> str:
        """Return what Ray wrote last that says why it ended."""
        return last_words(self.temporary)


class RayStartPlan(NamedTuple):
    """Start parameters of Ray on this node."""

    directory: str  # a private one; each try has a directory of its own in it
    find: Callable[[], Ports]  # finds ports for a try
    variables: Callable[[Ports], Mapping[str, str]]  # the whole environment, for ports
    arguments: Callable[[Ports, str], list[str]]  # of `ray start`, for ports and a directory of sessions


def start(
    family: Family, plan: RayStartPlan, stop: Callable[[], bool], say: Callable[[str], None]
) -> RayProcesses | None:
    """Start Ray on this node and return when it is ready; None when `stop` says so. RayStartFailed."""
    problem = ""
    for number in range(1, _TRIES_MAX + 1):
        engine = _begin(family, plan, os.path.join(plan.directory, str(number)))
        ended = _wait(engine, stop)
        if ended is None:
            return None
        if not ended:
            return engine
        words = engine.last_words()
        problem = f"{ended}: {words}" if words else ended
        # End what is left of this try; the agents end with the raylet, and all with the family.
        for pid in (*linux.descendants(engine.pid), engine.pid):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        for fd in engine.watched:
            os.close(fd)
        if ended.startswith(_SLOW):
            break
        if number < _TRIES_MAX:
            say(f"Ray did not start, and is started again: {problem}")
    raise RayStartFailed(problem)


def last_words(temporary: str) -> str:
    """Return Ray's last output that says why it ended, or ""."""
    logs = os.path.join(temporary, "session_latest", "logs")
    for name in _LOGS:
        if fatal := _FATAL.findall(_tail(os.path.join(logs, name))):
            return str(fatal[-1])[:_FATAL_CHARACTERS_MAX]
    written = _tail(os.path.join(temporary, OUTPUT_FILE)).splitlines()
    return "\n".join([line for line in written if line.strip() and not _PLAIN.match(line)][-_LAST_LINES:])


def _tail(path: str) -> str:
    with contextlib.suppress(OSError), open(path, "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _LAST_BYTES))
        return file.read(_LAST_BYTES).decode(errors="replace")
    return ""


def _begin(family: Family, plan: RayStartPlan, temporary: str) -> RayProcesses:
    os.mkdir(temporary, 0o700)
    ports = plan.find()
    argv = [sys.executable, "-P", "-m", "ray.scripts.scripts", "start", *plan.arguments(ports, temporary)]
    environment = dict(plan.variables(ports))
    environment.update(ray_installation.python_path(environment))
    pid = family.fork(_program(argv, environment, os.path.join(temporary, OUTPUT_FILE)))
    return RayProcesses(pid, {os.pidfd_open(pid): "ray start"}, ports, temporary)


def _wait(engine: RayProcesses, stop: Callable[[], bool]) -> str | None:
    """Return "" when Ray is ready, what is wrong, or None when it is to stop."""
    session = os.path.join(engine.temporary, "session_latest")
    until = time.monotonic() + START_S
    while time.monotonic() < until:
        if stop():
            return None
        if gone := engine.gone(_LOOK_S):
            return f"its {gone} ended before it was ready"
        ready = False
        if "raylet" in engine.watched.values():
            names: list[str] = []
            with contextlib.suppress(OSError):
                names = os.listdir(session)
            agents = all(any(name.startswith(agent) for name in names) for agent in _AGENTS)
            ready = agents or _STARTED in _tail(os.path.join(engine.temporary, OUTPUT_FILE))
        _watch(engine)  # as soon as there is anything: `ray start` misses a gcs_server that ends early for a while
        if ready:
            return ""
    return f"{_SLOW} after {START_S} s"


def _watch(engine: RayProcesses) -> None:
    """Watch the processes that `ray start` cannot be without, too."""
    for child in linux.descendants(engine.pid):
        with contextlib.suppress(OSError), open(f"/proc/{child}/comm", encoding="utf-8") as file:
            name = file.read().strip()
            if name in _WATCHED and name not in engine.watched.values():
                engine.watched[os.pidfd_open(child)] = name


def _program(argv: list[str], variables: dict[str, str], output: str) -> Callable[[], int]:
    def become() -> int:
        os.setpgid(0, 0)  # what is sent to the driver's group is not for Ray
        null = os.open(os.devnull, os.O_RDONLY)
        file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        for fd, target in ((null, 0), (file, 1), (file, 2)):
            os.dup2(fd, target)
        os.execve(argv[0], argv, variables)

    return become
