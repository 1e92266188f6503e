"""A rank's MLflow: everything that user code logs lands in the job's run, without a line that says so.

    rank: install ── a finder on sys.meta_path ──▶ user code's `import mlflow` ──▶ attach
                                                       ├ MlflowJob.resolve  which run it is (`job.py`)
                                                       ├ start_run …    resume it, as often as asked
                                                       └ Writes         what ranks may log (`writes.py`)

MLflow resumes the run of `MLFLOW_RUN_ID` once and then deletes the variable, marks it as finished with every `end_run`
and at the end of every process, and refuses it after `set_experiment`. In a rank
- `start_run` and its callers (`log_metric`, `autolog`, Trainer, Lightning) resume the job's run, every time;
- `run_name` of the first rank names the job's run; that of others is left out;
- a run of another experiment or server, one named by its identifier, and one below another are as elsewhere;
- ranks do not end the job's run: others may still be training, and the node knows how the job ended.
Nothing happens where MLflow is never imported. It is the user's MLflow, of any version: a name that is missing stays
unpatched, reported once. Failure cases: the run is not known (`job.py`); the server does not answer (`writes.py`;
`settle` waits for it and for asynchronous logging for a bounded time, and reports what was lost).
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
_PATIENCE_S = 60.0  # MLflow takes half a minute to start where cores are busy
_TRY_S = 0.5
_PROBE_S = 10.0
_MLFLOW = "mlflow"
_LIGHTNING = ("lightning.pytorch.loggers.mlflow", "pytorch_lightning.loggers.mlflow")
_LIGHTNING_DEFAULT = "lightning_logs"
_BUFFER = "MLFLOW_ASYNC_LOGGING_BUFFERING_SECONDS"
_ENDED = ("FINISHED", "FAILED", "KILLED")

_attached: list[MlflowHook] = []


def install(directory: str, rank: int) -> None:
    """Have MLflow know the job's run when user code imports it."""
    job = MlflowJob(directory, rank)
    sys.meta_path.insert(0, Finder(job))
    if _MLFLOW in sys.modules:  # the zygote has it: nothing is waited for before the first line of user code
        attach(job, sys.modules[_MLFLOW], wait_s=0.0)


def settle(limit_s: float = SETTLE_S) -> None:
    """Wait at most `limit_s` for asynchronous logging before this process ends; report what was lost."""
    with contextlib.suppress(BaseException):  # a signal handler of the user's may raise here; the outcome stands
        for attached in _attached:
            attached.settle(limit_s)


class Finder:
    """Finds what other finders find, and does something once it is imported."""

    def __init__(self, job: MlflowJob) -> None:
        self._job = job
        self._looking: set[str] = set()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the spec of one of our modules, with a loader that tells us; None for all others."""
        if (fullname != _MLFLOW and fullname not in _LIGHTNING) or fullname in self._looking:
            return None
        self._looking.add(fullname)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._looking.discard(fullname)
        if spec is not None and spec.loader is not None:
            with contextlib.suppress(AttributeError, TypeError):  # a loader that cannot be told: MLflow as it is
                self._listen(spec.loader, fullname)
        return spec

    def _listen(self, loader: Any, fullname: str) -> None:
        """Notice the import of a module whose loader may be foreign; a finder's caller may not import it."""
        awaited: set[str] = vars(loader).setdefault("_sgpu_awaited", set())
        awaited.add(fullname)
        if "exec_module" in vars(loader):
            return
        execute = loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            execute(module)
            name = module.__name__
            if name in awaited:
                awaited.discard(name)  # reloading is not importing
                (attach if name == _MLFLOW else _attach_lightning)(self._job, module)

        loader.exec_module = exec_module


def attach(job: MlflowJob, module: types.ModuleType, wait_s: float = WAIT_S) -> None:
    """Patch MLflow; never fails, because it happens inside a user's import."""
    if _attached:
        return
    try:
        fluent = importlib.import_module("mlflow.tracking.fluent")
        client = importlib.import_module("mlflow.tracking.client").MlflowClient
    except Exception:  # noqa: BLE001 - what has that name is not MLflow, or a part of it without runs
        return
    try:
        attached = MlflowHook(job, module, fluent, client)
        attached.take_names()
        _attached.append(attached)
        job.resolve(wait_s)
        attached.take_variables()
    except Exception as error:  # noqa: BLE001 - an MLflow that has changed must not break the import of it
        version = getattr(module, "__version__", "?")
        job.say_once("changed", f"MLflow {version} is not as it was, ranks may make runs of their own: {error!r}")


class MlflowHook:
    """MLflow of this process, and the job's run."""

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
        self._started = False  # any run, by this process

    def take_names(self) -> None:
        """Put ours in place of MLflow's functions, where user code and MLflow itself look for them."""
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
        """Have MLflow wait for the job's run before it makes a database in the working directory."""
        service: Any = importlib.import_module("mlflow.tracking._tracking_service.utils")
        original = getattr(service, "_get_default_tracking_uri", None)
        if original is not None:  # of the versions before, those that are not imported by the zygote have waited by now

            def default() -> str:
                self.job.resolve_in_use()
                return os.environ.get(URI) or str(original())

            service._get_default_tracking_uri = default

    def take_variables(self) -> None:
        """Set what MLflow reads from the environment, below what the caller has set."""
        os.environ.setdefault(_BUFFER, "1")  # else every point is a request
        # No variable, which this process's children would inherit: their last writes would be lost, unawaited.
        with contextlib.suppress(ImportError, AttributeError):
            default = importlib.import_module("mlflow.environment_variables").MLFLOW_ENABLE_ASYNC_LOGGING
            default.default = True
            os.register_at_fork(after_in_child=functools.partial(setattr, default, "default", False))
        if self.job.run_id and os.environ.get(EXPERIMENT_NAME) and os.environ.get(EXPERIMENT) == self._experiment_id():
            with contextlib.suppress(Exception):  # no answer: they agree, as far as we know
                self.job.renamed(self.client().get_experiment(self._experiment_id()).name)

    def settle(self, limit_s: float) -> None:
        """Wait for asynchronous logging; say what could not be written."""
        if not self.job.run_id and not self._started:
            return  # to ask for MLflow's store would make one in the working directory
        deadline = time.monotonic() + limit_s
        if not self._flush(limit_s) or not self.writes.wait(deadline - time.monotonic()):
            self.writes.give_up()
        lost = self.writes.lost()
        if lost and not self._said_lost:
            self._said_lost = True
            with contextlib.suppress(OSError, ValueError, AttributeError):
                sys.stderr.write(
                    f"serverless-gpu: {lost:,} points and values of rank {self.job.rank} were dropped: MLflow did not "
                    "answer\n"
                )

    def _flush(self, limit_s: float) -> bool:
        """Have MLflow's threads write, or hold, what they were given; return whether they have in time."""
        finish = getattr(self.fluent, "_shut_down_async_logging", None) or self.mlflow.flush_async_logging

        def work() -> None:
            with contextlib.suppress(Exception):
                finish()

        thread = threading.Thread(target=work, name="sgpu-mlflow-flush", daemon=True)
        with contextlib.suppress(RuntimeError):  # the interpreter ends, or no thread is left
            thread.start()
            thread.join(limit_s)
            return not thread.is_alive()
        return False

    def start_run(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Start the job's run where it is meant; runs of their own, or below it, start as in MLflow."""
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
        os.environ.pop(RUN, None)  # as MLflow does when it resumes: others read it and would start the run again
        if len(args) <= len(names):
            kwargs["log_system_metrics"] = False  # the node measures itself, once for all of its ranks
        if args:
            args = (self.job.run_id, *args[1:])
        else:
            kwargs["run_id"] = self.job.run_id
        if self.job.rank != 0:  # else it had the name of whichever rank came last
            args = (*args[:2], *(None for _ in args[2:3]), *args[3:])
            kwargs.pop("run_name", None)
        run = self.patiently(lambda: original(*args, **kwargs))
        self.writes.begin()
        return run

    def patiently(self, start: Callable[[], Any]) -> Any:
        """Start the job's run, patiently: its server has answered before, so a restarting one is back soon."""
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
                    self._patience_until = deadline  # once: else each of many calls would wait that long
                self.job.say_once(
                    "start", f"MLflow does not answer; start_run tries again, for up to {_PATIENCE_S:.0f} s"
                )
                time.sleep(_TRY_S)

    def _means_job(self, asked: dict[str, Any]) -> bool:
        try:
            return self._is_meant(asked)
        except self.refused:
            raise
        except Exception as error:  # noqa: BLE001 - ours must not be why a run cannot be started
            self.job.say_once("changed", f"ranks may make runs of their own in this MLflow: {error!r}")
            return False

    def _is_meant(self, asked: dict[str, Any]) -> bool:
        """Return whether a `start_run` without an identifier means the job's run, or one below it."""
        job = self.job
        if (
            not job.resolve_in_use()
            and job.is_away
            and not asked.get("parent_run_id")
            # Nor has user code chosen an experiment, while the job's is not known.
            and (asked.get("experiment_id") or getattr(self.fluent, "_active_experiment_id", None)) is None
            and not job.changed(EXPERIMENT_NAME)
            and not job.changed(EXPERIMENT)
        ):
            self._probe()
            job.ask()
        if not job.run_id or os.environ.get(RUN, job.run_id) != job.run_id:
            return False
        if asked.get("parent_run_id") or self.mlflow.active_run() is not None:
            return False  # one below that; or two at once, which MLflow refuses
        return self._our_server() and self._our_experiment(asked.get("experiment_id"))

    def _probe(self) -> None:
        """Raise MLflow's error where its server does not answer, and for some time again without asking."""
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
        """Keep MLflow from resuming the job's run where another one is meant."""
        ours = {RUN: self.job.run_id}
        if self.job.run_id and not self._our_server():
            ours[EXPERIMENT] = self.job.experiment_id  # a number of our server's
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
            self._flush(SETTLE_S)  # not further: a server that is away would cost each of the user's runs that long
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
    """Have a logger that was not told where to log use the job's run."""
    with contextlib.suppress(Exception):
        logger = module.MLFlowLogger
        logger.__init__ = wrapped(logger.__init__, functools.partial(_init_lightning, job))


def _init_lightning(job: MlflowJob, original: Callable[..., None], logger: Any, *args: Any, **kwargs: Any) -> None:
    names = ("experiment_name", "run_name", "tracking_uri", "tags")
    asked = {**dict(zip(names, args, strict=False)), **kwargs}
    ours = False
    with contextlib.suppress(Exception):  # ours must not be why a logger cannot be made
        ours = len(args) <= len(names) and not asked.get("run_id") and _lightning_means(job, asked)
    if ours:
        args, kwargs = (), {**asked, "run_id": job.run_id, "tracking_uri": job.uri or None}
    original(logger, *args, **kwargs)
    if ours and job.rank == 0:
        with contextlib.suppress(Exception):  # a logger with a run does not set these
            for key, value in (asked.get("tags") or {}).items():
                logger._mlflow_client.set_tag(job.run_id, key, value)
            if asked.get("run_name"):
                logger._mlflow_client.update_run(job.run_id, name=asked["run_name"])


def _lightning_means(job: MlflowJob, asked: dict[str, Any]) -> bool:
    """Return whether a logger's arguments mean the job's run."""
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
