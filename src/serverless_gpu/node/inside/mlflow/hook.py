"""Hooks a rank's MLflow, so that the job's run receives all data that user code logs.

    rank: install ── a finder on sys.meta_path ──▶ user code's `import mlflow` ──▶ attach
                                                       ├ MlflowJob.resolve  finds the run (`job.py`)
                                                       ├ start_run …    resumes the run at every call
                                                       └ Writes         limits what ranks log (`writes.py`)

Without the hook, MLflow resumes the run of `MLFLOW_RUN_ID` only once and then deletes the variable. MLflow also marks
the run as finished on every `end_run` and at the end of every process. After `set_experiment`, MLflow refuses to resume
the run. The hook changes MLflow in a rank as follows:

* `start_run` and its callers (`log_metric`, `autolog`, Trainer, Lightning) resume the job's run every time.
* The job's run gets the `run_name` of the first rank. The hook ignores the `run_name` of other ranks.
* MLflow's own behaviour remains for runs of other experiments or servers, runs with an explicit id, and child runs.
* Ranks do not end the job's run, because other ranks may still be training. The node records how the job ended.

The hook does nothing if user code never imports MLflow. The hook patches the user's own MLflow installation, of any
version. If the hook cannot patch an MLflow version, the hook prints one warning. Without the patch, ranks may create
their own runs.

Failure cases: `job.py` handles an unknown run. `writes.py` handles a server that does not answer. At process exit,
`settle` waits for asynchronous logging for a bounded time and then reports lost points.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.machinery
import importlib.util
import math
import os
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from .job import EXPERIMENT, EXPERIMENT_NAME, RUN, URI, WAIT_S, MlflowJob
from .writes import Writes, is_answer, wrapped

SETTLE_S = 15.0
_PATIENCE_S = 60.0  # An MLflow server takes half a minute to start on busy cores.
_TRY_S = 0.5
_PROBE_S = 10.0
_MLFLOW = "mlflow"
_LIGHTNING = ("lightning.pytorch.loggers.mlflow", "pytorch_lightning.loggers.mlflow")
_LIGHTNING_DEFAULT = "lightning_logs"
_BUFFER = "MLFLOW_ASYNC_LOGGING_BUFFERING_SECONDS"
_ENDED = ("FINISHED", "FAILED", "KILLED")

_attached: list[MlflowHook] = []


def install(directory: str, rank: int) -> None:
    """Install a hook that connects MLflow to the job's run when user code imports MLflow."""
    job = MlflowJob(directory, rank)
    sys.meta_path.insert(0, Finder(job))
    # If the zygote has already imported MLflow, user code must not wait for the job's run before its first line.
    if _MLFLOW in sys.modules:
        attach(job, sys.modules[_MLFLOW], wait_s=0.0)


def settle(limit_s: float = SETTLE_S) -> None:
    """Wait at most `limit_s` seconds for asynchronous logging at process exit. Report lost points."""
    # If the user's signal handler raises an exception here, the run's outcome must not change.
    with contextlib.suppress(BaseException):
        for attached in _attached:
            attached.settle(limit_s)


class Finder:
    """Import finder that patches MLflow and Lightning after their import."""

    def __init__(self, job: MlflowJob) -> None:
        self._job = job
        self._looking: set[str] = set()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return a spec that patches the module on import, or None if the module needs no patch."""
        if (fullname != _MLFLOW and fullname not in _LIGHTNING) or fullname in self._looking:
            return None
        self._looking.add(fullname)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._looking.discard(fullname)
        if spec is not None and spec.loader is not None:
            # If a loader accepts no attributes, MLflow stays unpatched.
            with contextlib.suppress(AttributeError, TypeError):
                self._listen(spec.loader, fullname)
        return spec

    def _listen(self, loader: Any, fullname: str) -> None:
        """Patch a module after its loader has executed the module.

        Code that calls `find_spec` may not import the module.
        """
        awaited: set[str] = vars(loader).setdefault("_sgpu_awaited", set())
        awaited.add(fullname)
        if "exec_module" in vars(loader):
            return
        execute = loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            execute(module)
            name = module.__name__
            if name in awaited:
                awaited.discard(name)  # Reloading the module must not patch it again.
                (attach if name == _MLFLOW else _attach_lightning)(self._job, module)

        loader.exec_module = exec_module


def attach(job: MlflowJob, module: types.ModuleType, wait_s: float = WAIT_S) -> None:
    """Patch MLflow without raising an exception, because `attach` runs inside the user's import."""
    if _attached:
        return
    try:
        fluent = importlib.import_module("mlflow.tracking.fluent")
        client = importlib.import_module("mlflow.tracking.client").MlflowClient
    except Exception:  # noqa: BLE001 - the module is not MLflow, or has no runs
        return
    try:
        attached = MlflowHook(job, module, fluent, client)
        attached.take_names()
        _attached.append(attached)
        job.resolve(wait_s)
        attached.take_variables()
    except Exception as error:  # noqa: BLE001 - the import of an unknown MLflow must not fail
        version = getattr(module, "__version__", "?")
        job.say_once(
            "changed",
            f"cannot connect MLflow {version} to the job's run, so ranks may create their own runs: {error!r}",
        )


class MlflowHook:
    """Connects the MLflow installation of this process to the job's run."""

    def __init__(self, job: MlflowJob, module: Any, fluent: Any, client: Any) -> None:
        self.job = job
        self.mlflow = module
        self.fluent = fluent
        self.client = client
        self.refused = importlib.import_module("mlflow.exceptions").MlflowException
        self.writes = Writes(job, self.refused)
        self._said_lost = False
        self._patience_until = math.inf
        self._probed = (-math.inf, Exception())
        self._started = False  # True once this process has started a run.

    def take_names(self) -> None:
        """Replace MLflow's functions in the modules where user code and MLflow look them up."""
        for name, ours in (("start_run", self.start_run), ("last_active_run", self._last_active_run)):
            original = getattr(self.fluent, name)
            function = wrapped(original, ours)
            setattr(self.fluent, name, function)
            if getattr(self.mlflow, name, None) is original:
                setattr(self.mlflow, name, function)
        for name, method in (("set_terminated", self._set_terminated), ("update_run", self._update_run)):
            setattr(self.client, name, wrapped(getattr(self.client, name), method))
        self._take_default()
        self.writes.patch(importlib.import_module("mlflow.store.tracking.rest_store").RestStore)

    def _take_default(self) -> None:
        """Make MLflow wait for the job's run before it creates a database in the working directory."""
        service: Any = importlib.import_module("mlflow.tracking._tracking_service.utils")
        original = getattr(service, "_get_default_tracking_uri", None)
        # Earlier versions of MLflow lack `_get_default_tracking_uri`.
        if original is not None:

            def default() -> str:
                self.job.resolve_in_use()
                return os.environ.get(URI) or str(original())

            service._get_default_tracking_uri = default

    def take_variables(self) -> None:
        """Set variables that MLflow reads from the environment, unless the caller has set them."""
        os.environ.setdefault(_BUFFER, "1")  # Without buffering, MLflow sends a request for every point.
        # The hook changes MLflow's default, because child processes would inherit an environment variable and lose
        # their last writes at exit.
        with contextlib.suppress(ImportError, AttributeError):
            default = importlib.import_module("mlflow.environment_variables").MLFLOW_ENABLE_ASYNC_LOGGING
            default.default = True
            os.register_at_fork(after_in_child=functools.partial(setattr, default, "default", False))
        if self.job.run_id and os.environ.get(EXPERIMENT_NAME) and os.environ.get(EXPERIMENT) == self._experiment_id():
            # If the server does not answer, the hook assumes that the experiment's name and id match.
            with contextlib.suppress(Exception):
                self.job.renamed(self.client().get_experiment(self._experiment_id()).name)

    def settle(self, limit_s: float) -> None:
        """Wait for asynchronous logging. Report points and values that MLflow did not receive."""
        if not self.job.run_id and not self._started:
            return  # Flushing would make MLflow create a database in the working directory.
        deadline = time.monotonic() + limit_s
        if not self._flush(limit_s) or not self.writes.wait(deadline - time.monotonic()):
            self.writes.give_up()
        lost = self.writes.lost()
        if lost and not self._said_lost:
            self._said_lost = True
            with contextlib.suppress(OSError, ValueError, AttributeError):
                sys.stderr.write(
                    f"serverless-gpu: {lost:,} points and values of rank {self.job.rank} were dropped, because MLflow "
                    "did not answer\n"
                )

    def _flush(self, limit_s: float) -> bool:
        """Make MLflow's logging threads send or hold their queued data. Return True if they finished in time."""
        finish = getattr(self.fluent, "_shut_down_async_logging", None) or self.mlflow.flush_async_logging

        def work() -> None:
            with contextlib.suppress(Exception):
                finish()

        thread = threading.Thread(target=work, name="sgpu-mlflow-flush", daemon=True)
        # The interpreter is shutting down, or the process cannot start a thread.
        with contextlib.suppress(RuntimeError):
            thread.start()
            thread.join(limit_s)
            return not thread.is_alive()
        return False

    def start_run(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Resume the job's run if the call denotes it. For any other run, call MLflow's `start_run`."""
        self._started = True
        names = ("run_id", "experiment_id", "run_name", "nested", "parent_run_id")
        asked = {**dict(zip(names, args, strict=False)), **kwargs}
        if asked.get("run_id") or not self._means_job(asked):
            with self._without_variables():
                return original(*args, **kwargs)
        if asked.get("nested"):
            for name, value in (("experiment_id", self._experiment_id()), ("parent_run_id", self.job.run_id)):
                if names.index(name) >= len(args):
                    kwargs[name] = value
            with self._without_variables():
                return original(*args, **kwargs)
        # The hook removes MLFLOW_RUN_ID, as MLflow does, so that other readers of the variable do not resume the run.
        os.environ.pop(RUN, None)
        if len(args) <= len(names):
            kwargs["log_system_metrics"] = False  # The node measures system metrics once for all of its ranks.
        if args:
            args = (self.job.run_id, *args[1:])
        else:
            kwargs["run_id"] = self.job.run_id
        if self.job.rank != 0:  # Only the first rank may name the run.
            args = (*args[:2], *(None for _ in args[2:3]), *args[3:])
            kwargs.pop("run_name", None)
        run = self.patiently(lambda: original(*args, **kwargs))
        self.writes.begin()
        return run

    def patiently(self, start: Callable[[], Any]) -> Any:
        """Call `start`, and retry while the MLflow server does not answer.

        The MLflow server has answered before and may be restarting.
        """
        deadline = max(time.monotonic(), min(time.monotonic() + _PATIENCE_S, self._patience_until))
        while True:
            try:
                run = start()
                self._patience_until = math.inf
                return run
            except self.refused as error:
                if is_answer(error) or time.monotonic() >= deadline:
                    raise
                if self._patience_until == math.inf:
                    # All calls of `start_run` share one deadline, so that a later call does not wait again.
                    self._patience_until = deadline
                self.job.say_once("start", f"MLflow does not answer, so start_run waits up to {_PATIENCE_S:.0f} s")
                time.sleep(_TRY_S)

    def _means_job(self, asked: dict[str, Any]) -> bool:
        try:
            return self._is_meant(asked)
        except self.refused:
            raise
        except Exception as error:  # noqa: BLE001 - an error of the hook must not prevent a run
            self.job.say_once("changed", f"ranks may create their own runs with this version of MLflow: {error!r}")
            return False

    def _is_meant(self, asked: dict[str, Any]) -> bool:
        """Return True if a `start_run` without an id denotes the job's run or a child of the job's run."""
        job = self.job
        if (
            not job.resolve_in_use()
            and job.is_away
            and not asked.get("parent_run_id")
            # The following conditions exclude user code that has chosen an experiment.
            and (asked.get("experiment_id") or getattr(self.fluent, "_active_experiment_id", None)) is None
            and not job.changed(EXPERIMENT_NAME)
            and not job.changed(EXPERIMENT)
        ):
            self._probe()
            job.ask()
        if not job.run_id or os.environ.get(RUN, job.run_id) != job.run_id:
            return False
        if asked.get("parent_run_id") or self.mlflow.active_run() is not None:
            return False  # MLflow handles a parent run that the user named, and refuses a second active run.
        return self._our_server() and self._our_experiment(asked.get("experiment_id"))

    def _probe(self) -> None:
        """Raise MLflow's error if the MLflow server does not answer. Reuse a recent error."""
        at, error = self._probed
        if time.monotonic() - at < _PROBE_S:
            raise error
        try:
            self.client().search_experiments(max_results=1)
        except self.refused as error:
            self._probed = (time.monotonic(), error)
            raise

    def _our_server(self) -> bool:
        return not self.job.uri or str(self.mlflow.get_tracking_uri()).rstrip("/") == self.job.uri.rstrip("/")

    def _our_experiment(self, asked: object) -> bool:
        active = asked or getattr(self.fluent, "_active_experiment_id", None)
        if active is not None:
            return str(active) == self._experiment_id()
        if self.job.changed(EXPERIMENT_NAME) and os.environ.get(EXPERIMENT_NAME):
            experiment = self.client().get_experiment_by_name(os.environ[EXPERIMENT_NAME])
            return experiment is not None and experiment.experiment_id == self._experiment_id()
        return not self.job.changed(EXPERIMENT) or os.environ.get(EXPERIMENT, "") in ("", self._experiment_id())

    def _experiment_id(self) -> str:
        if not self.job.experiment_id:
            self.job.experiment_id = str(self.client().get_run(self.job.run_id).info.experiment_id)
        return self.job.experiment_id

    @contextlib.contextmanager
    def _without_variables(self) -> Iterator[None]:
        """Keep MLflow from resuming the job's run when the call denotes another run."""
        ours = {RUN: self.job.run_id}
        if self.job.run_id and not self._our_server():
            ours[EXPERIMENT] = self.job.experiment_id  # The experiment id is valid only on the job's tracking server.
        hidden = {name: value for name, value in ours.items() if value and os.environ.get(name) == value}
        for name in hidden:
            del os.environ[name]
        try:
            yield
        finally:
            for name, value in hidden.items():
                os.environ.setdefault(name, value)

    def _last_active_run(self, original: Callable[..., Any]) -> Any:
        run = original()
        if run is None and self.job.resolve() and self._our_server():
            run = self.fluent.get_run(self.job.run_id)
        return run

    def _set_terminated(
        self, original: Callable[..., Any], client: Any, run_id: str, *args: Any, **kwargs: Any
    ) -> None:
        if run_id == self.job.run_id and run_id:
            # The hook's `end_run` does not wait for held writes, because every call would wait for an unreachable
            # server.
            self._flush(SETTLE_S)
        else:
            original(client, run_id, *args, **kwargs)

    def _update_run(
        self, original: Callable[..., Any], client: Any, run_id: str, status: Any = None, name: Any = None
    ) -> None:
        if run_id == self.job.run_id and status in _ENDED:
            status = None
        if status is not None or name is not None:
            original(client, run_id, status, name)


def _attach_lightning(job: MlflowJob, module: Any) -> None:
    """Make Lightning's MLflow loggers use the job's run unless their arguments name another run."""
    with contextlib.suppress(Exception):
        logger = module.MLFlowLogger
        logger.__init__ = wrapped(logger.__init__, functools.partial(_init_lightning, job))


def _init_lightning(job: MlflowJob, original: Callable[..., None], logger: Any, *args: Any, **kwargs: Any) -> None:
    names = ("experiment_name", "run_name", "tracking_uri", "tags")
    asked = {**dict(zip(names, args, strict=False)), **kwargs}
    ours = False
    with contextlib.suppress(Exception):  # The hook must not prevent the creation of a logger.
        ours = len(args) <= len(names) and not asked.get("run_id") and _lightning_means(job, asked)
    if ours:
        args, kwargs = (), {**asked, "run_id": job.run_id, "tracking_uri": job.uri or None}
    original(logger, *args, **kwargs)
    if ours and job.rank == 0:
        with contextlib.suppress(Exception):  # Lightning sets no tags or run name on an explicit run.
            for key, value in (asked.get("tags") or {}).items():
                logger._mlflow_client.set_tag(job.run_id, key, value)
            if asked.get("run_name"):
                logger._mlflow_client.update_run(job.run_id, name=asked["run_name"])


def _lightning_means(job: MlflowJob, asked: dict[str, Any]) -> bool:
    """Return True if a Lightning logger's arguments denote the job's run."""
    if not job.resolve(WAIT_S) or job.changed(URI):
        return False
    if asked.get("tracking_uri") and str(asked["tracking_uri"]).rstrip("/") != job.uri.rstrip("/"):
        return False
    name = asked.get("experiment_name", _LIGHTNING_DEFAULT)
    if name == _LIGHTNING_DEFAULT:
        return True
    client = importlib.import_module("mlflow.tracking.client").MlflowClient(job.uri or None)
    experiment = client.get_experiment_by_name(name)
    return experiment is not None and str(experiment.experiment_id) == job.experiment_id
