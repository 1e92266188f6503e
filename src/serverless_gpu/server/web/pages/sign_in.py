"""Signs readers in and out, and sets passwords.

    GET  /ui/sign-in                the ways to sign in
    GET  /ui/sign-in?code=…         a link of `sgpu up` or `sgpu web`: creates a session at once
    POST /ui/sign-in                a token that the reader pastes
    POST /ui/sign-in/password       a name and a password
    GET  /ui/sign-in/provider       to the identity provider, which sends the reader back to
    GET  /ui/sign-in/callback       a session, or a page to link the account with a user
    GET  /ui/link                   a signed-in reader confirms the link of an account
    POST /ui/sign-out               ends the session
    GET  /ui/sign-out/provider      ends the session at the identity provider, too
    GET  /ui/password               a reader with a link, or a signed-in reader, sets a password

The pages accept `to`, the page to open after the sign-in. It is always a path of this server. Forms for readers without
a session need no CSRF token, because the auth middleware requires this server's `Origin` for every form.
"""

from __future__ import annotations

import base64
from http.cookies import SimpleCookie
from typing import Annotated, Literal

import msgspec
from starlette.requests import cookie_parser
from starlette.responses import RedirectResponse, Response

from serverless_gpu.errors import InvalidValue, NotAllowed, NotAuthenticated, ServerlessGpuError
from serverless_gpu.server.core.caller import Caller
from serverless_gpu.server.http.auth_middleware import COOKIE, TOKEN_CHARACTERS_MAX, Authenticator
from serverless_gpu.server.http.routing import ANY_CALLER, FORM_BYTES_MAX, PUBLIC, Call, Form, Query, Routes, writing
from serverless_gpu.server.identity import oidc_service, password_service
from serverless_gpu.server.identity.oidc_service import OidcService
from serverless_gpu.server.identity.password_service import PasswordService
from serverless_gpu.server.identity.session_service import SessionService
from serverless_gpu.server.records.principals import SESSION_S
from serverless_gpu.server.web.site import PREFIX, WEB, Page, Redirect, Site, base_of
from serverless_gpu.wire.access import SessionOrigin
from serverless_gpu.wire.sign_in import PASSWORD_CHARACTERS_MAX, PASSWORD_CHARACTERS_MIN, LinkRequest, PasswordRequest

routes = Routes("sign-in", mount=WEB)
Target = Annotated[str, msgspec.Meta(max_length=2_000)]
Code = Annotated[str, msgspec.Meta(max_length=100)]
PasswordField = Annotated[str, msgspec.Meta(max_length=PASSWORD_CHARACTERS_MAX)]
_LOGIN_COOKIE = "sgpu_login"
_LOGIN_TARGET_MAX = 1_000
_LOGIN_BYTES_MAX = 4_000
NOTICES = {
    "": "",
    "out": "You have signed out.",
    "password": "The password is set. Sign in with it.",
}


class SignInQuery(Query, frozen=True, kw_only=True):
    """Parameters of the sign-in page: the code of a link, the page to open afterwards, and a notice."""

    code: Code = ""
    to: Target = ""
    done: Literal["", "out", "password"] = ""


class SignInForm(Form, frozen=True, kw_only=True):
    """A pasted token."""

    token: Annotated[str, msgspec.Meta(max_length=TOKEN_CHARACTERS_MAX)]
    to: Target = ""

    def __repr__(self) -> str:
        """Omit the token."""
        return "SignInForm(…)"


class PasswordSignInForm(Form, frozen=True, kw_only=True):
    """A name and a password."""

    name: Annotated[str, msgspec.Meta(max_length=64)]
    password: PasswordField
    to: Target = ""

    def __repr__(self) -> str:
        """Omit the password."""
        return f"PasswordSignInForm(name={self.name!r})"


class ProviderQuery(Query, frozen=True, kw_only=True):
    """Parameters of a sign-in with the identity provider."""

    to: Target = ""
    links: bool = False


class CallbackQuery(Query, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """Parameters with which the identity provider sends a reader back.

    Providers add parameters of their own.
    """

    code: Annotated[str, msgspec.Meta(max_length=4_000)] = ""
    state: Code = ""
    iss: Annotated[str, msgspec.Meta(max_length=512)] = ""
    error: Annotated[str, msgspec.Meta(max_length=200)] = ""
    error_description: Annotated[str, msgspec.Meta(max_length=2_000)] = ""


class TicketQuery(Query, frozen=True, kw_only=True):
    """The ticket of a verified account."""

    ticket: Code = ""


class LinkForm(Form, frozen=True, kw_only=True):
    """A confirmed link of an account."""

    ticket: Code


class PasswordQuery(Query, frozen=True, kw_only=True):
    """The code of a link to set a password; "" for a signed-in reader."""

    code: Code = ""


class PasswordForm(Form, frozen=True, kw_only=True):
    """A new password, typed twice."""

    password: PasswordField
    again: PasswordField
    current: PasswordField = ""
    code: Code = ""

    def __repr__(self) -> str:
        """Omit the passwords."""
        return "PasswordForm(…)"


class SignedIn(msgspec.Struct, frozen=True, kw_only=True):
    """The answer that stores or removes the session's cookie.

    Attributes:
        secret: secret of the session, or "" to remove the cookie.
        to: path to open.
        ends_login: True to remove the cookie of a sign-in with the identity provider.
    """

    secret: str
    to: str
    ends_login: bool = False

    def response(self, call: Call) -> Response:
        """Return the redirection with the cookie."""
        response = Redirect(path=check_target(self.to)).response(call)
        age_s = round(SESSION_S) if self.secret else 0
        path = base_of(call.scope) + PREFIX
        _set_cookie(call, response, COOKIE, self.secret, path=path, age_s=age_s, same_site="Strict")
        if self.ends_login:
            _end_login(call, response)
        return response


class ToProvider(msgspec.Struct, frozen=True, kw_only=True):
    """The answer that sends a reader to the identity provider.

    Attributes:
        url: address at the provider.
        login: encoded state of the sign-in for the cookie, or "" for none.
    """

    url: str
    login: str = ""

    def response(self, call: Call) -> Response:
        """Return the redirection."""
        response = RedirectResponse(self.url, status_code=303)
        if self.login:
            name, path = _login_cookie(call)
            # The provider's redirection is a request from another site, so that the cookie cannot be strict.
            _set_cookie(call, response, name, self.login, path=path, age_s=600, same_site="Lax")
        return response


@routes.get("/sign-in", needs=PUBLIC)
def show_sign_in(
    call: Call, site: Site, sessions: SessionService, passwords: PasswordService, oidc: OidcService, query: SignInQuery
) -> Page | SignedIn:
    """Show the ways to sign in, or sign in with the code of a link."""
    ways = _Ways(call, site, passwords, oidc)
    if not query.code:
        return ways.page(to=query.to, notice=NOTICES[query.done], is_out=query.done == "out")
    try:
        principal = sessions.redeem(query.code)
        return open_session(call, sessions, principal, method="link", to=query.to)
    except NotAuthenticated as error:
        return ways.page(to=query.to, problem=error)


@routes.post("/sign-in", needs=PUBLIC, limit=FORM_BYTES_MAX)
def sign_in(
    call: Call,
    site: Site,
    sessions: SessionService,
    authenticator: Authenticator,
    passwords: PasswordService,
    oidc: OidcService,
    body: SignInForm,
) -> Page | SignedIn:
    """Sign in with a token."""
    check_target(body.to)
    try:
        with sessions.attempt(call.address):
            who = authenticator.authenticate(body.token.strip())
            _check_user(who)
            return open_session(call, sessions, who.name, method="token", to=body.to)
    except ServerlessGpuError as error:
        return _Ways(call, site, passwords, oidc).page(to=body.to, problem=error, way="token")


@routes.post("/sign-in/password", needs=PUBLIC, limit=FORM_BYTES_MAX)
def sign_in_with_password(
    call: Call,
    site: Site,
    sessions: SessionService,
    passwords: PasswordService,
    oidc: OidcService,
    body: PasswordSignInForm,
) -> Page | SignedIn:
    """Sign in with a name and a password."""
    check_target(body.to)
    try:
        name = passwords.authenticate(body.name, body.password, address=call.address)
        return open_session(call, sessions, name, method="password", to=body.to)
    except ServerlessGpuError as error:
        return _Ways(call, site, passwords, oidc).page(to=body.to, problem=error, way="password", name=body.name)


@routes.get("/sign-in/provider", needs=PUBLIC)
def open_provider(
    call: Call, site: Site, passwords: PasswordService, oidc: OidcService, query: ProviderQuery
) -> Page | ToProvider:
    """Send the reader to the identity provider."""
    to = check_target(query.to) if len(query.to) <= _LOGIN_TARGET_MAX else "/"
    try:
        url, login = oidc.start(to=to, links=query.links, redirect=_absolute(call, site, "/sign-in/callback"))
    except ServerlessGpuError as error:
        return _Ways(call, site, passwords, oidc).page(to=to, problem=error)
    return ToProvider(url=url, login=base64.urlsafe_b64encode(login).decode())


@routes.get("/sign-in/callback", needs=PUBLIC)
def finish_provider(
    call: Call,
    site: Site,
    sessions: SessionService,
    passwords: PasswordService,
    oidc: OidcService,
    query: CallbackQuery,
) -> Page | SignedIn:
    """Sign in with the answer of the identity provider."""
    try:
        to, result = oidc.finish(
            _login_bytes(call),
            code=query.code,
            state=query.state,
            issuer=query.iss,
            error=(query.error, query.error_description),
            redirect=_absolute(call, site, "/sign-in/callback"),
        )
        if result.principal:
            signed_in = open_session(call, sessions, result.principal, method="provider", to=to)
            return msgspec.structs.replace(signed_in, ends_login=True)
    except ServerlessGpuError as error:
        return _Ways(call, site, passwords, oidc).page(to="", problem=error)
    account = oidc.account_of(result.ticket)
    return site.page(
        call, "no_user.html", title="No user yet", account=account, ticket=result.ticket, reason=result.reason
    )


@routes.get("/link", needs=writing("tokens"))
def show_link(call: Call, site: Site, oidc: OidcService, query: TicketQuery) -> Page:
    """Ask a signed-in reader to confirm the link of an account."""
    account = oidc.account_of(query.ticket)
    return site.page(call, "link.html", title="Link an account", nav="people", account=account, ticket=query.ticket)


@routes.post("/link", needs=writing("tokens"), limit=FORM_BYTES_MAX)
def link(call: Call, site: Site, body: LinkForm) -> Redirect:
    """Link an account at the identity provider with the reader's user."""
    site.ask(call, oidc_service.link_identity, body=LinkRequest(ticket=body.ticket))
    return Redirect(path=f"/people/users/{call.who.name}?done=linked")


@routes.post("/sign-out", needs=ANY_CALLER, limit=FORM_BYTES_MAX)
def sign_out(call: Call, sessions: SessionService, body: Form) -> SignedIn:
    """End the session, and remove its cookie."""
    sessions.end(call.who, call.who.token_id, reach="own")
    return SignedIn(secret="", to="/sign-in?done=out")


@routes.get("/sign-out/provider", needs=PUBLIC)
def sign_out_at_provider(call: Call, site: Site, oidc: OidcService) -> ToProvider | Redirect:
    """Send the reader to the identity provider, which ends its own session."""
    url = oidc.provider.sign_out_url(back=_absolute(call, site, "/sign-in"))
    return ToProvider(url=url) if url else Redirect(path="/sign-in")


@routes.get("/password", needs=PUBLIC)
def show_password(call: Call, site: Site, passwords: PasswordService, query: PasswordQuery) -> Page | Redirect:
    """Show the form for a password, for the user of a link."""
    if not query.code:
        return Redirect(path="/people/password")
    return _password_page(call, site, name=passwords.user_of_link(query.code), code=query.code)


@routes.post("/password", needs=PUBLIC, limit=FORM_BYTES_MAX)
def set_password(
    call: Call, site: Site, sessions: SessionService, passwords: PasswordService, body: PasswordForm
) -> Page | Redirect:
    """Set the password of a link's user."""
    with sessions.attempt(call.address):
        name = passwords.user_of_link(body.code)
    try:
        _check_again(body)
        passwords.reset(body.code, body.password)
    except InvalidValue as error:
        return _password_page(call, site, name=name, code=body.code, problem=error)
    return Redirect(path="/sign-in?done=password")


@routes.get("/people/password", needs=writing("tokens"))
def show_own_password(call: Call, site: Site, passwords: PasswordService) -> Page:
    """Show the form with which a signed-in reader changes the password."""
    return _own_password_page(call, site)


@routes.post("/people/password", needs=writing("tokens"), limit=FORM_BYTES_MAX)
def change_own_password(call: Call, site: Site, body: PasswordForm) -> Page | Redirect:
    """Change the reader's password."""
    request = PasswordRequest(password=body.password, current=body.current)
    try:
        _check_again(body)
        site.ask(call, password_service.set_password, name=call.who.name, body=request)
    except ServerlessGpuError as error:
        return _own_password_page(call, site, problem=error)
    return Redirect(path=f"/people/users/{call.who.name}?done=password")


def open_session(call: Call, sessions: SessionService, principal: str, *, method: str, to: str) -> SignedIn:
    """Create a session of a principal for the request's browser, and end the browser's earlier session."""
    origin = SessionOrigin(method=method, browser=call.headers.get("user-agent", ""), address=call.address)
    before = cookie_parser(call.headers.get("cookie", "")).get(COOKIE, "")
    replaces = before if len(before) <= TOKEN_CHARACTERS_MAX and before.isascii() else ""
    return SignedIn(secret=sessions.open(principal, origin, replaces=replaces), to=to)


def check_target(to: str) -> str:
    """Return the path to open after a sign-in, or raise `InvalidValue` for an address of another site."""
    if not to:
        return "/"
    is_path = to.startswith("/") and not to.startswith(("//", "/\\")) and "\\" not in to
    if not is_path or not to.isascii() or not to.isprintable():
        raise InvalidValue("the page to open must be a page of this server")
    return to


class _Ways:
    """Makes the page with the ways to sign in."""

    def __init__(self, call: Call, site: Site, passwords: PasswordService, oidc: OidcService) -> None:
        self._call, self._site = call, site
        self._has_passwords = passwords.has_passwords()
        self._provider = oidc.settings.name if oidc.settings is not None else ""

    def page(
        self,
        *,
        to: str,
        notice: str = "",
        is_out: bool = False,
        problem: ServerlessGpuError | None = None,
        way: str = "",
        name: str = "",
    ) -> Page:
        page = self._site.page(
            self._call,
            "sign_in.html",
            title="Sign in",
            to=check_target(to) if to else "",
            notice=notice,
            is_out=is_out,
            problem=problem,
            way=way,
            name=name,
            provider=self._provider,
            has_passwords=self._has_passwords,
        )
        return page if problem is None else msgspec.structs.replace(page, status=problem.status)


def _password_page(call: Call, site: Site, *, name: str, code: str, problem: ServerlessGpuError | None = None) -> Page:
    page = site.page(
        call,
        "password.html",
        title="Set a password",
        name=name,
        code=code,
        shortest=PASSWORD_CHARACTERS_MIN,
        problem=problem,
    )
    return page if problem is None else msgspec.structs.replace(page, status=problem.status)


def _own_password_page(call: Call, site: Site, *, problem: ServerlessGpuError | None = None) -> Page:
    from_api = site.ask(call, password_service.show_password, name=call.who.name)
    page = site.page(
        call,
        "own_password.html",
        title="Change your password",
        nav="people",
        has_password=from_api.is_set,
        shortest=PASSWORD_CHARACTERS_MIN,
        problem=problem,
    )
    return page if problem is None else msgspec.structs.replace(page, status=problem.status)


def _check_again(body: PasswordForm) -> None:
    if body.password != body.again:
        raise InvalidValue("the two passwords differ", hint="type the same password twice")


def _check_user(who: Caller) -> None:
    if who.kind != "user" or who.scopes:
        raise NotAllowed("only a user's token without scopes can sign in", hint="create one with `sgpu token create`")


def _absolute(call: Call, site: Site, path: str) -> str:
    """Return the absolute address of a page. The auth middleware has checked the host name."""
    return site.server(call) + PREFIX + path


def _login_cookie(call: Call) -> tuple[str, str]:
    """Return the name and path of the cookie of a sign-in with the provider.

    Other programs on the same host, for example on another port, cannot set a cookie with the prefix `__Host-`.
    """
    if call.scope["scheme"] == "https":
        return f"__Host-{_LOGIN_COOKIE}", "/"
    return _LOGIN_COOKIE, f"{base_of(call.scope)}{PREFIX}/sign-in"


def _login_bytes(call: Call) -> bytes:
    text = cookie_parser(call.headers.get("cookie", "")).get(_login_cookie(call)[0], "")
    try:
        return base64.urlsafe_b64decode(text[:_LOGIN_BYTES_MAX].encode("ascii"))
    except ValueError:
        return b""


def _end_login(call: Call, response: Response) -> None:
    name, path = _login_cookie(call)
    _set_cookie(call, response, name, "", path=path, age_s=0, same_site="Lax")


def _set_cookie(
    call: Call, response: Response, name: str, value: str, *, path: str, age_s: int, same_site: Literal["Strict", "Lax"]
) -> None:
    cookie = SimpleCookie({name: value})
    morsel = cookie[name]
    morsel["path"] = path
    morsel["httponly"], morsel["samesite"] = True, same_site
    morsel["max-age"] = str(age_s)
    morsel["secure"] = call.scope["scheme"] == "https"
    response.headers.append("Set-Cookie", morsel.OutputString())
    response.headers["Cache-Control"] = "no-store"
