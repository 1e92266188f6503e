"""Shows one run: overview, files, environment, receipt and spec; stops it, and runs it again.

`run_logs.py` and `run_metrics.py` have the other parts of the page.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from starlette.responses import Response

from serverless_gpu.ambient import new_run_id
from serverless_gpu.errors import AlreadyFinished, NotFound
from serverless_gpu.json_codec import from_json
from serverless_gpu.model.lifecycle.attempt import ACTIVE, MEANINGS, TERMINAL, State, StopReason
from serverless_gpu.model.receipt import Receipt
from serverless_gpu.server.http.routing import FORM_BYTES_MAX, Call, Form, Query, Routes, reading, writing
from serverless_gpu.server.runs import comparison, rerun, run_details, run_service
from serverless_gpu.server.runs.run_service import Fence, FenceQuery, ReceiptQuery
from serverless_gpu.server.web.pages import run_frame
from serverless_gpu.server.web.site import WEB, Page, Redirect, Site
from serverless_gpu.wire.runs import (
    AgainRequest,
    AttemptView,
    ComparisonView,
    EventView,
    FailureView,
    RunView,
    StopRequest,
    StopView,
    Timeline,
)

routes = Routes("run-pages", mount=WEB)
_UNFAILED = (State.SUCCEEDED, State.CANCELLED)
_STATE_WORDS = {
    State.QUEUED: "The run waits for GPUs.",
    State.STARTING: "The ranks start.",
    State.RUNNING: "User code runs.",
    State.STOPPING: "The ranks stop.",
    State.UNREACHABLE: "The node does not report. The run may still be running.",
}


class OverviewQuery(Query, frozen=True, kw_only=True):
    """`told` names the outcome of a form, which the page explains."""

    told: Literal["", "ended", "again"] = ""


class TimelineEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the timeline: a change of state in words, or a request to stop the run."""

    at_ns: int
    text: str
    fence: int = 0
    state: State | None = None
    node: str = ""


@routes.get("/runs/{run}", needs=reading("runs"))
def show_run(call: Call, site: Site, run: str, query: OverviewQuery) -> Page:
    """Show the state, failure and timeline of a run."""
    view = run_frame.read(call, site, run)
    attempts = site.ask(call, run_service.list_attempts, run=run).attempts
    is_settled = view.state in TERMINAL and view.finished
    notice = {
        "": "",
        "ended": f"The run had already ended as {view.state.lower().replace('_', ' ')}. Nothing was stopped.",
        "again": "This is the new run, with the spec, call and environment of the earlier one.",
    }[query.told]
    return run_frame.page(
        call,
        site,
        view,
        "run.html",
        tab="",
        is_live=not is_settled,
        notice=notice,
        failures=_failures(call, site, view, attempts),
        entries_=timeline_entries(site.ask(call, run_details.read_timeline, run=run)),
        attempts=attempts,
        changes=_changes(call, site, view) if is_settled and view.state not in _UNFAILED else ComparisonView(),
        tracked=view.tracked if view.tracked.startswith(("http://", "https://")) else "",
        commands=_commands(view),
        hangs=_hang_files(call, site, run),
    )


@routes.get("/runs/{run}/files", needs=reading("runs"))
def show_files(call: Call, site: Site, run: str, query: FenceQuery) -> Page:
    """List the files of an attempt."""
    view = run_frame.read(call, site, run)
    found = site.ask(call, run_service.list_files, run=run, query=query)
    return run_frame.page(
        call,
        site,
        view,
        "run_files.html",
        tab="files",
        is_live=view.state not in TERMINAL,
        fence=found.fence,
        files=found.files,
        attempts=site.ask(call, run_service.list_attempts, run=run).attempts,
    )


@routes.get("/runs/{run}/download/{name:path}", needs=reading("runs"))
def download(call: Call, site: Site, run: str, name: str, query: FenceQuery) -> Response:
    """Return a file as a download, which browsers never show."""
    return site.ask(call, run_service.read_file, run=run, name=name, query=query)


@routes.get("/runs/{run}/environment", needs=reading("runs"))
def show_environment(call: Call, site: Site, run: str) -> Page:
    """Show the environment of a run, and its changes since the previous run of the same name."""
    view = run_frame.read(call, site, run)
    return run_frame.page(
        call,
        site,
        view,
        "run_environment.html",
        tab="environment",
        is_live=False,
        environment=site.ask(call, run_details.read_environment, run=run),
        changes=_changes(call, site, view),
    )


@routes.get("/runs/{run}/receipt", needs=reading("runs"))
def show_receipt(call: Call, site: Site, run: str, query: FenceQuery) -> Page:
    """Show the cost of a run, and the receipts of its attempts and nodes."""
    view = run_frame.read(call, site, run)
    attempts = site.ask(call, run_service.list_attempts, run=run).attempts
    fence = query.fence or view.fence
    chosen = next((attempt for attempt in attempts if attempt.fence == fence), None)
    crews = chosen.crews if chosen is not None else ()
    receipts = [(crew.node, _receipt(call, site, run, fence, crew.number)) for crew in crews]
    return run_frame.page(
        call,
        site,
        view,
        "run_receipt.html",
        tab="receipt",
        is_live=not (view.state in TERMINAL and view.finished),
        fence=fence,
        attempts=attempts,
        receipt=_receipt(call, site, run, fence),
        receipts=[(node, receipt) for node, receipt in receipts if receipt is not None],
    )


@routes.get("/runs/{run}/spec", needs=reading("runs"))
def show_spec(call: Call, site: Site, run: str) -> Page:
    """Show the options and arguments of a run."""
    view = run_frame.read(call, site, run)
    arguments = site.ask(call, run_details.read_arguments, run=run)
    return run_frame.page(
        call,
        site,
        view,
        "run_spec.html",
        tab="spec",
        is_live=False,
        arguments=arguments,
        options=comparison.spec_texts(view.spec),
        spec=msgspec.json.format(msgspec.json.encode(view.spec), indent=2).decode(),
    )


# --- changes ----------------------------------------------------------------------------------------------------------


class StopForm(Form, frozen=True, kw_only=True):
    """Cancels or preempts a run."""

    reason: Literal["cancel", "preempt"] = "cancel"


class AgainForm(Form, frozen=True, kw_only=True):
    """Runs a run again as the new run `id`, so that a repeated form starts no second run."""

    id: Annotated[str, msgspec.Meta(max_length=26)] = ""


@routes.post("/runs/{run}/stop", needs=writing("runs"), limit=FORM_BYTES_MAX)
def stop(call: Call, site: Site, run: str, body: StopForm) -> Redirect:
    """Cancel or preempt a run. A run that has ended in the meantime is no error."""
    try:
        site.ask(call, run_service.stop_run, run=run, body=StopRequest(reason=StopReason(body.reason)))
    except AlreadyFinished:
        return Redirect(path=f"/runs/{run}?told=ended")
    return Redirect(path=f"/runs/{run}")


@routes.post("/runs/{run}/again", needs=writing("runs"), limit=FORM_BYTES_MAX)
def run_again(call: Call, site: Site, run: str, body: AgainForm) -> Redirect:
    """Submit a run again, and open the new run."""
    made = site.ask(call, rerun.run_again, run=run, body=AgainRequest(id=body.id or new_run_id()))
    return Redirect(path=f"/runs/{made.id}?told=again")


# --- parts ------------------------------------------------------------------------------------------------------------


def timeline_entries(timeline: Timeline) -> list[TimelineEntry]:
    """Return the events of a run and the requests to stop it in words, oldest first."""
    entries = [_event_entry(event) for event in timeline.events]
    entries += [TimelineEntry(at_ns=stop.at_ns, text=stop_text(stop)) for stop in timeline.stops]
    return sorted(entries, key=lambda entry: entry.at_ns)


def stop_text(stop: StopView) -> str:
    """Return who asked to stop a run, and why."""
    who = "The server" if stop.principal == "server" else stop.principal
    why = f" ({stop.reason})" if stop.reason else ""
    because = f": {stop.because}" if stop.because else ""
    return f"{who} asked to stop the run{why}{because}."


def _event_entry(event: EventView) -> TimelineEntry:
    text = event.sentence
    if not text and event.reason is not None:
        text = MEANINGS[event.reason].sentence
    return TimelineEntry(
        at_ns=event.at_ns,
        text=text or _STATE_WORDS.get(event.state, ""),
        fence=event.fence,
        state=event.state,
        node=event.node,
    )


def _failures(call: Call, site: Site, view: RunView, attempts: tuple[AttemptView, ...]) -> list[FailureView]:
    """Return the failure of the last ended attempt, if the run has not succeeded or been cancelled."""
    if view.state in _UNFAILED:
        return []
    ended = [attempt for attempt in attempts if attempt.reason is not None]
    if not ended:
        return []
    try:
        return [site.ask(call, run_details.read_failure, run=view.id, query=FenceQuery(fence=ended[-1].fence))]
    except NotFound:  # The last attempt has not failed.
        return []


def _changes(call: Call, site: Site, view: RunView) -> ComparisonView:
    return site.ask(call, comparison.read_changes, run=view.id) if view.name else ComparisonView()


def _hang_files(call: Call, site: Site, run: str) -> list[str]:
    found = site.ask(call, run_service.list_files, run=run, query=FenceQuery())
    return [file.name for file in found.files if file.name.startswith("hang-")]


def _receipt(call: Call, site: Site, run: str, fence: Fence, crew: int | None = None) -> Receipt | None:
    try:
        response = site.ask(call, run_service.read_receipt, run=run, query=ReceiptQuery(fence=fence, crew=crew))
        return from_json(bytes(response.body), Receipt)
    except (NotFound, msgspec.DecodeError):  # A node of another version may have sent the receipt.
        return None


def _commands(view: RunView) -> list[tuple[str, str]]:
    """Return commands about a run, with their purpose."""
    found = [("Output", f"sgpu logs {view.id}"), ("Details", f"sgpu show {view.id}")]
    if view.state in (State.QUEUED, *ACTIVE):
        found = [("Follow", f"sgpu attach {view.id}"), *found, ("Cancel", f"sgpu cancel {view.id}")]
    if view.state is State.SUCCEEDED:
        found.append(("Results in Python", f'serverless_gpu.attach("{view.id}").results()'))
    return found
