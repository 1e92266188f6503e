"""What all pages have in common: headers, sessions, CSRF, redirects, streams and errors; without a browser."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from serverless_gpu.server.web.site import HEADERS
from tests.support.server.served import Served, served
from tests.support.web.browser import make_user, sign_in_path
from tests.support.web.clients import csrf_of

WAIT_S = 30


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Yield a server for the tests of this file, which change nothing that another test reads."""
    with served(tmp_path_factory.mktemp("home")) as running:
        yield running


@pytest.fixture
def stranger(server: Served) -> Iterator[httpx2.Client]:
    """Yield a browser that is not signed in."""
    with httpx2.Client(base_url=server.url, timeout=WAIT_S) as client:
        yield client


@pytest.fixture
def admin(server: Served) -> Iterator[httpx2.Client]:
    """Yield the administrator's browser."""
    with httpx2.Client(base_url=server.url, timeout=WAIT_S) as client:
        client.get(sign_in_path(server))
        yield client


def test_the_address_of_the_server_leads_to_the_pages(stranger: httpx2.Client) -> None:
    answer = stranger.get("/")
    assert (answer.status_code, answer.headers["location"]) == (303, "/ui/")


def test_every_answer_has_the_headers_that_protect_a_page(stranger: httpx2.Client, admin: httpx2.Client) -> None:
    for client, path in ((stranger, "/ui/sign-in"), (stranger, "/ui/runs"), (admin, "/ui/"), (admin, "/ui/nothing")):
        answer = client.get(path)
        assert {name: answer.headers[name] for name in HEADERS} == HEADERS, path


def test_without_a_session_a_page_leads_to_the_sign_in_and_back(stranger: httpx2.Client) -> None:
    answer = stranger.get("/ui/runs", params={"state": "FAILED"})
    assert answer.status_code == 303
    assert answer.headers["location"] == "/ui/sign-in?to=%2Fruns%3Fstate%3DFAILED"


def test_a_stream_without_a_session_is_refused_and_not_redirected(stranger: httpx2.Client) -> None:
    headers = {"Accept": "text/html, text/event-stream", "HX-Request": "true"}
    assert stranger.get("/ui/nodes", headers=headers).status_code == 401


def test_a_link_of_another_site_reloads_itself_so_that_the_strict_cookie_comes_along(stranger: httpx2.Client) -> None:
    answer = stranger.get("/ui/runs", headers={"Sec-Fetch-Site": "cross-site"})
    assert answer.status_code == 200
    assert 'http-equiv="refresh" content="0; url=/ui/runs"' in answer.text


def test_a_link_opens_a_session_with_a_cookie_that_scripts_and_other_sites_cannot_use(
    server: Served, stranger: httpx2.Client
) -> None:
    answer = stranger.get(sign_in_path(server))
    cookie = answer.headers["set-cookie"]
    assert answer.headers["location"] == "/ui/"
    assert {"HttpOnly", "SameSite=Strict", "Path=/ui"} <= {part.strip() for part in cookie.split(";")}
    assert "Secure" not in cookie  # The server speaks plain HTTP on loopback.


def test_a_used_link_is_refused_with_what_to_do(server: Served, stranger: httpx2.Client) -> None:
    path = sign_in_path(server)
    stranger.get(path)
    stranger.cookies.clear()
    answer = stranger.get(path)
    assert answer.status_code == 401
    assert "sgpu web" in answer.text


def test_a_new_session_never_has_the_secret_that_the_browser_sent(server: Served, stranger: httpx2.Client) -> None:
    stranger.cookies.set("sgpu_session", "sgpu_chosen-by-an-attacker", path="/ui")
    answer = stranger.get(sign_in_path(server))
    assert "chosen-by-an-attacker" not in answer.headers["set-cookie"]


@pytest.mark.parametrize("to", ["//evil/ui", "/\\evil", "https://evil", "javascript:x()", "/ok\r\nX: y"])
def test_a_sign_in_never_leads_to_another_site(server: Served, stranger: httpx2.Client, to: str) -> None:
    headers = {"Origin": server.url}
    answer = stranger.post("/ui/sign-in", data={"token": server.token, "to": to}, headers=headers)
    assert answer.status_code == 400
    assert "set-cookie" not in answer.headers


def test_a_pasted_token_signs_in_a_user_and_no_service(server: Served, stranger: httpx2.Client) -> None:
    headers = {"Origin": server.url}
    answer = stranger.post("/ui/sign-in", data={"token": server.node_token}, headers=headers)
    assert answer.status_code == 403
    answer = stranger.post("/ui/sign-in", data={"token": server.token, "to": "/runs"}, headers=headers)
    assert (answer.status_code, answer.headers["location"]) == (303, "/ui/runs")


def test_a_form_needs_the_sessions_token_and_the_servers_origin(server: Served, admin: httpx2.Client) -> None:
    csrf, own = csrf_of(admin), {"Origin": server.url}
    for data, headers in (
        ({"csrf": ""}, own),
        ({"csrf": "0" * 64}, own),
        ({"csrf": csrf}, {}),
        ({"csrf": csrf}, {"Origin": "http://evil.example"}),
    ):
        assert admin.post("/ui/sign-out", data=data, headers=headers).status_code == 403
    assert admin.get("/ui/").status_code == 200
    assert admin.post("/ui/sign-out", data={"csrf": csrf}, headers=own).status_code == 303
    assert admin.get("/ui/").status_code == 303


def test_the_token_of_a_form_belongs_to_one_session(server: Served, admin: httpx2.Client) -> None:
    with httpx2.Client(base_url=server.url, timeout=WAIT_S) as another:
        another.get(sign_in_path(server))
        answer = admin.post("/ui/sign-out", data={"csrf": csrf_of(another)}, headers={"Origin": server.url})
    assert answer.status_code == 403


def test_a_form_with_an_unknown_or_repeated_field_changes_nothing(server: Served, admin: httpx2.Client) -> None:
    csrf, own = csrf_of(admin), {"Origin": server.url, "Content-Type": "application/x-www-form-urlencoded"}
    for more in ("&color=red", f"&csrf={csrf}&name=x"):
        answer = admin.post("/ui/pools", content=f"csrf={csrf}&name=p1{more}".encode(), headers=own)
        assert answer.status_code == 400
    assert admin.get("/ui/pools/p1").status_code == 404


def test_a_page_without_rights_answers_404_and_its_entry_is_missing(server: Served) -> None:
    token = make_user(server, "erin")
    with httpx2.Client(base_url=server.url, timeout=WAIT_S) as client:
        client.get(sign_in_path(server, token))
        home = client.get("/ui/").text
        assert "/ui/runs" in home
        assert "/ui/audit" not in home
        assert client.get("/ui/pools").status_code == 200
        answer = client.post(
            "/ui/pools", data={"csrf": csrf_of(client), "name": "mine"}, headers={"Origin": server.url}
        )
        assert answer.status_code == 403


def test_a_stream_sends_every_part_then_only_signs_of_life(server: Served, admin: httpx2.Client) -> None:
    headers = {"Accept": "text/html, text/event-stream"}
    with admin.stream("GET", "/ui/pools", headers=headers) as stream:
        lines = stream.iter_lines()
        first = next(line for line in lines if line.startswith("data: <hx-partial"))
        assert 'hx-target="#pools"' in first
        assert next(line for line in lines if line.startswith("event:")) == "event: tick"


def test_files_never_change_under_their_address(stranger: httpx2.Client) -> None:
    found = re.search(r'href="(/ui/assets/\w+/app.css)"', stranger.get("/ui/sign-in").text)
    assert found is not None
    answer = stranger.get(found[1])
    assert answer.headers["content-encoding"] == "gzip"
    assert "immutable" in answer.headers["cache-control"]
    assert stranger.get("/ui/assets/0000000000000000/app.css").status_code == 404
    assert stranger.get(found[1].replace("app.css", "..%2Fsite.py")).status_code != 200


def test_without_ui_there_are_no_pages(tmp_path: Path) -> None:
    with served(tmp_path / "home", ui=False) as running, httpx2.Client(base_url=running.url) as client:
        for path in ("/", "/ui/", "/ui/sign-in"):
            assert client.get(path).status_code == 401
        assert client.get("/api/v1/health").status_code == 200


def test_behind_a_path_prefix_every_address_has_the_prefix(tmp_path: Path) -> None:
    with served(tmp_path / "home", path_prefix="/gpu") as running, httpx2.Client(base_url=running.url) as client:
        assert client.get("/gpu/").headers["location"] == "/gpu/ui/"
        answer = client.get(f"/gpu{sign_in_path(running)}")
        assert answer.headers["location"] == "/gpu/ui/"
        assert "Path=/gpu/ui" in answer.headers["set-cookie"]
        page = client.get("/gpu/ui/", headers={"Cookie": answer.headers["set-cookie"].partition(";")[0]}).text
        paths = set(re.findall(r'\s(?:href|src|action|hx-sse:connect)="([^"#]+)"', page))
        assert paths
        assert [path for path in paths if not path.startswith("/gpu/ui/")] == []
