"""Implements the run handle, with methods for results, cancellation, receipts and logs.

Each method of a run handle processes new messages in the caller's thread. The run handle gets messages and files from a
`RunSource`: a local supervisor or a server. An unused handle consumes no CPU time, because the source stores messages
until the handle reads them. An unused handle may miss live output. The log files contain all output.

A run with a damaged stored environment does not start. The client captures the environment again and launches a new
run. The run handle refers to the new run.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Generator
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar, cast

import msgspec

from serverless_gpu.ambient import SystemClock, created_wall_ns
from serverless_gpu.client.caller_context import interruptible
from serverless_gpu.client.display.run_display import Display, TerminalDisplay, make_display, second_interrupt_text
from serverless_gpu.client.runs.outcome import checked_rank, in_notebooks, load_result, make_exception, untold_tails
from serverless_gpu.client.runs.run_source import ConnectionNote, RunSource
from serverless_gpu.client.tracked import TrackedRun, from_directory, from_link
from serverless_gpu.errors import InvalidValue, ServerlessGpuError, ServerProblem, error_class
from serverless_gpu.lazy_import import load
from serverless_gpu.model.lifecycle.attempt import Reason, State, StopReason
from serverless_gpu.model.receipt import Receipt
from serverless_gpu.model.spec import Command, RunSpec, patience
from serverless_gpu.node.base import protocol
from serverless_gpu.units import format_duration_ms

if TYPE_CHECKING:
    from concurrent.futures import Future

    from matplotlib.figure import Figure

    from serverless_gpu.client.metrics import Series
    from serverless_gpu.client.runs.started_runs import StartedRun
    from serverless_gpu.model.cost import Cost

own_sessions: set[str] = set()
"""Identifiers of the sessions that are open in this process."""
R = TypeVar("R")
# The client imports the module `futures` at first use, because most calls do not need the module.
_FUTURES = "serverless_gpu.client.runs.futures"
# Repairing a damaged snapshot may reveal damaged environment units. Repairing units may reveal damaged packs.
_RELAUNCHES = 3
_STARTED = "serverless_gpu.client.runs.started_runs"
_RECEIPT_AFTER_FAILURE_S = 0.05
Relaunch = Callable[[], RunSource | None]
"""Function that captures the environment again and launches a new run.

Returns None if a new capture cannot help.
"""


def with_session_advice(sentence: str) -> str:
    """Return a wait reason. If one of this process's sessions causes the wait, add advice."""
    if any(f"session {session} " in sentence for session in own_sessions):
        return f"{sentence}; that session is open in this process: call session.distributed(...), or close the session"
    return sentence


class Run(Generic[R]):
    """Handle of a submitted run.

    Attributes:
        session: identifier of the session whose devices the run uses, or "".
    """

    def __init__(self, source: RunSource, spec: RunSpec) -> None:
        self.session = ""
        self._started: StartedRun | None = None
        self._future: Future[list[R]] | None = None
        self._spec = spec
        self._keep(source)
        self._relaunch: Relaunch | None = None
        self._relaunches_left = _RELAUNCHES
        self._state = State.QUEUED
        self._stopped: protocol.Stopped | None = None
        self._receipt: Receipt | None = None
        self._refused: protocol.Refused | None = None
        self._tracked: TrackedRun | None = None
        self._waiting = ""
        self._queued_ns: int | None = None
        self._lock = threading.RLock()
        self._display: Display | None = None
        self._told: tuple[State, str] | None = None
        self._ticked_ns = 0
        self._left = False

    def _keep(self, source: RunSource) -> None:
        """Connect the handle to a source. The handle's finalizer closes the source without stopping the run."""
        self._source = source
        # A `__del__` method would run too late. In a reference cycle, for example through a traceback, Python could
        # finalize the socket first.
        weakref.finalize(self, source.close)

    @property
    def id(self) -> str:
        """Return the run's identifier. Another process can attach with `serverless_gpu.attach(id)`.

        The run's identifier changes if the client relaunches the run because of a damaged environment.
        """
        return self._source.run_id

    @property
    def directory(self) -> Path:
        """Return the directory of the last attempt, with results, receipt and (for a local run) logs."""
        return self._source.directory

    def __repr__(self) -> str:
        return f"<Run {self.id} {self._state}>"

    def status(self) -> str:
        """Return the current state, for example ``"RUNNING"``."""
        # If another thread holds the lock, that thread waits for the run and updates the state.
        if self._lock.acquire(blocking=False):
            try:
                while self._hear(0.0):
                    pass
            finally:
                self._lock.release()
        return self._state.value

    def last_sentence(self) -> str:
        """Return the last message about the run, such as a wait reason or a hang warning."""
        self.status()
        return self._waiting

    def waiting_for(self) -> str:
        """Return a sentence that names the devices a queued run needs and the runs that hold the devices."""
        return self._waiting if self.status() == State.QUEUED else ""

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until no rank is running on any node.

        Args:
            timeout: maximum number of seconds to wait, or None.

        Returns:
            True if the run has ended.

        Raises:
            KeyboardInterrupt: the user pressed Ctrl-C. The run continues.
        """
        try:
            return self._ended(timeout)
        except KeyboardInterrupt:
            self._say_that_it_goes_on()
            raise KeyboardInterrupt from None

    def results(self, timeout: float | None = None) -> list[R]:
        """Return the results of all ranks by global rank, or raise the error that ended the run.

        Args:
            timeout: maximum number of seconds to wait, or None.

        Raises:
            TimeoutError: the run did not end in time and continues.
            RunError: the run did not succeed.
            Exception: the exception that user code raised, with its own type.
        """
        self._refuse_session()
        error = self._error(timeout)
        if error is not None:
            raise in_notebooks(error)
        return [self._load(rank) for rank in range(self._source.world_size or 0)]

    def done(self) -> bool:
        """Return True if the run has succeeded or failed."""
        return self._ended(0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return the error that ended the run, as `results` raises it, or None after success.

        Args:
            timeout: maximum number of seconds to wait, or None.

        Raises:
            TimeoutError: the run did not end in time and continues.
        """
        self._refuse_session()
        if not self.wait(timeout):
            raise TimeoutError(f"run {self.id} is still {self._state}")
        return self._error(0)  # User code may have raised this TimeoutError.

    def future(self) -> Future[list[R]]:
        """Return a `concurrent.futures.Future` of the results.

        Each call of `future` returns the same object. The future works with `concurrent.futures.wait`, callbacks and
        `asyncio.wrap_future`. To stop the run, call `Run.cancel`, because the future cannot be cancelled.
        """
        self._refuse_session()
        if self._future is None:
            self._future = load(_FUTURES).future_of(self)
        return self._future

    def __await__(self) -> Generator[object, None, list[R]]:
        """Await the results in an event loop. Return or raise like `results`.

        Cancelling the asyncio task does not stop the run.
        """
        self._refuse_session()
        waiting: Generator[object, None, list[R]] = load(_FUTURES).results_of(self).__await__()
        return waiting

    def result(self, rank: int = 0, timeout: float | None = None) -> R:
        """Return the result of one rank. Wait and raise like `results`.

        Raises:
            InvalidOption: the rank is not a number.
            InvalidValue: the run has no such rank.
        """
        self._rank(rank)
        error = self._error(timeout)
        if error is not None:
            raise in_notebooks(error)
        # The handle checks the rank again, because the number of ranks may have been unknown until now.
        return self._load(self._rank(rank))

    def _load(self, rank: int) -> R:
        if isinstance(self._spec.payload, Command):
            return cast("R", None)  # A program has an exit code and files, but no return value.
        self._source.bring_result(rank)
        return cast("R", load_result(self.directory, rank, self.id, self._source.origin))

    def _rank(self, rank: object) -> int:
        self._refuse_session()
        return checked_rank(rank, self._source.world_size, self.id)

    def _refuse_session(self) -> None:
        if self._source.world_size == 0:
            message = f"{self.id} is a session, which has a receipt but no ranks or results"
            raise InvalidValue(message, hint="get results from the session's runs, which `sgpu runs` lists")

    def fileno(self) -> int:
        """Return a file descriptor that becomes readable when messages arrive, or -1."""
        return self._source.fileno()

    def cancel(self) -> None:
        """Request the run's cancellation. Do nothing if the run has already ended.

        Raises:
            ServerUnavailable: the server does not answer, so the run continues.
        """
        # `cancel` does not acquire the lock, because a thread that waits for the run may hold the lock.
        if self._stopped is None:
            self._source.stop(StopReason.CANCEL)

    def preempt(self) -> None:
        """Request the run's preemption. The ranks receive the reason and can save checkpoints.

        A remote run with ``resume=True`` continues as a new attempt. Any other run ends with the reason ``preempted``.

        Raises:
            ServerUnavailable: the server does not answer, so the run continues.
        """
        if self._stopped is None:
            self._source.stop(StopReason.PREEMPT)

    def receipt(self, timeout: float | None = None) -> Receipt:
        """Wait until the run's GPUs are verified and released, and return the run's receipt.

        Raises:
            TimeoutError: the receipt did not exist in time.
            ServerlessGpuError: the run never started and has no receipt.
        """
        self._hear_until(lambda: self._receipt is not None or not self._source.is_open, timeout)
        if self._receipt is None:
            if self._source.is_open:
                raise TimeoutError(f"run {self.id} has no receipt yet")
            raise ServerlessGpuError(
                f"run {self.id} has no receipt", hint=f"remaining files of the run: {self.directory}"
            )
        return self._receipt

    def receipts(self, timeout: float | None = None) -> dict[str, Receipt]:
        """Return the receipt of each node by node name. The method raises the same errors as `receipt`."""
        self.receipt(timeout)
        return self._source.receipts()

    def cost(self) -> Cost:
        """Return the usage and cost of all attempts so far. `print` shows the cost as a sentence.

        Raises:
            ServerProblem: the run's server does not answer, or its version is too old.
        """
        return self._source.cost()

    def tracked(self) -> TrackedRun | None:
        """Return the MLflow run that tracks this run. The method may return None before user code starts."""
        self.status()
        link = self._receipt.tracked if self._receipt is not None else ""
        return self._tracked or from_directory(self.directory) or from_link(link)

    def logs(self, rank: int = 0, stream: str = "stdout") -> str:
        """Return a rank's output so far. The log stores at most 1 GiB.

        Args:
            rank: global rank.
            stream: ``"stdout"`` or ``"stderr"``.

        Raises:
            InvalidValue: the run has no such rank or stream.
        """
        number = self._rank(rank)
        if stream not in ("stdout", "stderr"):
            raise InvalidValue(f"run {self.id} has no stream {stream!r}", hint='the streams are "stdout" and "stderr"')
        return self._source.read_log(number, stream).decode("utf-8", "replace")

    def metrics(self) -> dict[str, Series]:
        """Return the samples of nodes, GPUs and ranks: ``times`` (seconds since 1970) and ``values``.

        Each series has its name in MLflow, such as ``"system/node_0/gpu_0_utilization_percentage"``. Each series
        contains the samples of all attempts.
        """
        self._refuse_session()
        series: dict[str, Series] = load("serverless_gpu.client.metrics").read_metrics(self._source.read_telemetry())
        return series

    def plot(self, path: str | os.PathLike[str] | None = None) -> Figure:
        """Return a figure of GPU utilization and memory that marks failures and stop requests.

        Args:
            path: optional file for the figure. Its suffix sets the format: ``.png``, ``.svg`` or ``.pdf``.

        Raises:
            ServerlessGpuError: Matplotlib is missing, or the file cannot be written.
        """
        self._refuse_session()
        figure: Figure = load("serverless_gpu.client.runs.run_plot").plot(
            self._source, self._spec.name, self.status(), path
        )
        return figure

    def follow(self, *, only_looks: bool = False, raises: bool = True) -> BaseException | None:
        """Display the run until it ends. Return the error that ended the run, or None after success.

        Args:
            only_looks: True if the caller only views the run. Ctrl-C then does not stop the run, regardless of its
                options.
            raises: True if the caller raises the returned error, which shows its notes. Otherwise this method prints
                the last output of the failed rank if it was not shown live.

        Raises:
            KeyboardInterrupt: the user pressed Ctrl-C. The run was cancelled and its GPUs are free, unless the user
                pressed Ctrl-C twice or set `on_interrupt="detach"`.
        """
        if only_looks:
            self._spec = msgspec.structs.replace(self._spec, on_interrupt="detach", quiet=False)
        display = self._display = make_display(quiet=self._spec.quiet, logs=self._source.logs)
        self._told = None
        try:
            self._tell_state()
            if self._tracked is not None:
                display.tracked(self._tracked.url)
            self._ended(None)
            display.finish()
            if self._stopped is not None and self._stopped.tails:
                display.failure(untold_tails(self._stopped, with_tail=raises))
            ended_well = self._stopped is not None and self._stopped.state is State.SUCCEEDED
            timeout = None if ended_well else _RECEIPT_AFTER_FAILURE_S
            if (
                self._hear_until(lambda: self._receipt is not None or not self._source.is_open, timeout)
                and self._receipt
            ):
                display.receipt(self._receipt)
        except KeyboardInterrupt:
            self._interrupted(display)
            raise
        except ServerProblem:  # Without the stop request, the server continues the run.
            raise
        except BaseException:  # The user's signal handler or the notebook has interrupted the wait.
            if self._spec.on_interrupt == "cancel":
                self.cancel()
            raise
        finally:
            display.finish()
            self._display = None
        return self._error(None, with_tail=raises)

    def _interrupted(self, display: Display) -> None:
        if self._spec.on_interrupt == "detach":
            display.state(self._state.value, "this client detached")
            display.finish()
            display.say(f"run {self.id} continues; find it again with serverless_gpu.attach({self.id!r})")
            return
        started_ns = SystemClock().boottime_ns()
        try:
            display.finish()
            display.say(
                f"cancelling; {second_interrupt_text()} to leave at once"
            )  # The client prints this message first, because the stop request may wait for an unreachable server.
            self.cancel()
            self._hear_until(lambda: self._receipt is not None or not self._source.is_open, None)
        except KeyboardInterrupt:
            self._left = True
            display.state(self._state.value, "being cancelled")
            try:
                # The server may not have received the first stop request.
                self._source.stop(StopReason.CANCEL, patiently=False)
            except ServerProblem:
                display.say(
                    f"stopped waiting; the server does not answer, and run {self.id} continues: cancel the run "
                    f"with `sgpu cancel {self.id}`"
                )
            else:
                display.say(f"stopped waiting; run {self.id} is still being cancelled")
            raise
        took_ms = (SystemClock().boottime_ns() - started_ns) // 1_000_000
        gate = self._receipt.gate if self._receipt is not None else "the run had not started"
        ended = "cancelled" if self._state is State.CANCELLED else f"ended as {self._state}"
        display.say(f"{ended}; {gate}, after {format_duration_ms(took_ms)}")

    def _error(self, timeout: float | None, *, with_tail: bool = True) -> BaseException | None:
        """Return the exception that ended the run.

        Public methods raise the exception with a single frame of serverless-gpu.
        """
        if not self.wait(timeout):
            return TimeoutError(f"run {self.id} is still {self._state}")
        if self._refused is not None:
            return error_class(self._refused.code)(self._refused.message, hint=self._refused.hint)
        stopped = self._stopped
        if stopped is None or stopped.state is State.SUCCEEDED:
            return None
        return make_exception(stopped, self.directory, self.id, self._spec, self._source.origin, with_tail=with_tail)

    def _abandoned(self, *, interrupted: bool) -> bool:
        """Return True if Ctrl-C has ended the caller's wait while the run continues."""
        return self._left or (interrupted and self._spec.on_interrupt == "detach")

    def _say_that_it_goes_on(self) -> None:
        """Tell the user that the run continues without its caller."""
        self._note_end()
        while_session = " until its session ends" if self.session else ""
        TerminalDisplay(quiet=self._spec.quiet).say(
            f"run {self.id} continues{while_session}; stop the run with cancel() of its handle or `sgpu cancel`"
        )

    def _ended(self, timeout: float | None) -> bool:
        return self._hear_until(lambda: self._stopped is not None or self._refused is not None, timeout)

    def _hear_until(self, done: Callable[[], bool], timeout: float | None) -> bool:
        clock, timeout = SystemClock(), patience("timeout", timeout)
        deadline_ns = None if timeout is None else clock.boottime_ns() + round(timeout * 1e9)
        if not self._lock.acquire(timeout=-1 if timeout is None else timeout):
            return done()  # Another thread waits for the run and updates the state.
        try:
            with interruptible():
                while not done():
                    left_s = None if deadline_ns is None else max(0.0, (deadline_ns - clock.boottime_ns()) / 1e9)
                    if not self._source.is_open:
                        return done()
                    tick_s = self._display.tick_s if self._display is not None else None
                    pause_s = min((limit for limit in (left_s, tick_s) if limit is not None), default=None)
                    # After the deadline, the handle still reads messages that have already arrived.
                    if not self._hear(pause_s) and left_s == 0:
                        return done()
                    # The display updates even while messages arrive without a pause.
                    display, now_ns = self._display, clock.boottime_ns()
                    tick_s = display.tick_s if display is not None else None
                    if display is not None and tick_s is not None and now_ns - self._ticked_ns >= tick_s * 1e9:
                        self._ticked_ns = now_ns
                        display.tick()
        finally:
            self._lock.release()
        return True

    def _hear(self, timeout_s: float | None) -> bool:
        """Process one message if a message arrives before the timeout. Return True if a message arrived."""
        if not self._source.is_open:
            return False
        try:
            message = self._source.receive(timeout_s)
        except (TimeoutError, BlockingIOError):
            return False
        if message is None:
            self._nothing_more()
        else:
            self._take(message)
        self._tell_state()
        return True

    def _tell_state(self) -> None:
        if self._display is not None and self._told != (self._state, self._waiting):
            self._told = (self._state, self._waiting)
            if self._state is State.QUEUED and self._waiting and self._queued_ns is not None:
                self._display.waits(self._waiting, self._queued_ns)
            else:
                self._display.state(self._state.value, self._waiting)

    def _take(self, message: protocol.AnyMessage | ConnectionNote) -> None:
        match message:
            # The client prints a connection note even without a display, because the caller is waiting.
            case ConnectionNote(sentence=sentence):
                (self._display or TerminalDisplay(quiet=self._spec.quiet)).say(sentence)
            case protocol.AttemptSnapshot(state=state, waiting=waiting, tracked=tracked):
                self._state, self._waiting, self._queued_ns = state, waiting, created_wall_ns(self.id)
                if tracked is not None:
                    self._take(tracked)
            case protocol.Tracked(run_id=run_id, url=url):
                self._tracked = from_link(url, run_id)
                if self._display is not None:
                    self._display.tracked(url)
            case protocol.WaitingNote(sentence=sentence, passing=True):
                self._waiting = sentence
                if self._display is not None:
                    self._display.progress(sentence)
                    self._told = (self._state, sentence)
            case protocol.WaitingNote(sentence=sentence, queued_ns=int(queued_ns)) if self._state is State.QUEUED:
                # The display shows the message together with the state.
                self._waiting, self._queued_ns = with_session_advice(sentence), queued_ns
            case protocol.WaitingNote(sentence=sentence):
                self._waiting, self._queued_ns = with_session_advice(sentence), None
                if self._display is not None and sentence:
                    self._display.say(self._waiting)
            case protocol.Started():
                self._state, self._waiting = State.RUNNING, ""
            case protocol.Output(rank=rank, stream=stream, text=text):
                if self._display is not None:
                    self._display.output(rank, stream, text)
            case protocol.Skipped(rank=rank, stream=stream, bytes=bytes_, lost=lost):
                if self._display is not None:
                    self._display.skipped(rank, stream, bytes_, lost)
            case protocol.Stopped(reason=Reason.ENV_CORRUPT) if self._relaunched():
                pass
            case protocol.Stopped():
                self._stopped, self._state = message, message.state
                self._note_end()
            case protocol.Finished(receipt=receipt):
                self._receipt = receipt
                # Ctrl-C interrupted the handle after the Stopped message had arrived.
                if self._stopped is None:
                    self._stopped = self._source.ending()
                    self._state = self._stopped.state
                    self._note_end()
                self._source.close()
            case protocol.Refused():
                self._refused, self._state = message, State.FAILED
                self._note_end()
                self._source.close()
            case _:
                pass

    def _note_started(self) -> None:
        """Register the run, so that this process lists unfinished runs when it exits."""
        if not self._spec.quiet:
            is_remote = self._spec.remote
            self._started = load(_STARTED).note_started(self.id, self.directory, is_remote=is_remote)

    def _note_end(self) -> None:
        if self._started is not None:
            self._started.is_over = True

    def _relaunch_with(self, relaunch: Relaunch) -> None:
        """Set the function that relaunches the run if its stored environment is damaged."""
        self._relaunch = relaunch

    def _relaunched(self) -> bool:
        """Switch to a new run with a newly captured environment. Return True if the launch succeeds."""
        if self._relaunch is None or not self._relaunches_left:
            return False
        if self._relaunches_left == _RELAUNCHES:
            display = self._display or TerminalDisplay(quiet=self._spec.quiet)
            display.say(
                "the client captures a new environment and restarts the run, because the stored environment is damaged"
            )
        self._relaunches_left -= 1
        launched = self._relaunch()
        if launched is None:
            return False
        self._source.close()
        self._keep(launched)
        if self._started is not None:
            self._started.run_id, self._started.directory = self.id, self.directory
        self._state, self._waiting, self._tracked = State.QUEUED, "", None
        return True

    def _nothing_more(self) -> None:
        """Determine a run's final state after its source has closed without a final message."""
        self._source.close()
        if self._stopped is None:
            self._stopped = self._source.ending()
            self._state = self._stopped.state
            self._note_end()
        if self._receipt is None:
            self._receipt = self._source.receipt()
