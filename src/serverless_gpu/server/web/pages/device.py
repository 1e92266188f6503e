"""Approves the login of a terminal.

`sgpu login` shows a code. A signed-in reader compares the code and approves the login.

    GET  /ui/device?code=BCDF-GHJK     the terminal that waits with this code, or a form for the code
    POST /ui/device                    approves or refuses

A link only shows the terminal. The approval is a form with a CSRF token, so that another site cannot approve.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from serverless_gpu.errors import ServerlessGpuError
from serverless_gpu.server.http.routing import FORM_BYTES_MAX, Call, Form, Query, Routes, writing
from serverless_gpu.server.identity import device_service
from serverless_gpu.server.web.site import WEB, Page, Site
from serverless_gpu.wire.sign_in import DeviceDecision, DeviceRequestView

routes = Routes("device-page", mount=WEB)
UserCode = Annotated[str, msgspec.Meta(max_length=32)]


class DeviceQuery(Query, frozen=True, kw_only=True):
    """The code that a terminal displays."""

    code: UserCode = ""


class DeviceForm(Form, frozen=True, kw_only=True):
    """A decision about a terminal."""

    code: UserCode
    decision: Literal["approve", "refuse"]


@routes.get("/device", needs=writing("tokens"))
def show_device(call: Call, site: Site, query: DeviceQuery) -> Page:
    """Show the terminal that waits with a code, or a form for the code."""
    if not query.code:
        return _page(call, site)
    try:
        return _page(call, site, device=site.ask(call, device_service.show_login, code=query.code))
    except ServerlessGpuError as error:
        return _page(call, site, code=query.code, problem=error)


@routes.post("/device", needs=writing("tokens"), limit=FORM_BYTES_MAX)
def decide(call: Call, site: Site, body: DeviceForm) -> Page:
    """Approve or refuse a terminal's login."""
    decision = DeviceDecision(approve=body.decision == "approve")
    try:
        decided = site.ask(call, device_service.decide_login, code=body.code, body=decision)
    except ServerlessGpuError as error:
        return _page(call, site, code=body.code, problem=error)
    return _page(call, site, device=decided)


def _page(
    call: Call,
    site: Site,
    *,
    device: DeviceRequestView | None = None,
    code: str = "",
    problem: ServerlessGpuError | None = None,
) -> Page:
    page = site.page(
        call,
        "device.html",
        title="Log a terminal in",
        nav="people",
        device=device,
        code=code,
        problem=problem,
        address=call.address,
    )
    return page if problem is None else msgspec.structs.replace(page, status=problem.status)
