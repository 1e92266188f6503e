"""Reads a node's Ray metrics in a forked process and writes the latest values to a file.

    node task ── fork ──▶ metrics.run ── GET /metrics, every 10 s ──▶ Ray's agent of this node
                             └─▶ <attempt>/ray/<node rank>.metrics.json ──▶ the node's monitor: into the run's samples

    ray_tasks{Name="g",Source="executor",State="RUNNING",…} 1.0 ─┐
    ray_tasks{Name="h",Source="executor",State="RUNNING",…} 2.0 ─┴─▶ {"tasks_running": 3.0}

The metrics process sends HTTP/1.0 requests directly, without proxies or redirects, with a timeout of five seconds.
Ray's response contains a line for every task name, process and histogram bucket. The response size is 400 kB on an idle
node and several megabytes on a busy node. The metrics process therefore parses the response line by line and stores
only sums. If Ray does not export a metric, the metrics process omits its value instead of writing 0.

Failure cases:

* If Ray has not started yet, hangs or has ended, the metrics process retries. The reader of the metrics file recognizes
  outdated values by their timestamp.
* If Ray's response is incomplete or too large, the metrics process does not write the values.
* If the disk is full, the previous metrics file remains.
* If a line is not a metric or exceeds the length limit, the metrics process ignores the line.
* Labels contain users' task names, which may contain any characters. The metrics process therefore parses labels by
  their quotes.
* A gauge that Ray computes as a difference may fall below 0 after a process has ended. The metrics process reports 0
  for a negative gauge.

The metrics process ends when its parent ends.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import signal
import socket
import time
from typing import NamedTuple, NoReturn

from .. import linux, protocol
from . import ray_installation

EVERY_S = 10.0
"""Interval in seconds between two reads. Ray updates its metrics at the same interval."""
_SOON_S = 2.0  # Interval in seconds between reads until Ray reports its resources, for at most `_SOON_LOOKS` reads.
_SOON_LOOKS = 60
_LIMIT_S = 5.0
_HEAD_BYTES_MAX = 1 << 16
BODY_BYTES_MAX = 64 << 20
_LINE_BYTES_MAX = 1 << 16
_CHUNK_BYTES = 1 << 16
_WHOLE = "cpus"


def missing() -> str:
    """Return a message that explains why this environment's Ray exports no metrics, or ""."""
    absent = ray_installation.missing_parts()
    if not absent:
        return ""
    return f"Ray's own metrics are not recorded: {absent[0]} is missing (pip install 'ray[default]')"


def run(address: str, port: int, path: str, *, every_s: float = EVERY_S) -> NoReturn:
    """Poll `address`:`port` every `every_s` seconds until the process ends.

    Call `run` only in a forked process.
    """
    linux.set_name("sgpu-raymetrics")
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ignore Ctrl-C, which only the driver handles.
    linux.leave_descriptors()
    looks, whole = 0, False
    while True:
        began = time.monotonic()
        figures = scrape(address, port)
        if figures:
            _write(path, figures)
        looks, whole = looks + 1, whole or _WHOLE in figures
        pause_s = every_s if whole or looks > _SOON_LOOKS else min(every_s, _SOON_S)
        time.sleep(max(0.0, began + pause_s - time.monotonic()))


def scrape(address: str, port: int, limit_s: float = _LIMIT_S) -> dict[str, float]:
    """Return the metric values of a node's Ray, or {} if `limit_s` passes without a complete response."""
    until = time.monotonic() + limit_s
    try:
        with socket.create_connection((address, port), timeout=limit_s) as sock:
            sock.sendall(f"GET /metrics HTTP/1.0\r\nHost: {address}:{port}\r\n\r\n".encode())
            return _Answer(sock, until).figures()
    except (OSError, ValueError):
        return {}


class _Answer:
    def __init__(self, sock: socket.socket, until: float) -> None:
        self._sock = sock
        self._until = until

    def figures(self) -> dict[str, float]:
        """Return the metric values of Ray's response.

        Raises OSError after the deadline. Raises ValueError if the response is not valid.
        """
        buffer = self._head()
        figures = RayFigures()
        got, skipping = len(buffer), False
        while got <= BODY_BYTES_MAX:
            *lines, buffer = buffer.split(b"\n")
            for line in lines:
                if not skipping and len(line) <= _LINE_BYTES_MAX:
                    figures.add(line)
                skipping = False
            if len(buffer) > _LINE_BYTES_MAX:
                buffer, skipping = b"", True
            chunk = self._receive()
            if not chunk:
                if buffer or skipping or (self._length is not None and got != self._length):
                    raise ValueError("the metrics response of Ray is incomplete")
                return figures.result()
            got += len(chunk)
            buffer += chunk
        raise ValueError("the metrics response of Ray exceeds the size limit")

    def _head(self) -> bytes:
        data = b""
        while b"\r\n\r\n" not in data:
            chunk = self._receive()
            if not chunk or len(data) > _HEAD_BYTES_MAX:
                raise ValueError("the metrics response of Ray has no HTTP header")
            data += chunk
        head, _, rest = data.partition(b"\r\n\r\n")
        status, *fields = head.split(b"\r\n")
        if not status.startswith(b"HTTP/1.") or status.split()[1:2] != [b"200"]:
            raise ValueError(f"answered {status[:64]!r}")
        self._length: int | None = None
        for field in fields:
            name, _, value = field.partition(b":")
            if name.strip().lower() == b"transfer-encoding":
                raise ValueError("the metrics response of Ray is chunked, which HTTP/1.0 does not allow")
            if name.strip().lower() == b"content-length":
                self._length = int(value)
        return rest

    def _receive(self) -> bytes:
        left_s = self._until - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the metrics response of Ray did not arrive in time")
        self._sock.settimeout(left_s)
        return self._sock.recv(_CHUNK_BYTES)


def _write(path: str, figures: dict[str, float]) -> None:
    body = json.dumps({"at_ns": protocol.now_ns(), "figures": figures}).encode()
    new = f"{path}.new"
    with contextlib.suppress(OSError):
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            whole = os.write(fd, body) == len(body)
        finally:
            os.close(fd)
        if whole:
            os.replace(new, path)


_NAME_BYTES_MAX = 128
_LABEL = re.compile(r'\s*([A-Za-z_]\w*)="((?:[^"\\]|\\.)*)"\s*,?')
_DRIVER = "f" * 24
"""Suffix of a driver's worker id, which Ray pads from the job id."""


class _Rule(NamedTuple):
    """Rule for one value: sum of the metric's matching lines, or number of different `distinct` labels."""

    figure: str
    metric: str
    labels: tuple[tuple[str, frozenset[str]], ...] = ()
    distinct: str = ""


def _rule(figure: str, metric: str, distinct: str = "", **labels: str) -> _Rule:
    return _Rule(figure, metric, tuple((key, frozenset(values.split())) for key, values in labels.items()), distinct)


# Each value has one rule per metric name, because Ray 2.50 renamed some metrics. Only the head exports placement groups
# and pending actors.
_RULES = (
    _rule("cpus", "ray_resources", Name="CPU", State="USED AVAILABLE"),
    _rule("cpus_used", "ray_resources", Name="CPU", State="USED"),
    _rule("gpus", "ray_resources", Name="GPU", State="USED AVAILABLE"),
    _rule("gpus_used", "ray_resources", Name="GPU", State="USED"),
    _rule("object_store_bytes", "ray_object_store_used_memory"),
    _rule("object_store_free_bytes", "ray_object_store_available_memory"),
    _rule("objects", "ray_object_store_num_local_objects"),
    _rule("spilled_bytes", "ray_object_store_memory", Location="SPILLED"),
    _rule(
        "tasks_pending",
        "ray_tasks",
        State="PENDING_ARGS_AVAIL PENDING_NODE_ASSIGNMENT PENDING_OBJ_STORE_MEM_AVAIL PENDING_ARGS_FETCH "
        "PENDING_ACTOR_TASK_ARGS_FETCH PENDING_ACTOR_TASK_ORDERING_OR_CONCURRENCY",
    ),
    _rule(
        "tasks_running",
        "ray_tasks",
        State="RUNNING RUNNING_IN_RAY_GET RUNNING_IN_RAY_WAIT GETTING_AND_PINNING_ARGS",
    ),
    _rule("tasks_finished", "ray_tasks", State="FINISHED"),
    _rule("tasks_failed", "ray_tasks", State="FAILED"),
    _rule("tasks_infeasible", "ray_scheduler_unscheduleable_tasks", Reason="Infeasible"),
    _rule(
        "actors",
        "ray_actors",
        Source="executor",
        State="ALIVE_IDLE ALIVE_RUNNING_TASKS IDLE RUNNING_TASK RUNNING_IN_RAY_GET RUNNING_IN_RAY_WAIT",
    ),
    _rule("actors_pending", "ray_actors", State="DEPENDENCIES_UNREADY PENDING_CREATION"),
    _rule("actors_restarting", "ray_actors", State="RESTARTING"),
    _rule("actors_dead", "ray_actors", State="DEAD"),
    _rule("placement_groups", "ray_placement_groups", State="CREATED"),
    _rule("placement_groups_pending", "ray_placement_groups", State="PENDING PREPARED RESCHEDULING"),
    _rule("workers", "ray_object_store_memory", distinct="WorkerId", Location="WORKER_HEAP"),
    _rule("workers_out_of_memory", "ray_memory_manager_worker_eviction_total"),
    _rule("cpu_percent", "ray_node_cpu_utilization"),
    _rule("memory_bytes", "ray_node_mem_used"),
    _rule("memory_total_bytes", "ray_node_mem_total"),
)

FIGURES = tuple(rule.figure for rule in _RULES)
"""Names of all metric values that a node can report."""


class RayFigures:
    """Computes the metric values from the lines of one response."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._distinct: dict[str, set[str]] = {}

    def add(self, line: bytes) -> None:
        """Add the value of one line. Lines of metrics without a rule have no effect."""
        end = line.find(b"{", 0, _NAME_BYTES_MAX)
        if end < 0:
            end = line.find(b" ", 0, _NAME_BYTES_MAX)
        rules = _BY_METRIC.get(line[: max(end, 0)])
        read = _read_line(line[end:].decode("utf-8", "replace")) if rules else None
        if rules is None or read is None:
            return
        labels, value = read
        for rule in rules:
            if all(labels.get(key) in values for key, values in rule.labels):
                if rule.distinct:
                    self._distinct.setdefault(rule.figure, set()).add(labels.get(rule.distinct, ""))
                else:
                    self._sums[rule.figure] = self._sums.get(rule.figure, 0.0) + value

    def result(self) -> dict[str, float]:
        """Return the metric values computed from the added lines."""
        found = {figure: max(0.0, value) for figure, value in self._sums.items()}
        for figure, values in self._distinct.items():
            found[figure] = float(len([value for value in values if value and not value.endswith(_DRIVER)]))
        return found


_BY_METRIC: dict[bytes, list[_Rule]] = {}
for _each in _RULES:
    _BY_METRIC.setdefault(_each.metric.encode(), []).append(_each)


def _read_line(text: str) -> tuple[dict[str, str], float] | None:
    """Return the labels and the value that follow a metric's name; None if the line is not valid."""
    labels: dict[str, str] = {}
    at = 0
    if text.startswith("{"):
        at = 1
        while True:
            found = _LABEL.match(text, at)
            if found is None:
                break
            labels[found.group(1)] = found.group(2)
            at = found.end()
        if not text.startswith("}", at):
            return None
        at += 1
    words = text[at:].split()  # A timestamp may follow the metric's value.
    if not words:
        return None
    try:
        value = float(words[0])
    except ValueError:
        return None
    return (labels, value) if math.isfinite(value) else None
