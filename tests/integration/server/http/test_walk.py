"""Every route of a real server, with tokens of every role: let in exactly where the policy says."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest

from serverless_gpu.ambient import new_run_id
from serverless_gpu.model.access_control import ROLES, AccessReach, reach
from serverless_gpu.server.composition import api_routes
from serverless_gpu.server.http.routing import ANY_CALLER, ATTEMPT, BYTES, PROOF, PUBLIC, Route, writing
from serverless_gpu.wire.access import PrincipalRequest, TokenMade, TokenRequest
from serverless_gpu.wire.base import API
from tests.support.server.served import Served
from tests.support.server.walk import path_of

METHODS = ("GET", "HEAD", "OPTIONS", "POST", "PUT", "PATCH", "DELETE", "TRACE")


def ask(client: httpx2.Client, route: Route, token: str) -> int:
    headers = {"Authorization": f"Bearer {token}"}
    if route.content_type:
        headers["Content-Type"] = route.content_type
    content = b"{}" if route.content_type and route.content_type != BYTES else b"" if route.content_type else None
    with client.stream(route.method, path_of(route), headers=headers, content=content) as answer:
        return answer.status_code


@pytest.fixture
def client(server: Served) -> Any:
    with httpx2.Client(base_url=server.url, timeout=60) as client:
        yield client


def test_every_role_is_let_in_where_the_policy_says_and_nowhere_else(server: Served, client: httpx2.Client) -> None:
    admin = server.connection()
    for role in ROLES:
        made = admin.ask("POST", "/users", PrincipalRequest(name=f"a-{role}", role=role), answer=TokenMade)
        for route in api_routes():
            needs = writing("agents") if route.needs == PROOF else route.needs
            if needs == PUBLIC:
                continue
            status = ask(client, route, made.secret)
            how_far = AccessReach.OWN if needs == ANY_CALLER else AccessReach.NONE
            if needs not in (ANY_CALLER, ATTEMPT):
                how_far = reach(role, needs.noun, write=needs.write)
            if how_far in (AccessReach.NONE, AccessReach.ALL):  # between them, it depends on what is asked for
                assert (status == 403) == (how_far is AccessReach.NONE), (role, route.method, route.path, status)
            assert status < 500 and status not in (401, 405), (role, route.method, route.path, status)


def test_no_route_lets_in_a_token_that_is_wrong_revoked_or_expired_or_none(
    server: Served, client: httpx2.Client
) -> None:
    admin = server.connection()
    revoked = admin.ask("POST", "/tokens", TokenRequest(label="gone"), answer=TokenMade)
    client.delete(f"{API}/tokens/{revoked.token.id}", headers={"Authorization": f"Bearer {server.token}"})
    wrong = server.token[:-3] + ("aaa" if not server.token.endswith("aaa") else "bbb")
    attempt = f"sgpa_{new_run_id()}_1_" + "a" * 43
    for route in api_routes():
        if route.needs != PUBLIC:
            for token in (revoked.secret, wrong, attempt, server.token.upper(), "sgpu_", "x"):
                assert ask(client, route, token) == 401, (route.method, route.path, token[:5])
        for method in METHODS:
            status = client.request(method, path_of(route)).status_code
            admitted = 200 if method == "GET" else 415  # Without the body that the route needs.
            is_public = route.needs == PUBLIC and method == route.method
            assert status == (admitted if is_public else 401), (method, route.path)


def test_scopes_take_away_and_never_give(server: Served, client: httpx2.Client) -> None:
    admin = server.connection()
    read = admin.ask("POST", "/tokens", TokenRequest(scopes=("read",)), answer=TokenMade).secret
    for route in api_routes():
        if route.needs not in (PUBLIC, ANY_CALLER, ATTEMPT):
            assert (ask(client, route, read) == 403) == route.needs.write, (route.method, route.path)
