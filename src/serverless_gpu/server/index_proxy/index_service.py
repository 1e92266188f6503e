"""Sets, lists and deletes package indexes, issues tokens of their proxy, and serves the routes.

A change of an index needs the role `admin`, because it decides which hosts the server connects to and which secret the
server uses there. Each change adds an entry to the audit log.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
import sqlalchemy as sa

from serverless_gpu.ambient import Clock
from serverless_gpu.errors import InvalidValue, NotFound
from serverless_gpu.model.secrets import check_name
from serverless_gpu.server.core.caller import Caller
from serverless_gpu.server.core.server_key import Sealer
from serverless_gpu.server.core.settings import Settings
from serverless_gpu.server.db.database import Transactions
from serverless_gpu.server.http.routing import Call, Query, Routes, reading, writing
from serverless_gpu.server.index_proxy import definition, index_catalog, index_tokens, request_log
from serverless_gpu.server.index_proxy.index_catalog import IndexCatalog
from serverless_gpu.server.index_proxy.index_tokens import IndexTokens
from serverless_gpu.server.index_proxy.request_log import IndexRequestLog
from serverless_gpu.server.nodes.agent_service import AgentService
from serverless_gpu.server.records import audit, crews, indexes, principals, stored_secrets
from serverless_gpu.server.records.audit import Action
from serverless_gpu.server.records.indexes import StoredIndex
from serverless_gpu.server.records.stored_secrets import SecretOwner
from serverless_gpu.wire.indexes import (
    IndexList,
    IndexLog,
    IndexRequest,
    IndexToken,
    IndexTokenRequest,
    IndexView,
    NodeTokenRequest,
)


class IndexService:
    """Manages package indexes and the tokens of their proxy."""

    def __init__(
        self,
        *,
        settings: Settings,
        clock: Clock,
        database: Transactions,
        sealer: Sealer,
        index_catalog: IndexCatalog,
        index_tokens: IndexTokens,
        agents: AgentService,
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._database = database
        self._sealer = sealer
        self._catalog = index_catalog
        self._tokens = index_tokens
        self._agents = agents

    def put(self, who: Caller, name: str, request: IndexRequest) -> IndexView:
        """Create or replace an index."""
        made = definition.checked(name, request.url, file_hosts=request.file_hosts, private=request.private)
        if request.team and not request.secret:
            raise InvalidValue("the request names the team of a secret, but no secret", hint="name it: --secret NAME")
        if request.secret and made.scheme != "https" and not made.private:
            raise InvalidValue(
                f"the credentials of the index {name!r} would cross the network unencrypted", hint="use an https URL"
            )
        now_ns = self._clock.wall_ns()

        def work(connection: sa.Connection) -> StoredIndex:
            whose = SecretOwner("", "")
            if request.secret:
                whose = SecretOwner("team", request.team) if request.team else SecretOwner("user", who.name)
                if request.team:
                    principals.team(connection, request.team)
                value = stored_secrets.newest(connection, self._sealer, whose, check_name(request.secret))
                if not index_catalog.authorization(value):
                    raise InvalidValue(
                        f"the secret {request.secret!r} cannot be credentials of an index",
                        hint="set it to USER:PASSWORD or to a token: sgpu secret set",
                    )
            there = indexes.every(connection)
            if len(there) >= definition.INDEXES_MAX and name not in {each.name for each in there}:
                raise InvalidValue(f"a server has at most {definition.INDEXES_MAX} indexes")
            stored = StoredIndex(
                name=made.name,
                url=made.url,
                file_hosts=made.file_hosts,
                private=made.private,
                secret=request.secret,
                secret_kind=whose.kind,
                secret_owner=whose.owner,
                created_ns=now_ns,
                by=who.name,
            )
            indexes.put(connection, stored)
            detail = {
                "url": made.url,
                "file_hosts": list(made.file_hosts),
                "private": made.private,
                "secret": request.secret,
                "team": request.team,
            }
            audit.record(connection, who=who, action=Action.INDEX_SET, subject=name, now_ns=now_ns, detail=detail)
            return stored

        stored = self._database.write(work)
        self._catalog.changed()
        return _view(stored)

    def delete(self, who: Caller, name: str) -> IndexView:
        """Delete an index, and return the deleted index."""
        now_ns = self._clock.wall_ns()

        def work(connection: sa.Connection) -> StoredIndex:
            stored = indexes.find(connection, name)
            if stored is None:
                names = ", ".join(each.name for each in indexes.every(connection)) or "none"
                raise NotFound(f"the server has no index {name[:64]!r}", hint=f"indexes: {names}")
            indexes.delete(connection, name)
            audit.record(connection, who=who, action=Action.INDEX_DELETE, subject=name, now_ns=now_ns)
            return stored

        stored = self._database.write(work)
        self._catalog.changed()
        return _view(stored)

    def list_all(self) -> IndexList:
        """Return all indexes, and the URL of the proxy."""
        found = self._database.read(indexes.every)
        asked = self._settings.index_proxy
        return IndexList(indexes=tuple(_view(each) for each in found), proxy="" if asked is None else asked.url)

    def user_token(self, who: Caller, request: IndexTokenRequest) -> IndexToken:
        """Return a token for the caller."""
        return self._token(index_tokens.USER, who.name, lifetime_s=request.lifetime_s)

    def node_token(self, who: Caller, node_id: str, request: NodeTokenRequest) -> IndexToken:
        """Return a token for a build or for an attempt on the caller's node."""
        self._agents.check(who, node_id, "", "")
        if bool(request.build) == bool(request.gang):
            raise InvalidValue("the request must name a build or an attempt", hint="set either build or gang")
        if request.build:
            if not index_tokens.LABEL.fullmatch(request.build):
                raise InvalidValue(f"a build cannot have the label {request.build[:64]!r}")
            return self._token(index_tokens.BUILD, f"{node_id}:{request.build}")
        run_id, _, fence = request.gang.rpartition(":")
        number = int(fence) if fence.isascii() and fence.isdigit() and len(fence) <= 9 else 0
        crew = self._database.read(lambda connection: crews.on_node(connection, run_id, number, node_id))
        if crew is None:
            raise NotFound(f"the node has no attempt {request.gang[:64]!r}")
        return self._token(index_tokens.ATTEMPT, f"{run_id}:{number}")

    def _token(self, kind: str, name: str, *, lifetime_s: int = index_tokens.LIFETIME_S) -> IndexToken:
        asked = self._settings.index_proxy
        if asked is None:
            raise NotFound(
                "the server has no index proxy",
                hint="an administrator starts the server with --index-proxy ADDRESS:PORT",
            )
        token, until_ns = self._tokens.issue(kind, name, lifetime_s=lifetime_s)
        names = tuple(each.name for each in self._database.read(indexes.every))
        return IndexToken(url=asked.url, token=token, until_ns=until_ns, indexes=names)


def _view(stored: StoredIndex) -> IndexView:
    secret = f"{stored.secret} of {stored.secret_kind} {stored.secret_owner}" if stored.secret else ""
    return IndexView(
        name=stored.name,
        url=stored.url,
        file_hosts=stored.file_hosts,
        private=stored.private,
        secret=secret,
        created_ns=stored.created_ns,
        by=stored.by,
    )


routes = Routes("indexes")


class LogQuery(Query, frozen=True, kw_only=True):
    """Query parameter with the maximum number of requests."""

    limit: Annotated[int, msgspec.Meta(ge=1, le=request_log.KEPT_MAX)] = 50


@routes.get("/indexes", needs=reading("indexes"))
def list_indexes(call: Call, indexes: IndexService) -> IndexList:
    """List the package indexes of the index proxy."""
    return indexes.list_all()


@routes.put("/indexes/{name}", needs=writing("indexes"))
def put_index(call: Call, indexes: IndexService, name: str, body: IndexRequest) -> IndexView:
    """Create or replace a package index."""
    return indexes.put(call.who, name, body)


@routes.delete("/indexes/{name}", needs=writing("indexes"))
def delete_index(call: Call, indexes: IndexService, name: str) -> IndexView:
    """Delete a package index."""
    return indexes.delete(call.who, name)


@routes.get("/index-log", needs=reading("audit"))
def list_index_requests(call: Call, index_log: IndexRequestLog, query: LogQuery) -> IndexLog:
    """Return the last requests of the index proxy."""
    return IndexLog(requests=index_log.last(query.limit))


@routes.post("/index-token", needs=reading("indexes"))
def create_index_token(call: Call, indexes: IndexService, body: IndexTokenRequest) -> IndexToken:
    """Return a token of the index proxy for the caller."""
    return indexes.user_token(call.who, body)


@routes.post("/agents/{node}/index-token", needs=writing("agents"))
def create_node_index_token(call: Call, indexes: IndexService, node: str, body: NodeTokenRequest) -> IndexToken:
    """Return a token of the index proxy for a build or an attempt on the node."""
    return indexes.node_token(call.who, node, body)
