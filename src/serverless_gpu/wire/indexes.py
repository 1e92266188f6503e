"""HTTP bodies of package indexes and of their proxy.

    GET    /indexes                                        → IndexList
    PUT    /indexes/{name}          IndexRequest           → IndexView         creates or replaces an index
    DELETE /indexes/{name}                                 → IndexView         the deleted index
    GET    /index-log?limit                                → IndexLog          the last requests of the proxy
    POST   /index-token             IndexTokenRequest      → IndexToken        a token for the caller
    POST   /agents/{node}/index-token  NodeTokenRequest    → IndexToken        a token for a build or an attempt

A client of the proxy uses the URL `<url><index>/simple/`, with any user name and the token as the password. No route
returns the credentials of an index.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from serverless_gpu.wire.base import Answer, Request


class IndexRequest(Request, frozen=True, kw_only=True):
    """Create or replace a package index.

    Attributes:
        url: URL of the simple repository, without credentials.
        file_hosts: hosts of files beside the URL's own host; None for the known hosts of a public index.
        private: True if the hosts may have addresses of private networks.
        secret: name of the secret with `USER:PASSWORD` or a token, or "".
        team: team that owns the secret, or "" for the caller.
    """

    url: str
    file_hosts: tuple[str, ...] | None = None
    private: bool = False
    secret: str = ""
    team: str = ""


class IndexView(Answer, frozen=True, kw_only=True):
    """A package index.

    Attributes:
        url: URL of the simple repository.
        file_hosts: hosts of files beside the URL's own host.
        private: True if the hosts may have addresses of private networks.
        secret: name of the secret with the credentials, with its owner, or "".
        created_ns: time of the definition, in nanoseconds since 1970.
        by: principal who defined the index.
    """

    name: str
    url: str
    file_hosts: tuple[str, ...]
    private: bool
    secret: str
    created_ns: int
    by: str


class IndexList(Answer, frozen=True, kw_only=True):
    """Package indexes by name.

    Attributes:
        proxy: URL of the index proxy, or "" if the server has none.
    """

    indexes: tuple[IndexView, ...]
    proxy: str


class IndexTokenRequest(Request, frozen=True, kw_only=True):
    """Ask for a token of the index proxy. `lifetime_s` is in seconds."""

    lifetime_s: Annotated[int, msgspec.Meta(ge=60, le=86_400)] = 3_600


class NodeTokenRequest(Request, frozen=True, kw_only=True):
    """Ask for a token for a build, or for an attempt on the node.

    Attributes:
        build: label of a build, or "".
        gang: the attempt as `run:fence`, or "".
    """

    build: str = ""
    gang: str = ""


class IndexToken(Answer, frozen=True, kw_only=True):
    """A token of the index proxy.

    Attributes:
        url: URL of the proxy, with a slash at its end.
        token: the password for the proxy.
        until_ns: end of the token, in nanoseconds since 1970.
        indexes: names of the indexes.
    """

    url: str
    token: str
    until_ns: int
    indexes: tuple[str, ...]

    def __repr__(self) -> str:
        """Omit the token, because logs may store printed objects."""
        return f"IndexToken(url={self.url!r})"


class IndexLogEntry(Answer, frozen=True, kw_only=True):
    """One request of the index proxy.

    Attributes:
        at_ns: start of the request, in nanoseconds since 1970.
        client: `build:<node>:<label>`, `attempt:<run>:<fence>`, `user:<name>`, `address:<address>`, or "".
        index: name of the index, or "".
        project: name of the project, or "".
        file: name of the file, or "".
        status: HTTP status.
        bytes: bytes of the response body.
        ms: duration in milliseconds.
        outcome: "ok", or a short name of the problem.
        detail: description of the problem, or "".
    """

    at_ns: int
    client: str
    method: str
    index: str
    project: str
    file: str
    status: int
    bytes: int
    ms: float
    outcome: str
    detail: str = ""


class IndexLog(Answer, frozen=True, kw_only=True):
    """The last requests of the index proxy, oldest first."""

    requests: tuple[IndexLogEntry, ...]
