"""Browsers without a window: clients with cookies, the fields of forms, and the token against forged ones."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

import httpx2

from tests.support.server.served import Served
from tests.support.web.browser import sign_in_path

WAIT_S = 30


def stranger(server: Served) -> httpx2.Client:
    """Return a browser that is not signed in."""
    return httpx2.Client(base_url=server.url, timeout=WAIT_S, verify=False)  # Plain HTTP: no certificates to read.


@contextlib.contextmanager
def signed_in(server: Served, token: str | None = None) -> Iterator[httpx2.Client]:
    """Yield the browser of a token's owner."""
    with stranger(server) as client:
        client.get(sign_in_path(server, token))
        yield client


def csrf_of(client: httpx2.Client) -> str:
    """Return the token that forms of the browser's session contain."""
    found = re.search(r'name="csrf" value="(\w+)"', client.get("/ui/").text)
    assert found is not None
    return found[1]


def post(client: httpx2.Client, path: str, *, origin: str = "", **fields: str) -> httpx2.Response:
    """Post a form as a page of the server does, with the session's token if there is a session.

    `origin` is the site whose page contains the form; the server's own unless another is given.
    """
    if "sgpu_session" in client.cookies and "csrf" not in fields:
        fields["csrf"] = csrf_of(client)
    origin = origin or f"{client.base_url.scheme}://{client.base_url.netloc.decode()}"
    return client.post(path, data=fields, headers={"Origin": origin})
