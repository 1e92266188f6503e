"""The job's MLflow run, as a rank learns of it.

    monitor ──▶ <attempt>/tracking.json ──▶ Job.resolve ──▶ MLFLOW_TRACKING_URI, _RUN_ID, _EXPERIMENT_ID of this process
    supervisor ── the same variables, where it heard of them in time ──┘

Which run that is may not be known when a rank starts: then whoever imports MLflow waits for the file, as long as
somebody writes to it and MLflow may answer yet, and at most `WAIT_S`; a wait that is felt is said. What user code has
changed meanwhile is not touched.

Failure cases: the tracking server is known not to answer ("away": nothing is waited for); the file never comes (the
monitor is gone). Either is said once, MLflow stays as the caller has configured it, and every later `start_run` looks
again.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time

FILE = "tracking.json"
WAIT_S = 20.0
URI, RUN, EXPERIMENT, EXPERIMENT_NAME = (
    "MLFLOW_TRACKING_URI",
    "MLFLOW_RUN_ID",
    "MLFLOW_EXPERIMENT_ID",
    "MLFLOW_EXPERIMENT_NAME",
)
_FELT_S = 1.0  # from then on a wait is said
_APPEARS_S = 2.0  # the file of a monitor that was just told of the attempt
_LOOK_S = 0.02
_FILE_BYTES_MAX = 64 << 10


class Job:
    """What this process knows of the job's MLflow run.

    Args:
        directory: of the attempt.
        rank: of this process.
    """

    def __init__(self, directory: str, rank: int) -> None:
        self.directory = directory
        self.rank = rank
        self.run_id = ""
        self.experiment_id = ""
        self.uri = ""
        self._began = time.monotonic()
        self._state = self._sentence = ""
        self._before = {name: os.environ.get(name) for name in (URI, RUN, EXPERIMENT, EXPERIMENT_NAME)}

    def resolve(self, wait_s: float = 0.0) -> bool:
        """Return whether the job's run is known; takes on its variables when it first is.

        Args:
            wait_s: how long to wait for it where it is still being made.
        """
        if self.run_id:
            return True
        given = self._look(wait_s)
        if given is None and wait_s > 0:
            self.say_once("unknown", self._why_unknown())
        if given is not None:
            self._take(given)
        return bool(self.run_id)

    def changed(self, name: str) -> bool:
        """Return whether user code has given one of the variables another value than this process started with."""
        return os.environ.get(name) != self._before[name]

    def renamed(self, name: str) -> None:
        """Have the experiment's name agree with its number: callers may have named one and activated another."""
        if not self.changed(EXPERIMENT_NAME):
            self._before[EXPERIMENT_NAME] = os.environ[EXPERIMENT_NAME] = name

    def say_once(self, key: str, sentence: str) -> None:
        """Write a sentence to stderr: the first rank, whose lines are shown, and one of the others on a node, once."""
        whose = "" if self.rank == 0 else ".others"
        try:
            os.close(os.open(f"{self.directory}/said.{key}{whose}", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        except FileExistsError:
            return
        except OSError:  # nowhere to note it: better twice than never
            pass
        with contextlib.suppress(OSError, ValueError, AttributeError):
            sys.stderr.write(f"serverless-gpu: {sentence}\n")

    def _why_unknown(self) -> str:
        why = f": {self._sentence}" if self._sentence else ""
        unknown = f"which MLflow run this job has is not known{why}; "
        if self._state != "away":
            return f"{unknown}MLflow stays as it is configured"
        return (
            f"{unknown}until it answers, each of your own MLflow calls waits for its time-out and may raise, while "
            "what the node records is kept and sent later"
        )

    def _look(self, wait_s: float) -> dict[str, str] | None:
        began = time.monotonic()
        while True:
            said = self._read()
            environ = said.get("environ")
            self._state, self._sentence = str(said.get("state") or ""), str(said.get("sentence") or "")
            if self._state == "ready" and isinstance(environ, dict):
                return {str(name): str(value) for name, value in environ.items()}
            if self._before[RUN] and self._before[URI]:  # the supervisor, or the caller, knew it when this rank began
                return {}
            waited_s = time.monotonic() - began
            if self._state in ("failed", "away") or waited_s >= wait_s or not self._awaited():
                return None
            if waited_s >= _FELT_S:
                why = self._sentence or "MLflow has not answered yet"
                self.say_once("waiting", f"{why}; `import mlflow` waits for it, up to {wait_s:.0f} s")
            time.sleep(_LOOK_S)

    def _read(self) -> dict[str, object]:
        try:
            with open(f"{self.directory}/{FILE}", encoding="utf-8") as file:
                said = json.loads(file.read(_FILE_BYTES_MAX))
        except (OSError, ValueError):
            return {}
        return said if isinstance(said, dict) else {}

    def _awaited(self) -> bool:
        """Return whether somebody seems to be at work on the file: one that is old is left behind, not pending."""
        try:
            written = os.stat(f"{self.directory}/{FILE}").st_mtime
        except OSError:
            return time.monotonic() - self._began < _APPEARS_S
        return _now_in(self.directory, written) - written < WAIT_S

    def _take(self, given: dict[str, str]) -> None:
        self.uri = given.get(URI) or self._before[URI] or ""
        self.experiment_id = given.get(EXPERIMENT) or self._before[EXPERIMENT] or ""
        self.run_id = given.get(RUN) or self._before[RUN] or ""
        if self.changed(URI):
            return  # user code speaks to another server, where this run is unknown
        for name in (URI, RUN, EXPERIMENT):
            if given.get(name) and not self.changed(name):
                self._before[name] = os.environ[name] = given[name]


def _now_in(directory: str, otherwise: float) -> float:
    """Return the time as a directory's file system has it: that of a network may be ahead of this machine's."""
    try:
        fd = os.open(directory, os.O_TMPFILE | os.O_WRONLY, 0o600)
    except OSError:  # it has no such files
        return otherwise
    try:
        return os.fstat(fd).st_mtime
    finally:
        os.close(fd)
