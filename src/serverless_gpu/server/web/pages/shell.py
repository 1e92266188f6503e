"""Serves what all pages share: files, the redirection from the root, and a reader's preferences."""

from __future__ import annotations

from starlette.responses import Response

from serverless_gpu.errors import NotFound
from serverless_gpu.server.http.routing import PUBLIC, Call, Routes
from serverless_gpu.server.web.assets import assets
from serverless_gpu.server.web.site import ROOT, WEB, Redirect

root = Routes("web", mount=ROOT)
routes = Routes("web", mount=WEB)


@root.get("/", needs=PUBLIC)
def open_pages(call: Call) -> Redirect:
    """Redirect from the server's address to the pages."""
    return Redirect(path="/")


@routes.get("/assets/{digest}/{name}", needs=PUBLIC)
def read_asset(call: Call, digest: str, name: str) -> Response:
    """Return a script or a style sheet."""
    if digest != assets().digest:
        raise NotFound("this file belongs to another version of the server", hint="load the page again")
    return assets().response(name, accepts=call.headers.get("accept-encoding", ""))
