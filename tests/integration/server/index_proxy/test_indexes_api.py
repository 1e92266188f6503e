"""Package indexes of a server: who changes them, what the audit says, and who gets a token of their proxy."""

from __future__ import annotations

import base64
from collections.abc import Iterator

import msgspec
import pytest

from serverless_gpu.errors import InvalidValue, NotAuthenticated, NotFound
from serverless_gpu.model.egress import EgressPolicy, digest_of
from serverless_gpu.model.lifecycle.attempt import Reason
from serverless_gpu.model.lifecycle.run_lifecycle import AttemptEnded
from serverless_gpu.server.composition import Services
from serverless_gpu.server.core.caller import Caller
from serverless_gpu.server.core.settings import IndexProxySettings
from serverless_gpu.server.db.database import Database
from serverless_gpu.server.index_proxy.definition import INDEXES_MAX
from serverless_gpu.server.nodes.egress_policies import control_endpoints, index_proxy_endpoints
from serverless_gpu.server.records import audit, nodes
from serverless_gpu.testing import FakeClock
from serverless_gpu.wire.agents import Heartbeat
from serverless_gpu.wire.indexes import IndexTokenRequest, NodeTokenRequest
from serverless_gpu.wire.nodes import PoolRequest
from tests.support.server.agents import ADMIN, H100, NODE, OTHER, hello, placed, tell
from tests.support.server.made import recomposed
from tests.support.server.principals import Api
from tests.support.server.stored import add_people

pytestmark = pytest.mark.any_database

PYPI = {"url": "https://pypi.org/simple"}
PROXY = IndexProxySettings(host="10.0.0.5", port=7880, url="http://10.0.0.5:7880/")


@pytest.fixture
def proxied(services: Services) -> Services:
    """Return the parts of a server that has an index proxy."""
    return recomposed(services, settings=msgspec.structs.replace(services.settings, index_proxy=PROXY))


@pytest.fixture
def api(proxied: Services, database: Database, clock: FakeClock) -> Iterator[Api]:
    made = Api(proxied, database, clock)
    with made.client:
        made.alice = made.user("alice")
        yield made


def test_27_administrators_define_indexes_and_everybody_lists_them(api: Api) -> None:
    view = api.do(api.admin, "PUT", "/indexes/pypi", PYPI)
    assert (view["url"], view["file_hosts"]) == ("https://pypi.org/simple/", ["files.pythonhosted.org"])
    operator = api.user("olga", "operator")
    for token in (api.alice, operator):
        assert api.ask(token, "PUT", "/indexes/pypi", PYPI)[0] == 403
        assert api.ask(token, "DELETE", "/indexes/pypi")[0] == 403
        assert api.ask(token, "GET", "/index-log")[0] == 403
        found = api.do(token, "GET", "/indexes")
        assert ([each["name"] for each in found["indexes"]], found["proxy"]) == (["pypi"], PROXY.url)
    assert api.ask(api.node, "GET", "/indexes")[0] == 403
    api.do(api.admin, "PUT", "/indexes/pypi", {**PYPI, "file_hosts": [], "private": True})
    assert api.do(api.alice, "GET", "/indexes")["indexes"][0]["private"] is True
    api.do(api.admin, "DELETE", "/indexes/pypi")
    assert api.ask(api.admin, "DELETE", "/indexes/pypi")[0] == 404
    assert [each[1:] for each in api.audited() if each[1].startswith("index")] == [
        ("index.set", "pypi"),
        ("index.set", "pypi"),
        ("index.delete", "pypi"),
    ]


def test_27_an_index_uses_a_secret_by_name(api: Api) -> None:
    def secret(value: bytes, team: str = "") -> None:
        api.do(api.admin, "PUT", "/secrets/KEY", {"value": base64.b64encode(value).decode(), "team": team})

    own = {"url": "https://packages.example/", "secret": "KEY"}
    assert api.ask(api.admin, "PUT", "/indexes/own", own)[0] == 400, "the secret does not exist"
    secret(b"reader:hunter2")
    view = api.do(api.admin, "PUT", "/indexes/own", own)
    assert "KEY" in view["secret"]
    for body in (
        {**own, "url": "http://packages.example/"},
        {**own, "team": "nobody"},
        {"url": own["url"], "team": "search"},
        {**own, "secret": "../KEY"},
        {**own, "url": "https://reader:hunter2@packages.example/"},
    ):
        assert api.ask(api.admin, "PUT", "/indexes/own", body)[0] in (400, 404), body
    api.do(api.admin, "POST", "/teams", {"name": "search"})
    secret(b"\n", "search")
    assert api.ask(api.admin, "PUT", "/indexes/own", {**own, "team": "search"})[0] == 400, "no credentials"
    secret(b"a-token\n", "search")
    assert "search" in api.do(api.admin, "PUT", "/indexes/own", {**own, "team": "search"})["secret"]
    details = [entry.detail for entry in api.database.read(audit.entries) if entry.action == "index.set"]
    assert [(each["secret"], each["team"]) for each in details] == [("KEY", ""), ("KEY", "search")]
    assert "hunter2" not in repr(details)


def test_27_a_token_without_a_colon_is_the_password(proxied: Services, api: Api) -> None:
    api.do(api.admin, "PUT", "/secrets/KEY", {"value": base64.b64encode(b"a-token\n").decode()})
    api.do(api.admin, "PUT", "/indexes/own", {"url": "https://packages.example/", "secret": "KEY"})
    served = proxied.index_catalog.find("own")
    assert served is not None
    assert base64.b64decode(served.credentials.removeprefix("Basic ")) == b"__token__:a-token"
    assert served.credentials not in repr(served)


def test_27_a_server_has_a_bounded_number_of_indexes(api: Api) -> None:
    for number in range(INDEXES_MAX):
        api.do(api.admin, "PUT", f"/indexes/i{number}", PYPI)
    assert api.ask(api.admin, "PUT", "/indexes/more", PYPI)[0] == 400
    api.do(api.admin, "PUT", "/indexes/i0", PYPI)


def test_27_a_users_token_ends_in_time_and_with_the_user(api: Api, proxied: Services, clock: FakeClock) -> None:
    made = api.do(api.alice, "POST", "/index-token", {"lifetime_s": 600})
    tokens = proxied.index_tokens
    assert tokens.check(made["token"]) == "user:alice"
    assert (made["url"], made["until_ns"] - clock.wall_ns() <= 600e9) == (PROXY.url, True)
    for token in (made["token"][:-1], made["token"] + "a", api.alice, "", "sgpx_" + "00" * 300):
        with pytest.raises(NotAuthenticated):
            tokens.check(token)
    assert api.ask(api.alice, "POST", "/index-token", {"lifetime_s": 86_401})[0] == 400
    assert api.ask(api.node, "POST", "/index-token", {})[0] == 403
    clock.advance(601)
    with pytest.raises(NotAuthenticated):
        tokens.check(made["token"])
    made = api.do(api.alice, "POST", "/index-token", {})
    api.do(api.admin, "PATCH", "/users/alice", {"disabled": True})
    with pytest.raises(NotAuthenticated):
        tokens.check(made["token"])


def test_27_a_node_gets_tokens_for_its_builds_and_attempts(proxied: Services) -> None:
    add_people(proxied.database, "node", "other", "alice")  # type: ignore[arg-type] # a Database
    node = proxied.agents.hello(NODE, hello()).node
    run_id = placed(proxied)
    service, tokens = proxied.indexes, proxied.index_tokens
    build = service.node_token(NODE, node, NodeTokenRequest(build="lock-1")).token
    attempt = service.node_token(NODE, node, NodeTokenRequest(gang=f"{run_id}:1")).token
    assert tokens.check(build) == f"build:{node}:lock-1"
    assert tokens.check(attempt) == f"attempt:{run_id}:1"
    for who, request, error in (
        (OTHER, NodeTokenRequest(build="lock-1"), NotFound),
        (NODE, NodeTokenRequest(), InvalidValue),
        (NODE, NodeTokenRequest(build="a", gang=f"{run_id}:1"), InvalidValue),
        (NODE, NodeTokenRequest(build="a:b"), InvalidValue),
        (NODE, NodeTokenRequest(gang=f"{run_id}:2"), NotFound),
        (NODE, NodeTokenRequest(gang="x"), NotFound),
    ):
        with pytest.raises(error):
            service.node_token(who, node, request)
    tell(proxied, run_id, AttemptEnded(reason=Reason.COMPLETED, began=True))
    with pytest.raises(NotAuthenticated):
        tokens.check(attempt)
    assert tokens.check(build)
    proxied.database.write(lambda connection: nodes.revoke(connection, node, at_ns=1))
    with pytest.raises(NotAuthenticated):
        tokens.check(build)


def test_27_a_server_without_a_proxy_gives_no_token(services: Services) -> None:
    with pytest.raises(NotFound):
        services.indexes.user_token(Caller(name="alice"), IndexTokenRequest())
    assert services.indexes.list_all().proxy == ""


def test_27_nodes_learn_the_address_of_the_proxy_and_close_it_for_runs(proxied: Services) -> None:
    add_people(proxied.database, "node", "alice")  # type: ignore[arg-type] # a Database
    node = proxied.agents.hello(NODE, hello(isolation="sandbox", takes=("egress",)))
    proxied.pools.put(ADMIN, "default", PoolRequest(isolation="sandbox"))
    told = proxied.agents.heartbeat(NODE, node.node, Heartbeat(devices=H100, egress="")).egress
    assert told is not None and told.index_proxy == ("10.0.0.5:7880",)
    assert "10.0.0.5:7880" in told.closed
    plain = msgspec.structs.replace(told, index_proxy=())
    assert digest_of(plain) != digest_of(told)
    before = {"mode": plain.mode, "allow": plain.allow, "closed": plain.closed}
    assert digest_of(plain) == digest_of(msgspec.convert(before, EgressPolicy)), "as an older node computes it"


def test_27_a_proxy_on_loopback_or_behind_another_name_has_endpoints(services: Services) -> None:
    local = IndexProxySettings(host="127.0.0.1", port=7880, url="https://Packages.example/")
    settings = msgspec.structs.replace(services.settings, index_proxy=local)
    assert [each.text for each in index_proxy_endpoints(settings)] == ["127.0.0.1:7880", "packages.example:443"]
    assert "packages.example:443" in [each.text for each in control_endpoints(settings)]
    assert "127.0.0.1:7880" not in [each.text for each in control_endpoints(settings)]
