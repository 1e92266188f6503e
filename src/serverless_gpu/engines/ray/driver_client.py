"""The engine's side of `driver_process.py`: a child that has Ray, asked by line, killed when an answer is late.

    DriverLink     connect  ─▶ does the head's port answer? ─▶ a child, made a driver; pauses grow while that fails
                   ask      ─▶ the child's answer, or Unanswered; what comes late costs the child
                   trouble  ─▶ "" or why new gangs wait

    DriverClient   ask(operation, …) ── line ─▶ child          every request has its own deadline
                                     ◀── line ── reader thread: answers come in any order
                                     late, or its end: Unanswered for all who wait; DriverLink starts another one

Ray's calls can block for minutes once its head is gone, and none of them can be called off. A process can. A port that
refuses ends the child at once. The head may come back as another cluster at the same port; the old driver
is no driver of that.
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
from serverless_gpu.engines.ray import driver_process, node_launcher
from serverless_gpu.engines.ray.ray_tables import namespace, plain
from serverless_gpu.node.processes.spawn import clean_variables, open_log

_DRIVER_PROGRAM = Path(__file__).with_name("driver_process.py")
_KILL_WAIT_S = 10.0


class Unanswered(Exception):
    """The child did not answer in time, or is gone; what it was to do may have been done."""


class RayProblem(Exception):
    """Ray raised something; the text says what."""


class DriverClient:
    """One process that has Ray; OSError when it cannot be started."""

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
        """Return its process."""
        return self._process.pid

    @property
    def is_gone(self) -> bool:
        """Return whether it answers nothing any more."""
        return self._is_gone

    def ask(self, operation: str, deadline_s: float, **arguments: object) -> dict[str, object]:
        """Return the answer of `driver_process` to a request; a child that is late is killed.

        Raises Unanswered, or RayProblem when Ray refused or failed.
        """
        box: SimpleQueue[dict[str, object] | None] = SimpleQueue()
        with self._lock:
            if self._is_gone:
                raise Unanswered("the process that speaks with Ray has ended")
            self._count += 1
            number = self._count
            self._waiting[number] = box
        try:
            line = json.dumps({**arguments, "op": operation, "id": number}).encode() + b"\n"
            with self._lock, contextlib.suppress(OSError, ValueError):  # gone: the reader tells all who wait
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
            raise Unanswered("the process that speaks with Ray has ended")
        if "problem" in answer:
            raise RayProblem(plain(answer["problem"]))
        said = answer.get("ok")
        return said if isinstance(said, dict) else {}

    def kill(self) -> None:
        """End it; Ray keeps what it reserved."""
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
    Path(driver_process.__file__).read_bytes() + node_launcher.LAUNCHER.encode()
).hexdigest()[:8]
"""What names of actors end with: those that an older server left run another program, and are ended."""
_PORT_S = 2.0
_CONNECT_S = 60.0
_PAUSES_S = (0.5, 1.0, 2.0, 5.0)


class RayAccess(msgspec.Struct, frozen=True, kw_only=True):
    """How a Ray cluster is reached from the machine of its head."""

    address: str  # of the head, ``"10.0.0.1:6379"``
    node_address: str
    pool: str
    variables: dict[str, str]


class DriverLink:
    """The child, and whether it is of any use."""

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
        """Return why Ray cannot be asked, or ""."""
        return self._trouble

    def connect(self, closed: threading.Event) -> bool:
        """Have a child that is a driver of the cluster; return whether there is one."""
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
        """Return what the child answers; as `Child.ask`."""
        child = self._child
        if child is None:
            raise Unanswered(self._trouble)
        return child.ask(operation, deadline_s, **arguments)

    def failed(self, error: Exception) -> None:
        """Take that a look did not succeed: the head is not what it was."""
        self._drop()
        self._trouble = self._lost() if isinstance(error, Unanswered) else f"{self._lost()} ({error})"

    def close(self) -> None:
        """End the child, for good."""
        with self._lock:
            self._closed = True
        self._trouble = "the engine is closed"
        self._drop()

    def _begin(self) -> bool:
        try:
            child = DriverClient(self._python, self._access.variables, self._log)
        except OSError as error:
            self._fail(f"the process that speaks with Ray cannot be started: {error}")
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
            self._fail(f"the Ray head at {self._access.address} does not take this server as a driver: {error}")
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
        return f"the Ray head at {self._access.address} does not answer; what runs goes on"

    def _port_problem(self) -> str:
        host, _, port = self._access.address.rpartition(":")
        try:
            with contextlib.closing(socket.create_connection((host.strip("[]"), int(port)), _PORT_S)):
                return ""
        except (OSError, ValueError) as error:
            return str(error)
