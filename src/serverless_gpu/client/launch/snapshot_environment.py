"""Identifies, captures and checks the caller's Python environment for `env="snapshot"`.

    launch ─ ask ─────▶ service (a separate process, `environment/service.py`)
           ◀─ wanted ── known: at once · else after a capture, which the client shows
           ─ launched; meanwhile the service checks every file ─
           ◀─ changes ─ none: Confirm, user code starts · else: shown, captured, launched again

Each client process has one environment service per home directory. The first decorator or call starts the environment
service. A forked child process starts a separate environment service. If the environment service dies during a request,
the client restarts the service once. If the environment service refuses a request, the client raises an exception of
the same class. If the environment service is silent, the client prints a notice after 10 s and raises an error after 15
minutes. Ctrl-C withdraws the request and stops the capture if no other request needs it.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
from collections import defaultdict, deque
from collections.abc import Iterator
from pathlib import Path

from serverless_gpu.ambient import SystemClock
from serverless_gpu.client.caller_context import interruptible
from serverless_gpu.client.display.run_display import Display, make_display
from serverless_gpu.environment import service_messages
from serverless_gpu.environment.documents import ProgressPoint
from serverless_gpu.environment.scan.interpreter import describe
from serverless_gpu.environment.service_messages import StoreLocation
from serverless_gpu.errors import EnvironmentProblem, InvalidValue, error_class
from serverless_gpu.node.base.home import Home
from serverless_gpu.node.base.protocol import EnvironmentRequest, Mode
from serverless_gpu.node.inside.channel import pair
from serverless_gpu.node.processes import daemon
from serverless_gpu.units import format_bytes, format_duration_ms

RESTORE = "SERVERLESS_GPU_RESTORE"
_TRIES_MAX = 2
SILENT_S = 10.0
"""Number of seconds without a message from the environment service before the client prints a notice."""
SILENT_S_MAX = 900.0
"""Number of seconds without a message from the environment service before the client raises an error.

The environment service reports an unreachable store after a third of this limit.
"""
_clock = SystemClock()
_MODES: tuple[Mode, ...] = ("overlay", "links")


class _ServiceEnded(Exception):
    """Raised when the environment service has exited."""


class _Service:
    """The environment service of this process for one home directory."""

    def __init__(self, home: Home) -> None:
        self._turn = threading.Condition()
        self._reading = False
        self._inbox: dict[int, deque[service_messages.Answer]] = defaultdict(deque)
        self._number = 0
        self.alive = True
        self._channel, theirs = pair()
        index = str(home.environments / "index")
        try:
            process = daemon.start(
                "serverless_gpu.client.launch.environment_process",
                (theirs.fileno(), os.getpid(), index),
                log=home.agent_log,
                environ=os.environ,
                fds=(theirs.fileno(),),
            )
            process.wait()  # The client waits only briefly, because the started process detaches at once.
        except OSError as error:
            self._channel.close()
            raise EnvironmentProblem(f"the process that captures environments cannot be started: {error}") from None
        finally:
            theirs.close()

    def ask(self, description: dict[str, object], store: StoreLocation, *, capture: bool) -> int:
        """Send a request and return its number. Raise _ServiceEnded if the environment service has exited."""
        with self._turn:
            self._number += 1
            number = self._number
            self._inbox[number] = deque()
        question = service_messages.EnvironmentQuestion(
            number=number,
            description=description,
            store=store.url,
            environ=service_messages.store_variables(os.environ),
            token=store.token,
            ca=store.ca,
            capture=capture,
        )
        self._send(question)
        return number

    def answer(self, number: int, *, within_s: float) -> service_messages.Answer | None:
        """Return the next answer to a request, or None after a timeout.

        Raise _ServiceEnded if the service has exited.

        If several threads wait, one thread reads the answers for all threads.
        """
        until_ns = _clock.boottime_ns() + round(within_s * 1e9)
        with self._turn:
            while not self._inbox[number]:
                if not self.alive:
                    raise _ServiceEnded
                left_s = (until_ns - _clock.boottime_ns()) / 1e9
                if left_s <= 0:
                    return None
                if self._reading:
                    self._turn.wait(left_s)
                    continue
                self._reading = True
                try:
                    self._read(left_s)
                finally:
                    self._reading = False
                    self._turn.notify_all()
            return self._inbox[number].popleft()

    def forget(self, number: int, *, abandon: bool) -> None:
        """Ignore later answers to a request.

        If `abandon` is True, ask the service to stop processing the request.
        """
        with self._turn:
            self._inbox.pop(number, None)
        if abandon:
            with contextlib.suppress(_ServiceEnded):
                self._send(service_messages.Abandon(number=number))

    def close(self) -> None:
        """Close the socket, which makes the environment service exit."""
        self.alive = False
        self._channel.close()

    def _read(self, within_s: float) -> None:
        """Read one message before the timeout. Other threads may send requests during the read."""
        self._turn.release()
        received = None
        try:
            # `select` supports only descriptors below 1024. A client may have thousands of descriptors.
            poller = select.poll()
            poller.register(self._channel, select.POLLIN)
            if not poller.poll(within_s * 1000):
                return
            received = self._channel.receive()
        except OSError:
            pass
        finally:
            self._turn.acquire()
        if received is None:
            self.alive = False
            return
        answer = service_messages.decode_answer(received[0])
        if answer.number in self._inbox:
            self._inbox[answer.number].append(answer)

    def _send(self, question: service_messages.Question) -> None:
        try:
            self._channel.send(service_messages.encode(question))
        except OSError:
            self.alive = False
            raise _ServiceEnded from None


_services: dict[Path, _Service] = {}
_starting = threading.Lock()
_shared = threading.local()


def _forget_all() -> None:
    global _starting
    for each in _services.values():
        with contextlib.suppress(OSError):
            each._channel.close()
    _services.clear()
    _starting = threading.Lock()


os.register_at_fork(after_in_child=_forget_all)


class Recognition:
    """A request to the environment service.

    If `store` is None, the service uses the home directory's store.
    """

    def __init__(self, home: Home, *, capture: bool = True, store: StoreLocation | None = None) -> None:
        self._home = home
        self._mode = asked_mode(os.environ.get(RESTORE))
        self._capture = capture
        self._store = store or _own_store(home)
        self._display: Display | None = None
        self._description = describe()
        self._tries = 0
        self._over = False
        self._snapshot = ""
        self.verified = False
        """True if the environment service has found that every file matches the snapshot."""
        self._put()

    def wanted(self, display: Display | None = None) -> EnvironmentRequest | None:
        """Return the environment's stored snapshot.

        Return None if a capture is needed but the request does not allow it.
        """
        if not self.verified:
            self._display = display
            self._snapshot = self._until_known(display)
        return (
            EnvironmentRequest(snapshot=self._snapshot, store=self._store.url, mode=self._mode)
            if self._snapshot
            else None
        )

    def changes(self) -> tuple[str, ...]:
        """Wait until the service has checked every file, and return the differences from the snapshot.

        If the environment has changed, a later call of `wanted` returns the new snapshot.
        """
        while not self.verified:
            answer = self._next()
            if isinstance(answer, service_messages.FilesChecked):
                if answer.changes:
                    return answer.changes
                self.verified = True
                self.close()
            elif isinstance(
                answer, service_messages.UnknownEnvironment
            ):  # The client sent the request again after the death of the environment service.
                return ("installed packages or the project's code",)
        return ()

    def is_about(self, home: Home, store: StoreLocation | None) -> bool:
        """Return True if this request has the given home directory and store."""
        return self._home.root == home.root and self._store == (store or _own_store(home))

    def close(self) -> None:
        """Withdraw the environment request, unless it is already closed."""
        if not self._over:
            self._service.forget(self._number, abandon=not self.verified)
        self._over = True

    def _put(self) -> None:
        self._tries += 1
        while True:
            with _starting:
                known = _services.get(self._home.root)
                if known is None or not known.alive:
                    known = _services[self._home.root] = _Service(self._home)
            self._service = known
            try:
                self._number = self._service.ask(self._description, self._store, capture=self._capture)
                return
            except _ServiceEnded:
                self._count_try()

    def _count_try(self) -> None:
        self._tries += 1
        if self._tries > _TRIES_MAX:
            raise EnvironmentProblem(
                "the process that captures environments ended twice",
                hint=f"see {self._home.agent_log}",
            )

    def _next(self) -> service_messages.Answer:
        try:
            answer = self._heard()
        except _ServiceEnded:
            self._put()
            return self._next()
        if isinstance(answer, service_messages.CaptureFailed):
            self._over = True
            self._service.forget(self._number, abandon=False)
            raise error_class(answer.code)(answer.message, hint=answer.hint)
        return answer

    def _heard(self) -> service_messages.Answer:
        """Return the environment service's next answer.

        Print a notice after 10 s. Raise EnvironmentProblem after 15 min.
        """
        waited_s = 0.0
        while True:
            with interruptible():
                answer = self._service.answer(self._number, within_s=SILENT_S)
            if answer is not None:
                return answer
            waited_s += SILENT_S
            where = f"the store {self._store.url} may be unreachable" if self._store.token else "a disk may be blocked"
            if waited_s >= SILENT_S_MAX:
                self.close()
                raise EnvironmentProblem(
                    f"the process that scans the environment has not answered for {waited_s:.0f} s: {where}",
                    hint=f"check the server with `sgpu doctor`; see {self._home.agent_log}",
                )
            if self._display is not None and waited_s == SILENT_S:
                self._display.say(
                    f"the scan of the environment has made no progress for {waited_s:.0f} s: {where}; waiting up "
                    f"to {SILENT_S_MAX:.0f} s (check the server with `sgpu doctor`)"
                )

    def _until_known(self, display: Display | None) -> str:
        said = _CaptureNotices(display)
        while True:
            answer = self._next()
            match answer:
                case service_messages.Unchanged(snapshot=snapshot):
                    return snapshot
                case service_messages.UnknownEnvironment() if not self._capture:
                    return ""
                case service_messages.CaptureDone():
                    self.verified = True
                    self.close()
                    said.take(answer)
                    return answer.snapshot
                case _:
                    said.take(answer)


class _CaptureNotices:
    """Shows an environment capture on an optional display: the changes once, the progress and the result."""

    def __init__(self, display: Display | None) -> None:
        self._display = display
        self._shown = False
        self._found: service_messages.CapturedEnvironment | None = (
            None  # `_found` survives a service restart, so that the display shows the changes only once.
        )

    def take(self, answer: service_messages.Answer) -> None:
        """Show an answer's content on the display."""
        display = self._display
        if display is None:
            return
        if not self._shown:
            self._shown = True
            display.state("CAPTURING", "scanning the environment")
        match answer:
            case service_messages.CapturedEnvironment() if self._found is None:
                self._found = answer
                for sentence in found_text(answer):
                    display.say(sentence)
            case service_messages.CaptureProgress(progress=progress):
                display.progress(progress_text(progress))
            case service_messages.CaptureDone():
                display.state("CAPTURED", f"environment {answer.snapshot[:12]}")
                if sentence := taken_text(answer, self._found):
                    display.say(sentence)
            case _:
                pass


def _own_store(home: Home) -> StoreLocation:
    return StoreLocation(str(home.environments / "store"))


def recognise(home: Home, store: StoreLocation | None = None) -> Recognition:
    """Request this process's environment from the environment service.

    If `store` is None, use the home directory's store.

    All calls inside `shared_environment` share one environment request.
    """
    kept: list[Recognition] | None = getattr(_shared, "kept", None)
    if kept is None:
        return Recognition(home, store=store)
    if not kept or not kept[0].verified or not kept[0].is_about(home, store):
        kept[:] = [Recognition(home, store=store)]
    return kept[0]


@contextlib.contextmanager
def shared_environment() -> Iterator[None]:
    """Reuse the first launch's environment for all launches that this thread starts inside the block."""
    _shared.kept = []
    try:
        yield
    finally:
        _shared.kept = None


def capture_display(*, quiet: bool, logs: Path) -> Display:
    """Return the display that shows a capture's progress."""
    return make_display(quiet=quiet, logs=logs)


def asked_mode(text: str | None) -> Mode:
    """Return the restore mode from the value of `SERVERLESS_GPU_RESTORE`."""
    for mode in _MODES:
        if text == mode:
            return mode
    if text:
        raise InvalidValue(
            f"{RESTORE}={text!r} is not a valid restore mode",
            hint="set the mode to overlay or links, or unset the variable so that the node decides",
        )
    return ""


def progress_text(progress: ProgressPoint) -> str:
    """Return a capture's progress as text."""
    doing = "scanning the environment" if progress.phase == "scan" else "capturing the environment"
    done = format_bytes(progress.bytes_done)
    of = f" of {format_bytes(progress.bytes_total)}" if progress.bytes_total else ""
    files = f", {progress.files_done} files" if progress.files_done else ""
    return f"{doing}: {done}{of}{files}{f', {progress.name}' if progress.name else ''}"


def found_text(found: service_messages.CapturedEnvironment) -> list[str]:
    """Return the messages to show before an environment capture."""
    said = []
    if found.first:
        said.append("capturing the environment (done once; later calls only check for changes)")
    if found.changes:
        said.append(f"environment changed: {'; '.join(found.changes)}")
    return [*said, *found.remarks]


def taken_text(taken: service_messages.CaptureDone, found: service_messages.CapturedEnvironment | None) -> str:
    """Return the message to show after an environment capture, or "".

    A repeated capture reports only additional units.
    """
    address, took = taken.snapshot[:12], format_duration_ms(taken.ms)
    stored = format_bytes(taken.sent_bytes)
    if found is not None and not found.first:
        if not found.changes and not taken.sent_units:
            return ""
        new = f"{taken.sent_units} of {_units(taken.units)} new, {stored} stored" if taken.sent_units else "nothing new"
        return f"environment {address}: {new}, in {took}"
    code = f", including {format_bytes(taken.code_bytes)} of the project's code" if taken.code_bytes else ""
    sent = f"{taken.sent_units} new, {stored} stored" if taken.sent_units else "nothing new"
    size = f"{format_bytes(taken.size)} in {taken.files} files and {_units(taken.units)}"
    return f"environment {address}: {size}{code}; {sent}, in {took}"


def _units(count: int) -> str:
    return f"{count} unit{'' if count == 1 else 's'}"
