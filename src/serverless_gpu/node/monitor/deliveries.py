"""All attempts on their way to MLflow: running, ended, and left by an earlier monitor.

    Observe ─▶ Backlog.keep ─▶ Delivering ─▶ delivered, refused, given up ─▶ ClaimedAttempt.drop
    every 15 s, where there is room: Backlog.take ─▶ Recorder without a supervisor ─▶ Delivering ─▶ …

Threads are few: those of attempts that go on, and at most 32 of attempts that have ended. Where MLflow is away for
hours and runs are many, the others wait on disk (`backlog.py`).

Credentials are in memory alone, by tracker, as runs bring them; without them an attempt that needs some waits.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path

from serverless_gpu.ambient import Clock
from serverless_gpu.node.attempt.history import is_live
from serverless_gpu.node.base.home import Home
from serverless_gpu.node.mlflow_server.control import ensure_server
from serverless_gpu.node.monitor import messages
from serverless_gpu.node.monitor.backlog import KEPT_MAX, Backlog, BacklogAttempt, has_secrets, key_of
from serverless_gpu.node.monitor.delivery import Delivering, target_of
from serverless_gpu.node.monitor.recorder import Recorder

ENDED_MAX = 32
_LOOK_NS = 15 * 10**9
_SECRETS_MAX = 64


class MlflowDeliveries:
    """Running and waiting deliveries."""

    def __init__(self, home: Home, clock: Clock, wake: Callable[[], None]) -> None:
        self._home = home
        self._clock = clock
        self._wake = wake
        self._backlog = Backlog(home.tracking, clock)
        self._away: dict[str, messages.Untracked] = {}
        self._secrets: dict[str, Mapping[str, str]] = {}
        self._waiting: dict[str, str] = {}  # for credentials of a tracker, by attempt
        self._looked_ns: int | None = None

    def prepare(self, word: messages.Prepare) -> None:
        """Have the home's server ready where a run is going to need it."""
        if not word.tracker.uri:
            ensure_server(self._home, word.python, word.tracker.store, environ=word.environ)
        self._remember(word.tracker.uri, word.environ)

    def begin(self, recorder: Recorder) -> None:
        """Deliver an attempt that is observed, if it is to be tracked."""
        observe = recorder.observe
        if observe.spec.tracker is None:
            return
        self._remember(observe.spec.tracker.uri, observe.environ)
        kept = BacklogAttempt(observe=observe, origin_ns=recorder.origin_ns)
        held = self._backlog.keep(observe, recorder.origin_ns)
        delivering = recorder.delivering = Delivering(self._home, kept, observe.environ, held, self._wake)
        # Known already: ranks need not wait to hear it. Their file says it when it has been tried again.
        delivering.word = self._away.get(delivering.target)
        delivering.start()

    def tend(self, recorders: Mapping[str, Recorder]) -> Iterator[Recorder]:
        """Look after those that have ended; yield recorders of attempts that an earlier monitor left."""
        ended = 0
        for recorder in recorders.values():
            delivering = recorder.delivering
            if delivering is None:
                continue
            if self._note(delivering):
                self._recover(delivering.target, recorders)
            if delivering.is_done:
                self._bury(delivering)
            elif not recorder.is_observed:
                ended += 1
                if ended > ENDED_MAX:
                    delivering.stop()
        now_ns = self._clock.boottime_ns()
        if ended < ENDED_MAX and (self._looked_ns is None or now_ns - self._looked_ns > _LOOK_NS):
            self._looked_ns = now_ns
            waiting = {key for key, target in self._waiting.items() if target not in self._secrets}
            yield from self._taken(waiting.union(recorders), ENDED_MAX - ended)

    def _taken(self, known: Collection[str], limit: int) -> Iterator[Recorder]:
        for kept, held in self._backlog.take(known, limit, self._is_ready):
            target = target_of(kept.observe)
            environ = {**kept.observe.environ, **self._secrets.get(target, {})}
            recorder = Recorder(kept.observe, kept.origin_ns, self._clock)
            recorder.delivering = Delivering(self._home, kept, environ, held, self._wake)
            recorder.delivering.start()
            yield recorder

    def _is_ready(self, kept: BacklogAttempt) -> bool:
        """Return whether an attempt can be delivered; one without its credentials waits for them."""
        key, target = key_of(kept.observe), target_of(kept.observe)
        self._waiting.pop(key, None)
        if kept.has_secrets and target not in self._secrets:
            if len(self._waiting) >= KEPT_MAX:
                self._waiting.clear()
            self._waiting[key] = target
            return False
        return not is_live(Path(kept.observe.directory))

    def _note(self, delivering: Delivering) -> bool:
        """Remember whether a tracker answers; return whether it does again."""
        match delivering.take_answer():
            case messages.TrackedNote():
                return self._away.pop(delivering.target, None) is not None
            case messages.Untracked(final=False) as away:
                self._away[delivering.target] = away
            case _:
                pass
        return False

    def _recover(self, target: str, recorders: Mapping[str, Recorder]) -> None:
        """Have everything go on that waits for a tracker, now that it answers again."""
        self._looked_ns = None
        for recorder in recorders.values():
            if recorder.delivering is not None and recorder.delivering.target == target:
                recorder.delivering.wake()

    def _bury(self, delivering: Delivering) -> None:
        if delivering.held is None:
            return
        if delivering.over:
            delivering.held.drop()
        else:
            delivering.held.leave()
        delivering.held = None

    def _remember(self, target: str, environ: Mapping[str, str]) -> None:
        if target and has_secrets(environ):
            if self._secrets.pop(target, None) is None:
                self._looked_ns = None
            self._secrets[target] = environ
            while len(self._secrets) > _SECRETS_MAX:
                del self._secrets[next(iter(self._secrets))]
