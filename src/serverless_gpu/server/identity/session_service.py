"""Signs browsers in and out, and lists sessions.

    sgpu up, sgpu web ─▶ POST /sign-in-links ─▶ a link with a random code, kept in memory for ten minutes
    browser ─ opens the link ─▶ `redeem` removes the code ─▶ session in the database, cookie in the browser

A session is a token of another kind (`records/principals.py`). The server stores only the hash of its secret. The
secret is valid only in the cookie of the web pages, and ends after a week, or after a day without a request. A sign-in
always creates another session, so that a secret from before the sign-in never becomes valid. The sign-in also ends the
session that the browser had before.

Failure cases:
* After a restart of the server, links from before the restart are invalid. Sessions remain valid.
* A second use of a link fails. The message names the commands that create another link.
* Disabling a user ends all sessions of the user.
"""

from __future__ import annotations

import contextlib
import hashlib
import secrets
import threading
from collections import OrderedDict
from collections.abc import Iterator
from typing import Annotated, NamedTuple

import msgspec
import sqlalchemy as sa

from serverless_gpu.ambient import Clock
from serverless_gpu.errors import NotAllowed, NotAuthenticated, NotFound
from serverless_gpu.model.access_control import AccessReach, covers
from serverless_gpu.server.core.caller import Caller
from serverless_gpu.server.db.database import Transactions
from serverless_gpu.server.http.routing import ANY_CALLER, Call, Query, Routes, reading, writing
from serverless_gpu.server.identity.rate_limiter import Rate, RateLimiter, network_of
from serverless_gpu.server.records import audit, principals
from serverless_gpu.server.records.audit import Action
from serverless_gpu.wire.access import SessionList, SessionOrigin, SessionsEnded, SessionView, SignInLink

LINK_S = 600.0
"""Seconds for which a sign-in link is valid."""
LINKS_MAX = 1_000
PER_ADDRESS = Rate(30, 300.0)
"""Failed attempts to sign in with a token or a link to set a password."""
_CODE_BYTES = 32
_BROWSER_CHARACTERS = 200
_NEW_LINK = "create another link with `sgpu web`, or sign in in another way"


class _Link(NamedTuple):
    principal: str
    until_ns: int  # Boottime.


class SessionService:
    """Creates sign-in links and sessions, and ends sessions. Thread-safe."""

    def __init__(self, *, clock: Clock, database: Transactions) -> None:
        self._clock = clock
        self._database = database
        self._lock = threading.Lock()
        self._links: OrderedDict[str, _Link] = OrderedDict()
        self._attempts = RateLimiter(PER_ADDRESS, clock=clock)

    def link(self, who: Caller) -> SignInLink:
        """Return a link that signs its first user in as the caller."""
        if who.scopes:
            raise NotAllowed("a token with scopes cannot sign in to the web pages", hint="use a token without scopes")
        if who.kind != "user":
            raise NotAllowed(f"{who.name or 'this token'} is no user", hint="sign in with the token of a user")
        code = secrets.token_urlsafe(_CODE_BYTES)
        with self._lock:
            self._links[_digest(code)] = _Link(who.name, self._clock.boottime_ns() + round(LINK_S * 1e9))
            while len(self._links) > LINKS_MAX:
                self._links.popitem(last=False)
        return SignInLink(path=f"/ui/sign-in?code={code}", expires_ns=self._clock.wall_ns() + round(LINK_S * 1e9))

    def redeem(self, code: str) -> str:
        """Return the principal of a sign-in link, and make the link invalid."""
        with self._lock:
            link = self._links.pop(_digest(code), None)
        if link is None or link.until_ns < self._clock.boottime_ns():
            raise NotAuthenticated("this sign-in link has expired, or someone has used it", hint=_NEW_LINK)
        return link.principal

    @contextlib.contextmanager
    def attempt(self, address: str) -> Iterator[None]:
        """Count an attempt to sign in from an address, unless the attempt succeeds.

        Raises:
            TooManyRequests: too many failed attempts from the address.
        """
        key = network_of(address)
        self._attempts.take(key)
        yield
        self._attempts.give_back(key)

    def open(self, principal: str, origin: SessionOrigin, *, replaces: str = "") -> str:
        """Create a session of a principal, and return the session's secret for the cookie.

        `replaces` is the secret in the browser's cookie before the sign-in. Its session ends.
        """
        secret, now_ns = principals.new_secret(), self._clock.wall_ns()
        browser = "".join(filter(str.isprintable, origin.browser))[:_BROWSER_CHARACTERS]
        origin = SessionOrigin(method=origin.method, browser=browser, address=origin.address)

        def work(connection: sa.Connection) -> None:
            made = principals.create_session(connection, principal, origin, secret=secret, now_ns=now_ns)
            before = principals.token_id(replaces)
            if before and principals.is_session(connection, before) and principals.is_known(connection, replaces):
                principals.revoke_token(connection, before, now_ns=now_ns)
            who = Caller(name=principal, token_id=made)
            detail = {"method": origin.method, "address": origin.address}
            audit.record(connection, who=who, action=Action.SESSION_OPEN, subject=made, now_ns=now_ns, detail=detail)

        self._database.write(work)
        return secret

    def end(self, who: Caller, identifier: str, *, reach: str) -> None:
        """End a session."""
        now_ns = self._clock.wall_ns()

        def work(connection: sa.Connection) -> None:
            if not principals.is_session(connection, identifier):
                raise NotFound(f"there is no session {identifier[:64]!r}")
            before = principals.token(connection, identifier)
            if not covers(reach, name=who.name, teams=(), owner=before.principal):
                raise NotFound(f"there is no session {identifier[:64]!r}")
            principals.revoke_token(connection, identifier, now_ns=now_ns)
            if before.revoked_ns is None:
                detail = {"principal": before.principal}
                audit.record(
                    connection, who=who, action=Action.SESSION_END, subject=identifier, now_ns=now_ns, detail=detail
                )

        self._database.write(work)

    def end_all(self, who: Caller, principal: str, *, reach: str, kept: str = "") -> tuple[str, ...]:
        """End the sessions of a principal except `kept`, and return the identifiers of ended sessions."""
        if not covers(reach, name=who.name, teams=(), owner=principal):
            raise NotFound(f"there is no user or service {principal[:64]!r}")
        now_ns = self._clock.wall_ns()

        def work(connection: sa.Connection) -> tuple[str, ...]:
            principals.principal(connection, principal)
            ended = principals.end_sessions(connection, principal, kept=kept, now_ns=now_ns)
            if ended:
                detail = {"principal": principal, "sessions": len(ended)}
                audit.record(
                    connection, who=who, action=Action.SESSION_END, subject=principal, now_ns=now_ns, detail=detail
                )
            return ended

        return self._database.write(work)

    def sessions(self, who: Caller, *, reach: str) -> tuple[SessionView, ...]:
        """Return the open sessions within the caller's reach, newest first."""
        whose = None if reach == AccessReach.ALL else who.name
        now_ns = self._clock.wall_ns()
        return self._database.read(lambda connection: principals.sessions_of(connection, whose, now_ns=now_ns))


def _digest(code: str) -> str:
    return hashlib.sha256(code.encode()).hexdigest()


routes = Routes("sessions")


@routes.post("/sign-in-links", needs=ANY_CALLER)
def make_link(call: Call, sessions: SessionService) -> SignInLink:
    """Return a link that signs its first user in to the web pages, as the caller."""
    return sessions.link(call.who)


@routes.get("/sessions", needs=reading("tokens"))
def list_sessions(call: Call, sessions: SessionService) -> SessionList:
    """List the open sessions of browsers: all sessions, or the caller's sessions."""
    return SessionList(sessions=sessions.sessions(call.who, reach=call.reach))


class SessionsQuery(Query, frozen=True, kw_only=True):
    """Sessions to end.

    Attributes:
        principal: owner of the sessions, or "" for the caller.
        keep: identifier of a session that does not end, or "".
    """

    principal: Annotated[str, msgspec.Meta(max_length=64)] = ""
    keep: Annotated[str, msgspec.Meta(max_length=26)] = ""


@routes.delete("/sessions", needs=writing("tokens"))
def end_sessions(call: Call, sessions: SessionService, query: SessionsQuery) -> SessionsEnded:
    """End all sessions of a user."""
    owner = query.principal or call.who.name
    return SessionsEnded(count=len(sessions.end_all(call.who, owner, reach=call.reach, kept=query.keep)))


@routes.delete("/sessions/{session}", needs=writing("tokens"))
def end_session(call: Call, sessions: SessionService, session: str) -> None:
    """End a session of a browser."""
    sessions.end(call.who, session, reach=call.reach)
