"""Lists runs with filters in the address, and stops or compares selected runs.

`POST /ui/runs/selected` acts on the checked runs. After a stop, `/ui/stopped-runs` shows the outcome of each run.
"""

from __future__ import annotations

import datetime
from typing import Annotated, Any, Literal

import msgspec

from serverless_gpu.errors import InvalidValue, NotFound
from serverless_gpu.model.lifecycle.attempt import ACTIVE, TERMINAL, State
from serverless_gpu.server.core.hub import SCHEDULER
from serverless_gpu.server.http.routing import FORM_BYTES_MAX, Call, Form, Query, Routes, reading, writing
from serverless_gpu.server.records.run_list import Sort
from serverless_gpu.server.runs import run_service
from serverless_gpu.server.runs.run_service import STOPS_MAX, Label, RunsQuery
from serverless_gpu.server.web.pages import run_frame
from serverless_gpu.server.web.site import WEB, Page, Redirect, Site, zone_of_reader
from serverless_gpu.wire.base import PAGE_DEFAULT, PAGE_MAX
from serverless_gpu.wire.runs import BulkStopRequest, RunView

routes = Routes("run-pages", mount=WEB)

COLUMNS = {
    "owner": "Owner",
    "team": "Team",
    "gpus": "GPUs",
    "node": "Node",
    "pool": "Pool",
    "created": "Submitted",
    "waited": "Waited",
    "duration": "Duration",
    "cost": "Cost",
    "tags": "Tags",
}
"""Columns by name in the address. State and name are always shown."""
DEFAULT_COLUMNS = ("owner", "team", "gpus", "node", "created", "duration", "cost")
STATES = {
    "": "any state",
    "QUEUED": "waiting",
    ",".join(ACTIVE): "active",
    ",".join(("QUEUED", *ACTIVE)): "waiting or active",
    "SUCCEEDED": "succeeded",
    "FAILED,TIMED_OUT,LOST": "failed, timed out or lost",
    "CANCELLED,BUDGET_STOPPED": "cancelled or stopped",
}
"""Choices of states by value in the address, which also accepts other lists of states."""
SORTS = {"newest": "newest first", "oldest": "oldest first", "ended": "last ended first"}
_DATE = Annotated[str, msgspec.Meta(max_length=10)]


class RunsPageQuery(Query, frozen=True, kw_only=True):
    """Filters of the list, with days in the reader's time zone. `cols` lists the shown columns."""

    state: Label = ""
    owner: Label = ""
    team: Label = ""
    type: Label = ""
    tag: Annotated[str, msgspec.Meta(max_length=1024)] = ""
    name: Label = ""
    from_: _DATE = msgspec.field(name="from", default="")
    to: _DATE = ""
    q: Label = ""
    sort: Sort = "newest"
    cols: tuple[Label, ...] = ()
    limit: Annotated[int, msgspec.Meta(ge=1, le=PAGE_MAX)] = PAGE_DEFAULT
    cursor: Label = ""

    @property
    def columns(self) -> list[str]:
        """Return the names of the shown columns."""
        asked = {name for text in self.cols for name in text.split(",")}
        return [name for name in COLUMNS if name in (asked or DEFAULT_COLUMNS)]

    @property
    def filters(self) -> dict[str, str]:
        """Return the filters of the address, without cursor, order and columns."""
        names = ("state", "owner", "team", "type", "tag", "name", "from_", "to", "q")
        return {name: value for name in names if (value := getattr(self, name))}

    @property
    def parameters(self) -> dict[str, str]:
        """Return all parameters of the address but the cursor."""
        order = {} if self.sort == "newest" else {"sort": self.sort}
        cols = {"cols": ",".join(self.columns)} if self.cols else {}
        rows = {} if self.limit == PAGE_DEFAULT else {"limit": str(self.limit)}
        return self.filters | order | cols | rows


class SelectionForm(Form, frozen=True, kw_only=True):
    """Selected runs, and what to do with them."""

    runs: tuple[Label, ...] = ()
    action: Literal["stop", "compare"]


class RunsOfQuery(Query, frozen=True, kw_only=True):
    """Identifiers of runs, repeated or as a comma-separated list."""

    runs: tuple[Annotated[str, msgspec.Meta(max_length=8_000)], ...] = ()

    @property
    def identifiers(self) -> list[str]:
        """Return the identifiers in order, without duplicates."""
        return list(dict.fromkeys(run.strip() for text in self.runs for run in text.split(",") if run.strip()))


@routes.get("/runs", needs=reading("runs"))
def show_runs(call: Call, site: Site, query: RunsPageQuery) -> Page:
    """List runs that match the filters of the address."""
    zone, columns = zone_of_reader(call), query.columns
    wished = RunsQuery(
        state=query.state,
        owner=query.owner,
        team=query.team,
        type=query.type,
        tag=query.tag,
        name=query.name,
        from_ns=day_ns(query.from_, zone) or 0,
        to_ns=day_ns(query.to, zone, days=1),
        text=query.q.strip(),
        sort=query.sort,
        limit=query.limit,
        cursor=query.cursor,
        costs="cost" in columns,
    )
    found = site.ask(call, run_service.list_runs, query=wished)
    return site.page(
        call,
        "runs.html",
        title="Runs",
        nav="runs",
        wakes=(SCHEDULER,),
        query=query,
        runs=found.runs,
        cursor=found.cursor,
        previous=found.previous,
        costs={view.id: view.cost for view in found.costs},
        columns=columns,
        all_columns=COLUMNS,
        states=STATES if query.state in STATES else {**STATES, query.state: query.state},
        sorts=SORTS,
        usual=_usual(call),
        known=_known(found.runs, call),
        stoppable={run.id for run in found.runs if run.state not in TERMINAL and run_frame.may_stop(call, run)},
        most=STOPS_MAX,
    )


@routes.post("/runs/selected", needs=reading("runs"), limit=FORM_BYTES_MAX)
def act_on_selection(call: Call, site: Site, body: SelectionForm) -> Redirect:
    """Stop the selected runs, or compare them."""
    wanted = list(dict.fromkeys(body.runs))
    if not wanted:
        raise InvalidValue("no run is selected", hint="go back, and check the box of at least one run")
    chosen = ",".join(wanted)
    if body.action == "compare":
        return Redirect(path=f"/compare?runs={chosen}")
    site.ask(call, run_service.stop_runs, body=BulkStopRequest(runs=tuple(wanted)))
    return Redirect(path=f"/stopped-runs?runs={chosen}")


@routes.get("/stopped-runs", needs=writing("runs"))
def show_stopped(call: Call, site: Site, query: RunsOfQuery) -> Page:
    """Show what became of each run after a request to stop several runs."""
    outcomes = [_outcome(call, site, run_id) for run_id in query.identifiers[:STOPS_MAX]]
    return site.page(call, "stopped_runs.html", title="Stopped runs", nav="runs", wakes=(SCHEDULER,), outcomes=outcomes)


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """Outcome for a run that the reader asked to stop."""

    id: str
    run: RunView | None
    sentence: str


def _outcome(call: Call, site: Site, run_id: str) -> Outcome:
    try:
        run = run_frame.read(call, site, run_id)
    except NotFound:
        return Outcome(id=run_id, run=None, sentence="There is no such run, or you may not see it.")
    return Outcome(id=run_id, run=run, sentence=outcome_sentence(run, may_stop=run_frame.may_stop(call, run)))


def outcome_sentence(run: RunView, *, may_stop: bool) -> str:
    """Return what became of a run that its reader asked to stop."""
    if not may_stop:
        return f"Not stopped: you may see the run, but not stop it. Ask {run.owner} or an operator."
    if run.state in (State.CANCELLED, State.BUDGET_STOPPED):
        return "Stopped."
    if run.state in TERMINAL:
        return "Not stopped: the run had already ended."
    return "Asked to stop. Its ranks have time to save their work." if run.stop is not None else "Not asked to stop."


def day_ns(text: str, zone: datetime.tzinfo, *, days: int = 0) -> int | None:
    """Return the begin of a day, or of a later day, in nanoseconds since 1970; None for no day."""
    if not text:
        return None
    try:
        day = datetime.date.fromisoformat(text) + datetime.timedelta(days=days)
        seconds = datetime.datetime.combine(day, datetime.time(), zone).timestamp()
    except (ValueError, OverflowError) as error:
        raise InvalidValue(f"{text!r} is not a day", hint="write a day as 2027-01-31") from error
    return max(0, round(seconds)) * 1_000_000_000


def _usual(call: Call) -> list[tuple[str, dict[str, Any]]]:
    """Return the title and the filters of usual lists."""
    busy, failed = ",".join(("QUEUED", *ACTIVE)), "FAILED,TIMED_OUT,LOST"
    today = datetime.datetime.fromtimestamp(call.clock.wall_ns() / 1e9, zone_of_reader(call)).date()
    week = (today - datetime.timedelta(days=6)).isoformat()
    found: list[tuple[str, dict[str, Any]]] = [
        ("All", {}),
        ("Waiting or active", {"state": busy}),
        ("Mine", {"owner": call.who.name}),
        ("My failed", {"owner": call.who.name, "state": failed}),
        ("Failed in 7 days", {"state": failed, "from_": week}),
    ]
    return found + [(f"Team {team}", {"team": team}) for team in call.who.teams[:4]]


def _known(found: tuple[RunView, ...], call: Call) -> dict[str, list[str]]:
    """Return suggestions for the filters, from the shown runs."""
    return {
        "owner": sorted({run.owner for run in found} | {call.who.name}),
        "team": sorted({run.team for run in found if run.team} | set(call.who.teams)),
        "type": sorted({run.gpu_type for run in found if run.gpu_type}),
        "tag": sorted({f"{key}={value}" for run in found for key, value in run.spec.tags.items()})[:100],
    }
