"""Delivers one attempt to MLflow in a thread, and reports the tracking state to ranks and supervisor.

    thread: MlflowDelivery.run ──tracked, untracked, said──▶ tracking.json, for ranks that import mlflow
                                                          └▶ news, and the main thread is woken
    <attempt>/tracking.json    {"state": "pending" | "away" | "ready" | "failed", "environ": {…}, "run_id",
                                "url", "sentence"}

`tracking.json` contains no credentials, because ranks already have the caller's `MLFLOW_TRACKING_URI`. While the state
in `tracking.json` is "pending", the monitor touches the file every few seconds. Ranks recognize an active delivery by
the modification time of `tracking.json`. In the state "away", ranks do not wait for MLflow, because MLflow does not
answer. While the installation's own MLflow server starts, the state is "pending".

Failure cases: If the monitor cannot write `tracking.json`, only ranks that started with the MLflow variables know the
run. If the delivery thread fails because of a bug, the monitor logs the exception and stops tracking the attempt. The
monitor continues to deliver the other attempts.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Literal

import msgspec

from serverless_gpu.json_codec import from_json
from serverless_gpu.model.lifecycle.attempt import Reason, State
from serverless_gpu.node.attempt.usage_account import write_text
from serverless_gpu.node.base.home import Home
from serverless_gpu.node.inside.mlflow import job as mlflow_job
from serverless_gpu.node.mlflow_server.server import ensure_server
from serverless_gpu.node.monitor import messages
from serverless_gpu.node.monitor.backlog import BacklogAttempt, ClaimedAttempt
from serverless_gpu.tracking.base import TrackerAway, TrackerRun, split_userinfo
from serverless_gpu.tracking.delivery import DeliveryJob, MlflowDelivery
from serverless_gpu.tracking.mlflow import MlflowTracker

_NOTE_BYTES_MAX = 64 << 10
_STARTING = "the home's MLflow server is starting"
_TRIED = "the home's MLflow server could not start, so its keeper retries. Run `sgpu status` for the reason"
_AGAIN = "the home's MLflow server ended unexpectedly and is starting again"


class TrackingNote(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of the file `tracking.json`."""

    state: Literal["pending", "away", "ready", "failed"] = "pending"
    environ: dict[str, str] = {}  # Variables with which MLflow finds the run in a rank.
    run_id: str = ""
    url: str = ""
    sentence: str = ""  # Reason for which the MLflow run is unknown, or "".


class AttemptDelivery:
    """The MLflow delivery of one attempt.

    `environ` contains the caller's MLflow variables, including credentials. The delivery thread calls `wake` after
    queuing messages.
    """

    def __init__(
        self,
        home: Home,
        kept: BacklogAttempt,
        environ: Mapping[str, str],
        held: ClaimedAttempt | None,
        wake: Callable[[], None],
    ) -> None:
        observe = self._observe = kept.observe
        # Tracking state; None until the tracker has answered.
        self.status: messages.TrackedNote | messages.Untracked | None = None
        self.held = held  # The attempt's claimed backlog file, or None.
        self._answer: messages.TrackedNote | messages.Untracked | None = None
        self._environ = environ
        self._home = home
        self._wake = wake
        self._news: queue.SimpleQueue[messages.MonitorMessage] = queue.SimpleQueue()
        self._path = Path(observe.directory) / mlflow_job.FILE
        self._asked = Path(observe.directory) / mlflow_job.ASKED
        job = DeliveryJob(
            run_id=observe.run_id,
            fence=observe.fence,
            node_rank=observe.node_rank,
            num_nodes=observe.num_nodes,
            spec=observe.spec,
            environment=observe.environment,
            called_ns=kept.origin_ns,
        )
        self._delivery = MlflowDelivery(Path(observe.directory), job, self._tracker(), self)
        self._thread = threading.Thread(target=self._run, name=f"deliver {observe.run_id}", daemon=True)

    @property
    def target(self) -> str:
        """Return the key of the attempt's tracker."""
        return target_of(self._observe)

    @property
    def is_done(self) -> bool:
        """Return True if this process has no more data to send."""
        return not self._thread.is_alive()

    @property
    def over(self) -> str:
        """Return the reason for which the attempt's delivery has ended, or "" while data remains."""
        return self._delivery.over

    def start(self) -> None:
        """Start the delivery."""
        noted = TrackingNote()
        with contextlib.suppress(OSError, msgspec.MsgspecError), self._path.open("rb") as file:
            noted = from_json(file.read(_NOTE_BYTES_MAX), TrackingNote)
        if not isinstance(self.status, messages.TrackedNote) and noted.state != "ready":
            self._note(TrackingNote())
        self._thread.start()

    def ending(self, state: State, reason: Reason, sentence: str) -> None:
        """Notify the delivery that the attempt has ended and its logs and failures are on disk."""
        self._delivery.ending(state, reason, sentence)

    def settled(self) -> None:
        """Notify the delivery that the receipt is on disk, or that no receipt will follow."""
        self._delivery.settled()

    def stop(self) -> None:
        """Stop the delivery thread soon. Any monitor may continue the delivery later."""
        self._delivery.stop()

    def take_answer(self) -> messages.TrackedNote | messages.Untracked | None:
        """Return and discard the tracker's latest answer or failure."""
        answer, self._answer = self._answer, None
        return answer

    def wake(self) -> None:
        """Retry the delivery immediately."""
        self._delivery.wake()

    def tend(self) -> None:
        """Show ranks that the delivery is active.

        Retry immediately after the installation's MLflow server has started.
        """
        if isinstance(self.status, messages.TrackedNote) or self.is_done:
            return
        with contextlib.suppress(OSError):
            os.utime(self._path)
        with contextlib.suppress(OSError):
            os.unlink(self._asked)  # A rank creates this file when MLflow answers.
            self._delivery.wake()
        tracker = self._observe.spec.tracker
        if isinstance(self.status, messages.Untracked) and tracker is not None and not tracker.uri:
            with contextlib.suppress(TrackerAway):
                self._address()
                self._delivery.wake()

    def news(self) -> Iterator[messages.MonitorMessage]:
        """Remove and yield each queued message."""
        with contextlib.suppress(queue.Empty):
            while True:
                yield self._news.get_nowait()

    # --- delivery thread -----------------------------------------------------------------------------------------

    def tracked(self, tracked: TrackerRun) -> None:
        """Record the attempt's MLflow run."""
        environ = {"MLFLOW_RUN_ID": tracked.run_id, "MLFLOW_EXPERIMENT_ID": tracked.experiment_id}
        if split_userinfo(self._environ.get("MLFLOW_TRACKING_URI", ""))[0] != tracked.uri:
            environ["MLFLOW_TRACKING_URI"] = tracked.uri
        self._note(TrackingNote(state="ready", environ=environ, run_id=tracked.run_id, url=tracked.url))
        self._tell(messages.TrackedNote(run_id=tracked.run_id, url=tracked.url, environ=environ))

    def untracked(self, sentence: str, *, final: bool) -> None:
        """Record that the run is not tracked, temporarily or permanently."""
        is_starting = sentence in (_STARTING, _AGAIN)
        self._note(TrackingNote(state="failed" if final else "pending" if is_starting else "away", sentence=sentence))
        self._tell(messages.Untracked(sentence=sentence, final=final, is_starting=is_starting))

    def said(self, sentence: str, *, note: bool) -> None:
        """Queue a message for the user."""
        self._tell(messages.UserSentence(sentence=sentence, note=note))

    def _run(self) -> None:
        try:
            self._delivery.run()
        except Exception:  # noqa: BLE001 - one attempt's delivery must not end the delivery of other attempts
            traceback.print_exc()
            # Without `abandon`, every later delivery of the attempt would fail in the same way.
            self._delivery.abandon("failed")
            self.untracked("the delivery to MLflow failed. See the node's monitor.log", final=True)
        self._wake()

    def _tell(self, message: messages.MonitorMessage) -> None:
        if isinstance(message, messages.TrackedNote | messages.Untracked):
            self.status = self._answer = message
        self._news.put(message)
        self._wake()

    # --- tracker address -----------------------------------------------------------------------------------------

    def _tracker(self) -> MlflowTracker:
        tracking = self._observe.spec.tracker
        if tracking is None or not tracking.uri:
            return MlflowTracker(self._address, {})
        named = self._environ.get("MLFLOW_TRACKING_URI", "")
        is_callers = split_userinfo(named)[0] == tracking.uri.rstrip("/")
        return MlflowTracker(named if is_callers else tracking.uri, self._environ)

    def _address(self) -> str:
        return address_of(self._home, self._observe, self._environ)

    # --- tracking.json -------------------------------------------------------------------------------------------

    def _note(self, note: TrackingNote) -> None:
        with contextlib.suppress(OSError):
            write_text(self._path, msgspec.json.encode(note).decode())


def address_of(home: Home, observe: messages.Observe, environ: Mapping[str, str]) -> str:
    """Return the address of the MLflow server for an attempt's store.

    The function starts the server if needed. Raises TrackerAway while the MLflow server does not answer.
    """
    store = observe.spec.tracker.store if observe.spec.tracker is not None else ""
    serving = ensure_server(home, observe.python, store, environ=environ)
    if not serving.ready:
        # Ranks do not wait for a server that failed to start before, although the keeper retries.
        starting = _TRIED if serving.failures else _STARTING
        raise TrackerAway(_AGAIN if serving.is_restarting else serving.problem or starting)
    return serving.uri


def target_of(observe: messages.Observe) -> str:
    """Return the key of an attempt's tracker."""
    tracking = observe.spec.tracker
    return "" if tracking is None else tracking.uri or f"store {tracking.store}"
