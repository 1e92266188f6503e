"""Makes the frame that all parts of a run's page share: header, actions and tabs.

    @routes.get("/runs/{run}/logs", needs=reading("runs"))
    def show_logs(call: Call, site: Site, run: str) -> Page:
        view = run_frame.read(call, site, run)             # answers 404 for a run that the reader may not see
        return run_frame.page(call, site, view, "run_logs.html", tab="logs", …)

The template of a part extends `run_base.html` and fills the block `tab`. The template receives `run`, the `RunView`,
and `cost`, the `Cost` of the run so far.
"""

from __future__ import annotations

from typing import Any

from serverless_gpu.ambient import new_run_id
from serverless_gpu.model import access_control
from serverless_gpu.model.lifecycle.attempt import TERMINAL
from serverless_gpu.server.core.hub import run_key
from serverless_gpu.server.http.routing import Call, writing
from serverless_gpu.server.runs import run_service
from serverless_gpu.server.web.api_calls import reach_of
from serverless_gpu.server.web.site import Page, Site
from serverless_gpu.wire.runs import RunView

TABS = (
    ("", "Overview"),
    ("logs", "Logs"),
    ("metrics", "Metrics"),
    ("files", "Files"),
    ("environment", "Environment"),
    ("receipt", "Receipt"),
    ("spec", "Spec"),
)
"""Path below the run, and title, of each part of a run's page."""


def read(call: Call, site: Site, run_id: str) -> RunView:
    """Return a run, or raise `NotFound` if the reader may not see the run."""
    return site.ask(call, run_service.read_run, run=run_id)


def page(
    call: Call,
    site: Site,
    run: RunView,
    template: str,
    *,
    tab: str,
    is_live: bool = True,
    wakes: tuple[str, ...] = (),
    **values: Any,
) -> Page:
    """Return a part of a run's page.

    Args:
        call: the request for the page.
        site: the site.
        run: the run.
        template: file in `templates/` that extends `run_base.html`.
        tab: path of the part in `TABS`.
        is_live: False for a part that has its own stream, so that the page opens no second stream.
        wakes: further keys of the hub that signal a change of the part.
        values: further values for the template.
    """
    return site.page(
        call,
        template,
        title=run.name or run.id,
        nav="runs",
        wakes=(run_key(run.id), *wakes) if is_live else None,
        run=run,
        cost=site.ask(call, run_service.read_cost, run=run.id).cost,
        tab=tab,
        tabs=TABS,
        is_over=run.state in TERMINAL,
        may_stop=may_stop(call, run),
        may_run_again=may_stop(call, run) and run.owner == call.who.name,
        new_id=new_run_id(),
        **values,
    )


def may_stop(call: Call, run: RunView) -> bool:
    """Return True if the reader's role may stop a run."""
    reach = reach_of(call, writing("runs"))
    return access_control.covers(reach, name=call.who.name, teams=call.who.teams, owner=run.owner, team=run.team)
