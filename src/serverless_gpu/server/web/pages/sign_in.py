"""Signs readers in and out.

    GET  /ui/sign-in                the ways to sign in
    GET  /ui/sign-in?code=…         a link of `sgpu up` or `sgpu web`: creates a session at once
    POST /ui/sign-in                a token that the reader pastes
    POST /ui/sign-out               ends the session

The pages accept `to`, the page to open after the sign-in. It is always a path of this server.
"""

from __future__ import annotations

from http.cookies import SimpleCookie
from typing import Annotated

import msgspec
from starlette.responses import Response

from serverless_gpu.errors import InvalidValue, NotAllowed, NotAuthenticated, ServerlessGpuError
from serverless_gpu.server.core.caller import Caller
from serverless_gpu.server.http.auth_middleware import COOKIE, Authenticator
from serverless_gpu.server.http.routing import ANY_CALLER, FORM_BYTES_MAX, PUBLIC, Call, Form, Query, Routes
from serverless_gpu.server.identity.session_service import SessionService
from serverless_gpu.server.records.principals import SESSION_S
from serverless_gpu.server.web.site import PREFIX, WEB, Page, Redirect, Site, base_of
from serverless_gpu.wire.access import SessionOrigin

routes = Routes("sign-in", mount=WEB)
Target = Annotated[str, msgspec.Meta(max_length=2_000)]


class SignInQuery(Query, frozen=True, kw_only=True):
    """Parameters of the sign-in page: the code of a link, and the page to open afterwards."""

    code: Annotated[str, msgspec.Meta(max_length=100)] = ""
    to: Target = ""


class SignInForm(Form, frozen=True, kw_only=True):
    """A pasted token."""

    token: Annotated[str, msgspec.Meta(max_length=200)]
    to: Target = ""

    def __repr__(self) -> str:
        """Omit the token."""
        return "SignInForm(…)"


class SignedIn(msgspec.Struct, frozen=True, kw_only=True):
    """The answer that stores or removes the session's cookie.

    Attributes:
        secret: secret of the session, or "" to remove the cookie.
        to: path to open.
    """

    secret: str
    to: str

    def response(self, call: Call) -> Response:
        """Return the redirection with the cookie."""
        response = Redirect(path=check_target(self.to)).response(call)
        cookie = SimpleCookie({COOKIE: self.secret})
        morsel = cookie[COOKIE]
        morsel["path"] = base_of(call.scope) + PREFIX
        morsel["httponly"], morsel["samesite"] = True, "Strict"
        morsel["max-age"] = str(round(SESSION_S)) if self.secret else "0"
        morsel["secure"] = call.scope["scheme"] == "https"
        response.headers["Set-Cookie"] = morsel.OutputString()
        response.headers["Cache-Control"] = "no-store"
        return response


@routes.get("/sign-in", needs=PUBLIC)
def show_sign_in(call: Call, site: Site, sessions: SessionService, query: SignInQuery) -> Page | SignedIn:
    """Show the ways to sign in, or sign in with the code of a link."""
    if not query.code:
        return _sign_in_page(call, site, to=query.to)
    try:
        principal = sessions.redeem(query.code)
        return open_session(call, sessions, principal, method="link", to=query.to)
    except NotAuthenticated as error:
        return _sign_in_page(call, site, to=query.to, problem=error)


@routes.post("/sign-in", needs=PUBLIC, limit=FORM_BYTES_MAX)
def sign_in(
    call: Call, site: Site, sessions: SessionService, authenticator: Authenticator, body: SignInForm
) -> Page | SignedIn:
    """Sign in with a token."""
    try:
        who = authenticator.authenticate(body.token.strip())
        _check_user(who)
    except (NotAuthenticated, NotAllowed) as error:
        return _sign_in_page(call, site, to=body.to, problem=error)
    return open_session(call, sessions, who.name, method="token", to=body.to)


@routes.post("/sign-out", needs=ANY_CALLER, limit=FORM_BYTES_MAX)
def sign_out(call: Call, sessions: SessionService, body: Form) -> SignedIn:
    """End the session, and remove its cookie."""
    sessions.end(call.who, call.who.token_id, reach="own")
    return SignedIn(secret="", to="/sign-in")


def open_session(call: Call, sessions: SessionService, principal: str, *, method: str, to: str) -> SignedIn:
    """Create a session of a principal for the request's browser."""
    origin = SessionOrigin(
        method=method,
        browser=call.headers.get("user-agent", ""),
        address=str((call.scope.get("client") or ("",))[0]),
    )
    return SignedIn(secret=sessions.open(principal, origin), to=to)


def check_target(to: str) -> str:
    """Return the path to open after a sign-in, or raise `InvalidValue` for an address of another site."""
    if not to:
        return "/"
    if not to.startswith("/") or to.startswith(("//", "/\\")) or not to.isprintable():
        raise InvalidValue("the page to open must be a page of this server")
    return to


def _check_user(who: Caller) -> None:
    if who.kind != "user" or who.scopes:
        raise NotAllowed("only a user's token without scopes can sign in", hint="create one with `sgpu token create`")


def _sign_in_page(call: Call, site: Site, *, to: str, problem: ServerlessGpuError | None = None) -> Page:
    page = site.page(call, "sign_in.html", title="Sign in", to=check_target(to) if to else "", problem=problem)
    return page if problem is None else msgspec.structs.replace(page, status=problem.status)
