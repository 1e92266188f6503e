"""Starts Ray on this node with given ports, environment and arguments, and watches Ray's processes.

    node task ── fork, exec ─▶ ray start --block ─┬─ gcs_server   of the head; without it, the cluster is lost
                  output: ray-start.log           ├─ raylet       without it, this node is lost
                                                  └─ agents, monitor, …   Ray restarts them, or ends with them

Ray is ready when the node's agents have written their ports to files. The raylet registers with the head immediately
after the agents have written their ports. Ray versions without port files report readiness by a line in the output of
`ray start`. Ray has failed on a node when `ray start`, the raylet or the head's gcs_server has ended. The node task
watches `ray start`, the raylet and gcs_server by pidfd. `ray start --block` checks its processes only once a second.
`ray start` treats a SIGTERM sent to one of its processes as a requested stop.

Ports: The node task assigns all ports explicitly, so that clusters on one machine do not collide. By default, Ray uses
fixed ports or lets its processes choose ports. The node task tests each port by binding the port. The node task avoids
the kernel's ephemeral range, where any connection could take a port before Ray starts.

Environment: The caller's shell may have environment variables of another Ray cluster. The other cluster's address,
token or temporary directory would connect this run to the other cluster. The node task therefore removes all variables
that begin with ``RAY_``, except variables that tune libraries. The node task also removes torch's distributed
variables, which the supervisor sets for every rank. The driver is not a torch rank, and Ray Train creates its own torch
process groups.

Failure cases:

* A watched process may end before Ray is ready, for example because another process took a port. After an early end of
  a process, the node task retries, up to `_TRIES_MAX` attempts.
* If Ray is not ready after `START_S` seconds, the node task does not retry.

A failed start raises `RayStartFailed` with Ray's last output.
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
    """Return the `ray start` arguments for the head node, which also offers devices.

    `temporary` is Ray's session directory. `client` means that this Ray can serve `ray://` connections. Without an
    explicit client port, Ray with `ray://` support would use a fixed port. Ray without `ray://` support rejects the
    option for the client port.
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
    """Return the `ray start` arguments for a node that joins the head at `address`.

    `temporary` is Ray's session directory.
    """
    return [f"--address={address}", *_common_arguments(share, ports, temporary)]


def cluster_address(share: ClusterShare, ports: Ports) -> str:
    """Return the head's address, for the driver's RAY_ADDRESS and for joining nodes."""
    return f"{LOOPBACK if share.num_nodes == 1 else share.address}:{ports.gcs}"


def listens_at(share: ClusterShare) -> str:
    """Return the address at which Ray listens on a node, or "" for all addresses of the machine."""
    return LOOPBACK if share.num_nodes == 1 else ""


def ready_sentence(share: ClusterShare, shares: Sequence[ClusterShare], version: str, page: str) -> str:
    """Return the message that announces a ready cluster.

    `page` is the dashboard's URL, or "" if the dashboard does not run.
    """
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
        "--min-worker-port=0",  # With port 0, the kernel chooses a free port.
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
    # By default, Ray offers one unit of the accelerator type regardless of the number of devices.
    if share.accelerator and share.devices:
        arguments.append("--resources=" + json.dumps({f"accelerator_type:{share.accelerator}": 1}))
    if share.num_nodes > 1:
        arguments.append(f"--node-ip-address={share.address}")
    return arguments


# --- environment ------------------------------------------------------------------------------------------------------


TOKEN_FILE = "token"
START_S = 180
"""Time limit in seconds for starting Ray. The first import of Ray from a slow disk takes most of the time."""
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
# Variables that tune user libraries but neither locate a Ray cluster nor grant access to its processes.
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
# Ray Train queries the state API for its controller once a second. The dashboard process serves the state API. Without
# a dashboard, the workers would print an error line once a second.
_REPEATED_LOG_LINE = "Failed to query Ray Train Controller actor state"
_KEPT_PREFIXES = ("RAY_AIR_", "RAY_CGRAPH_", "RAY_DATA_", "RAY_EXPERIMENTAL_NOSET_", "RAY_TRAIN_", "RAY_TUNE_")
_METRIC_PORT_VARIABLES = frozenset({"AUTOSCALER_METRIC_PORT", "DASHBOARD_METRIC_PORT"})


def stripped_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables without those of another Ray cluster or of torch's rendezvous."""
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
    """Return the environment variables for Ray's own processes, the workers and the driver.

    Ray reads some environment variables on import. `token` means that this Ray version supports token authentication.
    """
    variables = {
        "RAY_USAGE_STATS_ENABLED": "0",  # Ray enables usage statistics by default and would contact Ray's servers.
        "RAY_raylet_start_wait_time_s": str(START_S),  # Ray's default of 30 s is too short for a busy machine.
    }
    if share.num_nodes == 1:
        # RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0 forbids a cluster of several machines. Only this setting makes every Ray
        # process listen on the loopback address only.
        variables["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    if token:
        variables["RAY_AUTH_MODE"] = "token"
        variables["RAY_AUTH_TOKEN_PATH"] = os.path.join(share.directory, TOKEN_FILE)
    return variables


def port_variables(ports: Ports, address: str) -> dict[str, str]:
    """Return the port-dependent environment variables for all processes of the cluster.

    Tasks also need RAY_ADDRESS, because Ray Train's actors read the variable.
    """
    return {
        "RAY_ADDRESS": address,
        # `ray start` has no arguments for the autoscaler and dashboard metric ports.
        "AUTOSCALER_METRIC_PORT": str(ports.autoscaler_metrics),
        "DASHBOARD_METRIC_PORT": str(ports.dashboard_metrics),
    }


def token_of(secret: str) -> str:
    """Return the token of a run's cluster, which is the same on all nodes.

    The token authenticates clients only to Ray.
    """
    return hmac.new(secret.encode(), b"the token of the run's Ray cluster", hashlib.sha256).hexdigest()


# --- ports ------------------------------------------------------------------------------------------------------------


# Range between the ports of common services and the ports that Kubernetes assigns.
_LOWEST_PORT, _HIGHEST_PORT = 11_000, 30_000
_PORT_RANGE_FILE = "/proc/sys/net/ipv4/ip_local_port_range"
_PORT_RANGE_MIN = 1_000
_PORT_TRIES_MAX = 2_000


class Ports(NamedTuple):
    """The ports of Ray's processes on one node. Only the head uses all ports of `Ports`."""

    gcs: int  # Port of the head's gcs_server, part of the cluster's address.
    object_manager: int  # Port of the raylet for object transfers.
    node_manager: int  # Port of the raylet for task scheduling.
    runtime_env_agent: int  # Port of the agent that creates the runtime environments of tasks.
    agent_grpc: int
    agent_http: int
    metrics: int  # Port of this node's metrics endpoint, with ``ray[default]``.
    client_server: int  # Port of the head for `ray://` connections.
    autoscaler_metrics: int
    dashboard_metrics: int
    dashboard: int  # Port of the head's dashboard, if requested.


def find_ports(address: str = LOOPBACK, range_file: str = _PORT_RANGE_FILE) -> Ports:
    """Return free ports at `address` ("" for all addresses of this machine). Raises OSError.

    `range_file` contains the kernel's ephemeral port range.
    """
    lowest, highest = _port_range(range_file)
    chosen: list[int] = []
    with contextlib.ExitStack() as held:  # Keep all sockets open at once, so that the function chooses no port twice.
        for _ in range(_PORT_TRIES_MAX):
            port = random.SystemRandom().randint(lowest, highest)
            sock = held.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                # The kernel also refuses a port on which a process listens at all addresses.
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
    # If the ephemeral range covers nearly all ports, the range cannot be avoided. Without an unused range, a retry of
    # `ray start` resolves port conflicts.
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
# Ray's log files that contain the failure reason of a process, and the pattern of the line with the reason.
_LOGS = ("raylet.err", "raylet.out", "gcs_server.err", "gcs_server.out")
_FATAL = re.compile(r"^\[[^\]]* C \d+ \d+\].*", re.M)
_FATAL_CHARACTERS_MAX = 600
# Pattern of the lines that `ray start` prints for terminal users about connecting and stopping.
_PLAIN = re.compile(r"^\S+ \S+\s+(INFO|SUCC)\s")


class RayStartFailed(Exception):
    """Ray did not start on this node. The exception text contains Ray's last output."""


class RayProcesses(NamedTuple):
    """Ray's running processes on this node."""

    pid: int  # Pid of the `ray start` process.
    watched: dict[int, str]  # Names of all processes on which this node's Ray depends, by pidfd.
    ports: Ports
    temporary: str  # Session directory of this Ray.

    def gone(self, timeout_s: float = 0.0) -> str:
        """Return the name of a Ray process that has ended, or "".

        Wait up to `timeout_s` seconds for a Ray process to end.
        """
        ended = linux.readable(self.watched, timeout_s)
        # If another process has ended before `ray start`, the function returns the other process's name.
        names = sorted((self.watched[fd] for fd in ended), key=lambda name: name not in _WATCHED)
        return names[0] if names else ""

    def last_words(self) -> str:
        """Return the part of Ray's last output that explains why Ray ended."""
        return last_words(self.temporary)


class RayStartPlan(NamedTuple):
    """Start parameters of Ray on this node."""

    directory: str  # Private directory that contains one directory per start attempt.
    find: Callable[[], Ports]  # Function that finds the ports for one start attempt.
    variables: Callable[[Ports], Mapping[str, str]]  # Function that returns the whole environment for given ports.
    # Function that returns the `ray start` arguments for given ports and a session directory.
    arguments: Callable[[Ports, str], list[str]]


def start(
    family: Family, plan: RayStartPlan, stop: Callable[[], bool], say: Callable[[str], None]
) -> RayProcesses | None:
    """Start Ray on this node. Return when Ray is ready, or return None when `stop` returns True.

    Raises RayStartFailed if Ray does not start.
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
        # End the remaining processes of the failed start attempt. Ray's agents end with the raylet.
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
    """Return the part of Ray's last output that explains why Ray ended, or ""."""
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
    """Return "" when Ray is ready, a failure reason, or None when `stop` returns True."""
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
    """Watch newly started processes on which the node's Ray depends."""
    for child in linux.descendants(engine.pid):
        with contextlib.suppress(OSError), open(f"/proc/{child}/comm", encoding="utf-8") as file:
            name = file.read().strip()
            if name in _WATCHED and name not in engine.watched.values():
                engine.watched[os.pidfd_open(child)] = name


def _program(argv: list[str], variables: dict[str, str], output: str) -> Callable[[], int]:
    def become() -> int:
        os.setpgid(0, 0)  # Ray must not receive signals sent to the driver's process group.
        null = os.open(os.devnull, os.O_RDONLY)
        file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        for fd, target in ((null, 0), (file, 1), (file, 2)):
            os.dup2(fd, target)
        os.execve(argv[0], argv, variables)

    return become
