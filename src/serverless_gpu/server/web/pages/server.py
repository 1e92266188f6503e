"""Shows the server's health, version, backups, settings and nodes, and drains the server."""

from __future__ import annotations

from typing import Annotated

import anyio.from_thread
import msgspec
from starlette.responses import Response

from serverless_gpu.json_codec import from_json
from serverless_gpu.server.http.routing import FORM_BYTES_MAX, Call, Form, Routes, reading, writing
from serverless_gpu.server.nodes import drain, node_service
from serverless_gpu.server.operations import server_report, server_status
from serverless_gpu.server.web.site import WEB, Page, Redirect, Site
from serverless_gpu.wire.nodes import NodeView
from serverless_gpu.wire.server_status import DrainRequest, Health

routes = Routes("server-pages", mount=WEB)
NODES_MAX = 50
"""Maximum number of names that the page lists for one version."""


class ServerDrainForm(Form, frozen=True, kw_only=True):
    """The reason for a drain."""

    note: Annotated[str, msgspec.Meta(max_length=500)] = ""


@routes.get("/server", needs=reading("metrics"))
def show_server(call: Call, site: Site) -> Page:
    """Show the state of the server."""
    nodes = site.ask_if_allowed(call, node_service.list_nodes)
    return site.page(
        call,
        "server.html",
        title="Server",
        nav="server",
        wakes=(),
        health=_health(call, site),
        version_view=site.ask(call, server_status.version),
        drain=site.ask_if_allowed(call, drain.show_drain),
        report=site.ask_if_allowed(call, server_report.show_server),
        versions=versions(nodes.nodes if nodes is not None else ()),
        shown_nodes=NODES_MAX,
    )


@routes.post("/server/drain", needs=writing("nodes"), limit=FORM_BYTES_MAX)
def drain_server(call: Call, site: Site, body: ServerDrainForm) -> Redirect:
    """Start a drain of the server."""
    site.ask(call, drain.put_drain, body=DrainRequest(on=True, note=body.note.strip()))
    return Redirect(path="/server")


@routes.post("/server/resume", needs=writing("nodes"), limit=FORM_BYTES_MAX)
def resume_server(call: Call, site: Site, body: Form) -> Redirect:
    """End the drain of the server."""
    site.ask(call, drain.put_drain, body=DrainRequest(on=False))
    return Redirect(path="/server")


def versions(nodes: tuple[NodeView, ...]) -> list[tuple[str, list[NodeView]]]:
    """Return the nodes by version of serverless-gpu, with the most frequent version first."""
    found: dict[str, list[NodeView]] = {}
    for node in nodes:
        found.setdefault(node.version, []).append(node)
    return sorted(found.items(), key=lambda item: (-len(item[1]), item[0]))


def _health(call: Call, site: Site) -> Health:
    """Return the health of each part. A page runs in a thread, and the checks run in the event loop."""
    answer = anyio.from_thread.run(_ask_health, call, site)
    return from_json(bytes(answer.body), Health) if isinstance(answer, Response) else answer


async def _ask_health(call: Call, site: Site) -> Health | Response:
    return await site.ask(call, server_status.health)
