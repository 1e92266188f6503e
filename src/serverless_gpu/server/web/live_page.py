"""Keeps an open page current: renders the page again after changes, and sends the parts that differ.

    template        {% call live("queue") %} … {% endcall %}    ─▶ an element with an id, kept by `LiveParts`
    GET, Accept: text/event-stream ─▶ render ─▶ send every part ─▶ wait for the hub ─▶ render ─▶ send changed parts …

The stream has no history: each part contains its whole state. After a reconnect, the server therefore sends all parts
once, and htmx morphs them into the page, which keeps focus, typed text and scroll positions.

A stream renders at most once per second, and at most for a twentieth of the time. Many open pages therefore cannot slow
down the server. The server speaks at least every nine seconds. A page without news for 20 s is not live.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

from markupsafe import Markup

from serverless_gpu.server.core.hub import Hub
from serverless_gpu.server.http.routing import Call
from serverless_gpu.server.web import formats

PAUSE_S = 1.0
"""Minimum seconds between two renders of one stream."""
EVERY_S = 5.0
"""Seconds after which a stream renders again without a change in the hub, for ages and device metrics."""
SPARE = 20
"""A stream waits this many times longer than a render took."""
IDLE = b"event: tick\ndata: 1"
"""Message that shows a page that its stream is alive. Scripts cannot see comments of a stream."""


class LiveParts:
    """Collects the live parts of one rendered page."""

    def __init__(self) -> None:
        self.html: dict[str, str] = {}

    def __call__(self, name: str, *, tag: str = "div", caller: Callable[[], Markup], **attributes: Any) -> Markup:
        """Return an element with a live part's content. Templates call this with `{% call live(...) %}`."""
        given = {key.rstrip("_").replace("_", "-"): value for key, value in attributes.items()}
        start = Markup('<{} id="{}"{}>').format(tag, name, formats.attributes(given))
        html = start + caller() + Markup("</{}>").format(tag)
        self.html[name] = html
        return html


async def parts_stream(
    call: Call, hub: Hub, keys: tuple[str, ...], render: Callable[[], dict[str, str]]
) -> AsyncIterator[dict[str, str] | None]:
    """Yield the parts that changed since the last message, and None as a keep-alive."""
    loop = asyncio.get_running_loop()
    sent: dict[str, str] = {}
    while not hub.closed:
        seen = {key: hub.version(key) for key in keys}
        began_s = loop.time()
        parts = await call.in_thread(render)
        took_s = loop.time() - began_s
        changed = {name: html for name, html in parts.items() if sent.get(name) != html}
        sent = parts
        yield changed or None
        await _pause(hub, max(PAUSE_S, SPARE * took_s))
        await _changed(hub, seen, EVERY_S)


async def _pause(hub: Hub, seconds: float) -> None:
    loop = asyncio.get_running_loop()
    until_s = loop.time() + min(seconds, EVERY_S)
    while not hub.closed and (left_s := until_s - loop.time()) > 0:
        await asyncio.sleep(min(left_s, 0.5))  # The server must not wait for the stream when it stops.


async def _changed(hub: Hub, seen: dict[str, int], timeout_s: float) -> None:
    """Wait until one of several keys changes."""
    if not seen:
        await _pause(hub, timeout_s)
        return
    waits = [asyncio.ensure_future(hub.changed(key, version, timeout_s)) for key, version in seen.items()]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)


def encode_parts(parts: dict[str, str]) -> bytes:
    """Return the data of a server-sent event that replaces parts of a page."""
    html = "".join(
        f'<hx-partial hx-target="#{name}" hx-swap="outerMorph">{part}</hx-partial>' for name, part in parts.items()
    )
    # A carriage return or a line feed ends a line of the stream.
    return html.replace("\r\n", "\n").replace("\r", "\n").replace("\n", "\ndata: ").encode("utf-8", "replace")
