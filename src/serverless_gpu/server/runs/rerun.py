"""Submits a run again with the spec, call, arguments, environment and variables of an earlier run.

    stored run ─▶ request of its client: spec without limits of policies, context decrypted ─▶ `SubmissionService`

Only the owner may run a run again, because the request contains the owner's environment variables. The server encrypts
the variables for the new run, and never unpickles the call. The new run uses the current values of its secrets, and the
current usage policies, budgets and teams decide about the run.

Failure cases:

* The server keeps a large call only until its run has ended. Later, the caller has to call the function again.

* The server's key has changed since the end of the run. The server can no longer decrypt the variables.
"""

from __future__ import annotations

import msgspec
import sqlalchemy as sa

from serverless_gpu.errors import NotAllowed, NotFound, ServerProblem
from serverless_gpu.model.lifecycle.attempt import UNSAVED_MAX
from serverless_gpu.model.spec import Function, RunSpec
from serverless_gpu.server.core.caller import Caller
from serverless_gpu.server.core.server_key import Sealer
from serverless_gpu.server.db.database import Transactions
from serverless_gpu.server.http.routing import Call, Routes, writing
from serverless_gpu.server.records import runs
from serverless_gpu.server.records.runs import Payload, StoredRun
from serverless_gpu.server.runs import run_views
from serverless_gpu.server.runs.submission import SubmissionService
from serverless_gpu.server.storage.blobs import Blobs
from serverless_gpu.wire.runs import AgainRequest, RunRequest, RunView

_CALL_AGAIN = "start the run from your program again"


class RerunService:
    """Submits runs again."""

    def __init__(self, *, database: Transactions, sealer: Sealer, blobs: Blobs, submissions: SubmissionService) -> None:
        self._database = database
        self._sealer = sealer
        self._blobs = blobs
        self._submissions = submissions

    def submit(self, who: Caller, reach: str, run_id: str, new_id: str) -> RunView:
        """Submit a run again, and return the view of the new run.

        Raises:
            NotAllowed: the run belongs to another principal.
            NotFound: the caller may not see the run, or the server no longer has its call.
        """

        def work(connection: sa.Connection) -> tuple[StoredRun, Payload | None, dict[str, str] | None]:
            run = run_views.visible(connection, run_id, who=who, reach=reach)
            if run.owner != who.name:
                raise NotAllowed(
                    f"run {run_id} uses the environment variables of {run.owner}, so only {run.owner} may run it again",
                    hint=f"ask {run.owner} to run it again",
                )
            return run, runs.payload(connection, run_id), runs.arguments(connection, run_id)

        run, payload, arguments = self._database.read(work)
        if payload is None:
            raise NotFound(f"there is no run {run_id[:40]!r} that you may see", hint="list your runs with `sgpu runs`")
        self._check_call(run)
        request = RunRequest(
            id=new_id,
            spec=submitted_spec(run.spec),
            target=run.target,
            context=msgspec.Raw(self._context(run, payload)),
            call=payload.call,
            snapshot=run.snapshot,
            version="",
            arguments=arguments,
        )
        return self._submissions.submit(who, request)

    def _check_call(self, run: StoredRun) -> None:
        called = run.spec.payload
        if isinstance(called, Function) and called.call is not None and self._blobs.missing(called.call.parts):
            raise NotFound(
                f"the server no longer has the function and arguments of run {run.id}, because it keeps large ones "
                "only until the end of their run",
                hint=_CALL_AGAIN,
            )

    def _context(self, run: StoredRun, payload: Payload) -> bytes:
        if not self._sealer.is_mine(payload.context_sealed):
            raise NotFound(
                f"the server can no longer read the environment variables of run {run.id}, because its key has changed "
                "since the end of the run",
                hint=_CALL_AGAIN,
            )
        try:
            return self._sealer.unseal(payload.context_sealed, about=run.id)
        except ServerProblem as error:
            raise NotFound(f"the environment variables of run {run.id} are damaged", hint=_CALL_AGAIN) from error


def submitted_spec(spec: RunSpec) -> RunSpec:
    """Return a stored spec without the limits that usage policies set at its submission."""
    tracker = spec.tracker
    if tracker is not None:  # The first run has already ended the MLflow run that it continued.
        tracker = msgspec.structs.replace(tracker, run_id="")
    return msgspec.structs.replace(
        spec,
        max_run_s=None,
        total_run_s=None,
        attempts_max=None,
        unsaved_max=UNSAVED_MAX,
        policies=(),
        tracker=tracker,
    )


routes = Routes("runs")


@routes.post("/runs/{run}/again", needs=writing("runs"))
def run_again(call: Call, reruns: RerunService, run: str, body: AgainRequest) -> RunView:
    """Submit an own run again, with its spec, call, arguments and environment."""
    return reruns.submit(call.who, call.reach, run, body.id)
