"""What the claims of an account mean: who it is, which role and teams its groups have, and who may not sign in."""

from __future__ import annotations

from typing import Any

import pytest

from serverless_gpu.errors import NotAllowed
from serverless_gpu.server.core.settings import OidcSettings
from serverless_gpu.server.identity.provider_accounts import (
    TeamChanges,
    account_of,
    missing_claims,
    role_of,
    team_changes,
)


def settings(**changes: Any) -> OidcSettings:
    return OidcSettings(issuer="https://login", client_id="sgpu", **changes)


@pytest.mark.parametrize(
    ("claim", "name"),
    [
        ("ada", "ada"),
        ("Ada Lovelace", "ada-lovelace"),
        ("ADA@lab.example", "ada@lab.example"),
        ("../root", "root"),
        ("<b>", "b-"),
        ("é", ""),
        ("", ""),
        (7, ""),
        (None, ""),
        ("x" * 100, "x" * 64),
    ],
)
def test_a_new_user_gets_the_valid_name_closest_to_the_claim(claim: object, name: str) -> None:
    name = name.rstrip("-") if claim == "é" else name
    found = account_of(settings(), {"sub": "1", "preferred_username": claim}, issuer="https://login")
    assert found.name == name


@pytest.mark.parametrize("sub", [None, "", 5, "x" * 256])
def test_an_account_without_a_usable_subject_is_refused(sub: object) -> None:
    with pytest.raises(NotAllowed):
        account_of(settings(), {"sub": sub}, issuer="https://login")


@pytest.mark.parametrize(
    ("claims", "is_in"),
    [
        ({"email": "ada@lab.example", "email_verified": True}, True),
        ({"email": "ada@LAB.example", "email_verified": True}, True),
        ({"email": "ada@lab.example", "email_verified": False}, False),
        ({"email": "ada@lab.example", "email_verified": "true"}, False),
        ({"email": "ada@lab.example"}, False),
        ({"email": "ada@lab.example.evil.org", "email_verified": True}, False),
        ({"email": "lab.example", "email_verified": True}, True),
        ({"email": "a@evil.org@lab.example", "email_verified": True}, True),
        ({}, False),
    ],
)
def test_only_a_verified_address_of_the_domain_may_sign_in(claims: dict[str, object], is_in: bool) -> None:
    limited = settings(domains=("lab.example",))
    if is_in:
        account_of(limited, {"sub": "1", **claims}, issuer="https://login")
    else:
        with pytest.raises(NotAllowed):
            account_of(limited, {"sub": "1", **claims}, issuer="https://login")


@pytest.mark.parametrize(
    ("claims", "groups"),
    [
        ({"groups": ["a", "b"]}, ("a", "b")),
        ({"groups": "a"}, ("a",)),
        ({"groups": [1, "b", None]}, ("b",)),
        ({"groups": {"a": 1}}, ()),
        ({}, ()),
    ],
)
def test_groups_are_a_list_or_one_text(claims: dict[str, object], groups: tuple[str, ...]) -> None:
    assert account_of(settings(), {"sub": "1", **claims}, issuer="i").groups == groups


def test_a_claim_may_be_nested_or_have_dots_in_its_name() -> None:
    nested = settings(groups_claim="realm_access.roles")
    assert account_of(nested, {"sub": "1", "realm_access": {"roles": ["x"]}}, issuer="i").groups == ("x",)
    assert account_of(nested, {"sub": "1", "realm_access.roles": ["y"]}, issuer="i").groups == ("y",)


def test_the_most_powerful_role_wins_and_others_have_the_default() -> None:
    mapped = settings(roles={"ops": "operator", "boss": "admin", "all": "viewer"})
    assert role_of(mapped, ["all", "boss", "ops"]) == "admin"
    assert role_of(mapped, ["all"]) == "viewer"
    assert role_of(mapped, ["else"]) == "member"
    assert role_of(settings(), ["boss"]) is None


def test_without_a_default_role_an_account_needs_a_mapped_group() -> None:
    strict = settings(roles={"ops": "operator"}, role="")
    assert role_of(strict, ["ops"]) == "operator"
    with pytest.raises(NotAllowed):
        role_of(strict, ["else"])


def test_only_mapped_teams_change() -> None:
    mapped = settings(teams={"g-vision": "vision", "g-lang": "language", "g-lang2": "language"})
    assert team_changes(mapped, ["g-vision"], ["language", "robots"]) == TeamChanges(("vision",), ("language",))
    assert team_changes(mapped, ["g-lang2"], ["language"]) == TeamChanges((), ())
    assert team_changes(settings(), ["g-vision"], ["vision"]) == TeamChanges((), ())


def test_user_information_is_asked_for_only_if_a_claim_is_missing() -> None:
    assert missing_claims(settings(), {})
    assert not missing_claims(settings(), {"preferred_username": "ada"})
    assert missing_claims(settings(teams={"g": "t"}), {"preferred_username": "ada"})
    assert missing_claims(settings(domains=("x",)), {"preferred_username": "ada", "email": "a@x"})
