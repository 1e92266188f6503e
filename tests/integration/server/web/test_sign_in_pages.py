"""Signing in on the pages: passwords, terminals and identity providers; without a browser."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from types import NoneType
from typing import Any

import httpx2
import pytest

from serverless_gpu.wire.access import SessionList, SignInLink, TokenList
from serverless_gpu.wire.sign_in import DeviceAnswer, DeviceCode, DeviceCodeRequest, DevicePoll, PasswordRequest
from tests.support.server.identity_provider import CLIENT, SECRET, SmallProvider, small_provider
from tests.support.server.served import Served, served
from tests.support.web.browser import make_user, sign_in_path
from tests.support.web.clients import csrf_of, post, signed_in, stranger

PASSWORD = "correct horse battery"
ELSEWHERE = (
    "//evil.example/ui",
    "/\\evil.example",
    "/ok\\..\\evil",
    "\\/evil",
    "https://evil.example",
    "https:evil",
    "javascript:x()",
    "data:text/html,x",
    "evil.example",
    "?next=%2F%2Fevil",
    "/ok\r\nX: y",
    "/\t/evil",
    "/ok\0",
    "/\u202eevil",
    "/\u2028",
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Yield a server whose user alice has a password."""
    with served(tmp_path_factory.mktemp("home")) as running:
        make_user(running, "alice")
        request = PasswordRequest(password=PASSWORD)
        running.connection().ask("PUT", "/users/alice/password", request, answer=NoneType)
        yield running


@pytest.fixture
def somebody(server: Served) -> Iterator[httpx2.Client]:
    with stranger(server) as client:
        yield client


@pytest.fixture
def admin(server: Served) -> Iterator[httpx2.Client]:
    with signed_in(server) as client:
        yield client


# --- passwords --------------------------------------------------------------------------------------------------------


def test_a_name_and_a_password_sign_in_and_lead_to_the_page_that_was_asked_for(somebody: httpx2.Client) -> None:
    assert 'name="password"' in somebody.get("/ui/sign-in").text
    answer = post(somebody, "/ui/sign-in/password", name="alice", password=PASSWORD, to="/runs?state=FAILED")
    assert (answer.status_code, answer.headers["location"]) == (303, "/ui/runs?state=FAILED")
    assert somebody.get("/ui/").status_code == 200


def found(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    assert match is not None
    return match[1]


problems: set[str] = set()
"""What the page said of a wrong password and of an unknown name."""


@pytest.mark.parametrize("name", ["alice", "nobody"])
def test_a_wrong_password_and_an_unknown_name_have_one_answer(somebody: httpx2.Client, name: str) -> None:
    answer = post(somebody, "/ui/sign-in/password", name=name, password="wrong", to="/runs")
    assert answer.status_code == 401
    assert "set-cookie" not in answer.headers
    page = answer.text.replace(f'value="{name}"', "")
    assert 'value="/runs"' in page
    problems.add(found(r'class="problem"[^>]*>([^<]+)', page))
    assert len(problems) == 1


@pytest.mark.parametrize("to", ELSEWHERE)
def test_no_way_to_sign_in_leads_to_another_site(server: Served, somebody: httpx2.Client, to: str) -> None:
    for path, fields in (
        ("/ui/sign-in", {"token": server.token}),
        ("/ui/sign-in/password", {"name": "alice", "password": PASSWORD}),
    ):
        answer = post(somebody, path, to=to, **fields)
        assert answer.status_code == 400, path
        assert "set-cookie" not in answer.headers
    assert somebody.get("/ui/sign-in", params={"to": to}).status_code == 400
    assert somebody.get(sign_in_path(server), params={"to": to}).headers.get("location", "/ui/") == "/ui/"


def test_a_sign_in_ends_the_session_that_the_browser_had(server: Served, admin: httpx2.Client) -> None:
    before = dict(admin.cookies)
    post(admin, "/ui/sign-in/password", name="alice", password=PASSWORD, csrf="")
    assert "alice" in admin.get("/ui/").text
    with stranger(server) as thief:
        thief.cookies.update(before)
        assert thief.get("/ui/").status_code == 303


def test_an_unknown_secret_of_the_browser_ends_no_session(server: Served, somebody: httpx2.Client) -> None:
    with signed_in(server) as other:
        real = other.cookies["sgpu_session"]
        somebody.cookies.set("sgpu_session", real[:-1] + ("A" if real[-1] != "A" else "B"))
        post(somebody, "/ui/sign-in/password", name="alice", password=PASSWORD, csrf="")
        assert other.get("/ui/").status_code == 200


def test_a_form_of_another_site_signs_nobody_in(somebody: httpx2.Client) -> None:
    fields = {"name": "alice", "password": PASSWORD}
    for origin in ("http://evil.example", "null"):
        assert post(somebody, "/ui/sign-in/password", origin=origin, **fields).status_code == 403
    assert somebody.post("/ui/sign-in/password", data=fields).status_code == 403


def test_a_link_of_an_administrator_sets_a_password_once(server: Served, somebody: httpx2.Client) -> None:
    make_user(server, "dora")
    link: SignInLink = server.connection().ask("POST", "/users/dora/password-links", answer=SignInLink)
    page = somebody.get(link.path)
    assert page.status_code == 200
    code = link.path.partition("code=")[2]
    fields = {"code": code, "password": "a new long password", "again": "a new long password"}
    assert post(somebody, "/ui/password", **{**fields, "again": "another"}).status_code == 400
    assert post(somebody, "/ui/password", **fields).headers["location"] == "/ui/sign-in?done=password"
    assert post(somebody, "/ui/password", **fields).status_code == 404
    assert somebody.get(link.path).status_code == 404
    answer = post(somebody, "/ui/sign-in/password", name="dora", password="a new long password")
    assert answer.status_code == 303


def test_guessing_has_a_limit(server: Served, somebody: httpx2.Client) -> None:
    statuses = [post(somebody, "/ui/sign-in", token=f"sgpu_{number}").status_code for number in range(40)]
    assert statuses[0] == 401
    assert statuses[-1] == 429


# --- terminals --------------------------------------------------------------------------------------------------------


@pytest.fixture
def code(server: Served) -> DeviceCode:
    request = DeviceCodeRequest(host="<img src=x onerror=x()>\u202e")
    made: DeviceCode = server.connection("").ask("POST", "/device/codes", request, answer=DeviceCode)
    return made


def poll(server: Served, code: DeviceCode) -> DeviceAnswer:
    body = DevicePoll(device_code=code.device_code)
    found: DeviceAnswer = server.connection("").ask("POST", "/device/token", body, answer=DeviceAnswer)
    return found


def test_a_terminal_gets_a_token_only_after_the_form(server: Served, admin: httpx2.Client, code: DeviceCode) -> None:
    page = admin.get("/ui/device", params={"code": code.user_code})
    assert (page.status_code, page.text.count(code.user_code)) == (200, 3)
    assert "<img" not in page.text
    assert html.escape("<img src=x") in page.text
    assert poll(server, code).state == "pending"
    for forged in ("", "0" * 64):
        answer = post(admin, "/ui/device", code=code.user_code, decision="approve", csrf=forged)
        assert answer.status_code == 403
    assert poll(server, code).made is None
    assert post(admin, "/ui/device", code=code.user_code, decision="approve").status_code == 200
    made = poll(server, code).made
    assert made is not None
    tokens: TokenList = server.connection(made.secret).ask("GET", "/tokens", answer=TokenList)
    assert made.token.id in {token.id for token in tokens.tokens}


def test_a_refused_terminal_hears_it(server: Served, admin: httpx2.Client, code: DeviceCode) -> None:
    post(admin, "/ui/device", code=code.user_code, decision="refuse")
    assert poll(server, code).state == "refused"
    assert post(admin, "/ui/device", code=code.user_code, decision="approve").status_code == 404


def test_without_a_session_the_terminals_link_leads_through_the_sign_in(
    server: Served, somebody: httpx2.Client, code: DeviceCode
) -> None:
    answer = somebody.get("/ui/device", params={"code": code.user_code})
    assert answer.status_code == 303
    to = answer.headers["location"]
    assert to == f"/ui/sign-in?to=%2Fdevice%3Fcode%3D{code.user_code}"
    answer = post(
        somebody, "/ui/sign-in/password", name="alice", password=PASSWORD, to=f"/device?code={code.user_code}"
    )
    assert answer.headers["location"] == f"/ui/device?code={code.user_code}"
    assert poll(server, code).state == "pending"


def test_an_unknown_code_is_an_answer_and_not_a_crash(admin: httpx2.Client) -> None:
    for code in ("BBBB-BBBB", "<script>", "%00", "-"):
        page = admin.get("/ui/device", params={"code": code})
        assert page.status_code in (400, 404)
        assert "<script>" not in page.text.replace("<script src=", "")


def test_a_reader_of_runs_alone_approves_nothing(server: Served, code: DeviceCode) -> None:
    token = make_user(server, f"v-{code.user_code.lower()}", role="agent")
    with stranger(server) as client:
        assert client.get(f"/api/v1/device/requests/{code.user_code}", headers=bearer(token)).status_code == 403


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


# --- identity providers -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def provider() -> Iterator[SmallProvider]:
    with small_provider() as running:
        yield running


@pytest.fixture(scope="module")
def team(tmp_path_factory: pytest.TempPathFactory, provider: SmallProvider) -> Iterator[Served]:
    """Yield a server with an identity provider, which creates users."""
    options: dict[str, Any] = {
        "oidc_issuer": provider.issuer,
        "oidc_client_id": CLIENT,
        "oidc_client_secret": SECRET,
        "oidc_create": True,
        "oidc_name": "Lab",
    }
    with served(tmp_path_factory.mktemp("home"), **options) as running:
        yield running


def begin(client: httpx2.Client, provider: SmallProvider, **claims: object) -> str:
    """Begin a sign-in; return the address with which the provider sends the browser back."""
    provider.claims = claims
    answer = client.get("/ui/sign-in/provider", params={"to": "/runs"})
    assert answer.status_code == 303
    cookie = {part.strip() for part in answer.headers["set-cookie"].split(";")}
    assert {"HttpOnly", "SameSite=Lax", "Path=/ui/sign-in"} <= cookie
    return provider.authorize(answer.headers["location"])


def test_an_account_signs_in_and_the_cookie_of_the_sign_in_goes(team: Served, provider: SmallProvider) -> None:
    with stranger(team) as client:
        page = client.get("/ui/sign-in").text
        assert "with Lab<" in page
        assert 'name="password"' not in page
        answer = client.get(begin(client, provider, sub="1", preferred_username="ada"))
        assert (answer.status_code, answer.headers["location"]) == (303, "/ui/runs")
        assert "sgpu_login" not in client.cookies
        assert "ada" in client.get("/ui/").text
    sessions: SessionList = team.connection().ask("GET", "/sessions", answer=SessionList)
    assert {one.origin.method for one in sessions.sessions if one.principal == "ada"} == {"provider"}


def test_the_answer_for_another_browser_signs_nobody_in(team: Served, provider: SmallProvider) -> None:
    with stranger(team) as attacker, stranger(team) as victim:
        callback = begin(attacker, provider, sub="1", preferred_username="ada")
        assert victim.get(callback).status_code == 401
        begin(victim, provider, sub="2", preferred_username="victim")
        assert victim.get(callback).status_code == 401
        assert "sgpu_session" not in victim.cookies


def test_an_answer_is_valid_once(team: Served, provider: SmallProvider) -> None:
    with stranger(team) as client:
        callback = begin(client, provider, sub="1", preferred_username="ada")
        cookies = dict(client.cookies)
        assert client.get(callback).status_code == 303
        client.cookies.clear()
        client.cookies.update(cookies)
        assert client.get(callback).status_code == 401


@pytest.mark.parametrize(
    "query",
    [
        "error=access_denied&error_description=%3Cscript%3Ex()%3C/script%3E&state=x",
        "state=x",
        "",
        "code=%00&state=%C3%A9",
        f"code={'x' * 5000}",
    ],
)
def test_a_refusal_of_the_provider_is_shown_and_inert(team: Served, provider: SmallProvider, query: str) -> None:
    with stranger(team) as client:
        begin(client, provider, sub="1")
        page = client.get(f"/ui/sign-in/callback?{query}")
        assert page.status_code in (400, 401, 403, 413)
        assert "<script>x" not in page.text


@pytest.mark.parametrize("cookie", ["", "x", "e30=", "bnVsbA==", "%"])
def test_a_forged_cookie_of_a_sign_in_is_refused(team: Served, cookie: str) -> None:
    with stranger(team) as client:
        headers = {"Cookie": f"sgpu_login={cookie}"}
        assert client.get("/ui/sign-in/callback?code=x&state=y", headers=headers).status_code == 401


@pytest.mark.parametrize("to", ELSEWHERE)
def test_the_way_over_the_provider_leads_to_no_other_site(team: Served, to: str) -> None:
    with stranger(team) as client:
        answer = client.get("/ui/sign-in/provider", params={"to": to})
        assert answer.status_code == 400
        assert "location" not in answer.headers


def test_a_provider_that_is_down_leaves_the_other_ways(team: Served, provider: SmallProvider) -> None:
    provider.is_down = True
    try:
        with stranger(team) as client:
            callback = client.get("/ui/sign-in/provider").headers.get("location", "")
            provider.claims = {"sub": "1"}
            page = client.get(provider.authorize(callback)) if callback else client.get("/ui/sign-in/provider")
            assert page.status_code == 503
            assert 'name="token"' in page.text
            assert post(client, "/ui/sign-in", token=team.token).status_code == 303
    finally:
        provider.is_down = False


def test_an_account_with_a_taken_name_is_linked_by_its_owner_alone(team: Served, provider: SmallProvider) -> None:
    token = make_user(team, "bob")
    with stranger(team) as client:
        page = client.get(begin(client, provider, sub="7", preferred_username="bob"))
        assert page.status_code == 200
        assert "sgpu_session" not in client.cookies
        link = html.unescape(found(r'href="(/ui/link[^"]+)"', page.text))
        assert client.get(link).headers["location"].startswith("/ui/sign-in?to=%2Flink%3Fticket%3D")
        client.get(sign_in_path(team, token))
        assert "bob" in client.get(link).text
        ticket = link.partition("ticket=")[2]
        assert post(client, "/ui/link", ticket=ticket, csrf="").status_code == 403
        assert post(client, "/ui/link", ticket=ticket).headers["location"] == "/ui/people/users/bob?done=linked"
        assert client.get(link).status_code == 404
    with stranger(team) as client:
        assert client.get(begin(client, provider, sub="7", preferred_username="renamed")).status_code == 303
        assert "bob" in client.get("/ui/").text


def test_a_disabled_user_is_refused(team: Served, provider: SmallProvider) -> None:
    with stranger(team) as client, signed_in(team) as root:
        client.get(begin(client, provider, sub="9", preferred_username="zoe"))
        assert client.get("/ui/").status_code == 200
        answer = post(root, "/ui/people/users/zoe/state", disabled="true", runs="finish")
        assert answer.status_code == 303
        assert client.get("/ui/").status_code == 303
        assert client.get(begin(client, provider, sub="9", preferred_username="zoe")).status_code == 401


def test_a_sign_out_offers_the_providers_too(team: Served, provider: SmallProvider) -> None:
    with stranger(team) as client:
        client.get(begin(client, provider, sub="1", preferred_username="ada"))
        assert post(client, "/ui/sign-out").headers["location"] == "/ui/sign-in?done=out"
        assert "/ui/sign-out/provider" in client.get("/ui/sign-in?done=out").text
        location = client.get("/ui/sign-out/provider").headers["location"]
        assert location.startswith(f"{provider.issuer}/end?client_id={CLIENT}&post_logout_redirect_uri=")


def test_beside_a_provider_no_password_signs_in(team: Served) -> None:
    with stranger(team) as client:
        answer = post(client, "/ui/sign-in/password", name="ada", password=PASSWORD)
        assert answer.status_code == 403
    with signed_in(team) as client:
        assert csrf_of(client)
        assert client.get("/ui/people/users/ada").text.count("password-link") == 0


def test_without_a_provider_its_pages_are_not_there(server: Served, somebody: httpx2.Client) -> None:
    for path in ("/ui/sign-in/provider", "/ui/sign-in/callback?code=x&state=y", "/ui/sign-out/provider"):
        assert somebody.get(path).status_code == 404
