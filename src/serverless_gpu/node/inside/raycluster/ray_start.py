"""Runs `ray start` on this node with ports, environment and arguments, and watches its processes.

    node task ── fork, exec ─▶ ray start --block ─┬─ gcs_server   of the head; without it, the cluster is lost
                  output: ray-start.log           ├─ raylet       without it, this node is lost
                                                  └─ agents, monitor, …   Ray restarts them, or ends with them

Ray is ready when the node's agents have written their ports to files. The raylet registers with the head immediately
after the agents have written their ports. Ray versions without such files print a line in the output of `ray start`.
Ray is gone when `ray start`, the raylet or the head's gcs_server has ended. The node task watches all three processes
by pidfd. `ray start --block` checks its processes only once a second. `ray start` treats a SIGTERM to one of its
processes as a requested stop.

Ports: The node task names all ports, so that clusters on one machine do not collide. Ray's default ports are fixed
numbers, or numbers that Ray's processes choose. The node task tests each port by binding it. The node task avoids the
kernel's ephemeral range, where any connection could use a port before Ray starts.

Environment: The caller's shell may belong to another Ray. The address, token or temporary directory of the other Ray
would connect this cluster to the other Ray. The node task therefore removes all variables that begin with ``RAY_``,
except for those that tune libraries. The node task also removes the variables of torch's world, which the supervisor
sets for every rank. A driver does not belong to torch's world, and Ray Train creates its own worlds.

Failure cases:

* A watched process may end before Ray is ready, because another process took a port or an agent exceeded the raylet's
  limit of 15 s. The node task then tries again, up to `_TRIES_MAX` tries.
* If Ray is not ready after `START_S`, the node task does not try again.

A failed start raises `RayStartFailed`, which contains Ray's last output.
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
    """Return the arguments that start the head, which is also a node with devices.

    `temporary` is Ray's directory for sessions. `client` means that this Ray can serve `ray://` connections. Without
    the option for the client port, a Ray with `ray://` support would use a fixed port. A Ray without `ray://` support
    refuses the option.
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
    """Return the address for a driver's RAY_ADDRESS and for nodes that join."""
    return f"{LOOPBACK if share.num_nodes == 1 else share.address}:{ports.gcs}"


def listens_at(share: ClusterShare) -> str:
    """Return the address at which Ray listens on a node, or "" for all addresses of the machine."""
    return LOOPBACK if share.num_nodes == 1 else ""


def ready_sentence(share: ClusterShare, shares: Sequence[ClusterShare], version: str, page: str) -> str:
    """Return the message for a ready cluster. `page` is the dashboard's address, or ""."""
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
        "--min-worker-port=0",  # The kernel chooses only free ports.
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
    if share.accelerator and share.devices:  # Ray itself offers one unit of the type for any number of devices.
        arguments.append("--resources=" + json.dumps({f"accelerator_type:{share.accelerator}": 1}))
    if share.num_nodes > 1:
        arguments.append(f"--node-ip-address={share.address}")
    return arguments


# --- environment ------------------------------------------------------------------------------------------------------


TOKEN_FILE = "token"
START_S = 180
"""Seconds for Ray to start. The first import from a slow disk needs most of the time."""
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
# Variables that tune libraries of user code, without locating a Ray cluster or granting access to a Ray cluster's
# processes.
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
# Ray Train queries the state API for its controller once a second. The dashboard's process serves this API. Without a
# dashboard, the workers' output would contain an error line once a second.
_REPEATED_LOG_LINE = "Failed to query Ray Train Controller actor state"
_KEPT_PREFIXES = ("RAY_AIR_", "RAY_CGRAPH_", "RAY_DATA_", "RAY_EXPERIMENTAL_NOSET_", "RAY_TRAIN_", "RAY_TUNE_")
_METRIC_PORT_VARIABLES = frozenset({"AUTOSCALER_METRIC_PORT", "DASHBOARD_METRIC_PORT"})


def stripped_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables, except those of another Ray cluster and of torch's world."""
    return {
        name: value
        for name, value in variables.items()
        if name not in _WORLD_VARIABLES
        and name not in _METRIC_PORT_VARIABLES
        and (not name.startswith("RAY_") or name in _KEPT_VARIABLES or name.startswith(_KEPT_PREFIXES))
    }


def default_variables(share: ClusterShare) -> dict[str, str]:
    """Return the variables that apply unless the caller has set them."""
    return {} if share.dashboard else {"RAY_DEDUP_LOGS_SKIP_REGEX": _REPEATED_LOG_LINE}


def cluster_variables(share: ClusterShare, *, token: bool) -> dict[str, str]:
    """Return the environment of every process of the cluster: Ray's own processes, workers, driver.

    Ray reads some variables on import. `token` means that this Ray supports tokens.
    """
    variables = {
        "RAY_USAGE_STATS_ENABLED": "0",  # Usage statistics are on by default and would contact Ray's servers.
        "RAY_raylet_start_wait_time_s": str(START_S),  # Ray's default of 30 s is too short for a busy machine.
    }
    if share.num_nodes == 1:
        # RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0 forbids a cluster of several machines. No other setting makes every
        # process of Ray listen on loopback only.
        variables["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    if token:
        variables["RAY_AUTH_MODE"] = "token"
        variables["RAY_AUTH_TOKEN_PATH"] = os.path.join(share.directory, TOKEN_FILE)
    return variables


def port_variables(ports: Ports, address: str) -> dict[str, str]:
    """Return the variables that depend on the ports, for all processes of the cluster.

    Tasks also need the address, because Ray Train's actors read it.
    """
    return {
        "RAY_ADDRESS": address,
        # `ray start` has no arguments for the next two ports.
        "AUTOSCALER_METRIC_PORT": str(ports.autoscaler_metrics),
        "DASHBOARD_METRIC_PORT": str(ports.dashboard_metrics),
    }


def token_of(secret: str) -> str:
    """Return the token of a run's cluster, which is the same on all nodes.

    The token only authenticates to Ray.
    """
    return hmac.new(secret.encode(), b"the token of the run's Ray cluster", hashlib.sha256).hexdigest()


# --- ports ------------------------------------------------------------------------------------------------------------


_LOWEST_PORT, _HIGHEST_PORT = 11_000, 30_000  # Services use lower ports, and Kubernetes assigns higher ones.
_PORT_RANGE_FILE = "/proc/sys/net/ipv4/ip_local_port_range"
_PORT_RANGE_MIN = 1_000
_PORT_TRIES_MAX = 2_000


class Ports(NamedTuple):
    """The ports of the Ray processes of one node. Only the head uses all ports."""

    gcs: int  # Port of the head, part of the cluster's address.
    object_manager: int  # Port of the raylet for objects.
    node_manager: int  # Port of the raylet for tasks.
    runtime_env_agent: int  # Port of the agent that makes the environments of tasks.
    agent_grpc: int
    agent_http: int
    metrics: int  # Port for the metrics of this node, with ``ray[default]``.
    client_server: int  # Port of the head for `ray://` connections.
    autoscaler_metrics: int
    dashboard_metrics: int
    dashboard: int  # Port of the head's web page, if requested.


def find_ports(address: str = LOOPBACK, range_file: str = _PORT_RANGE_FILE) -> Ports:
    """Return free ports at `address` ("" for all addresses of this machine). Raises OSError.

    `range_file` holds the kernel's ephemeral range.
    """
    lowest, highest = _port_range(range_file)
    chosen: list[int] = []
    with contextlib.ExitStack() as held:  # Hold all sockets at once, so that no port is chosen twice.
        for _ in range(_PORT_TRIES_MAX):
            port = random.SystemRandom().randint(lowest, highest)
            sock = held.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                # The kernel also refuses a port at which a process listens on all addresses.
                sock.bind((address, port))
                chosen.append(port)
            if len(chosen) == len(Ports._fields):
                return Ports(*chosen)
    raise OSError(f"found fewer than {len(Ports._fields)} free ports between {lowest} and {highest}")


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
    # The ephemeral range covers nearly all ports. Only a retry of `ray start` then resolves a port conflict.
    return _LOWEST_PORT, 65_535


# --- processes --------------------------------------------------------------------------------------------------------


OUTPUT_FILE = "ray-start.log"

_TRIES_MAX = 3
_LOOK_S = 0.02
_LAST_BYTES = 64_000
_LAST_LINES = 8
_WATCHED = frozenset({"gcs_server", "raylet"})
_AGENTS = ("dashboard_agent_listen_port_", "runtime_env_agent_port_")
_STARTED = "Ray runtime started"
_SLOW = "Ray was not ready"
# Log files in which Ray gives the reason for the end of a process, and the pattern of the line with the reason.
_LOGS = ("raylet.err", "raylet.out", "gcs_server.err", "gcs_server.out")
_FATAL = re.compile(r"^\[[^\]]* C \d+ \d+\].*", re.M)
_FATAL_CHARACTERS_MAX = 600
# Lines that `ray start` prints for a user at a terminal, about connecting and stopping.
_PLAIN = re.compile(r"^\S+ \S+\s+(INFO|SUCC)\s")


class RayStartFailed(Exception):
    """Ray did not start on this node. The text contains Ray's last output."""


class RayProcesses(NamedTuple):
    """Ray's processes on this node, once Ray is ready."""

    pid: int  # Pid of `ray start`.
    watched: dict[int, str]  # Names by pidfd of all processes on which this node's Ray depends.
    ports: Ports
    temporary: str  # Ray's directory for sessions.

    def gone(self, timeout_s: float = 0.0) -> str:
        """Return the name of a Ray process that has ended, or "".

        Waits up to `timeout_s` for the end of a process.
        """
        ended = linux.readable(self.watched, timeout_s)
        # `ray start` ends after another process has ended, so the function returns the name of the other process.
        names = sorted((self.watched[fd] for fd in ended), key=lambda name: name not in _WATCHED)
        return names[0] if names else ""

    def last_words(self) -> str:
        """Return Ray's last output that explains why Ray ended."""
        return last_words(self.temporary)


class RayStartPlan(NamedTuple):
    """Start parameters of Ray on this node."""

    directory: str  # Private directory, in which each try has its own directory.
    find: Callable[[], Ports]  # Finds the ports of one try.
    variables: Callable[[Ports], Mapping[str, str]]  # Returns the whole environment for given ports.
    # Returns the arguments of `ray start` for ports and a directory of sessions.
    arguments: Callable[[Ports, str], list[str]]


def start(
    family: Family, plan: RayStartPlan, stop: Callable[[], bool], say: Callable[[str], None]
) -> RayProcesses | None:
    """Start Ray on this node. Return when Ray is ready, or return None when `stop` returns True.

    Raises RayStartFailed when Ray does not start.
    """
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
        # End the remaining processes of this try. The agents end with the raylet, and all processes end with the
        # family.
        for pid in (*linux.descendants(engine.pid), engine.pid):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        for fd in engine.watched:
            os.close(fd)
        if ended.startswith(_SLOW):
            break
        if number < _TRIES_MAX:
            say(f"Ray did not start. The node task tries again: {problem}")
    raise RayStartFailed(problem)


def last_words(temporary: str) -> str:
    """Return Ray's last output that explains why Ray ended, or ""."""
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
    """Return "" when Ray is ready, the reason of a failure, or None when `stop` returns True."""
    session = os.path.join(engine.temporary, "session_latest")
    until = time.monotonic() + START_S
    while time.monotonic() < until:
        if stop():
            return None
        if gone := engine.gone(_LOOK_S):
            return f"its {gone} ended before Ray was ready"
        ready = False
        if "raylet" in engine.watched.values():
            names: list[str] = []
            with contextlib.suppress(OSError):
                names = os.listdir(session)
            agents = all(any(name.startswith(agent) for name in names) for agent in _AGENTS)
            ready = agents or _STARTED in _tail(os.path.join(engine.temporary, OUTPUT_FILE))
        # Watch each process from its start, because `ray start` notices an early end of gcs_server only later.
        _watch(engine)
        if ready:
            return ""
    return f"{_SLOW} after {START_S} s"


def _watch(engine: RayProcesses) -> None:
    """Also watch the processes on which the node's Ray depends."""
    for child in linux.descendants(engine.pid):
        with contextlib.suppress(OSError), open(f"/proc/{child}/comm", encoding="utf-8") as file:
            name = file.read().strip()
            if name in _WATCHED and name not in engine.watched.values():
                engine.watched[os.pidfd_open(child)] = name


def _program(argv: list[str], variables: dict[str, str], output: str) -> Callable[[], int]:
    def become() -> int:
        os.setpgid(0, 0)  # Signals to the driver's process group must not reach Ray.
        null = os.open(os.devnull, os.O_RDONLY)
        file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        for fd, target in ((null, 0), (file, 1), (file, 2)):
            os.dup2(fd, target)
        os.execve(argv[0], argv, variables)

    return become
