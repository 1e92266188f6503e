"""Heads of requests as no client of ours writes them, given to a real server byte by byte as they stand here.

A thing is right when what asks for something gets nothing of it without leave: the answer is a refusal, or the
connection is closed; never a 500, never what a token is needed for. Afterwards the server answers everybody else.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from serverless_gpu.server.http.auth_middleware import HEADERS_MAX, PATH_BYTES_MAX, TOKEN_CHARACTERS_MAX
from serverless_gpu.server.http.listener import HEAD_BYTES_MAX
from serverless_gpu.wire.base import API
from serverless_gpu.wire.server_status import Health
from tests.support.server.served import Served, served

ANSWER_S = 10.0
SECRET = b'"role":"admin"'
"""What only an answer to a good token has in it."""
HOST = "Host: 127.0.0.1"
GET = f"GET {API}/whoami HTTP/1.1"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One server for all of these."""
    with served(tmp_path_factory.mktemp("home")) as running:
        yield running


def head(*lines: str) -> bytes:
    """Return a head of these lines."""
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def said(server: Served, sent: bytes) -> bytes:
    """Return everything the server answers until it closes the connection."""
    host, _, port = server.url.removeprefix("http://").partition(":")
    received = b""
    with (
        contextlib.suppress(ConnectionResetError, BrokenPipeError),
        socket.create_connection((host, int(port)), timeout=ANSWER_S) as connection,
    ):
        connection.sendall(sent)
        while piece := connection.recv(1 << 16):
            received += piece
    return received


def statuses(answer: bytes) -> list[int]:
    """Return the statuses of all answers on a connection; bodies of ours hold no status line."""
    return [int(part[:3]) for part in answer.split(b"HTTP/1.1 ")[1:]]


def with_token(server: Served, *lines: str) -> bytes:
    """Return a request with a good token, and some lines more."""
    return head(GET, HOST, f"Authorization: Bearer {server.token}", "Connection: close", *lines)


def test_the_corpus_would_see_an_answer_that_is_let_through(server: Served) -> None:
    answer = said(server, with_token(server))
    assert statuses(answer) == [200] and SECRET in answer


# Each would be answered if one thing in it were believed: "{token}" is a good one.
REFUSED = {
    "no host": [GET, "Authorization: Bearer {token}"],
    "two hosts": [GET, HOST, "Host: evil.example", "Authorization: Bearer {token}"],
    "two hosts that are the same": [GET, HOST, HOST, "Authorization: Bearer {token}"],
    "another host": [GET, "Host: evil.example", "Authorization: Bearer {token}"],
    "a host with somebody in it": [GET, "Host: 127.0.0.1@evil.example", "Authorization: Bearer {token}"],
    "a host that goes on": [GET, "Host: 127.0.0.1.evil.example", "Authorization: Bearer {token}"],
    "a host with a path": [GET, "Host: 127.0.0.1/evil.example", "Authorization: Bearer {token}"],
    "a host with a word for a port": [GET, "Host: 127.0.0.1:evil", "Authorization: Bearer {token}"],
    "a host in another number": [GET, "Host: 0x7f000001", "Authorization: Bearer {token}"],
    "a host with a dot at its end": [GET, "Host: localhost.", "Authorization: Bearer {token}"],
    "an empty host": [GET, "Host:", "Authorization: Bearer {token}"],
    "a host that was forwarded": [
        GET, "Host: evil.example", "X-Forwarded-Host: 127.0.0.1", "Authorization: Bearer {token}"
    ],
    "an address that was forwarded": [GET, HOST, "X-Forwarded-For: 127.0.0.1", "X-Real-IP: 127.0.0.1"],
    "a user that was forwarded": [GET, HOST, "X-Forwarded-User: root", "X-Remote-User: root", "Remote-User: root"],
    "an absolute address of another host": [
        f"GET http://evil.example{API}/whoami HTTP/1.1", "Host: evil.example", "Authorization: Bearer {token}"
    ],
    "no token": [GET, HOST],
    "two tokens": [GET, HOST, "Authorization: Bearer {token}", "Authorization: Bearer {token}"],
    "a token after another": [GET, HOST, "Authorization: Bearer nobody, Bearer {token}"],
    "another scheme": [GET, HOST, "Authorization: Basic {token}"],
    "a scheme without a space": [GET, HOST, "Authorization: Bearer:{token}"],
    "a token in a cookie": [GET, HOST, "Cookie: token={token}; Authorization=Bearer {token}"],
    "a token in the address": [f"GET {API}/whoami?token={{token}}&access_token={{token}} HTTP/1.1", HOST],
    "a token for the proxy": [GET, HOST, "Proxy-Authorization: Bearer {token}"],
    "a long token": [GET, HOST, "Authorization: Bearer {token}" + "x" * TOKEN_CHARACTERS_MAX],
    "a token with a letter of another alphabet": [GET, HOST, "Authorization: Bearer {token}\xe9"],
    "a token on a line that is folded": [GET, HOST, "Authorization: Bearer", " {token}"],
    "a space in the name of a header": [GET, HOST, "Authorization : Bearer {token}"],
    "a header without a colon": [GET, HOST, "Authorization Bearer {token}"],
    "a header without a name": [GET, HOST, ": x", "Authorization: Bearer {token}"],
    "a zero byte in a header": [GET, HOST, "X-Zero: a\0b", "Authorization: Bearer {token}"],
    "a zero byte in the path": [f"GET {API}/who\0ami HTTP/1.1", HOST, "Authorization: Bearer {token}"],
    "a zero byte in the path, written": [f"GET {API}/whoami%00 HTTP/1.1", HOST, "Authorization: Bearer {token}"],
    "a page of another site": [GET, HOST, "Origin: http://evil.example", "Authorization: Bearer {token}"],
    "a page of no site": [GET, HOST, "Origin: null", "Authorization: Bearer {token}"],
    "too many headers": [GET, HOST, "Authorization: Bearer {token}", *["X: 1"] * HEADERS_MAX],
    "a long path": [f"GET {API}/whoami?{'x' * PATH_BYTES_MAX} HTTP/1.1", HOST, "Authorization: Bearer {token}"],
    "another method, overridden": [f"POST {API}/whoami HTTP/1.1", HOST, "X-HTTP-Method-Override: GET"],
    "a way around by dots": [f"GET {API}/health/../whoami HTTP/1.1", HOST],
    "a way around by dots, written": [f"GET {API}/health/%2e%2e/whoami HTTP/1.1", HOST],
    "a way around by backslashes": [f"GET {API}/health\\..\\whoami HTTP/1.1", HOST],
    "two slashes": [f"GET /{API}/whoami HTTP/1.1", HOST],
    "a parameter in the path": [f"GET {API}/health;/whoami HTTP/1.1", HOST],
    "a slash at the end": [f"GET {API}/whoami/ HTTP/1.1", HOST],
    "capitals": [f"GET {API.upper()}/WHOAMI HTTP/1.1", HOST],
    "another method in the name": ["GETT /api/v1/whoami HTTP/1.1", HOST, "Authorization: Bearer {token}"],
    "a method in small letters": [f"get {API}/whoami HTTP/1.1", HOST, "Authorization: Bearer {token}"],
    "a version that there is not": [f"GET {API}/whoami HTTP/3.7", HOST, "Authorization: Bearer {token}"],
    "no version": [f"GET {API}/whoami", HOST],
    "control characters in a header": [GET, HOST, "Authorization: Bearer {token}", "User-Agent: \x1b]52;c;aGk=\x07"],
    "the preface of HTTP/2": ["PRI * HTTP/2.0", "", "SM"],
    "a tunnel": ["CONNECT 169.254.169.254:80 HTTP/1.1", HOST, "Authorization: Bearer {token}"],
    "a WebSocket": [GET, HOST, "Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13"],
    "a body that is no number long": [GET, HOST, "Authorization: Bearer {token}", "Content-Length: 1_0"],
    "a body of less than nothing": [GET, HOST, "Authorization: Bearer {token}", "Content-Length: -1"],
    "a body with a sign": [GET, HOST, "Authorization: Bearer {token}", "Content-Length: +1"],
    "a body of two lengths": [GET, HOST, "Authorization: Bearer {token}", "Content-Length: 1", "Content-Length: 2"],
    "a body of two lengths in one": [GET, HOST, "Authorization: Bearer {token}", "Content-Length: 1, 2"],
    "a body where none is taken": [GET, HOST, "Authorization: Bearer {token}", "Content-Length: 5"],
    "chunks that are also counted": [
        GET, HOST, "Authorization: Bearer {token}", "Transfer-Encoding: chunked", "Content-Length: 5"
    ],
    "chunks of another kind": [GET, HOST, "Authorization: Bearer {token}", "Transfer-Encoding: xchunked"],
    "chunks twice": [GET, HOST, "Authorization: Bearer {token}", "Transfer-Encoding: chunked, chunked"],
    "chunks by a tab": [GET, HOST, "Authorization: Bearer {token}", "Transfer-Encoding:\tchunked"],
}  # fmt: skip


@pytest.mark.spot
@pytest.mark.parametrize("lines", REFUSED.values(), ids=REFUSED)
def test_a_head_of_the_corpus_is_refused_or_the_connection_is_closed(server: Served, lines: list[str]) -> None:
    answer = said(server, head(*(line.replace("{token}", server.token) for line in lines), "Connection: close"))
    assert SECRET not in answer
    assert all(400 <= status < 500 for status in statuses(answer)), answer[:500]
    assert server.token.encode() not in answer and b"uvicorn" not in answer.lower()


SMUGGLED = f"GET {API}/users HTTP/1.1\r\n{HOST}\r\n\r\n"


@pytest.mark.parametrize(
    "sent",
    [
        head(f"POST {API}/runs HTTP/1.1", HOST, "Content-Length: 6", "Transfer-Encoding: chunked") + b"0\r\n\r\nG",
        head(f"POST {API}/runs HTTP/1.1", HOST, "Content-Length: 0", "Content-Length: 60") + SMUGGLED.encode(),
        head(f"POST {API}/runs HTTP/1.1", HOST, "Transfer-Encoding: chunked") + b"0;" + b"x" * (1 << 20),
        head(f"POST {API}/runs HTTP/1.1", HOST, "Transfer-Encoding: chunked") + b"fffffffffffffffff\r\nx",
        head(f"POST {API}/runs HTTP/1.1", HOST, "Transfer-Encoding: chunked") + b"-1\r\nx",
        head(f"GET {API}/health HTTP/1.1", HOST, "X: a\nHost: evil.example"),
        f"GET {API}/whoami HTTP/1.1\n{HOST}\nConnection: close\n\n".encode(),
        b"\r\n" * 1000 + head(GET, HOST, "Connection: close"),
        b"\r\n" * HEAD_BYTES_MAX,
        b"GET " + b"/" * (HEAD_BYTES_MAX + 1),
        head(GET, HOST, "X: " + "y" * (HEAD_BYTES_MAX + 1)),
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"\x00" * 4096,
        bytes(range(256)) * 64,
    ],
    ids=lambda sent: repr(sent[:12]),
)
def test_what_two_parsers_could_read_in_two_ways_gives_nothing_away(server: Served, sent: bytes) -> None:
    answer = said(server, sent)
    assert not [status for status in statuses(answer) if not 400 <= status < 500 and status != 200]
    assert SECRET not in answer and b"principals" not in answer
    assert server.connection().ask("GET", "/health", answer=Health).ok


def test_requests_on_one_connection_are_each_let_in_by_themselves(server: Served) -> None:
    good = head(GET, HOST, f"Authorization: Bearer {server.token}")
    answer = said(server, good + head(GET, HOST, "Connection: close") + good)
    assert statuses(answer)[:2] == [200, 401]
    assert answer.count(SECRET) == 1


@pytest.mark.parametrize(
    "line",
    [
        "X-Forwarded-Proto: https",
        "Forwarded: for=127.0.0.1;host=evil.example",
        "X-Original-URL: /api/v1/users",
        "X-Rewrite-URL: /api/v1/users",
        "Accept: " + "text/html," * 500,
        "Accept-Encoding: gzip, deflate, br, zstd",
        "Range: bytes=0-0," + "1-1," * 500,
        "If-None-Match: *",
        "If-Modified-Since: never",
        "Expect: 100-continue",
        "Expect: the unexpected",
        "TE: trailers",
        "Upgrade: h2c",
        "Cookie: " + "a=b; " * 500,
        "User-Agent: () { :;}; /bin/true",
        "User-Agent: ${jndi:ldap://127.0.0.1/x}",
        "Accept-Language: \xff\xfe",
    ],
    ids=lambda line: line[:24].encode("unicode_escape").decode(),
)
def test_a_header_that_says_nothing_to_us_changes_nothing(server: Served, line: str) -> None:
    answer = said(server, with_token(server, line))
    assert statuses(answer)[-1] == 200 and SECRET in answer
    assert b"content-encoding" not in answer.lower()


_NAMES = st.one_of(
    st.sampled_from(
        ["Host", "Authorization", "Content-Length", "Transfer-Encoding", "Origin", "Connection", "Upgrade", "Expect"]
    ),
    st.text(st.characters(max_codepoint=255), max_size=20),
)
_VALUES = st.one_of(
    st.sampled_from(["", "0", "-1", "chunked", "Bearer x", "127.0.0.1", "close", "websocket", "100-continue", "*"]),
    st.text(st.characters(max_codepoint=255), max_size=60),
)


@given(lines=st.lists(st.tuples(_NAMES, _VALUES), max_size=12), tail=st.binary(max_size=40))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None)
def test_no_head_is_answered_with_what_a_token_is_needed_for(
    server: Served, lines: list[tuple[str, str]], tail: bytes
) -> None:
    answer = said(server, head(GET, HOST, *(f"{name}: {value}" for name, value in lines), "Connection: close") + tail)
    assert SECRET not in answer
    assert not [status for status in statuses(answer) if status >= 500], answer[:300]
