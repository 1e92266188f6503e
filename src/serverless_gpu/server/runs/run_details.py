"""Serves the details of one run: timeline, failure, arguments and environment.

The failure combines the report of the node (`Stopped`) with the rank's description of its exception
(`failures/RANK.json`), which is JSON. The server never unpickles an exception.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping

import msgspec
import sqlalchemy as sa

from serverless_gpu.errors import EnvironmentProblem, NotFound, ServerlessGpuError
from serverless_gpu.json_codec import from_json
from serverless_gpu.model.arguments import command_text
from serverless_gpu.model.lifecycle import failure_advice
from serverless_gpu.model.lifecycle.attempt import MEANINGS, Failure, State, Stopped
from serverless_gpu.model.spec import Command
from serverless_gpu.server.db.database import Transactions
from serverless_gpu.server.http.routing import Call, Routes, reading
from serverless_gpu.server.lifecycle import endings
from serverless_gpu.server.lifecycle.transitions import reason_sentence
from serverless_gpu.server.records import attempts, audit, events, files, runs
from serverless_gpu.server.records.attempts import StoredAttempt
from serverless_gpu.server.records.files import StoredFile
from serverless_gpu.server.records.runs import StoredRun
from serverless_gpu.server.runs import run_views
from serverless_gpu.server.runs.run_service import FenceQuery
from serverless_gpu.server.storage.blobs import Blobs, file_source
from serverless_gpu.server.storage.environment_store import EnvironmentStore
from serverless_gpu.wire.runs import (
    ArgumentsView,
    EventView,
    FailureView,
    HangView,
    RunEnvironmentView,
    RunUnitView,
    StopView,
    Timeline,
)

EVENTS_MAX = 1_000
STOPS_MAX = 100
TEXT_CHARACTERS_MAX = 200_000
"""Maximum characters of a traceback or stack in a view of a failure."""
MESSAGE_CHARACTERS_MAX = 20_000
UNITS_MAX = 5_000
DIGEST_CHARACTERS = 12
"""Shown beginning of an address. A complete address would give access to the code of the environment."""
_CONSEQUENCES_MAX = 8
_RECORD_BYTES_MAX = 4 << 20
_SEQUENCE = re.compile(r"\x1b(?:\[[0-?]{0,64}[ -/]{0,8}[@-~]|\][^\x07\x1b]{0,2048}(?:\x07|\x1b\\)?|[@-Z\\^_])")

routes = Routes("runs")


@routes.get("/runs/{run}/timeline", needs=reading("runs"))
def read_timeline(call: Call, database: Transactions, run: str) -> Timeline:
    """Return the events of a run and the requests to stop the run, oldest first."""

    def work(db: sa.Connection) -> Timeline:
        run_views.visible(db, run, who=call.who, reach=call.reach)
        found = events.after(db, run, 0, limit=EVENTS_MAX)
        return Timeline(
            events=tuple(from_event(event) for event in found),
            stops=tuple(
                StopView(
                    at_ns=entry.at_ns,
                    principal=entry.principal,
                    reason=str(entry.detail.get("reason", "")),
                    because=str(entry.detail.get("because", "")),
                )
                for entry in audit.of_subject(db, run, audit.Action.RUN_STOP, limit=STOPS_MAX)
            ),
        )

    return database.read(work)


@routes.get("/runs/{run}/failure", needs=reading("runs"))
def read_failure(call: Call, blobs: Blobs, database: Transactions, run: str, query: FenceQuery) -> FailureView:
    """Return the failure of a run's attempt, or of the last attempt."""

    def work(db: sa.Connection) -> tuple[StoredRun, StoredAttempt, Stopped | None, dict[str, StoredFile]]:
        stored = run_views.visible(db, run, who=call.who, reach=call.reach)
        attempt = attempts.find(db, run, query.fence or stored.fence)
        if attempt is None or attempt.reason is None or MEANINGS[attempt.reason].state is State.SUCCEEDED:
            raise NotFound(f"run {run} has not failed in this attempt", hint="show its state with `sgpu show`")
        stopped = _stopped(endings.outcome(db, attempt).stopped)
        rank = stopped.cause.rank if stopped is not None and stopped.cause is not None else None
        found = (files.find(db, run, attempt.fence, name) for name in _names(rank))
        return stored, attempt, stopped, {file.name: file for file in found if file is not None}

    stored, attempt, stopped, found = database.read(work)
    texts = {name: _text(blobs, file) for name, file in found.items()}
    return failure_view(stored, attempt, stopped, texts)


@routes.get("/runs/{run}/arguments", needs=reading("runs"))
def read_arguments(call: Call, database: Transactions, run: str) -> ArgumentsView:
    """Return the arguments of a run's call, or its command line, as text."""

    def work(db: sa.Connection) -> ArgumentsView:
        stored = run_views.visible(db, run, who=call.who, reach=call.reach)
        return arguments_view(stored, runs.arguments(db, run))

    return database.read(work)


@routes.get("/runs/{run}/environment", needs=reading("runs"))
def read_environment(
    call: Call, environments: EnvironmentStore, database: Transactions, run: str
) -> RunEnvironmentView:
    """Return the interpreter and packages of a run's environment."""
    stored = database.read(lambda db: run_views.visible(db, run, who=call.who, reach=call.reach))
    return environment_view(environments, stored)


def from_event(event: events.StoredEvent) -> EventView:
    """Return the view of a stored event."""
    parts = msgspec.structs.asdict(event)
    del parts["run_id"]
    return EventView(**parts)


def arguments_view(run: StoredRun, arguments: dict[str, str] | None) -> ArgumentsView:
    """Return the view of a call's arguments or of a program's command line."""
    called = run.spec.payload
    command = command_text(called.argv) if isinstance(called, Command) else ""
    return ArgumentsView(arguments=arguments, command=command)


def environment_view(environments: EnvironmentStore, run: StoredRun) -> RunEnvironmentView:
    """Return the view of a run's environment, or only the caller's interpreter without a snapshot."""
    asked = RunEnvironmentView(
        kind="snapshot" if run.snapshot else "live",
        digest=run.snapshot[:DIGEST_CHARACTERS],
        python=run.target.python,
        platform=run.target.platform,
    )
    if not run.snapshot:
        return asked
    try:
        contents = environments.contents(run.snapshot)
    except EnvironmentProblem:
        return msgspec.structs.replace(asked, missing=True)
    python = contents.interpreter
    return msgspec.structs.replace(
        asked,
        python=f"{python.implementation} {python.version}",
        platform=" ".join(filter(None, (python.platform, python.glibc and f"glibc {python.glibc}"))),
        captured_ns=contents.captured_ns,
        size=contents.size,
        files=contents.files,
        units=tuple(
            RunUnitView(
                kind=unit.kind,
                name=unit.name,
                version=unit.version,
                digest=unit.address[:DIGEST_CHARACTERS],
                size=unit.size,
                files=unit.files,
            )
            for unit in contents.units[:UNITS_MAX]
        ),
    )


def failure_view(
    run: StoredRun, attempt: StoredAttempt, stopped: Stopped | None, texts: Mapping[str, str]
) -> FailureView:
    """Return the view of a failure.

    Args:
        run: the run.
        attempt: the ended attempt.
        stopped: the report of the attempt's nodes, or None without a report.
        texts: the failed rank's files by name.
    """
    assert attempt.reason is not None
    cause = stopped.cause if stopped is not None else None
    rank, node = (cause.rank, cause.node or attempt.node) if cause is not None else (None, attempt.node)
    record_name, stack_name = _names(rank) if rank is not None else ("", "")
    record = _record(texts.get(record_name, ""))
    is_last = attempt.fence == run.fence and run.reason is not None
    detail = cause.detail if cause is not None else ""
    view = FailureView(
        fence=attempt.fence,
        state=attempt.state,
        reason=attempt.reason,
        sentence=run_views.sentence(run) if is_last else attempt.sentence or reason_sentence(attempt.reason, detail),
        rank=rank,
        node=node,
        exception=_exception(record),
        message=(_said(record, "message") or detail)[:MESSAGE_CHARACTERS_MAX],
        notes=_notes(record),
        traceback=_plain(_said(record, "traceback"))[:TEXT_CHARACTERS_MAX],
        stack=texts.get(stack_name, "")[:TEXT_CHARACTERS_MAX],
        advice=failure_advice.advice(attempt.reason, run.id, node=node, rank=rank),
    )
    if stopped is None:
        return view
    hang = stopped.hang
    return msgspec.structs.replace(
        view,
        exit_code=cause.exit_code if cause is not None else None,
        signal=cause.signal if cause is not None else None,
        hint=stopped.hint,
        log_tail=_plain(stopped.log_tail)[:MESSAGE_CHARACTERS_MAX],
        consequences=tuple(_consequences(stopped)),
        hang=None
        if hang is None
        else HangView(waiting=hang.waiting, elsewhere=hang.elsewhere, stacks=hang.stacks, file=hang.file),
    )


def _names(rank: int | None) -> tuple[str, ...]:
    """Return the names of the files in which a rank describes its failure."""
    return () if rank is None else (f"failures/{rank}.json", f"failures/{rank}.stack")


def _stopped(text: str | None) -> Stopped | None:
    if text is None:
        return None
    try:
        return from_json(text, Stopped)
    except msgspec.DecodeError:  # A node of another version may have sent the report.
        return None


def _text(blobs: Blobs, file: StoredFile) -> str:
    """Return the beginning of a file as text, or "" if the store no longer has the file."""
    with contextlib.suppress(ServerlessGpuError):
        data = b"".join(file_source(blobs, file)(0, min(file.size, _RECORD_BYTES_MAX)))
        return data.decode("utf-8", "replace")
    return ""


def _plain(text: str) -> str:
    """Return a text of a terminal without its colours and other control sequences."""
    return _SEQUENCE.sub("", text)


def _record(text: str) -> dict[str, object]:
    """Return a rank's description of its exception, or {} for other text."""
    try:
        return from_json(text, dict[str, object]) if text else {}
    except msgspec.DecodeError:
        return {}


def _said(record: Mapping[str, object], name: str) -> str:
    value = record.get(name)
    return value if isinstance(value, str) else ""


def _exception(record: Mapping[str, object]) -> str:
    module, name = _said(record, "module"), _said(record, "type")
    return (name if module in ("", "builtins", "__main__") else f"{module}.{name}")[:MESSAGE_CHARACTERS_MAX]


def _notes(record: Mapping[str, object]) -> tuple[str, ...]:
    notes = record.get("notes")
    return tuple(str(note)[:MESSAGE_CHARACTERS_MAX] for note in notes[:20]) if isinstance(notes, list) else ()


def _consequences(stopped: Stopped) -> list[str]:
    shown = [_consequence(failure) for failure in stopped.consequences[:_CONSEQUENCES_MAX]]
    more = len(stopped.consequences) - _CONSEQUENCES_MAX
    return shown + ([f"{more} more ranks failed"] if more > 0 else [])


def _consequence(failure: Failure) -> str:
    who = "the attempt" if failure.rank is None else f"rank {failure.rank}"
    where = f" on {failure.node}" if failure.node else ""
    return f"{who}{where}: {(failure.detail or MEANINGS[failure.reason].sentence)[:MESSAGE_CHARACTERS_MAX]}"
