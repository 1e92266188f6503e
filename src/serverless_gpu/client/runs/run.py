"""The handle of one run: wait, results, cancel, receipt, logs.

Each call on a handle advances it, in the caller's thread. Its messages and files come from a `RunSource`: a supervisor
of this machine, or a server. Either keeps its messages until they are read, so an unused handle costs nothing and loses
nothing but live output (which is in the logs).

A run whose environment is damaged in the store has not begun: it is captured and launched again, and the handle is from
then on that of the new run.
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
"""Identifiers of those that are open now."""
R = TypeVar("R")
_FUTURES = "serverless_gpu.client.runs.futures"  # loaded when it is asked for: a call has no use for it
_RELAUNCHES = 3  # behind a damaged snapshot damaged units may be found, and behind these damaged packs
_STARTED = "serverless_gpu.client.runs.started_runs"
_RECEIPT_AFTER_FAILURE_S = 0.05
Relaunch = Callable[[], RunSource | None]
"""Captures the environment once more and launches again; None where that does not help."""


def with_session_advice(sentence: str) -> str:
    """Return the reason of a wait, with advice for a caller that blocks itself."""
    if any(f"session {session} " in sentence for session in own_sessions):
        return f"{sentence}; that session is open in this process: call session.distributed(...), or close it"
    return sentence


class Run(Generic[R]):
    """One submitted run.

    Attributes:
        session: the session whose devices it uses, or "".
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
        """Attach to a source; a garbage-collected handle closes it and leaves the run alone."""
        self._source = source
        # Not `__del__`: in a reference cycle, such as an exception's traceback makes, a socket would go first.
        weakref.finalize(self, source.close)

    @property
    def id(self) -> str:
        """Return the run's identifier, with which `serverless_gpu.attach(id)` finds it from another process.

        It is another one after the environment was found damaged in the store, and the run was launched again.
        """
        return self._source.run_id

    @property
    def directory(self) -> Path:
        """Return the directory of the run's last attempt, with its results and receipt (and logs, if it ran here)."""
        return self._source.directory

    def __repr__(self) -> str:
        return f"<Run {self.id} {self._state}>"

    def status(self) -> str:
        """Return the state now, for example ``"RUNNING"``."""
        if self._lock.acquire(blocking=False):  # else another thread is waiting for the run and keeps the state fresh
            try:
                while self._hear(0.0):
                    pass
            finally:
                self._lock.release()
        return self._state.value

    def last_sentence(self) -> str:
        """Return the run's last sentence: its wait, ranks that returned long ago, a standstill."""
        self.status()
        return self._waiting

    def waiting_for(self) -> str:
        """Return in words what a queued run waits for and who has it; "" when it does not wait."""
        return self._waiting if self.status() == State.QUEUED else ""

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until no rank runs any more; of a run that failed on one of several nodes, until that is known.

        Args:
            timeout: seconds to wait at most, or None.

        Returns:
            Whether the run has ended.

        Raises:
            KeyboardInterrupt: Ctrl-C; the run goes on.
        """
        try:
            return self._ended(timeout)
        except KeyboardInterrupt:
            self._say_that_it_goes_on()
            raise KeyboardInterrupt from None

    def results(self, timeout: float | None = None) -> list[R]:
        """Return what every rank returned, by global rank; raise what ended the run otherwise.

        Args:
            timeout: seconds to wait at most, or None.

        Raises:
            TimeoutError: the run has not ended by then; it goes on.
            RunError: the run did not succeed.
            Exception: what user code raised, as its own type.
        """
        self._refuse_session()
        error = self._error(timeout)
        if error is not None:
            raise in_notebooks(error)
        return [self._load(rank) for rank in range(self._source.world_size or 0)]

    def done(self) -> bool:
        """Return whether the run has ended, well or not."""
        return self._ended(0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return what ended the run, as `results` raises it; None when the run succeeded.

        Args:
            timeout: seconds to wait at most, or None.

        Raises:
            TimeoutError: the run has not ended by then; it goes on.
        """
        self._refuse_session()
        if not self.wait(timeout):
            raise TimeoutError(f"run {self.id} is still {self._state}")
        return self._error(0)  # may be a TimeoutError of the user's

    def future(self) -> Future[list[R]]:
        """Return a `concurrent.futures.Future` of what `results` returns or raises, the same one each time.

        For `concurrent.futures.wait`, callbacks and `asyncio.wrap_future`. Cancelling it does nothing: `cancel` of the
        run stops the run.
        """
        self._refuse_session()
        if self._future is None:
            self._future = load(_FUTURES).future_of(self)
        return self._future

    def __await__(self) -> Generator[object, None, list[R]]:
        """Wait in an event loop; return or raise as `results` does. A task that is cancelled leaves the run alone."""
        self._refuse_session()
        waiting: Generator[object, None, list[R]] = load(_FUTURES).results_of(self).__await__()
        return waiting

    def result(self, rank: int = 0, timeout: float | None = None) -> R:
        """Return what one rank returned; as `results` otherwise.

        Raises:
            InvalidOption: the rank is not a number.
            InvalidValue: there is no such rank.
        """
        self._rank(rank)
        error = self._error(timeout)
        if error is not None:
            raise in_notebooks(error)
        return self._load(self._rank(rank))  # once more: how many there are may have been unknown

    def _load(self, rank: int) -> R:
        if isinstance(self._spec.payload, Command):
            return cast("R", None)  # a program leaves files and an exit code
        self._source.bring_result(rank)
        return cast("R", load_result(self.directory, rank, self.id, self._source.origin))

    def _rank(self, rank: object) -> int:
        self._refuse_session()
        return checked_rank(rank, self._source.world_size, self.id)

    def _refuse_session(self) -> None:
        if self._source.world_size == 0:
            message = f"{self.id} is a session: it has a receipt, but no ranks and no results of its own"
            raise InvalidValue(message, hint="the runs that use it have: `sgpu runs` lists them")

    def fileno(self) -> int:
        """Return a descriptor that is readable when there is news of the run, or -1: for `select` and `asyncio`."""
        return self._source.fileno()

    def cancel(self) -> None:
        """Ask for the run to be stopped; does nothing when it has ended.

        Raises:
            ServerUnavailable: the run goes on through a server, which does not answer.
        """
        # Without the lock: another thread may be waiting for the run, and holds it.
        if self._stopped is None:
            self._source.stop(StopReason.CANCEL)

    def preempt(self) -> None:
        """Ask the run to make room for another, as a server does: its ranks may save, and are told why.

        A run of a server with ``resume=True`` continues as a new attempt; any other ends, reason ``preempted``.

        Raises:
            ServerUnavailable: as `cancel`.
        """
        if self._stopped is None:
            self._source.stop(StopReason.PREEMPT)

    def receipt(self, timeout: float | None = None) -> Receipt:
        """Return the account of the run, once its GPUs were checked and given back.

        Raises:
            TimeoutError: that has not happened by then.
            ServerlessGpuError: there is none, because the run never started.
        """
        self._hear_until(lambda: self._receipt is not None or not self._source.is_open, timeout)
        if self._receipt is None:
            if self._source.is_open:
                raise TimeoutError(f"run {self.id} has no receipt yet")
            raise ServerlessGpuError(f"run {self.id} has no receipt", hint=f"what there is: {self.directory}")
        return self._receipt

    def receipts(self, timeout: float | None = None) -> dict[str, Receipt]:
        """Return the account of each of the run's nodes, by its name; raises as `receipt`, which has their sum."""
        self.receipt(timeout)
        return self._source.receipts()

    def cost(self) -> Cost:
        """Return what the run used so far, over all of its attempts, and what that costs; `print` says it in words.

        Raises:
            ServerProblem: the run is a server's that does not answer, or is of an earlier version.
        """
        return self._source.cost()

    def tracked(self) -> TrackedRun | None:
        """Return its run in MLflow, which may come to be a moment after its first line; None without one."""
        self.status()
        link = self._receipt.tracked if self._receipt is not None else ""
        return self._tracked or from_directory(self.directory) or from_link(link)

    def logs(self, rank: int = 0, stream: str = "stdout") -> str:
        """Return what a rank has written so far, all that is kept of it: up to 1 GiB.

        Args:
            rank: global rank.
            stream: ``"stdout"`` or ``"stderr"``.

        Raises:
            InvalidValue: there is no such rank or stream.
        """
        number = self._rank(rank)
        if stream not in ("stdout", "stderr"):
            raise InvalidValue(f"run {self.id} has no stream {stream!r}", hint='the streams are "stdout" and "stderr"')
        return self._source.read_log(number, stream).decode("utf-8", "replace")

    def metrics(self) -> dict[str, Series]:
        """Return what was sampled so far of nodes, GPUs and ranks: ``times`` (seconds since 1970) and ``values``.

        Names are those in MLflow, as ``"system/node_0/gpu_0_utilization_percentage"``; attempts follow each other.
        """
        self._refuse_session()
        series: dict[str, Series] = load("serverless_gpu.client.metrics").read_metrics(self._source.read_telemetry())
        return series

    def plot(self, path: str | os.PathLike[str] | None = None) -> Figure:
        """Return a picture of the run: use and memory of every GPU over time, with failures and stops marked.

        Args:
            path: a file to write it to, too; its ending says as what: ``.png``, ``.svg``, ``.pdf``.

        Raises:
            ServerlessGpuError: there is no Matplotlib here, or the file cannot be written.
        """
        self._refuse_session()
        figure: Figure = load("serverless_gpu.client.runs.run_plot").plot(
            self._source, self._spec.name, self.status(), path
        )
        return figure

    def follow(self, *, only_looks: bool = False, raises: bool = True) -> BaseException | None:
        """Show the run while it goes on; return what ended it, or None when its results are there.

        Args:
            only_looks: whether the caller only views the run: Ctrl-C leaves it to itself, whatever
                its options say.
            raises: whether the caller raises what ended the run, which shows its notes; else the last output of the
                rank that failed is shown here, where it was not shown live.

        Raises:
            KeyboardInterrupt: after Ctrl-C; the run was cancelled and its GPUs handed back, unless Ctrl-C came twice or
                `on_interrupt="detach"` was asked for.
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
        except ServerProblem:  # the stop request reached no server: the run goes on
            raise
        except BaseException:  # a signal handler that exits, a notebook's own interrupt: the wait is over
            if self._spec.on_interrupt == "cancel":
                self.cancel()
            raise
        finally:
            display.finish()
            self._display = None
        return self._error(None, with_tail=raises)

    def _interrupted(self, display: Display) -> None:
        if self._spec.on_interrupt == "detach":
            display.state(self._state.value, "not watched any more")
            display.finish()
            display.say(f"run {self.id} goes on; find it again with serverless_gpu.attach({self.id!r})")
            return
        started_ns = SystemClock().boottime_ns()
        try:
            display.finish()
            display.say(
                f"cancelling; {second_interrupt_text()} to leave at once"
            )  # first: a server that is away is waited for
            self.cancel()
            self._hear_until(lambda: self._receipt is not None or not self._source.is_open, None)
        except KeyboardInterrupt:
            self._left = True
            display.state(self._state.value, "being cancelled")
            try:
                self._source.stop(StopReason.CANCEL, patiently=False)  # the first may not have been sent
            except ServerProblem:
                display.say(f"left; the server does not answer, and run {self.id} goes on: `sgpu cancel {self.id}`")
            else:
                display.say(f"left; run {self.id} is still being cancelled")
            raise
        took_ms = (SystemClock().boottime_ns() - started_ns) // 1_000_000
        gate = self._receipt.gate if self._receipt is not None else "it had not started"
        ended = "cancelled" if self._state is State.CANCELLED else f"ended as {self._state}"
        display.say(f"{ended}; {gate}, after {format_duration_ms(took_ms)}")

    def _error(self, timeout: float | None, *, with_tail: bool = True) -> BaseException | None:
        """Return the exception that ended the run; public methods raise it, with one frame of ours."""
        if not self.wait(timeout):
            return TimeoutError(f"run {self.id} is still {self._state}")
        if self._refused is not None:
            return error_class(self._refused.code)(self._refused.message, hint=self._refused.hint)
        stopped = self._stopped
        if stopped is None or stopped.state is State.SUCCEEDED:
            return None
        return make_exception(stopped, self.directory, self.id, self._spec, self._source.origin, with_tail=with_tail)

    def _abandoned(self, *, interrupted: bool) -> bool:
        """Return whether to stop waiting: Ctrl-C came twice, or once (`interrupted`) where that detaches."""
        return self._left or (interrupted and self._spec.on_interrupt == "detach")

    def _say_that_it_goes_on(self) -> None:
        """Print that the run goes on though its caller waits no longer."""
        self._note_end()
        while_session = " while its session does" if self.session else ""
        TerminalDisplay(quiet=self._spec.quiet).say(
            f"run {self.id} goes on{while_session}; cancel() of its handle, or `sgpu cancel`, stops it"
        )

    def _ended(self, timeout: float | None) -> bool:
        return self._hear_until(lambda: self._stopped is not None or self._refused is not None, timeout)

    def _hear_until(self, done: Callable[[], bool], timeout: float | None) -> bool:
        clock, timeout = SystemClock(), patience("timeout", timeout)
        deadline_ns = None if timeout is None else clock.boottime_ns() + round(timeout * 1e9)
        if not self._lock.acquire(timeout=-1 if timeout is None else timeout):
            return done()  # another thread is waiting for the run, and keeps it fresh
        try:
            with interruptible():
                while not done():
                    left_s = None if deadline_ns is None else max(0.0, (deadline_ns - clock.boottime_ns()) / 1e9)
                    if not self._source.is_open:
                        return done()
                    tick_s = self._display.tick_s if self._display is not None else None
                    pause_s = min((limit for limit in (left_s, tick_s) if limit is not None), default=None)
                    if not self._hear(pause_s) and left_s == 0:  # messages that are there are read in any case
                        return done()
                    # The display redraws also while messages keep coming.
                    display, now_ns = self._display, clock.boottime_ns()
                    tick_s = display.tick_s if display is not None else None
                    if display is not None and tick_s is not None and now_ns - self._ticked_ns >= tick_s * 1e9:
                        self._ticked_ns = now_ns
                        display.tick()
        finally:
            self._lock.release()
        return True

    def _hear(self, timeout_s: float | None) -> bool:
        """Take one message if it comes in time; return whether one came."""
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
            case ConnectionNote(sentence=sentence):  # also where nothing else is shown: the caller waits
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
                self._waiting, self._queued_ns = with_session_advice(sentence), queued_ns  # shown as the state is
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
                if self._stopped is None:  # a Ctrl-C between hearing it and taking it in
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
        """Register the run to be named at the end of this process, unless its end is seen before."""
        if not self._spec.quiet:
            is_remote = self._spec.remote
            self._started = load(_STARTED).note_started(self.id, self.directory, is_remote=is_remote)

    def _note_end(self) -> None:
        if self._started is not None:
            self._started.is_over = True

    def _relaunch_with(self, relaunch: Relaunch) -> None:
        """Launch the run again if its environment turns out to be damaged in the store."""
        self._relaunch = relaunch

    def _relaunched(self) -> bool:
        """Continue as a new run, whose environment was captured again; return whether there is one."""
        if self._relaunch is None or not self._relaunches_left:
            return False
        if self._relaunches_left == _RELAUNCHES:
            display = self._display or TerminalDisplay(quiet=self._spec.quiet)
            display.say("what is stored of the environment is damaged: it is captured again, and the run starts anew")
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
        """Set the ending of a run whose source has ended without the last message."""
        self._source.close()
        if self._stopped is None:
            self._stopped = self._source.ending()
            self._state = self._stopped.state
            self._note_end()
        if self._receipt is None:
            self._receipt = self._source.receipt()
