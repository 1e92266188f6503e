"""Routes of `wire/access.py`: names and versions; no route returns a value."""

from __future__ import annotations

from serverless_gpu.server.http.routing import Call, Query, Routes, reading, writing
from serverless_gpu.server.secrets.secret_service import SecretService
from serverless_gpu.wire.access import SecretList, SecretRequest, SecretView

REQUEST_BYTES_MAX = 128 << 10
routes = Routes("secrets")


class SecretQuery(Query, frozen=True, kw_only=True):
    """Whose secret; one's own without a team."""

    team: str = ""


@routes.get("/secrets", needs=reading("secrets"))
def list_secrets(call: Call, secrets: SecretService) -> SecretList:
    """List secrets without their values: one's own, and those of one's teams."""
    return SecretList(secrets=tuple(secrets.list_visible(call.who, reach=call.reach)))


@routes.put("/secrets/{name}", needs=writing("secrets"), limit=REQUEST_BYTES_MAX)
def set_secret(call: Call, secrets: SecretService, name: str, body: SecretRequest) -> SecretView:
    """Set a secret; attempts that start from now on get it."""
    return secrets.set(call.who, name, body, reach=call.reach)


@routes.delete("/secrets/{name}", needs=writing("secrets"))
def delete_secret(call: Call, secrets: SecretService, name: str, query: SecretQuery) -> SecretView:
    """Delete a secret with all of its versions."""
    return secrets.delete(call.who, name, query.team, reach=call.reach)
