"""Renders pages and their errors, and gives pages access to the API.

    @routes.get("/pools", needs=reading("pools"))
    def show_pools(call: Call, site: Site) -> Page:
        found = site.ask(call, pools.list_pools)
        return site.page(call, "pools.html", title="Pools", nav="pools", pools=found.pools)

Every template extends `base.html` and receives these values:

    who       the reader: `name`, `role`, `teams`
    may       may("runs") and may("runs", write=True): True if the reader has any access to a resource
    url       url("/runs", state="RUNNING"): address of a page, with the path prefix of a proxy
    asset     asset("app.js"): address of a script or style
    csrf      hidden input for forms; every form that posts contains {{ csrf }}
    live      {% call live("parts") %}: a part of the page that stays current
    moment    {{ moment(run.created_ns) }}: a time in the reader's zone
    now_ns    the server's time in nanoseconds since 1970

Templates escape all values. Scripts and styles come only from `assets/`, because the Content-Security-Policy forbids
inline code.
"""

from __future__ import annotations

import datetime
import http
import logging
from collections.abc import Callable
from typing import Any, TypeVar
from urllib.parse import quote, urlencode, urlsplit, urlunsplit

import jinja2
import msgspec
from markupsafe import Markup
from starlette.responses import RedirectResponse, Response
from starlette.types import Scope

from serverless_gpu.ambient import Clock
from serverless_gpu.errors import NotAllowed, NotAuthenticated, NotFound, ServerlessGpuError
from serverless_gpu.model.access_control import AccessReach
from serverless_gpu.server.core import server_log
from serverless_gpu.server.core.hub import Hub
from serverless_gpu.server.core.settings import Settings
from serverless_gpu.server.http.routing import BASE, CSRF, EVENTS, Call, Mount, Need, Stream
from serverless_gpu.server.web import formats, live_page, navigation
from serverless_gpu.server.web.api_calls import ApiCalls, reach_of
from serverless_gpu.server.web.assets import assets
from serverless_gpu.server.web.live_page import LiveParts
from serverless_gpu.version import __version__

T = TypeVar("T")
PREFIX = "/ui"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
ZONE_COOKIE = "sgpu_zone"
THEME_COOKIE = "sgpu_theme"
THEMES = ("light", "dark")
_HTML = "text/html; charset=utf-8"
_log = logging.getLogger(__name__)


def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("serverless_gpu.server.web"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
        extensions=["jinja2.ext.do"],
    )
    environment.filters.update(formats.FILTERS)
    environment.globals["gpus"] = formats.gpus
    environment.globals["part_name"] = formats.part_name
    return environment


TEMPLATES = _environment()


class Page(msgspec.Struct, frozen=True, kw_only=True):
    """A page for one reader.

    Attributes:
        template: file in `templates/`.
        values: values for the template.
        hub: wakes the streams of the page; None for a page that does not change.
        wakes: keys of the hub that signal a change of the page.
        status: HTTP status.
    """

    template: str
    values: dict[str, Any]
    hub: Hub | None = None
    wakes: tuple[str, ...] = ()
    status: int = 200

    def response(self, call: Call) -> Response:
        """Return the page, or the stream of its parts if the browser requests a stream."""
        if self.hub is None or EVENTS not in call.headers.get("accept", ""):
            html = TEMPLATES.get_template(self.template).render(_context(call, LiveParts()) | self.values)
            return _html(html, self.status)

        def render() -> dict[str, str]:
            page = call.again_answer()
            assert isinstance(page, Page)
            parts = LiveParts()
            TEMPLATES.get_template(page.template).render(_context(call, parts) | page.values)
            return parts.html

        source = live_page.parts_stream(call, self.hub, self.wakes, render)
        return Stream(source, encode=live_page.encode_parts, idle=live_page.IDLE).response(call)


class Redirect(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a form: the browser loads a page with GET.

    Attributes:
        path: path of the page below `/ui`, with its query.
    """

    path: str

    def response(self, call: Call) -> Response:
        """Return the redirection."""
        return RedirectResponse(base_of(call.scope) + PREFIX + self.path, status_code=303)


class Site:
    """Makes pages, and calls the API for their readers."""

    def __init__(self, *, settings: Settings, clock: Clock, hub: Hub, api_calls: ApiCalls) -> None:
        self._settings = settings
        self._clock = clock
        self._hub = hub
        self._api_calls = api_calls

    def ask(self, call: Call, handler: Callable[..., T], **arguments: Any) -> T:
        """Call a handler of the API with the rights of the page's reader, as `ApiCalls.ask` does."""
        return self._api_calls.ask(call, handler, **arguments)

    def ask_if_allowed(self, call: Call, handler: Callable[..., T], **arguments: Any) -> T | None:
        """Call a handler of the API, or return None if the reader has no access to the resource."""
        try:
            return self.ask(call, handler, **arguments)
        except NotAllowed:
            return None

    def server(self, call: Call) -> str:
        """Return the address of this server as the reader's browser knows it."""
        return f"{call.scope['scheme']}://{call.headers.get('host', '')}{base_of(call.scope)}"

    def page(
        self,
        call: Call,
        template: str,
        *,
        title: str,
        nav: str = "",
        wakes: tuple[str, ...] | None = None,
        **values: Any,
    ) -> Page:
        """Return a page.

        Args:
            call: the request for the page.
            template: file in `templates/`.
            title: heading and title of the page.
            nav: name of the highlighted navigation entry.
            wakes: keys of the hub that signal a change of the page. None for a page that does not change by itself. An
                empty tuple renders the page every five seconds.
            values: further values for the template.
        """
        given = {
            "title": title,
            "nav": nav,
            "currency": self._settings.currency,
            "is_live": wakes is not None,
            "now_ns": self._clock.wall_ns(),
            **values,
        }
        if wakes is None:
            return Page(template=template, values=given)
        return Page(template=template, values=given, hub=self._hub, wakes=wakes)


def base_of(scope: Scope) -> str:
    """Return the path prefix under which a proxy serves this server, or ""."""
    return str(scope.get(BASE, ""))


def address(base: str, path: str, **query: Any) -> str:
    """Return the address of a page. The function omits empty parameters."""
    given = [(name.rstrip("_"), str(value)) for name, value in query.items() if value not in (None, "", False)]
    return f"{base}{PREFIX}{quote(path, safe='/')}" + (f"?{urlencode(given)}" if given else "")


def zone_of_reader(call: Call) -> datetime.tzinfo:
    """Return the time zone of a page's reader."""
    return formats.zone_of(_cookies(call).get(ZONE_COOKIE, ""))


def _context(call: Call, live: LiveParts) -> dict[str, Any]:
    base, request = base_of(call.scope), _cookies(call)

    def may(noun: str, *, write: bool = False) -> bool:
        return reach_of(call, Need(noun=noun, write=write)) != AccessReach.NONE

    zone = zone_of_reader(call)
    return {
        "who": call.who,
        "may": may,
        "entries": navigation.visible_entries(call) if call.who.name else [],
        "url": lambda path, **query: address(base, path, **query),
        "here": address(base, call.scope["path"].removeprefix(PREFIX)),
        "here_with_query": _here(base, call.scope),
        "asset": lambda name: f"{base}{PREFIX}/assets/{assets().digest}/{name}",
        "csrf": Markup('<input type="hidden" name="{}" value="{}">').format(CSRF, call.csrf),
        "csrf_token": call.csrf,
        "live": live,
        "moment": formats.moments(zone),
        "zone": getattr(zone, "key", "UTC"),
        "theme": request.get(THEME_COOKIE) if request.get(THEME_COOKIE) in THEMES else "",
        "version": __version__,
        "notice": "",
    }


def _here(base: str, scope: Scope) -> str:
    query = scope.get("query_string", b"").decode("ascii", "replace")
    return address(base, scope["path"].removeprefix(PREFIX)) + (f"?{query}" if query else "")


def _cookies(call: Call) -> dict[str, str]:
    pairs = (part.strip().partition("=") for part in call.headers.get("cookie", "").split(";"))
    # A browser may not send a slash of a time zone literally.
    return {name: value.replace("%2F", "/") for name, _, value in pairs}


def _html(html: str, status: int) -> Response:
    # Lone surrogates in the names of users' objects are not encodable.
    data = html.encode("utf-8", "replace")
    return Response(data, status_code=status, headers={"Cache-Control": "no-store"}, media_type=_HTML)


def error_response(error: ServerlessGpuError, scope: Scope, close: bool) -> Response:
    """Return the page for an error. A browser without a session goes to the sign-in page."""
    base = base_of(scope)
    headers = dict(scope["headers"])
    is_stream = EVENTS.encode() in headers.get(b"accept", b"") and b"text/html" not in headers.get(b"accept", b"")
    is_script = b"hx-request" in headers or is_stream
    if isinstance(error, NotAuthenticated) and scope["method"] == "GET" and not is_script:
        if headers.get(b"sec-fetch-site") == b"cross-site" and b"sgpu_session=" not in headers.get(b"cookie", b""):
            # A browser omits a strict cookie when another site links here. A reload by this page includes the cookie.
            return _finished(
                _html(TEMPLATES.get_template("reload.html").render(here=_here(base, scope), base=base), 200), close
            )
        return _finished(RedirectResponse(address(base, "/sign-in", to=_target(scope)), status_code=303), close)
    status = 404 if isinstance(error, NotAllowed) and scope["method"] == "GET" else error.status
    if status == 404 and not isinstance(error, NotFound):
        error = NotFound("there is no such page, or you may not see it")
    values = {
        "url": lambda path, **query: address(base, path, **query),
        "asset": lambda name: f"{base}{PREFIX}/assets/{assets().digest}/{name}",
        "title": http.HTTPStatus(status).phrase,
        "message": error.message,
        "hint": error.hint,
        "request": server_log.current().get("request_id", ""),
        "here": _here(base, scope) if scope["method"] == "GET" else _page_before(base, headers),
        "theme": "",
    }
    return _finished(_html(TEMPLATES.get_template("error.html").render(values), status), close)


def _page_before(base: str, headers: dict[bytes, bytes]) -> str:
    """Return the path of the page with the refused form."""
    before = urlsplit(headers.get(b"referer", b"").decode("latin-1"))
    is_own = before.netloc.encode() == headers.get(b"host", b"") and before.path.startswith(base + PREFIX)
    return urlunsplit(("", "", before.path, before.query, "")) if is_own else address(base, "/")


def _finished(response: Response, close: bool) -> Response:
    response.headers.update(HEADERS)
    if close:
        response.headers["Connection"] = "close"
    return response


def _target(scope: Scope) -> str:
    query = scope.get("query_string", b"").decode("ascii", "replace")
    path = scope["path"].removeprefix(PREFIX)
    return f"{path}?{query}" if query else path if path not in ("", "/") else ""


WEB = Mount(prefix=PREFIX, session=True, respond=error_response, headers=HEADERS)
ROOT = Mount(prefix="", session=True, respond=error_response, headers=HEADERS)
