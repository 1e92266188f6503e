"""Shows package indexes of the index proxy with its last requests, and sets and deletes indexes."""

from __future__ import annotations

from typing import Annotated

import msgspec

from serverless_gpu.server.http.routing import FORM_BYTES_MAX, Call, Form, Routes, reading, writing
from serverless_gpu.server.index_proxy import index_service
from serverless_gpu.server.web import form_values
from serverless_gpu.server.web.site import WEB, Page, Redirect, Site
from serverless_gpu.wire.base import NAME_CHARACTERS_MAX
from serverless_gpu.wire.indexes import IndexRequest

routes = Routes("index-pages", mount=WEB)
_Name = Annotated[str, msgspec.Meta(max_length=NAME_CHARACTERS_MAX)]


class IndexForm(Form, frozen=True, kw_only=True):
    """A package index. `file_hosts` has one host per line, or nothing for the usual hosts."""

    name: _Name
    url: Annotated[str, msgspec.Meta(max_length=2_000)]
    file_hosts: Annotated[str, msgspec.Meta(max_length=4_000)] = ""
    private: bool = False
    secret: _Name = ""
    team: _Name = ""


@routes.get("/indexes", needs=reading("indexes"))
def show_indexes(call: Call, site: Site) -> Page:
    """List package indexes and the last requests of the index proxy."""
    found = site.ask(call, index_service.list_indexes)
    log = site.ask_if_allowed(call, index_service.list_index_requests)
    return site.page(
        call,
        "indexes.html",
        title="Package indexes",
        nav="indexes",
        wakes=(),
        indexes=found.indexes,
        proxy=found.proxy,
        requests=log.requests if log is not None else (),
        sees_log=log is not None,
    )


@routes.post("/indexes", needs=writing("indexes"), limit=FORM_BYTES_MAX)
def set_index(call: Call, site: Site, body: IndexForm) -> Redirect:
    """Create or replace a package index."""
    hosts = form_values.lines(body.file_hosts)
    request = IndexRequest(
        url=body.url.strip(), file_hosts=hosts or None, private=body.private, secret=body.secret, team=body.team
    )
    site.ask(call, index_service.put_index, name=body.name.strip(), body=request)
    return Redirect(path="/indexes")


@routes.post("/indexes/{name}/delete", needs=writing("indexes"), limit=FORM_BYTES_MAX)
def delete_index(call: Call, site: Site, name: str, body: Form) -> Redirect:
    """Delete a package index."""
    site.ask(call, index_service.delete_index, name=name)
    return Redirect(path="/indexes")
