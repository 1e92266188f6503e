"""One `ray_launch` of a test, in the user's environment: its program, what the driver said, what belongs to the run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from serverless_gpu.testing import agent_status
from tests.e2e.ray.plain_ray import PYTHON, own_variables
from tests.e2e.ray.remains import Footprint
from tests.support.local.observe import Process, run_directories, wait_for
from tests.support.paths import REPOSITORY

ROOT = str(REPOSITORY)
READY_S = 180.0
ENDED_S = 90.0
GONE_S = 30.0


class Launched:
    """A program that calls a driver of `remains_caller`.

    Args:
        home: where its runs are.
        where: a directory for what the driver writes; made.
        act: what the driver does once it is ready.
        options: of `ray_launch`.
        environ: variables of the caller's.
        command: what the program is run by.

    Attributes:
        run_id: of its run, once that is there.
        footprint: what belongs to the run, once it is ready.
    """

    def __init__(
        self,
        home: Path,
        where: Path,
        act: str,
        *,
        options: Mapping[str, object] | None = None,
        environ: Mapping[str, str] | None = None,
        command: tuple[str, ...] = (str(PYTHON),),
    ) -> None:
        self.home, self.where = home, where
        where.mkdir(exist_ok=True)
        known = set(run_directories(home))
        path = os.pathsep.join(filter(None, [ROOT, (environ or {}).get("PYTHONPATH", os.environ.get("PYTHONPATH"))]))
        variables = {name: value for name, value in os.environ.items() if name.startswith("SERVERLESS_GPU_")}
        program = str(Path(__file__).with_name("remains_caller.py"))
        with open(where / "output", "wb") as output:
            self.process = subprocess.Popen(
                [*command, program, str(where), act, json.dumps(dict(options or {}))],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**own_variables(), **variables, **(environ or {}), "PYTHONPATH": path},
                start_new_session=True,
            )
        self.run_id = str(wait_for(lambda: self._new(known), "the call has a run", limit_s=ENDED_S))
        self.footprint = Footprint(
            f"SGPU_RUN_ID={self.run_id}", allowed=(f"{home}/", f"{where}/", "/tmp/serverless_gpu-")
        )

    def _new(self, known: set[str]) -> str:
        assert self.process.poll() is None or self._directories(known), self.output()
        return next(iter(self._directories(known)), "")

    def _directories(self, known: set[str]) -> list[str]:
        return [name for name in run_directories(self.home) if name not in known]

    def ready(self) -> dict[str, Any]:
        """Wait until the driver uses its cluster; return what it said, having looked at what belongs to the run."""
        wait_for(lambda: (self.where / "ready").exists() or self._ended_early(), "the driver is ready", limit_s=READY_S)
        self.footprint.look()
        told: dict[str, Any] = json.loads((self.where / "ready").read_text(encoding="utf-8"))
        return told

    def _ended_early(self) -> bool:
        assert self.process.poll() is None, self.output()
        return False

    def ended(self) -> dict[str, Any]:
        """Wait for the program's end and return how the call ended."""
        wait_for(lambda: self.process.poll() is not None, "the caller has ended", limit_s=ENDED_S)
        lines = self.output().splitlines()
        assert lines and lines[-1].startswith("{"), self.output()
        outcome: dict[str, Any] = json.loads(lines[-1])
        return outcome

    def output(self) -> str:
        """Return everything the program has written."""
        return (self.where / "output").read_text(encoding="utf-8", errors="replace")

    def go(self) -> None:
        """Let a driver go on that waits for that."""
        (self.where / "go").touch()

    def interrupt(self) -> None:
        """Press Ctrl-C."""
        self.process.send_signal(signal.SIGINT)

    def stem(self) -> Process:
        """Return the parent of the run's rank."""
        return Process(self._one("[sgpu-stem]"))

    def node_task(self) -> Process:
        """Return the run's rank."""
        return Process(self._one("[sgpu-rank0]"))

    def one(self, name: str) -> Process:
        """Return a process of the run by the name the kernel has for it."""
        return Process(self._one(f"[{name}]"))

    def _one(self, name: str) -> int:
        (pid,) = self.footprint.named(name)
        return pid

    def nothing_left(self) -> None:
        """Wait until nothing of the run is left.

        Raises:
            AssertionError: something is.
        """
        left: list[str] = []

        def gone() -> bool:
            left[:] = self.footprint.left()
            return not left

        try:
            wait_for(gone, "nothing of the run is left", limit_s=GONE_S)
        except AssertionError:
            raise AssertionError("\n".join(["there is still:", *left])) from None

    def close(self) -> None:
        """End whatever a failed test left."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.footprint.end()


def supervisor_of(home: Path, run_id: str) -> Process:
    """Return the supervisor of a run."""
    status = agent_status(home)
    assert status is not None
    return Process(next(attempt.pid for attempt in status.attempts if attempt.run_id == run_id))
