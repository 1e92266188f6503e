"""The table of roles: complete, printed as the reference page has it, and narrowed by scopes only."""

from __future__ import annotations

import pytest

from serverless_gpu.model.access_control import POLICY, ROLES, SCOPES, AccessReach, Resource, covers, reach, table
from tests.support.paths import REPOSITORY

ORDER = [AccessReach.NONE, AccessReach.OWN, AccessReach.TEAM, AccessReach.ALL]
REFERENCE = REPOSITORY / "docs" / "reference.md"


def test_the_reference_has_the_table() -> None:
    print(table())
    assert table() in REFERENCE.read_text(), f"docs/reference.md, Roles, has to have:\n{table()}"


def test_every_role_has_a_row() -> None:
    assert set(POLICY) == set(ROLES)


def test_nobody_writes_farther_than_they_read() -> None:
    for role in ROLES:
        for resource in Resource:
            read, write = (reach(role, resource, write=write) for write in (False, True))
            assert ORDER.index(write) <= ORDER.index(read), (role, resource)


def test_nobody_may_more_than_an_admin_but_nodes_with_their_orders_and_who_joins() -> None:
    for role in ROLES:
        for resource in set(Resource) - {Resource.ORDERS, Resource.JOINING}:
            for write in (False, True):
                most = ORDER.index(reach("admin", resource, write=write))
                assert ORDER.index(reach(role, resource, write=write)) <= most


def test_nobody_writes_the_audit() -> None:
    assert {reach(role, "audit", write=True) for role in ROLES} == {AccessReach.NONE}


def test_only_nodes_see_orders_which_hold_the_callers_variables() -> None:
    assert [role for role in ROLES if reach(role, "orders", write=False) != AccessReach.NONE] == ["agent"]


def test_a_token_that_only_reads_reaches_no_orders_which_hold_the_tokens_of_attempts() -> None:
    assert {reach("agent", "orders", write=write, scopes=("read",)) for write in (False, True)} == {AccessReach.NONE}
    assert reach("agent", "orders", write=True, scopes=("agent",)) == AccessReach.OWN


def test_a_token_for_joining_is_good_for_that_and_what_it_brings_is_not() -> None:
    for resource in Resource:
        assert reach("agent", resource, write=True, scopes=("joining",)) == (
            AccessReach.OWN if resource is Resource.JOINING else AccessReach.NONE
        )
    assert reach("agent", "joining", write=True, scopes=("agent",)) == AccessReach.NONE


def test_an_agent_sees_nothing_that_people_see() -> None:
    people = ("runs", "nodes", "pools", "users", "teams", "tokens", "audit")
    assert {reach("agent", resource, write=write) for resource in people for write in (False, True)} == {
        AccessReach.NONE
    }


@pytest.mark.parametrize(("role", "resource"), [("root", "runs"), ("", "runs"), ("admin", "wishes"), ("admin", "")])
def test_what_is_not_in_the_table_is_refused(role: str, resource: str) -> None:
    assert reach(role, resource, write=False) == AccessReach.NONE


def test_scopes_only_take_away() -> None:
    for role in ROLES:
        for resource in Resource:
            for write in (False, True):
                full = reach(role, resource, write=write)
                for scope in SCOPES:
                    assert reach(role, resource, write=write, scopes=(scope,)) in (full, AccessReach.NONE)


@pytest.mark.parametrize(
    ("scopes", "resource", "write", "expected"),
    [
        (("read",), "runs", False, AccessReach.ALL),
        (("read",), "runs", True, AccessReach.NONE),
        (("runs:read",), "runs", True, AccessReach.NONE),
        (("runs:read", "nodes"), "nodes", True, AccessReach.ALL),
        (("submit",), "tokens", True, AccessReach.NONE),
        (("submit",), "pools", False, AccessReach.ALL),
        (("submit",), "pools", True, AccessReach.NONE),
        (("submit",), "policies", False, AccessReach.ALL),  # which are mine?
        (("submit",), "policies", True, AccessReach.NONE),
        (("agent",), "agents", True, AccessReach.ALL),
        (("agent",), "runs", False, AccessReach.NONE),
        (("unheard-of",), "runs", False, AccessReach.NONE),
    ],
)
def test_a_token_with_scopes_is_good_for_those(
    scopes: tuple[str, ...], resource: str, write: bool, expected: AccessReach
) -> None:
    assert reach("admin", resource, write=write, scopes=scopes) == expected


@pytest.mark.parametrize(
    ("reached", "owner", "team", "expected"),
    [
        (AccessReach.ALL, "bob", "", True),
        (AccessReach.TEAM, "bob", "search", True),
        (AccessReach.TEAM, "bob", "ads", False),
        (AccessReach.TEAM, "bob", "", False),
        (AccessReach.TEAM, "alice", "ads", True),
        (AccessReach.OWN, "alice", "", True),
        (AccessReach.OWN, "bob", "search", False),
        (AccessReach.NONE, "alice", "search", False),
    ],
)
def test_what_is_in_reach(reached: AccessReach, owner: str, team: str, expected: bool) -> None:
    assert covers(reached, name="alice", teams=("search",), owner=owner, team=team) is expected


def test_nobody_owns_nothing() -> None:
    assert not covers(AccessReach.OWN, name="", teams=(), owner="")
