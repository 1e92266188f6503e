"""Sends Ray requests to the child process `driver_process.py`, and kills the child on a timeout.

    DriverLink     connect  ─▶ does the head's port answer? ─▶ start a child as driver; backoff grows on failure
                   ask      ─▶ the child's answer, or Unanswered; a late answer ends the child
                   trouble  ─▶ "" or the reason why new gangs wait

    DriverClient   ask(operation, …) ── line ─▶ child          every request has its own deadline
                                     ◀── line ── reader thread: answers come in any order
                                     timeout or exit: Unanswered for all requests; DriverLink starts another child

A call to Ray can block for minutes after the head has exited. The engine kills the child process, because Ray cannot
cancel a blocked call. DriverLink kills the child when the head's port refuses connections. A new head at the same port
may belong to a different cluster, which the old driver cannot use.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import subprocess
import threading
from collections.abc import Mapping
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import IO

import msgspec

from serverless_gpu.ambient import Clock
from serverless_gpu.engines.ray import driver_process, uplink_launcher
from serverless_gpu.engines.ray.ray_tables import namespace, plain
from serverless_gpu.node.processes.spawn import clean_variables, open_log

_DRIVER_PROGRAM = Path(__file__).with_name("driver_process.py")
_KILL_WAIT_S = 10.0


class Unanswered(Exception):
    """Raised if the driver process exits or misses a deadline. The driver may have executed the request."""


class RayProblem(Exception):
    """Raised for an exception in Ray, with Ray's error message."""


class DriverClient:
    """Controls a child process that has Ray installed.

    The constructor raises OSError if the child process cannot start.
    """

    def __init__(self, python: str, variables: Mapping[str, str], log: Path) -> None:
        fd = open_log(log)
        try:
            self._process = subprocess.Popen(
                [python, "-I", str(_DRIVER_PROGRAM)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=fd,
                cwd="/",
                env={**clean_variables(os.environ), **variables},
                start_new_session=True,
            )
        finally:
            os.close(fd)
        self._lock = threading.Lock()
        self._waiting: dict[int, SimpleQueue[dict[str, object] | None]] = {}
        self._count = 0
        self._is_gone = False
        assert self._process.stdin is not None and self._process.stdout is not None
        self._requests: IO[bytes] = self._process.stdin
        self._reader = threading.Thread(
            target=self._read, args=(self._process.stdout,), name="ray answers", daemon=True
        )
        self._reader.start()

    @property
    def pid(self) -> int:
        """Return the process id of the child process."""
        return self._process.pid

    @property
    def is_gone(self) -> bool:
        """Return True if the child process has closed its output and cannot answer requests."""
        return self._is_gone

    def ask(self, operation: str, deadline_s: float, **arguments: object) -> dict[str, object]:
        """Return the child's answer to a request, and kill the child after a missed deadline.

        Raises RayProblem if Ray fails or refuses the request. Raises Unanswered if the child does not answer.
        """
        box: SimpleQueue[dict[str, object] | None] = SimpleQueue()
        with self._lock:
            if self._is_gone:
                raise Unanswered("the Ray driver process has exited")
            self._count += 1
            number = self._count
            self._waiting[number] = box
        try:
            line = json.dumps({**arguments, "op": operation, "id": number}).encode() + b"\n"
            # If the child process has exited, the reader thread fails all pending requests.
            with self._lock, contextlib.suppress(OSError, ValueError):
                self._requests.write(line)
                self._requests.flush()
            answer = box.get(timeout=deadline_s)
        except Empty:
            self.kill()
            raise Unanswered(f"Ray did not answer {operation!r} within {deadline_s:g} s") from None
        finally:
            with self._lock:
                self._waiting.pop(number, None)
        if answer is None:
            raise Unanswered("the Ray driver process has exited")
        if "problem" in answer:
            raise RayProblem(plain(answer["problem"]))
        said = answer.get("ok")
        return said if isinstance(said, dict) else {}

    def kill(self) -> None:
        """Kill the child process. Ray keeps the reservations that the child made."""
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_KILL_WAIT_S)
        self._reader.join(_KILL_WAIT_S)
        with contextlib.suppress(OSError):
            self._requests.close()

    def _read(self, answers: IO[bytes]) -> None:
        with answers:
            for line in answers:
                with contextlib.suppress(ValueError):
                    answer = json.loads(line)
                    with self._lock:
                        box = self._waiting.get(answer.get("id"))
                    if box is not None:
                        box.put(answer)
        with self._lock:
            self._is_gone = True
            for box in self._waiting.values():
                box.put(None)


PROGRAM_DIGEST = hashlib.sha256(
    Path(driver_process.__file__).read_bytes() + uplink_launcher.LAUNCHER.encode()
).hexdigest()[:8]
"""Suffix of actor names, derived from the actor's program. `connect` kills actors with a different suffix."""
_PORT_S = 2.0
_CONNECT_S = 60.0
_PAUSES_S = (0.5, 1.0, 2.0, 5.0)


class RayAccess(msgspec.Struct, frozen=True, kw_only=True):
    """The address and environment variables that connect the head's machine to a Ray cluster."""

    address: str  # Address of the Ray head, for example ``"10.0.0.1:6379"``.
    node_address: str
    pool: str
    variables: dict[str, str]


class DriverLink:
    """Connects to a Ray cluster through one driver process at a time."""

    def __init__(self, access: RayAccess, python: str, log: Path, clock: Clock) -> None:
        self._access, self._python, self._log, self._clock = access, python, log, clock
        self._lock = threading.Lock()
        self._child: DriverClient | None = None
        self._closed = False
        self._failures = 0
        self._again_ns = 0
        self._trouble = f"the Ray head at {access.address} has not answered yet"

    @property
    def trouble(self) -> str:
        """Return the reason why the Ray head does not answer, or ""."""
        return self._trouble

    def connect(self, closed: threading.Event) -> bool:
        """Start a driver process for the cluster if necessary. Return True if a driver is connected."""
        child = self._child
        if (problem := self._port_problem()) or (child is not None and child.is_gone):
            self._drop()
            child = None
        if problem:
            self._trouble = self._lost()
            return False
        if child is not None:
            return True
        if self._clock.boottime_ns() < self._again_ns or closed.is_set():
            return False
        return self._begin()

    def ask(self, operation: str, deadline_s: float, **arguments: object) -> Mapping[str, object]:
        """Return the child's answer to a request, as `DriverClient.ask` does."""
        child = self._child
        if child is None:
            raise Unanswered(self._trouble)
        return child.ask(operation, deadline_s, **arguments)

    def failed(self, error: Exception) -> None:
        """Kill the driver process after a failed poll of Ray's tables, because the head may have changed."""
        self._drop()
        self._trouble = self._lost() if isinstance(error, Unanswered) else f"{self._lost()} ({error})"

    def close(self) -> None:
        """Kill the driver process and refuse later requests."""
        with self._lock:
            self._closed = True
        self._trouble = "the engine is closed"
        self._drop()

    def _begin(self) -> bool:
        try:
            child = DriverClient(self._python, self._access.variables, self._log)
        except OSError as error:
            self._fail(f"the Ray driver process did not start: {error}")
            return False
        with self._lock:
            self._child = child
            is_late = self._closed
        if is_late:
            self._drop()
            return False
        try:
            child.ask(
                "connect",
                _CONNECT_S,
                address=self._access.address,
                node_address=self._access.node_address,
                namespace=namespace(self._access.pool),
                program=PROGRAM_DIGEST,
            )
        except (Unanswered, RayProblem) as error:
            self._drop()
            self._fail(f"the Ray head at {self._access.address} does not accept this server as a driver: {error}")
            return False
        self._failures, self._trouble = 0, ""
        return True

    def _fail(self, trouble: str) -> None:
        pause_s = _PAUSES_S[min(self._failures, len(_PAUSES_S) - 1)]
        self._failures += 1
        self._again_ns = self._clock.boottime_ns() + round(pause_s * 1e9)
        self._trouble = trouble

    def _drop(self) -> None:
        with self._lock:
            child, self._child = self._child, None
        if child is not None:
            child.kill()

    def _lost(self) -> str:
        return f"the Ray head at {self._access.address} does not answer; running attempts continue"

    def _port_problem(self) -> str:
        host, _, port = self._access.address.rpartition(":")
        try:
            with contextlib.closing(socket.create_connection((host.strip("[]"), int(port)), _PORT_S)):
                return ""
        except (OSError, ValueError) as error:
            return str(error)
