"""The right to lower a pool's isolation: its holders, its grants, its tokens, and what the audit has about it."""

from __future__ import annotations

import pytest

from serverless_gpu.errors import InvalidValue, NotAllowed
from serverless_gpu.model.access_control import Right
from serverless_gpu.model.isolation import LEVELS
from serverless_gpu.server.composition import Services
from serverless_gpu.server.core.caller import Caller
from serverless_gpu.server.db import tables
from serverless_gpu.server.records import audit, principals
from serverless_gpu.wire.access import PrincipalChange, TokenRequest
from serverless_gpu.wire.nodes import PoolRequest
from tests.support.server.agents import NODE, hello
from tests.support.server.stored import T0

RIGHT = Right.LOWER_ISOLATION.value
FIRST = Caller(name="root", role="admin")
SECOND = Caller(name="second", role="admin")
OPERATOR = Caller(name="olga", role="operator")
STRONGEST = LEVELS[-1]


@pytest.fixture(autouse=True)
def shared_pools() -> None:
    """Decide nothing beforehand: these are the tests of that decision."""


@pytest.fixture(autouse=True)
def people(services: Services) -> None:
    """Make the first administrator, a second one, an operator, a member, and a node in the pool `default`."""
    rows = [
        {"name": name, "kind": kind, "role": role, "created_ns": T0 + number}
        for number, (name, kind, role) in enumerate(
            [
                ("root", "user", "admin"),
                ("node", "service", "agent"),
                ("second", "user", "admin"),
                ("olga", "user", "operator"),
                ("bob", "user", "member"),
            ]
        )
    ]
    services.database.write(lambda connection: connection.execute(tables.principals.insert(), rows))
    services.agents.hello(NODE, hello())
    services.pools.put(FIRST, "default", PoolRequest(isolation=STRONGEST))


def isolate(services: Services, who: Caller, level: str, pool: str = "default") -> str:
    return services.pools.put(who, pool, PoolRequest(isolation=level)).isolation


def rights_of(services: Services, name: str) -> tuple[str, ...]:
    return services.database.read(lambda connection: principals.principal(connection, name)).rights


@pytest.mark.parametrize("who", [SECOND, OPERATOR], ids=["administrator", "operator"])
@pytest.mark.parametrize("level", [*LEVELS[:-1], "unset"])
def test_an_administrator_of_pools_cannot_lower_their_isolation_without_the_right(
    services: Services, who: Caller, level: str
) -> None:
    with pytest.raises(NotAllowed) as refused:
        isolate(services, who, level)
    assert all(word in refused.value.message for word in (STRONGEST, level, RIGHT))
    assert refused.value.hint.startswith("ask root ") and refused.value.hint.endswith(f"{who.name} --grant {RIGHT}")
    assert services.nodes.view_pools()[0].isolation == STRONGEST


def test_raising_needs_no_right_and_the_first_shared_uid_does(services: Services) -> None:
    assert isolate(services, FIRST, "unset") == "unset"
    with pytest.raises(NotAllowed):
        isolate(services, OPERATOR, "none")
    for level in LEVELS[1:]:
        assert isolate(services, OPERATOR, level) == level
    assert isolate(services, FIRST, "none") == "none"
    assert isolate(services, OPERATOR, "unset") == "unset"
    with pytest.raises(NotAllowed):
        isolate(services, OPERATOR, "none", pool="new")


def test_a_holder_grants_and_revokes_the_right_and_the_audit_has_before_and_after(services: Services) -> None:
    changed = services.principals.change(FIRST, "olga", PrincipalChange(grant=(RIGHT,)))
    assert changed.rights == rights_of(services, "olga") == (RIGHT,)
    assert isolate(services, OPERATOR, "none") == "none"
    services.principals.change(FIRST, "olga", PrincipalChange(revoke=(RIGHT,)))
    assert rights_of(services, "olga") == ()
    isolate(services, FIRST, STRONGEST)
    with pytest.raises(NotAllowed):
        isolate(services, OPERATOR, "none")
    entries = services.database.read(audit.entries)
    said = [
        (one.principal, one.subject, one.detail.get("isolation") or one.detail.get("rights"))
        for one in entries
        if one.action in ("pool.put", "user.change")
    ]
    assert said == [
        ("root", "default", ["unset", STRONGEST]),
        ("root", "olga", [[], [RIGHT]]),
        ("olga", "default", [STRONGEST, "none"]),
        ("root", "olga", [[RIGHT], []]),
        ("root", "default", ["none", STRONGEST]),
    ]


def test_a_second_administrator_gets_the_right_by_no_detour(services: Services) -> None:
    with pytest.raises(NotAllowed, match="grant or revoke"):
        services.principals.change(SECOND, "second", PrincipalChange(grant=(RIGHT,)))
    services.principals.change(FIRST, "olga", PrincipalChange(grant=(RIGHT,)))
    for holder in ("root", "olga"):
        for scopes in ((), ("pools", RIGHT)):
            with pytest.raises(NotAllowed, match=f"token of {holder}"):
                services.principals.make_token(SECOND, TokenRequest(principal=holder, scopes=scopes), reach="all")
    limited = services.principals.make_token(SECOND, TokenRequest(principal="root", scopes=("pools",)), reach="all")
    assert limited.token.scopes == ("pools",)
    services.principals.change(FIRST, "second", PrincipalChange(grant=(RIGHT,)))
    assert services.principals.make_token(SECOND, TokenRequest(principal="olga"), reach="all").token.scopes == ()


@pytest.mark.parametrize("scopes", [("pools",), ("read", "pools", "users")])
def test_a_token_has_the_right_only_as_a_scope(services: Services, scopes: tuple[str, ...]) -> None:
    with pytest.raises(NotAllowed, match=RIGHT) as refused:
        isolate(services, Caller(name="root", role="admin", scopes=scopes), "none")
    assert "additional scope" in refused.value.hint
    assert isolate(services, Caller(name="root", role="admin", scopes=(*scopes, RIGHT)), "none") == "none"


def test_moving_a_node_into_a_pool_with_less_isolation_needs_the_right(services: Services) -> None:
    services.pools.put(OPERATOR, "strict", PoolRequest(isolation=STRONGEST))
    (node,) = services.nodes.view_nodes()
    with pytest.raises(NotAllowed, match=f"node '{node.name}' from"):
        services.pools.put(OPERATOR, "loose", PoolRequest(nodes=(node.name,)))
    assert services.pools.put(OPERATOR, "strict", PoolRequest(nodes=(node.name,))).nodes == (node.name,)
    assert services.pools.put(FIRST, "loose", PoolRequest(nodes=(node.name,))).nodes == (node.name,)
    assert services.pools.put(OPERATOR, "default", PoolRequest(nodes=(node.name,))).nodes == (node.name,)


def test_the_first_administrator_keeps_the_right_and_a_successor_is_named(services: Services) -> None:
    with pytest.raises(InvalidValue, match="first administrator"):
        services.principals.change(FIRST, "root", PrincipalChange(revoke=(RIGHT,)))
    services.principals.change(FIRST, "root", PrincipalChange(role="operator"))
    assert rights_of(services, "root") == ()
    with pytest.raises(NotAllowed) as refused:
        isolate(services, SECOND, "none")
    assert "--role admin" in refused.value.hint
    services.principals.change(SECOND, "root", PrincipalChange(role="admin"))
    assert rights_of(services, "root") == (RIGHT,)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (PrincipalChange(grant=("isolation.raise",)), "there is no right 'isolation.raise'"),
        (PrincipalChange(grant=(RIGHT,), revoke=(RIGHT,)), "grants and revokes the same right"),
        (PrincipalChange(grant=(RIGHT,)), "cannot change pools"),
    ],
)
def test_grants_that_mean_nothing_are_refused(services: Services, change: PrincipalChange, problem: str) -> None:
    with pytest.raises(InvalidValue, match=problem):
        services.principals.change(FIRST, "bob", change)
