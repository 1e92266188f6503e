"""Shows, sets, replaces and deletes secrets. No page contains a value."""

from __future__ import annotations

from typing import Annotated

import msgspec

from serverless_gpu.errors import ServerlessGpuError
from serverless_gpu.model.access_control import AccessReach
from serverless_gpu.model.secrets import VALUE_BYTES_MAX
from serverless_gpu.server import secrets
from serverless_gpu.server.http.routing import FORM_BYTES_MAX, Call, Form, Query, Routes, reading, writing
from serverless_gpu.server.secrets import SecretQuery
from serverless_gpu.server.web import form_values
from serverless_gpu.server.web.list_pages import page_of
from serverless_gpu.server.web.site import WEB, Page, Redirect, Site
from serverless_gpu.wire.access import SecretRequest
from serverless_gpu.wire.base import NAME_CHARACTERS_MAX

routes = Routes("secret-pages", mount=WEB)
_Name = Annotated[str, msgspec.Meta(max_length=NAME_CHARACTERS_MAX)]


class SecretsPageQuery(Query, frozen=True, kw_only=True):
    """A secret to replace, a filter by a part of the name, and the previous page's cursor."""

    name: _Name = ""
    team: _Name = ""
    text: _Name = ""
    after: Annotated[str, msgspec.Meta(max_length=200)] = ""


class SecretForm(Form, frozen=True, kw_only=True):
    """A secret with its value."""

    name: _Name
    team: _Name = ""
    value: Annotated[str, msgspec.Meta(max_length=VALUE_BYTES_MAX)]

    def __repr__(self) -> str:
        """Omit the value."""
        return f"SecretForm(name={self.name!r}, team={self.team!r}, …)"


class DeleteForm(Form, frozen=True, kw_only=True):
    """The owner of a secret to delete."""

    team: _Name = ""


@routes.get("/secrets", needs=reading("secrets"))
def show_secrets(call: Call, site: Site, query: SecretsPageQuery) -> Page:
    """List secrets, with a form that sets one."""
    return _page(call, site, query)


@routes.post("/secrets", needs=writing("secrets"), limit=FORM_BYTES_MAX)
def set_secret(call: Call, site: Site, body: SecretForm) -> Page | Redirect:
    """Set a secret. As `sgpu secret set` does, remove one line break from the end of a typed value."""
    try:
        request = SecretRequest(value=body.value.removesuffix("\n").encode(), team=body.team)
        site.ask(call, secrets.set_secret, name=body.name.strip(), body=request)
    except ServerlessGpuError as problem:
        # The page never shows the typed value again.
        page = _page(call, site, SecretsPageQuery(name=body.name, team=body.team))
        return form_values.with_problem(page, problem)
    return Redirect(path="/secrets")


@routes.post("/secrets/{name}/delete", needs=writing("secrets"), limit=FORM_BYTES_MAX)
def delete_secret(call: Call, site: Site, name: str, body: DeleteForm) -> Redirect:
    """Delete a secret with all versions."""
    site.ask(call, secrets.delete_secret, name=name, query=SecretQuery(team=body.team))
    return Redirect(path="/secrets")


def _page(call: Call, site: Site, query: SecretsPageQuery) -> Page:
    every = site.ask(call, secrets.list_secrets).secrets
    found = [one for one in every if query.text.casefold() in one.name.casefold()]
    return site.page(
        call,
        "secrets.html",
        title="Secrets",
        nav="secrets",
        page=page_of(found, lambda one: f"{one.name}/{one.team}/{one.owner}", query.after),
        total=len(every),
        query=query,
        teams=call.who.teams,
        # Administrators see secrets of other users, but can only change their own secrets and those of teams.
        may_change=lambda one: bool(one.team) or one.owner == call.who.name,
        sees_all=call.reach == AccessReach.ALL,
        limit=VALUE_BYTES_MAX,
        problem=None,
    )
