"""The pages behind a proxy that ends TLS and has a path prefix: addresses, cookies, forms, identity providers."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import httpx2
import pytest

from serverless_gpu.wire.access import SessionList, SignInLink
from tests.support.network.path_proxy import path_proxy
from tests.support.server.identity_provider import CLIENT, SECRET, small_provider
from tests.support.server.served import served


def cookie_of(answer: httpx2.Response, name: str) -> set[str]:
    [found] = [one for one in answer.headers.get_list("set-cookie") if one.startswith(name)]
    return {part.strip() for part in found.split(";")}


def value_of(answer: httpx2.Response, name: str) -> str:
    return next(part for part in cookie_of(answer, name) if part.startswith(name))


@pytest.mark.parametrize("strips", [True, False])
def test_pages_work_below_a_prefix_and_their_cookies_need_tls(tmp_path: Path, strips: bool) -> None:
    with (
        small_provider() as provider,
        served(
            tmp_path / "home",
            path_prefix="/gpu",
            behind_proxy=("127.0.0.1",),
            oidc_issuer=provider.issuer,
            oidc_client_id=CLIENT,
            oidc_client_secret=SECRET,
            oidc_create=True,
        ) as server,
        path_proxy(server.url, prefix="/gpu", strips=strips) as url,
        httpx2.Client(timeout=30, verify=False) as client,
    ):
        assert client.get(f"{url}/ui/runs").headers["location"] == "/gpu/ui/sign-in?to=%2Fruns"
        link: SignInLink = server.connection().ask("POST", "/sign-in-links", answer=SignInLink)
        answer = client.get(url + link.path)
        assert answer.headers["location"] == "/gpu/ui/"
        assert {"Path=/gpu/ui", "Secure", "HttpOnly", "SameSite=Strict"} <= cookie_of(answer, "sgpu_session")
        # The client does not send a Secure cookie over this test's plain connection.
        headers = {"Cookie": value_of(answer, "sgpu_session"), "Origin": f"https://{urlsplit(url).netloc}"}
        page = client.get(f"{url}/ui/people", headers=headers).text
        paths = set(re.findall(r'\s(?:href|src|action)="([^"#]+)"', page))
        assert [path for path in paths if not path.startswith("/gpu/ui/")] == []
        csrf = re.search(r'name="csrf" value="(\w+)"', page)
        assert csrf is not None
        answer = client.post(f"{url}/ui/people/teams", data={"csrf": csrf[1], "team": "vision"}, headers=headers)
        assert answer.headers["location"] == "/gpu/ui/people/teams/vision?done=changed"
        found: SessionList = server.connection().ask("GET", "/sessions", answer=SessionList)
        assert {one.origin.address for one in found.sessions} == {"203.0.113.7"}

        answer = client.get(f"{url}/ui/sign-in/provider")
        assert {"Path=/", "Secure", "HttpOnly", "SameSite=Lax"} <= cookie_of(answer, "__Host-sgpu_login")
        asked = parse_qs(urlsplit(answer.headers["location"]).query)
        assert asked["redirect_uri"] == [f"https://{urlsplit(url).netloc}/gpu/ui/sign-in/callback"]
        provider.claims = {"sub": "1", "preferred_username": "ada"}
        callback = provider.authorize(answer.headers["location"]).replace("https://", "http://")
        answer = client.get(callback, headers={"Cookie": value_of(answer, "__Host-sgpu_login")})
        assert (answer.status_code, answer.headers["location"]) == (303, "/gpu/ui/")
        assert "Secure" in cookie_of(answer, "sgpu_session")
        assert "Max-Age=0" in cookie_of(answer, "__Host-sgpu_login")


def test_a_proxy_that_was_reached_without_tls_signs_nobody_in(tmp_path: Path) -> None:
    with (
        served(tmp_path / "home", behind_proxy=("127.0.0.1",)) as server,
        path_proxy(server.url, prefix="", strips=False, proto="http") as url,
        httpx2.Client(timeout=30, verify=False) as client,
    ):
        link: SignInLink = server.connection().ask("POST", "/sign-in-links", answer=SignInLink)
        answer = client.get(url + link.path)
        assert answer.status_code == 403
        assert "set-cookie" not in answer.headers
