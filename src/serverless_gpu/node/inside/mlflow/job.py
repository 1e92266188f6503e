"""Finds the job's MLflow run for a rank.

    monitor ──▶ <attempt>/tracking.json ──▶ MlflowJob.resolve ──▶ MLFLOW_TRACKING_URI, _RUN_ID, _EXPERIMENT_ID
    supervisor ── the same variables, if it knows them in time ────────┘

When a rank starts, the monitor may not know the MLflow run yet. If the run is unknown, the import of MLflow waits for
`tracking.json`, for at most `WAIT_S` seconds. The import stops waiting if the monitor ends or MLflow cannot answer. If
the wait exceeds a second, the rank prints a message. The rank does not overwrite variables that user code has changed.

Failure cases: If the tracking server does not answer the node ("away") or the monitor has ended, the import does not
wait. If the import does not wait, the rank prints one message. If the caller has named a tracking server, MLflow keeps
its configuration. Every later `start_run` checks the named server again. Once the tracking server answers, the rank
asks the node to find the run (`ask`). Without a tracking server, all ranks would share a database that MLflow creates
in the working directory. The hook therefore gives each rank a separate database in the attempt directory.
"""

from __future__ import annotations

import contextlib
import importlib.util
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
ASKED = "tracking.asked"
BACK_S = 15.0
_ASK_AGAIN_S = 60.0
# Name of the variable with the artifact directory of MLflow's local databases.
_ARTIFACTS = "_MLFLOW_SERVER_ARTIFACT_ROOT"
_FELT_S = 1.0  # Minimum wait in seconds that a rank reports.
APPEARS_S = 2.0  # Maximum seconds until a monitor writes the file of a new attempt.
_LOOK_S = 0.02
_FILE_BYTES_MAX = 64 << 10


class MlflowJob:
    """The job's MLflow run, as far as a rank knows it."""

    def __init__(self, directory: str, rank: int) -> None:
        self.directory = directory
        self.rank = rank
        self.run_id = ""
        self.experiment_id = ""
        self.uri = ""
        self._began = time.monotonic()
        self._state = self._sentence = ""
        self._has_waited = False
        self._ask_again = 0.0
        self._before = {name: os.environ.get(name) for name in (URI, RUN, EXPERIMENT, EXPERIMENT_NAME)}

    def resolve(self, wait_s: float = 0.0) -> bool:
        """Return True if the job's run is known, and set its variables.

        Waits for the monitor to find the run, for at most `wait_s` seconds.
        """
        if self.run_id:
            return True
        given = self._look(wait_s)
        if given is None and wait_s > 0:
            self._do_without()
        if given is not None:
            self._take(given)
        return bool(self.run_id)

    def resolve_in_use(self) -> bool:
        """Return True if the job's run is known. The first call waits for the run."""
        return self.resolve(0.0 if self._has_waited else WAIT_S)

    @property
    def is_away(self) -> bool:
        """Return True if the node could not reach the tracking server that the caller named."""
        is_server = (self._before[URI] or "").startswith(("http://", "https://"))
        return not self.run_id and self._state == "away" and is_server and not self.changed(URI)

    def ask(self) -> bool:
        """Ask the node to find the job's run. Return True if the node has found the run."""
        if time.monotonic() < self._ask_again:
            return False  # A recent request of this rank did not find the MLflow run.
        with contextlib.suppress(OSError):
            os.close(os.open(f"{self.directory}/{ASKED}", os.O_CREAT | os.O_WRONLY, 0o600))
        limit = time.monotonic() + BACK_S
        while not self.resolve() and self.is_away and time.monotonic() < limit and self._awaited():
            time.sleep(_LOOK_S)
        self._ask_again = time.monotonic() + _ASK_AGAIN_S
        return bool(self.run_id)

    def changed(self, name: str) -> bool:
        """Return True if user code has changed the variable `name` since this process started."""
        return os.environ.get(name) != self._before[name]

    def renamed(self, name: str) -> None:
        """Set the experiment name in the environment to the name of the run's experiment.

        The caller may have set another experiment name.
        """
        if not self.changed(EXPERIMENT_NAME):
            self._before[EXPERIMENT_NAME] = os.environ[EXPERIMENT_NAME] = name

    def say_once(self, key: str, sentence: str) -> None:
        """Print a message on stderr, once for the first rank and once for all other ranks of a node."""
        whose = "" if self.rank == 0 else ".others"
        try:
            os.close(os.open(f"{self.directory}/said.{key}{whose}", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        except FileExistsError:
            return
        except OSError:  # If the marker file cannot be created, the rank may print the message several times.
            pass
        with contextlib.suppress(OSError, ValueError, AttributeError):
            sys.stderr.write(f"serverless-gpu: {sentence}\n")

    def _do_without(self) -> None:
        """Report that the job's run is unknown, and name the store that receives this rank's data."""
        why = f": {self._sentence}" if self._sentence else ""
        unknown = f"the node does not know this job's MLflow run{why}. "
        apart = self._apart()
        if apart:
            unknown += f"This rank logs to {apart} instead"
        elif self.is_away:
            unknown += (
                "Until the server answers, each of your own MLflow calls waits for its timeout and may raise an "
                "error. The node stores its own records of the run and sends them later"
            )
        else:
            unknown += "MLflow keeps its configuration"
        self.say_once("unknown", unknown)

    def _apart(self) -> str:
        """Give this rank a separate MLflow database unless the user has configured MLflow. Return its URI.

        A run id or experiment id is also a configuration, because it exists only in the caller's database.
        """
        if any(self._before[name] or self.changed(name) for name in (URI, RUN, EXPERIMENT)):
            return ""
        place = f"{self.directory}/mlflow/{self.rank}"
        try:
            os.makedirs(place, 0o700, exist_ok=True)
        except OSError:
            return ""
        has_databases = importlib.util.find_spec("sqlalchemy") is not None  # mlflow-skinny has no databases.
        os.environ[URI] = f"sqlite:///{place}/mlflow.db" if has_databases else f"file://{place}/mlruns"
        os.environ.setdefault(_ARTIFACTS, f"{place}/artifacts")
        return os.environ[URI]

    def _look(self, wait_s: float) -> dict[str, str] | None:
        self._has_waited |= wait_s > 0
        began = time.monotonic()
        while True:
            said = self._read()
            environ = said.get("environ")
            self._state, self._sentence = str(said.get("state") or ""), str(said.get("sentence") or "")
            if self._state == "ready" and isinstance(environ, dict):
                return {str(name): str(value) for name, value in environ.items()}
            # The supervisor or the caller has already set the variables of the run.
            if self._before[RUN] and self._before[URI]:
                return {}
            waited_s = time.monotonic() - began
            if self._state in ("failed", "away") or waited_s >= wait_s or not self._awaited():
                return None
            if waited_s >= _FELT_S:
                why = self._sentence or "MLflow has not answered yet"
                self.say_once("waiting", f"{why}, so `import mlflow` waits up to {wait_s:.0f} s for the run")
            time.sleep(_LOOK_S)

    def _read(self) -> dict[str, object]:
        try:
            with open(f"{self.directory}/{FILE}", encoding="utf-8") as file:
                said = json.loads(file.read(_FILE_BYTES_MAX))
        except (OSError, ValueError):
            return {}
        return said if isinstance(said, dict) else {}

    def _awaited(self) -> bool:
        """Return True while a monitor updates `tracking.json`. The `tracking.json` of an ended monitor is old."""
        try:
            written = os.stat(f"{self.directory}/{FILE}").st_mtime
        except OSError:
            return time.monotonic() - self._began < APPEARS_S
        return _now_in(self.directory, written) - written < WAIT_S

    def _take(self, given: dict[str, str]) -> None:
        self.uri = given.get(URI) or self._before[URI] or ""
        self.experiment_id = given.get(EXPERIMENT) or self._before[EXPERIMENT] or ""
        self.run_id = given.get(RUN) or self._before[RUN] or ""
        if self.changed(URI):
            return  # User code uses another tracking server, which does not have the job's run.
        for name in (URI, RUN, EXPERIMENT):
            if given.get(name) and not self.changed(name):
                self._before[name] = os.environ[name] = given[name]


def _now_in(directory: str, otherwise: float) -> float:
    """Return the current time of a directory's file system, whose clock may be a server's."""
    try:
        fd = os.open(directory, os.O_TMPFILE | os.O_WRONLY, 0o600)
    except OSError:  # The file system does not support O_TMPFILE.
        return otherwise
    try:
        return os.fstat(fd).st_mtime
    finally:
        os.close(fd)
