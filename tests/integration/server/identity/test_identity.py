"""Principals, teams and tokens, on both databases; who is let in, and who is not any more."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar, cast

import pytest
import sqlalchemy as sa

from serverless_gpu.errors import InvalidValue, NotAuthenticated, NotFound, ServerStorageFull
from serverless_gpu.model.access_control import Role
from serverless_gpu.server.core.caller import Caller
from serverless_gpu.server.core.server_key import Keys, sha256
from serverless_gpu.server.db.database import Database
from serverless_gpu.server.db.tables import attempts, crews, nodes, pools, runs, tokens
from serverless_gpu.server.http.auth_middleware import Authenticator
from serverless_gpu.server.http.routing import reading, writing
from serverless_gpu.server.identity.bootstrap import first_tokens, principal_name
from serverless_gpu.server.records import audit, principals
from serverless_gpu.server.records.principals import NewToken
from serverless_gpu.testing import FakeClock
from serverless_gpu.wire.access import PrincipalRequest

T = TypeVar("T")
NOW = 1_800_000_000_000_000_000
MINUTE = 60_000_000_000
RUN = "01kaz5w8d3e4f5g6h7j8k9m0n1"


def make(database: Database, name: str, role: Role = "member", teams: tuple[str, ...] = ()) -> str:
    """Make a principal with a token; return the token."""
    secret = principals.new_secret()

    def work(connection: sa.Connection) -> None:
        principals.create_principal(connection, PrincipalRequest(name=name, role=role, teams=teams), now_ns=NOW)
        principals.create_token(connection, NewToken(principal=name), secret=secret, now_ns=NOW)

    database.write(work)
    return secret


def who(database: Database, secret: str, now_ns: int = NOW) -> Caller:
    return database.read(lambda connection: principals.authenticate(connection, secret, now_ns=now_ns))


def refused(database: Database, secret: str, says: str, now_ns: int = NOW) -> None:
    with pytest.raises(NotAuthenticated, match=says):
        who(database, secret, now_ns)


def test_a_token_says_who_its_owner_is(database: Database) -> None:

    def make_teams(connection: sa.Connection) -> None:
        for team in ("search", "ads", "other"):
            principals.create_team(connection, team, now_ns=NOW)

    database.write(make_teams)
    secret = make(database, "ada", "operator", ("search", "ads"))
    caller = who(database, secret)
    assert caller == Caller(name="ada", role="operator", teams=("ads", "search"), token_id=principals.token_id(secret))


def test_the_secret_is_nowhere_in_the_database(database: Database) -> None:
    secret = make(database, "ada")
    rows = database.read(lambda connection: [tuple(row) for row in connection.execute(sa.select(tokens))])
    assert secret[-43:] not in repr(rows) and sha256(secret) in repr(rows)


def test_secrets_are_of_256_bits_and_of_one_form() -> None:
    secrets = {principals.new_secret() for _ in range(100)}
    assert len({secret[-43:] for secret in secrets}) == 100
    assert {len(secret) for secret in secrets} == {5 + 26 + 1 + 43}
    assert all(len(principals.token_id(secret)) == 26 for secret in secrets)


@pytest.mark.parametrize("secret", ["", "x", "sgpu_", "sgpu_" + "0" * 26 + "_" + "A" * 43, "sgpu_" + "é" * 70, "sgpa_"])
def test_what_is_nobodys_token_is_refused(database: Database, secret: str) -> None:
    refused(database, secret, "does not know")


@pytest.mark.parametrize("secret", ["", "x", "sgpu_short", "sgpa_x_1_y"])
def test_what_cannot_be_a_token_costs_no_look_into_the_database(secret: str) -> None:
    nothing = cast(sa.Connection, None)
    with pytest.raises(NotAuthenticated):
        principals.authenticate(nothing, secret, now_ns=NOW)


def test_the_right_identifier_with_another_secret_says_no_more_than_an_unknown_one(database: Database) -> None:
    secret = make(database, "ada")
    refused(database, secret[:-1] + ("A" if secret[-1] != "A" else "B"), "does not know")


def test_a_revoked_token_lets_nobody_in_and_others_stay(database: Database) -> None:
    secret, other = make(database, "ada"), principals.new_secret()
    new = NewToken(principal="ada")
    database.write(lambda connection: principals.create_token(connection, new, secret=other, now_ns=NOW))
    identifier = principals.token_id(secret)
    for _ in range(2):
        view = database.write(lambda connection: principals.revoke_token(connection, identifier, now_ns=NOW + 5))
    assert view.revoked_ns == NOW + 5
    refused(database, secret, "revoked")
    assert who(database, other).name == "ada"


def test_a_token_is_good_until_it_expires(database: Database) -> None:
    make(database, "ada")
    secret = principals.new_secret()
    new = NewToken(principal="ada", expires_ns=NOW + 10)
    database.write(lambda connection: principals.create_token(connection, new, secret=secret, now_ns=NOW))
    assert who(database, secret, NOW + 9).name == "ada"
    refused(database, secret, "expired", NOW + 10)


def test_disabling_revokes_all_tokens_and_enabling_brings_none_back(database: Database) -> None:
    make(database, "root", "admin")
    secret = make(database, "ada")
    database.write(lambda connection: principals.disable(connection, "ada", now_ns=NOW))
    refused(database, secret, "ada is disabled")
    with pytest.raises(InvalidValue, match="disabled"):
        database.write(
            lambda connection: principals.create_token(
                connection, NewToken(principal="ada"), secret=principals.new_secret(), now_ns=NOW
            )
        )
    database.write(lambda connection: principals.enable(connection, "ada"))
    refused(database, secret, "revoked")


@pytest.mark.parametrize("change", ["disable", "demote"])
def test_the_last_administrator_stays(database: Database, change: str) -> None:
    make(database, "root", "admin")
    make(database, "ada")

    def work(connection: sa.Connection) -> None:
        if change == "disable":
            principals.disable(connection, "root", now_ns=NOW)
        else:
            principals.change_role(connection, "root", "member")

    with pytest.raises(InvalidValue, match="only administrator"):
        database.write(work)
    database.write(lambda connection: principals.change_role(connection, "ada", "admin"))
    database.write(work)


def test_two_administrators_who_remove_each_other_at_once_leave_one(database: Database) -> None:
    make(database, "ada", "admin")
    make(database, "bob", "admin")

    def remove(name: str) -> bool:
        try:
            database.write(lambda connection: principals.change_role(connection, name, "viewer"))
        except InvalidValue:
            return False
        return True

    with ThreadPoolExecutor(2) as threads:
        assert sorted(threads.map(remove, ["ada", "bob"])) == [False, True]


@pytest.mark.parametrize("name", ["", "A", "a b", "-a", "a" * 65, "a/b", "ä", "server", "a\n"])
def test_names_that_cannot_be_are_refused(database: Database, name: str) -> None:
    with pytest.raises(InvalidValue):
        make(database, name)


def test_names_are_taken_once_and_teams_have_to_be_there(database: Database) -> None:
    make(database, "ada")
    with pytest.raises(InvalidValue, match="already"):
        make(database, "ada")
    with pytest.raises(NotFound, match="no team"):
        make(database, "bob", teams=("nowhere",))
    assert [one.name for one in database.read(principals.all_principals)] == ["ada"]


def test_members_come_and_go(database: Database) -> None:
    make(database, "ada")
    database.write(lambda connection: principals.create_team(connection, "search", now_ns=NOW))

    def add(connection: sa.Connection) -> bool:
        return principals.add_member(connection, team="search", principal="ada")

    def remove(connection: sa.Connection) -> bool:
        return principals.remove_member(connection, team="search", principal="ada")

    assert [database.write(add), database.write(add)] == [True, False]
    assert database.read(lambda connection: principals.team(connection, "search")).members == ("ada",)
    assert database.read(lambda connection: principals.principal(connection, "ada")).teams == ("search",)
    assert [database.write(remove), database.write(remove)] == [True, False]
    assert database.read(principals.all_teams)[0].members == ()


@pytest.mark.parametrize(
    "new",
    [
        NewToken(principal="ada", scopes=("everything",)),
        NewToken(principal="ada", label="x" * 257),
        NewToken(principal="ada", label="a\0b"),
        NewToken(principal="ada", label="a\x1b[2Jb"),
        NewToken(principal="ada", expires_ns=NOW),
    ],
)
def test_tokens_that_cannot_be_are_refused(database: Database, new: NewToken) -> None:
    make(database, "ada")
    with pytest.raises(InvalidValue):
        database.write(
            lambda connection: principals.create_token(connection, new, secret=principals.new_secret(), now_ns=NOW)
        )


def test_a_use_is_written_down_once_a_minute(database: Database) -> None:
    identifier = principals.token_id(make(database, "ada"))

    def used(now_ns: int) -> int | None:
        database.write(lambda connection: principals.note_use(connection, [identifier], now_ns=now_ns))
        return database.read(lambda connection: principals.token(connection, identifier)).used_ns

    assert [used(NOW), used(NOW + MINUTE - 1), used(NOW + MINUTE + 1)] == [NOW, NOW, NOW + MINUTE + 1]


# --- attempts ---------------------------------------------------------------------------------------------------------


def place(database: Database, fence: int, token: str, *others: str) -> None:
    """Make an attempt as the scheduler would, with as little as there can be."""
    make(database, f"node{fence}", "agent")

    def work(connection: sa.Connection) -> None:
        connection.execute(sa.insert(pools).values(name=f"p{fence}", kind="on-demand", created_ns=NOW))
        node = {"id": f"n{fence}", "name": f"n{fence}", "machine": "", "boot_id": "", "principal": f"node{fence}"}
        connection.execute(sa.insert(nodes).values(**node, pool=f"p{fence}", hello_json="{}", seen_ns=NOW))
        run = {"id": RUN, "owner": f"node{fence}", "priority": 1, "state": "RUNNING", "created_ns": NOW}
        more = {"queued_ns": NOW, "request_sha256": "", "spec_json": "", "target_json": "", "context_sealed": b""}
        connection.execute(sa.insert(runs).values(**run, **more))
        attempt = {"run_id": RUN, "fence": fence, "state": "RUNNING"}
        values = {"gpu_type": "CPU", "world_size": 1, "created_ns": NOW}
        connection.execute(sa.insert(attempts).values(**attempt, **values))
        there = {"node_id": f"n{fence}", "boot_id": "", "gpus": 1, "lease_ns": NOW, "grace_s": 900.0}
        for crew, its in enumerate((token, *others)):
            if crew:
                other = {"id": f"m{crew}", "name": f"m{crew}", "machine": "", "boot_id": "", "pool": f"p{fence}"}
                owner = {"principal": f"node{fence}", "hello_json": "", "seen_ns": NOW}
                connection.execute(sa.insert(nodes).values(**other, **owner))
                there["node_id"] = f"m{crew}"
            connection.execute(sa.insert(crews).values(**attempt, crew=crew, token_sha256=sha256(its), **there))

    database.write(work)


def test_the_token_of_an_attempt_is_good_for_that_attempt(database: Database) -> None:
    keys = Keys(bytes(32))
    token = keys.attempt_token(RUN, 2)
    place(database, 2, token)
    assert who(database, token) == Caller(kind="attempt", attempt=(RUN, 2, 0))
    refused(database, keys.attempt_token(RUN, 3), "does not know")
    refused(database, Keys(bytes(31) + b"1").attempt_token(RUN, 2), "does not know")


def test_the_token_of_a_crew_is_good_for_that_crew(database: Database) -> None:
    keys = Keys(bytes(32))
    first, second = keys.attempt_token(RUN, 2), keys.attempt_token(RUN, 2, 1)
    place(database, 2, first, second)
    assert who(database, first).attempt == (RUN, 2, 0)
    assert who(database, second).attempt == (RUN, 2, 1)
    refused(database, keys.attempt_token(RUN, 2, 2), "does not know")
    refused(database, second.replace("_2-1_", "_2_"), "does not know")


# --- admission --------------------------------------------------------------------------------------------------------


def test_the_gates_questions_are_answered(database: Database) -> None:
    admission = Authenticator(database, clock=FakeClock())
    caller = admission.authenticate(make(database, "vic", "viewer"))
    assert admission.reach(caller, reading("runs")) == "team"
    assert admission.reach(caller, writing("runs")) == "none"
    assert admission.reach(caller, reading("unheard-of")) == "none"
    views = database.read(principals.tokens_of)
    assert views[0].used_ns is not None


def test_somebody_who_only_looks_is_let_in_when_nothing_can_be_written(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = make(database, "ada")

    def full(work: Callable[[sa.Connection], T]) -> T:
        raise ServerStorageFull

    monkeypatch.setattr(database, "write", full)
    assert Authenticator(database, clock=FakeClock()).authenticate(secret).name == "ada"


# --- the first start --------------------------------------------------------------------------------------------------


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "server"


def start(database: Database, directory: Path) -> tuple[str, str]:
    made = first_tokens(database, directory, login="Ada", now_ns=NOW)
    assert made.principal == "ada"
    return made.token, made.node_token


def test_the_first_start_makes_an_administrator_and_a_node(database: Database, directory: Path) -> None:
    token, node_token = start(database, directory)
    assert (who(database, token).name, who(database, token).role) == ("ada", "admin")
    assert (who(database, node_token).kind, who(database, node_token).role) == ("service", "agent")
    assert sorted(os.listdir(directory)) == ["node.token", "token"]
    assert {path.stat().st_mode & 0o777 for path in directory.iterdir()} == {0o600}
    assert (directory / "token").read_text() == f"{token}\n"
    actions = [(entry.principal, entry.action) for entry in database.read(audit.entries)]
    assert actions == [("server", "user.create"), ("server", "token.create")] * 2


def test_a_second_start_changes_nothing(database: Database, directory: Path) -> None:
    first = start(database, directory)
    assert start(database, directory) == first
    assert len(database.read(principals.tokens_of)) == 2


def test_a_lost_file_is_made_again_and_a_crash_before_the_row_too(database: Database, directory: Path) -> None:
    first = start(database, directory)
    (directory / "token").write_text(f"{principals.new_secret()}\n")
    (directory / "node.token").unlink()
    second = start(database, directory)
    assert not set(first) & set(second)
    assert who(database, second[0]).role == "admin" and who(database, second[1]).role == "agent"


def test_a_file_that_is_deleted_takes_its_token_with_it_and_nobody_elses(
    database: Database, directory: Path, tmp_path: Path
) -> None:
    first, elsewhere = start(database, directory), start(database, tmp_path / "elsewhere")
    (directory / "token").unlink()
    (directory / "node.token").unlink()
    start(database, directory)
    for token in first:
        refused(database, token, "revoked")
    assert [who(database, token).role for token in elsewhere] == ["admin", "agent"]
    actions = [entry.action for entry in database.read(audit.entries)]
    assert actions[-4:] == ["token.revoke", "token.create"] * 2


def test_a_token_that_was_revoked_does_not_come_back(database: Database, directory: Path) -> None:
    token, _ = start(database, directory)
    identifier = principals.token_id(token)
    database.write(lambda connection: principals.revoke_token(connection, identifier, now_ns=NOW))
    assert start(database, directory)[0] == token
    refused(database, token, "revoked")


def test_a_login_that_is_somebody_else_here_gives_no_more_than_they_have(database: Database, directory: Path) -> None:
    make(database, "ada", "viewer")
    assert who(database, start(database, directory)[0]).role == "viewer"


@pytest.mark.parametrize(
    ("login", "name"),
    [("ada", "ada"), ("Ada L.", "ada-l."), ("", "admin"), ("--", "admin"), ("server", "admin"), ("node", "admin")],
)
def test_a_login_becomes_a_name(login: str, name: str) -> None:
    assert principal_name(login) == name


def test_a_row_of_the_audit_says_who_did_what_with_which_token(database: Database) -> None:
    caller = Caller(name="ada", token_id="t" * 26)

    def work(connection: sa.Connection) -> None:
        for subject in ("r1", "r2"):
            audit.record(
                connection, who=caller, action=audit.Action.RUN_STOP, subject=subject, now_ns=NOW, detail={"a": 1}
            )

    database.write(work)
    found = database.read(audit.entries)
    assert [(one.principal, one.action, one.subject, one.token, one.detail) for one in found] == [
        ("ada", "run.stop", subject, "t" * 26, {"a": 1}) for subject in ("r1", "r2")
    ]
    assert database.read(lambda connection: audit.entries(connection, after=found[0].seq)) == found[1:]
