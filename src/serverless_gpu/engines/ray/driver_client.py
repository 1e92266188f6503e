"""The engine's side of `driver_process.py`: a child that is asked, and killed when an answer is late.

    ask(operation, …) ── line ─▶ child          every request has its own deadline
                      ◀── line ── reader thread: answers come in any order
                      late, or its end: Unanswered for all who wait; whoever keeps it starts another one

Ray's calls can block for minutes once its head is gone, and none of them can be called off. A process can.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import threading
from collections.abc import Mapping
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import IO

from serverless_gpu.engines.ray.ray_tables import plain
from serverless_gpu.node.processes.spawn import clean_variables, open_log

_PROGRAM = Path(__file__).with_name("driver_process.py")
_END_S = 10.0


class Unanswered(Exception):
    """The child did not answer in time, or is gone; what it was to do may have been done."""


class RayProblem(Exception):
    """Ray raised something; the text says what."""


class DriverClient:
    """One process that has Ray.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self, python: str, variables: Mapping[str, str], log: Path) -> None:
        fd = open_log(log)
        try:
            self._process = subprocess.Popen(
                [python, "-I", str(_PROGRAM)],
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
        """Return the answer to a request.

        Args:
            operation: of `ray_driver`.
            deadline_s: how long it may take; a child that is late is killed.
            arguments: of the operation.

        Raises:
            Unanswered: there is none.
            RayProblem: Ray refused, or failed.
        """
        box: SimpleQueue[dict[str, object] | None] = SimpleQueue()
        with self._lock:
            if self._is_gone:
                raise Unanswered("the process that speaks with Ray has ended")
            self._count += 1
            number = self._count
            self._waiting[number] = box
        try:
            self._send({**arguments, "op": operation, "id": number})
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
            self._process.wait(_END_S)
        self._reader.join(_END_S)
        with contextlib.suppress(OSError):
            self._requests.close()

    def _send(self, request: Mapping[str, object]) -> None:
        line = json.dumps(request).encode() + b"\n"
        with self._lock, contextlib.suppress(OSError, ValueError):  # gone: the reader says so to whoever waits
            self._requests.write(line)
            self._requests.flush()

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
