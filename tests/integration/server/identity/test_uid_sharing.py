"""Runs of a second principal wait with the reason `isolation` until an administrator accepts a shared uid."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import alembic.command
import alembic.config
import msgspec
import pytest
import sqlalchemy as sa
from click.testing import CliRunner, Result

from serverless_gpu.ambient import SystemClock
from serverless_gpu.cli import program
from serverless_gpu.cli.server import decide_sharing
from serverless_gpu.doctor.probes.servers import look_at_server
from serverless_gpu.engines.base import EngineNode
from serverless_gpu.engines.simulated_engine import Reservations, SimulatedEngine
from serverless_gpu.errors import InvalidValue, NotAllowed, NotAuthenticated, ServerProblem
from serverless_gpu.model.lifecycle.attempt import State
from serverless_gpu.model.scheduling.values import WaitReason
from serverless_gpu.model.spec import Resources, RunSpec
from serverless_gpu.server.composition import Services, make_planning, make_scheduler
from serverless_gpu.server.core.caller import Caller
from serverless_gpu.server.core.server_key import sha256
from serverless_gpu.server.db import migrations, tables
from serverless_gpu.server.db.database import Database
from serverless_gpu.server.identity import uid_sharing
from serverless_gpu.server.identity.bootstrap import first_tokens
from serverless_gpu.server.identity.uid_sharing import Exposure
from serverless_gpu.server.records import audit, nodes, pools, principals
from serverless_gpu.server.scheduling.scheduler import Scheduler
from serverless_gpu.wire.access import (
    PrincipalChange,
    PrincipalRequest,
    PrincipalView,
    SecretRequest,
    SecretView,
    TokenMade,
)
from serverless_gpu.wire.nodes import PoolRequest, PoolView
from serverless_gpu.wire.runs import EstimateRequest, Target
from tests.support.golden import golden
from tests.support.server.agents import NODE, find, hello
from tests.support.server.late import before_next_write
from tests.support.server.served import Served, served
from tests.support.server.stored import T0, add_run

ROOT = Caller(name="root", role="admin")
BOB = Caller(name="bob", role="member", token_id="token-1")
RESOURCES = Resources(gpus=1, gpu_type="H100")
ALLOW, REVOKE = PoolRequest(isolation="none"), PoolRequest(isolation="unset")


@pytest.fixture(autouse=True)
def shared_pools() -> None:
    """Decide nothing beforehand: these are the tests of that decision."""


@pytest.fixture
def people(services: Services) -> None:
    """Make the first administrator, a node's service, and a member who was first to submit."""
    rows = [
        {"name": "root", "kind": "user", "role": "admin", "created_ns": T0},
        {"name": "node", "kind": "service", "role": "agent", "created_ns": T0},
        {"name": "bob", "kind": "user", "role": "member", "created_ns": T0 + 1},
    ]
    services.database.write(lambda connection: connection.execute(tables.principals.insert(), rows))
    services.agents.hello(NODE, hello())


def submit(services: Services, owner: str, **fields: object) -> str:
    return add_run(services.database, owner=owner, resources=RESOURCES, **fields)  # type: ignore[arg-type] # a Database


def tick(services: Services, scheduler: Scheduler) -> None:
    scheduler.tick(services.clock.boottime_ns())


def state(services: Services, run_id: str) -> State:
    return find(services, run_id).state


@pytest.mark.usefixtures("people")
def test_in_a_pool_with_sandboxes_runs_of_all_principals_start_on_nodes_that_offer_them(services: Services) -> None:
    view = services.pools.put(ROOT, "default", PoolRequest(isolation="sandbox"))
    assert view.isolation == "sandbox"
    theirs = submit(services, "bob")
    scheduler = make_scheduler(services)
    tick(services, scheduler)
    assert state(services, theirs) is State.QUEUED
    told = services.sentences.told(theirs)
    assert told.wait is not None and told.wait.reason is WaitReason.AWAY
    assert golden("server.isolation.no-sandbox") in told.sentence

    services.agents.hello(NODE, hello(isolation="sandbox"))
    tick(services, scheduler)
    assert state(services, theirs) is State.STARTING
    (node,) = services.nodes.view_nodes()
    assert (node.isolation, node.sentence) == ("sandbox", "")
    assert services.database.read(lambda connection: pools.level(connection, node.pool)) == "sandbox"


@pytest.mark.usefixtures("people")
def test_22A1_runs_of_a_second_principal_wait_until_an_administrator_accepts_it(services: Services) -> None:
    theirs, own = submit(services, "bob"), submit(services, "root")
    scheduler = make_scheduler(services)
    tick(services, scheduler)
    assert (state(services, theirs), state(services, own)) == (State.QUEUED, State.STARTING)
    told = services.sentences.told(theirs)
    assert told.wait is not None and told.wait.reason is WaitReason.ISOLATION
    assert told.sentence == told.wait.words and golden("server.isolation.sgpu-pool-set") in told.sentence
    (entry,) = services.queue_views.view(ROOT, "all", limit=10, mine=False).entries
    assert entry.waiting is not None and entry.waiting.reason == "isolation"
    asked = EstimateRequest(
        spec=RunSpec(remote=True, resources=RESOURCES), target=Target(python="3.11", platform="linux-x86_64")
    )
    estimated = services.estimates.make(BOB, asked)
    assert estimated.at_ns is None and estimated.basis == told.sentence
    assert services.estimates.make(ROOT, asked).at_ns is not None

    view = services.pools.put(ROOT, "default", ALLOW)
    assert view.isolation == "none"
    tick(services, scheduler)
    assert state(services, theirs) is State.STARTING
    entries = services.database.read(lambda connection: audit.entries(connection, limit=10))
    assert [(one.principal, one.detail["isolation"]) for one in entries if one.action == "pool.put"] == [
        ("root", ["unset", "none"])
    ]


@pytest.mark.usefixtures("people")
def test_22A1_an_engine_reserves_nothing_for_a_second_principal(services: Services) -> None:
    """A pool whose nodes are an engine's, as those of Ray are."""
    (node,) = services.database.read(nodes.every)
    engine = SimulatedEngine([EngineNode(name=node.name, devices=node.hello.devices)], Reservations())
    scheduler = make_scheduler(services, engine=engine)
    theirs, own = submit(services, "bob"), submit(services, "root")
    tick(services, scheduler)
    assert (state(services, theirs), state(services, own)) == (State.QUEUED, State.STARTING)
    told = services.sentences.told(theirs)
    assert told.wait is not None and told.wait.reason is WaitReason.ISOLATION
    assert engine.recover() == [f"{own}:1"]
    services.pools.put(ROOT, "default", ALLOW)
    tick(services, scheduler)
    assert state(services, theirs) is State.STARTING
    assert sorted(engine.recover()) == sorted([f"{own}:1", f"{theirs}:1"])


@pytest.mark.usefixtures("people")
def test_22A1_taking_it_back_keeps_new_runs_waiting_and_leaves_those_that_run(services: Services) -> None:
    services.pools.put(ROOT, "default", ALLOW)
    first, scheduler = submit(services, "bob"), make_scheduler(services)
    tick(services, scheduler)
    assert services.pools.put(ROOT, "default", REVOKE).isolation == "unset"
    later = submit(services, "bob")
    tick(services, scheduler)
    assert (state(services, first), state(services, later)) == (State.STARTING, State.QUEUED)
    tick(services, make_scheduler(services))  # also after a restart
    assert state(services, later) is State.QUEUED
    services.pools.put(ROOT, "default", PoolRequest(kind="on-demand"))  # what is not said stays as it is
    assert services.nodes.view_pools()[0].isolation == "unset"
    with pytest.raises(InvalidValue, match=re.escape(golden("server.isolation.cannot-isolation-container"))):
        services.pools.put(ROOT, "default", PoolRequest(isolation="container"))


@pytest.mark.usefixtures("people")
def test_22A1_a_decision_that_was_taken_back_meanwhile_holds_in_the_transaction_that_places(
    services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    services.pools.put(ROOT, "default", ALLOW)
    run_id, scheduler = submit(services, "bob"), make_scheduler(services)
    before_next_write(monkeypatch, services.database, lambda: services.pools.put(ROOT, "default", REVOKE))
    tick(services, scheduler)
    assert state(services, run_id) is State.QUEUED


@pytest.mark.usefixtures("people")
def test_22A1_only_the_first_administrator_is_the_first_principal(services: Services) -> None:
    def first() -> str:
        return services.database.read(principals.first_administrator)

    def change(name: str, **values: object) -> None:
        where = tables.principals.c.name == name
        services.database.write(lambda connection: connection.execute(tables.principals.update().where(where), values))

    assert first() == "root"
    change("bob", role="admin")
    assert first() == "root"  # a second administrator is a second principal
    change("root", role="member")
    assert first() == ""  # and does not take the place of the first one
    own, scheduler = submit(services, "root"), make_scheduler(services)
    tick(services, scheduler)
    assert state(services, own) is State.QUEUED
    change("root", role="admin")
    tick(services, scheduler)
    assert state(services, own) is State.STARTING


@pytest.mark.usefixtures("people")
def test_22A1_a_run_that_waits_for_isolation_takes_no_room_of_a_cap(services: Services) -> None:
    planning = make_planning(services)
    waiting = [submit(services, "bob") for _ in range(3)]
    reading = planning.read()
    assert {reading.waiting[run_id].held for run_id in waiting} == {""}
    assert all(reading.waiting[run_id].second_principal for run_id in waiting)


@pytest.mark.usefixtures("people")
def test_22A1_the_operator_is_asked_once_and_the_answer_is_audited(services: Services) -> None:
    submit(services, "bob")
    asked: list[Exposure] = []

    def settle(answer: bool | None) -> None:
        def ask(found: Exposure) -> bool | None:
            asked.append(found)
            return answer

        uid_sharing.settle(services.database, ask, now_ns=T0)

    settle(None)  # no terminal: it stays open
    settle(False)
    settle(True)  # decided already: this is a warning only
    assert [one.undecided for one in asked] == [("default",), ("default",), ()]
    assert {(one.principals, one.had_runs, one.closed, one.shared) for one in asked} == {
        (("bob",), ("bob",), ("default",), ())
    }
    entries = services.database.read(lambda connection: audit.entries(connection, limit=10))
    said = [(one.principal, one.detail.get("isolation")) for one in entries if one.action == "pool.put"]
    assert said == [("server", "unset")]


def test_22A1_a_database_of_the_first_revision_is_upgraded_undecided_and_its_tokens_get_an_end(
    tmp_path: Path,
) -> None:
    """A server that has several users already: after the upgrade nobody has decided."""
    config = alembic.config.Config()
    config.set_main_option("script_location", str(Path(migrations.__file__).parent))
    secret = principals.new_secret()
    person = "INSERT INTO principals (name, kind, role, created_ns) VALUES (:name, 'user', :role, :at)"
    pool = "INSERT INTO pools (name, kind, lends, return_s, created_ns) VALUES ('default', 'on-demand', false, 300, 1)"
    token = (
        "INSERT INTO tokens (id, sha256, principal, label, scopes_json, created_ns) "
        "VALUES (:id, :sha256, 'ann', 'made by the server: token', '[]', 1)"
    )

    def as_before(connection: sa.Connection) -> None:
        config.attributes["connection"] = connection
        alembic.command.upgrade(config, "0001")
        connection.execute(sa.text(person), [{"name": "ann", "role": "admin", "at": 1}])
        connection.execute(sa.text(person), [{"name": "bob", "role": "member", "at": 2}])
        connection.execute(sa.text(pool))
        connection.execute(sa.text(token), {"id": principals.token_id(secret), "sha256": sha256(secret)})

    with contextlib.closing(Database(f"sqlite:///{tmp_path}/server.db", clock=SystemClock())) as database:
        database.write(as_before)
        database.migrate()
        assert database.read(migrations.revision) == migrations.HEAD
        found = database.read(uid_sharing.exposure)
        assert (found.undecided, found.principals, found.had_runs) == (("default",), ("bob",), ())
        first_tokens(database, tmp_path, login="ann", now_ns=T0)
        kept = database.read(lambda connection: principals.token(connection, principals.token_id(secret)))
        assert kept.expires_ns == T0 + int(principals.TOKEN_EXPIRY_S * 1e9)


def test_22A1_a_real_server_warns_keeps_apart_and_is_told_otherwise(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    admin = server.connection()
    monkeypatch.setenv("SERVERLESS_GPU_SERVER", server.url)
    monkeypatch.setenv("SERVERLESS_GPU_TOKEN", server.token)
    facts = look_at_server({"SERVERLESS_GPU_SERVER": server.url, "SERVERLESS_GPU_TOKEN": server.token})
    assert (facts.principals, facts.shared_pools) == (1, ())

    def sgpu(*arguments: str) -> tuple[str, str]:
        done = CliRunner().invoke(program.sgpu, arguments, catch_exceptions=False, prog_name="sgpu")
        assert done.exit_code == 0, done.output
        return done.stdout, done.stderr

    out, err = sgpu("user", "create", "bob")
    assert len(out.splitlines()) == 1  # the secret alone
    assert (
        golden("server.isolation.warning-runs-bob") in err and golden("server.isolation.sgpu-pool-set-default") in err
    )
    assert "warning" not in sgpu("user", "create", "looks", "--role", "viewer")[1]
    _, err = sgpu("pool", "set", "--isolation", "none")
    assert golden("server.isolation.warning-pool-default") in err
    assert " none " in sgpu("pool", "list")[0]
    assert "sgpu server rotate" in sgpu("pool", "set", "--isolation", "sandbox")[1]
    assert "sgpu server rotate" not in sgpu("pool", "set", "--isolation", "sandbox")[1]
    sgpu("pool", "set", "--isolation", "none")
    _, err = sgpu("user", "create", "eve")
    assert golden("server.isolation.all-runs-pool") in err
    facts = look_at_server({"SERVERLESS_GPU_SERVER": server.url, "SERVERLESS_GPU_TOKEN": server.token})
    assert (facts.principals, facts.shared_pools, facts.closed_pools) == (3, ("default",), ())
    out, _ = sgpu("pool", "set", "--isolation", "unset")
    assert "now wait" in out
    member = server.connection(admin.ask("POST", "/users", PrincipalRequest(name="max"), answer=TokenMade).secret)
    with pytest.raises(NotAllowed):
        member.ask("PUT", "/pools/default", ALLOW, answer=PoolView)
    admin.ask("PATCH", "/users/max", PrincipalChange(disabled=True), answer=PrincipalView)
    assert msgspec.json.decode(sgpu("pool", "list", "--json")[0])[0]["isolation"] == "unset"


def test_22A1_a_start_shows_who_shares_a_uid_with_whom(server: Served) -> None:
    server.connection().ask("POST", "/users", PrincipalRequest(name="bob"), answer=TokenMade)
    server.stop()
    server.wait_stopped()
    asked: list[Exposure] = []

    def decide(found: Exposure) -> bool:
        asked.append(found)
        return True

    with served(server.home, decide=decide):
        assert [one.principals for one in asked] == [("bob",)]


class Terminal(io.StringIO):
    """Somebody who types, or reads."""

    def isatty(self) -> bool:
        return True


FOUND = Exposure(principals=("bob",), had_runs=("bob",), undecided=("default",), closed=("default",), shared=())


@pytest.mark.parametrize(("typed", "answer"), [("y\n", True), ("\n", False)])
def test_22A1_an_upgrade_asks_on_a_terminal_and_says_how_to_rotate(
    typed: str, answer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = Terminal()
    monkeypatch.setattr("sys.stdin", Terminal(typed))
    monkeypatch.setattr("sys.stderr", shown)
    assert decide_sharing(FOUND) is answer
    assert golden("server.isolation.bob-ran-code") in shown.getvalue() and "`sgpu server rotate`" in shown.getvalue()
    assert golden("server.isolation.may-runs-several") in shown.getvalue()


def test_22A1_without_a_terminal_it_warns_and_leaves_it_open(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    assert decide_sharing(FOUND) is None
    assert golden("server.isolation.warning-runs-bob") in capsys.readouterr().err
    decided = Exposure(principals=("bob",), had_runs=(), undecided=(), closed=(), shared=("default",))
    monkeypatch.setattr("sys.stdin", Terminal("y\n"))
    assert decide_sharing(decided) is None
    assert golden("server.isolation.code-bob-can") in capsys.readouterr().err


def test_22A1_a_server_is_rotated_while_it_is_stopped_and_says_what_is_left_to_do(server: Served) -> None:
    made = server.connection().ask("POST", "/users", PrincipalRequest(name="bob"), answer=TokenMade)
    secret = SecretRequest(value=b"hi")
    server.connection().ask("PUT", "/secrets/HF", secret, answer=SecretView)

    def rotate() -> Result:
        return CliRunner().invoke(program.sgpu, ["server", "rotate", "--yes"], prog_name="sgpu")

    running = rotate()
    assert isinstance(running.exception, ServerProblem) and "is already running" in running.exception.message
    server.stop()
    server.wait_stopped()
    done = rotate()
    assert done.exit_code == 0, done.output
    assert golden("server.isolation.bob-token-revoked") in done.stdout
    assert "secret HF of " in done.stdout and golden("server.isolation.change-source") in done.stdout
    with served(server.home) as again:
        assert again.token != server.token and again.node_token != server.node_token
        assert again.connection().ask("GET", "/whoami", answer=PrincipalView).role == "admin"
        for token in (server.token, server.node_token, made.secret):
            with pytest.raises(NotAuthenticated, match="revoked"):
                again.connection(token).ask("GET", "/whoami", answer=PrincipalView)
