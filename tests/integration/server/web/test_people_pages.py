"""The pages of people: what an administrator changes, and what others neither see nor change; without a browser."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator

import httpx2
import pytest

from serverless_gpu.errors import NotAuthenticated
from serverless_gpu.wire.access import PrincipalList, PrincipalView, TokenList, TokenRequest
from serverless_gpu.wire.access import TokenMade as Made
from serverless_gpu.wire.sign_in import PrincipalDetails
from tests.support.server.served import Served, served
from tests.support.web.browser import make_user
from tests.support.web.clients import post, signed_in, stranger

HOSTILE = "</td><script>x()</script>\" onfocus='x()' {{7*7}} <hx-partial hx-target=body>"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("home")) as running:
        yield running


@pytest.fixture(scope="module")
def alice(server: Served) -> str:
    """Return the token of a member of the team vision."""
    return make_user(server, "alice", team="vision")


@pytest.fixture(scope="module")
def admin(server: Served) -> Iterator[httpx2.Client]:
    with signed_in(server) as client:
        yield client


def secret_on(page: httpx2.Response) -> str:
    assert page.status_code == 200
    assert page.headers["cache-control"] == "no-store"
    found = re.search(r"<code>(sgpu_\w+[\w-]+)</code>", page.text)
    assert found is not None
    return found[1]


def test_a_new_users_token_is_on_the_page_once_and_works(server: Served, admin: httpx2.Client) -> None:
    page = post(admin, "/ui/people", name="nina", kind="user", role="viewer", teams="")
    who = server.connection(secret_on(page)).ask("GET", "/whoami", answer=PrincipalView)
    assert (who.name, who.role) == ("nina", "viewer")
    assert "sgpu_" not in admin.get("/ui/people/users/nina").text
    assert post(admin, "/ui/people", name="nina").status_code == 400
    assert post(admin, "/ui/people", name="../x").status_code == 400


def test_a_token_says_who_made_it_and_ends_when_revoked(server: Served, admin: httpx2.Client, alice: str) -> None:
    page = post(admin, "/ui/people/tokens", label=HOSTILE, of="alice", scopes="read, submit", days="7")
    secret = secret_on(page)
    listed = admin.get("/ui/people/tokens", params={"of": "alice"}).text
    assert html.escape(HOSTILE, quote=False) in listed.replace("&#34;", '"').replace("&#39;", "'")
    assert "<script>x" not in listed
    [row] = [row for row in listed.split("<tr>") if secret.split("_")[1] in row]
    owner = server.connection().ask("GET", "/whoami", answer=PrincipalView).name
    assert f'data-label="made by">{owner}<' in row
    assert "read submit" in row
    assert post(admin, f"/ui/people/tokens/{secret.split('_')[1]}/revoke").status_code == 303
    with pytest.raises(NotAuthenticated):
        server.connection(secret).ask("GET", "/whoami", answer=PrincipalView)
    assert secret.split("_")[1] not in admin.get("/ui/people/tokens").text
    assert secret.split("_")[1] in admin.get("/ui/people/tokens", params={"all": "true"}).text


def test_a_refused_form_shows_its_page_with_the_reason(admin: httpx2.Client) -> None:
    for path, fields in (
        ("/ui/people/tokens", {"scopes": "everything"}),
        ("/ui/people/tokens", {"of": "nobody"}),
        ("/ui/people/teams", {"team": "No Name"}),
    ):
        page = post(admin, path, **fields)
        assert page.status_code in (400, 404)
        assert 'role="alert"' in page.text
        assert "<table" in page.text or 'class="empty"' in page.text


def test_roles_rights_and_states_change_as_with_the_command(server: Served, admin: httpx2.Client) -> None:
    make_user(server, "otto")
    for fields, seen in (
        ({"role": "operator", "rights": "isolation.lower"}, ("operator", ("isolation.lower",), False)),
        ({"role": "operator", "before": "isolation.lower"}, ("operator", (), False)),
        ({"role": "viewer"}, ("viewer", (), False)),
    ):
        assert post(admin, "/ui/people/users/otto/role", **fields).status_code == 303
        assert state_of(server, "otto") == seen
    assert post(admin, "/ui/people/users/otto/state", disabled="true", runs="stop").status_code == 303
    assert state_of(server, "otto") == ("viewer", (), True)
    assert post(admin, "/ui/people/users/otto/state", disabled="false").status_code == 303
    assert post(admin, "/ui/people/users/otto/delete").status_code == 303
    assert admin.get("/ui/people/users/otto").status_code == 404


def state_of(server: Served, name: str) -> tuple[str, tuple[str, ...], bool]:
    found = server.connection().ask("GET", f"/users/{name}", answer=PrincipalDetails).principal
    return found.role, found.rights, found.disabled


def test_the_only_administrator_stays(server: Served, admin: httpx2.Client) -> None:
    own = server.connection().ask("GET", "/whoami", answer=PrincipalView).name
    for path, fields in (("role", {"role": "viewer", "before": "isolation.lower"}), ("state", {"disabled": "true"})):
        assert post(admin, f"/ui/people/users/{own}/{path}", **fields).status_code == 400
    assert post(admin, f"/ui/people/users/{own}/delete").status_code == 400


def test_teams_have_members_and_a_time_zone(server: Served, admin: httpx2.Client) -> None:
    make_user(server, "tim")
    assert post(admin, "/ui/people/teams", team="robots").headers["location"].startswith("/ui/people/teams/robots")
    assert post(admin, "/ui/people/teams/robots/members", user="tim", member="true").status_code == 303
    assert post(admin, "/ui/people/teams/robots/time-zone", time_zone="Europe/Berlin").status_code == 303
    page = admin.get("/ui/people/teams/robots").text
    assert "Europe/Berlin" in page
    assert "/ui/people/users/tim" in page
    assert post(admin, "/ui/people/teams/robots/time-zone", time_zone="Mars/Base").status_code == 400
    assert post(admin, "/ui/people/teams/robots/members", user="tim", member="false").status_code == 303
    assert post(admin, "/ui/people/teams/robots/delete").status_code == 303
    assert admin.get("/ui/people/teams/robots").status_code == 404


def test_sessions_are_listed_and_end(server: Served, admin: httpx2.Client, alice: str) -> None:
    with signed_in(server, alice) as other, signed_in(server, alice) as another:
        page = other.get("/ui/people/sessions").text
        assert page.count("this browser") == 1
        ends = re.findall(r'action="/ui/people/sessions/(\w+)/end"', page)
        assert len(ends) == 1
        assert post(other, f"/ui/people/sessions/{ends[0]}/end").status_code == 303
        assert another.get("/ui/").status_code == 303
        assert other.get("/ui/").status_code == 200
        assert post(admin, "/ui/people/users/alice/sign-out").status_code == 303
        assert other.get("/ui/").status_code == 303
        assert admin.get("/ui/").status_code == 200


def test_an_own_password_needs_the_current_one(server: Served, alice: str) -> None:
    with signed_in(server, alice) as client:
        new = {"password": "correct horse battery", "again": "correct horse battery"}
        assert post(client, "/ui/people/password", **{**new, "again": "other"}).status_code == 400
        assert post(client, "/ui/people/password", **new).status_code == 303
        assert 'name="current"' in client.get("/ui/people/password").text
        assert post(client, "/ui/people/password", **new).status_code == 403
        assert post(client, "/ui/people/users/alice/password-removal").status_code == 303


def test_a_link_for_a_password_is_shown_once(server: Served, admin: httpx2.Client, alice: str) -> None:
    page = post(admin, "/ui/people/users/alice/password-link").text
    found = re.search(r"<code>(http[^<]+/ui/password\?code=[\w-]+)</code>", page)
    assert found is not None
    with stranger(server) as client:
        assert client.get(found[1]).status_code == 200


def test_a_member_sees_nobody_else_and_changes_nothing(server: Served, admin: httpx2.Client, alice: str) -> None:
    make_user(server, "other", team="secret-team")
    made: Made = server.connection().ask("POST", "/tokens", TokenRequest(label="a-label-of-root"), answer=Made)
    owner = server.connection().ask("GET", "/whoami", answer=PrincipalView).name
    assert f"/ui/people/users/{owner}" in admin.get("/ui/people/sessions").text
    with signed_in(server, alice) as client:
        for path in ("users/other", "users/nobody", "teams/secret-team", "teams/nothing"):
            assert client.get(f"/ui/people/{path}").status_code == 404, path
        people = client.get("/ui/people").text
        assert "other" not in people
        assert "<details" not in people.partition("<main")[2]
        assert "a-label-of-root" not in client.get("/ui/people/tokens").text
        assert "a-label-of-root" not in client.get("/ui/people/tokens", params={"of": owner}).text
        assert owner not in client.get("/ui/people/sessions").text
        assert "secret-team" not in client.get("/ui/people/teams").text
        for path, fields, status in (
            ("/ui/people", {"name": "mallory", "role": "admin"}, 403),
            ("/ui/people/users/alice/role", {"role": "admin"}, 403),
            ("/ui/people/users/other/state", {"disabled": "true"}, 403),
            ("/ui/people/users/other/delete", {}, 403),
            ("/ui/people/users/other/password-link", {}, 403),
            ("/ui/people/users/other/sign-out", {}, 404),
            ("/ui/people/users/other/password-removal", {}, 404),
            ("/ui/people/teams", {"team": "mine"}, 403),
            ("/ui/people/teams/vision/delete", {}, 403),
            ("/ui/people/tokens", {"of": "other"}, 404),
            (f"/ui/people/tokens/{made.token.id}/revoke", {}, 404),
            (f"/ui/people/sessions/{made.token.id}/end", {}, 404),
            ("/ui/people/users/other/identities/x", {}, 404),
        ):
            assert post(client, path, **fields).status_code == status, path
    users = server.connection().ask("GET", "/users", answer=PrincipalList).principals
    assert "mallory" not in {one.name for one in users}


def test_long_lists_have_a_next_page(server: Served, admin: httpx2.Client) -> None:
    root = server.connection()
    users = root.ask("GET", "/users", answer=PrincipalList, query={"limit": "2"})
    following = root.ask("GET", "/users", answer=PrincipalList, query={"limit": "2", "after": users.cursor})
    assert users.cursor == users.principals[-1].name < following.principals[0].name
    query = {"newest": "true", "limit": "2"}
    tokens: TokenList = root.ask("GET", "/tokens", answer=TokenList, query=query)
    older: TokenList = root.ask("GET", "/tokens", answer=TokenList, query={**query, "before": tokens.cursor})
    assert [token.id for token in (*tokens.tokens, *older.tokens)] == sorted(
        {token.id for token in (*tokens.tokens, *older.tokens)}, reverse=True
    )
    assert "user-" not in admin.get("/ui/people", params={"q": "zzz"}).text
    page = admin.get("/ui/people", params={"q": HOSTILE[:40]}).text
    assert "<script>x" not in page
