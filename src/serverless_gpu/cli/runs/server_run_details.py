"""Everything about one run of a server, as `sgpu show` prints it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from serverless_gpu.ambient import format_moment
from serverless_gpu.cli.output import columns
from serverless_gpu.cli.runs.run_details import use_lines
from serverless_gpu.cli.runs.run_endings import fetch_ending
from serverless_gpu.cli.runs.run_location import this_home
from serverless_gpu.cli.runs import server_runs
from serverless_gpu.cli.server_connection import patient_server
from serverless_gpu.client.runs.outcome import ending_text
from serverless_gpu.errors import NotFound
from serverless_gpu.lazy_import import load
from serverless_gpu.model.lifecycle.attempt import TERMINAL, State
from serverless_gpu.model.receipt import Receipt
from serverless_gpu.units import format_bytes, format_duration_ms

if TYPE_CHECKING:
    from serverless_gpu.model.cost import Cost
    from serverless_gpu.wire.runs import AttemptList, CrewView, FileList, RunView

_FILES_MAX = 200


def details(view: RunView) -> dict[str, object]:
    """Return everything about a run, for machines."""
    files, attempts = _asked(view)
    cost = _cost(view)
    return server_runs.as_json(view, cost) | {
        "spec": view.spec,
        "attempts": attempts.attempts,
        "files": [{"name": file.name, "size_bytes": file.size} for file in files.files],
        "receipt": _receipt(view),
        "receipts": {crew.node: _receipt(view, crew.number) for crew in view.crews if view.finished},
        "cost": cost,
        "failure": failure_text(view),
    }


def story(view: RunView) -> Iterator[str]:
    """Yield the lines that tell everything about a run."""
    files, attempts = _asked(view)
    reason = "" if view.reason is None else view.reason.value
    yield " · ".join(part for part in (f"run {view.id}", view.name, view.state.value, reason) if part)
    if view.sentence:
        yield server_runs.sentence_of(view)
    cluster = "" if view.spec.ray is None else f", {view.spec.ray.text()}"
    whose = f"by {view.owner}" + (f" for {view.team}" if view.team else "")
    policy = f", under policy {view.spec.policy}" if view.spec.policy else ""
    yield f"asked for: {server_runs.devices_text(view)}{cluster}, {whose}{policy}"
    if view.waiting is not None and view.waiting.at_ns is not None:
        yield f"starts: {server_runs.moment_of(view.waiting)}"
    started = view.started_ns or view.created_ns
    took = "" if view.started_ns is None else f" · took {format_duration_ms(server_runs.took_ms(view))}"
    yield f"{'submitted' if view.started_ns is None else 'started'}: {format_moment(started)}{took}"
    yield from columns([_crew_row(view, crew) for crew in view.crews])
    cost = _cost(view)
    if cost is not None and cost.gpu_ms:
        yield f"cost: {cost}"
    if len(attempts.attempts) > 1 or any(each.sentence not in view.sentence for each in attempts.attempts):
        for each in attempts.attempts:
            why = "" if each.reason is None else f" · {each.reason.value}"
            had = f" · secrets: {', '.join(each.secrets)}" if each.secrets else ""
            told = f": {each.sentence}" if each.sentence else ""
            yield f"attempt {each.fence}: {each.state.value}{why} on {each.node}{told}{had}"
    failure = failure_text(view)
    if failure and failure != view.sentence:
        yield from ("", *failure.splitlines())
    receipt = _receipt(view)
    if receipt is not None:
        which = (
            "receipt"
            if view.state in TERMINAL and len(attempts.attempts) == 1
            else f"receipt of attempt {receipt.fence}"
        )
        yield from ("", f"{which}:", *(f"  {line}" for line in receipt.text().splitlines()[1:]))
        crews = view.crews if len(view.crews) > 1 and receipt.fence == view.fence else ()
        if uses := use_lines(receipt.uses, [crew.node for crew in crews for _ in range(crew.gpus)]):
            yield from ("", "devices:", *(f"  {line}" for line in uses))
    yield from ("", f"files on the server: {format_bytes(sum(file.size for file in files.files))}")
    yield from (f"  {line}" for line in columns([[format_bytes(f.size), f.name] for f in files.files[:_FILES_MAX]]))
    if len(files.files) > _FILES_MAX:
        yield f"  and {len(files.files) - _FILES_MAX} more"


def failure_text(view: RunView) -> str:
    """Return how a run failed, for reading; "" for one that goes on or did not fail. Nothing is unpickled."""
    if view.state not in TERMINAL or view.state is State.SUCCEEDED or not view.fence:
        return ""
    found = fetch_ending(view)
    return "" if found is None else ending_text(found.stopped, found.directory, view.id, view.spec)


def _receipt(view: RunView, crew: int | None = None) -> Receipt | None:
    """Return the last attempt's receipt, or that of one of its nodes; None before it exists."""
    query = {} if crew is None else {"fence": str(view.fence), "crew": str(crew)}
    with patient_server(this_home().root) as connection:
        try:
            return connection.ask("GET", f"/runs/{view.id}/receipt", answer=Receipt, query=query)
        except NotFound:
            return None


def _cost(view: RunView) -> Cost | None:
    """Return the run's cost from the server; None from a server of an earlier version."""
    wire = load("serverless_gpu.wire.runs")
    with patient_server(this_home().root) as connection:
        try:
            found: Cost = connection.ask("GET", f"/runs/{view.id}/cost", answer=wire.CostView).cost
        except NotFound:
            return None
    return found


def _asked(view: RunView) -> tuple[FileList, AttemptList]:
    wire = load("serverless_gpu.wire.runs")
    with patient_server(this_home().root) as connection:
        files: FileList = (
            connection.ask("GET", f"/runs/{view.id}/files", answer=wire.FileList)
            if view.fence
            else wire.FileList(fence=0, files=())
        )
        attempts: AttemptList = connection.ask("GET", f"/runs/{view.id}/attempts", answer=wire.AttemptList)
    return files, attempts


def _crew_row(view: RunView, crew: CrewView) -> list[str]:
    state = crew.state.value if crew.reason is None else f"{crew.state.value} · {crew.reason.value}"
    silent = f"no word since {format_moment(crew.heard_ns)}" if crew.state is State.UNREACHABLE else ""
    last = crew.first_rank + crew.gpus - 1
    ranks = f"rank {last}" if crew.gpus == 1 else f"ranks {crew.first_rank} to {last}"
    what = f"{crew.gpus} device{'' if crew.gpus == 1 else 's'}" if view.spec.per_node else ranks
    return [f"on {crew.node}:", what, state, silent or crew.sentence]
