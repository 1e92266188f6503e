"""The audit in the database: every row gets its place in the chain, whatever order it came in, and keeps it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import sqlalchemy as sa

from serverless_gpu.cli.access import audit as cli_audit
from serverless_gpu.errors import AuditBroken
from serverless_gpu.model.audit_chain import ChainedEntry, ChainHead, follow
from serverless_gpu.server.audit import AT_ONCE, BACK_S, EVERY_S, AuditChainWriter
from serverless_gpu.server.composition import Services
from serverless_gpu.server.db import tables
from serverless_gpu.server.db.database import Database
from serverless_gpu.server.records import audit
from serverless_gpu.server.records.audit import SERVER, Action, AuditFilter
from serverless_gpu.testing import FakeClock
from tests.support.server.principals import Api


def write(database: Database, *subjects: str, action: Action = Action.TEAM_CREATE) -> None:
    def work(connection: sa.Connection) -> None:
        for subject in subjects:
            audit.record(connection, who=SERVER, action=action, subject=subject, now_ns=5, detail={"é": 1.5})

    database.write(work)


def chain_all(services: Services, clock: FakeClock) -> AuditChainWriter:
    chainer = services.make(AuditChainWriter)
    while chainer.tick(clock.boottime_ns()) == clock.boottime_ns():
        pass
    return chainer


def seen(database: Database, **wanted: object) -> list[str]:
    asked = AuditFilter(**wanted)  # type: ignore[arg-type] # as a route passes them on
    return [link.subject for link in database.read(lambda connection: audit.links(connection, asked))]


def whole(database: Database) -> ChainHead:
    """Return the end of the chain, which has to be whole."""
    links = database.read(lambda connection: audit.links(connection, AuditFilter()))
    head, problem = follow(links, after=ChainHead())
    assert not problem
    assert database.read(audit.head) == head
    return head


def test_rows_are_chained_in_order_and_found_by_what_they_say(
    services: Services, database: Database, clock: FakeClock
) -> None:
    write(database, "a", "b")
    assert seen(database) == []
    assert database.read(lambda connection: audit.pending(connection, after_seq=0)) == (2, 5)
    chain_all(services, clock)
    write(database, "c", action=Action.TEAM_ADD)
    chain_all(services, clock)
    assert whole(database).number == 3
    assert seen(database) == ["a", "b", "c"]
    assert seen(database, after=1, limit=1) == ["b"]
    assert seen(database, newest=True, limit=2) == ["b", "c"]
    assert seen(database, action="team.add") == seen(database, subject="c", principal="server") == ["c"]
    assert database.read(lambda connection: audit.pending(connection, after_seq=0)) == (0, None)


def test_where_nothing_happens_the_last_number_is_all_that_is_read(
    services: Services, database: Database, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(database, "a", "b")
    chainer = chain_all(services, clock)
    said: list[str] = []

    def read(work: Callable[[sa.Connection], object]) -> object:
        def noted(connection: sa.Connection) -> object:
            sa.event.listen(connection, "before_cursor_execute", lambda *told: said.append(told[2]))
            return work(connection)

        return Database.read(database, noted)

    monkeypatch.setattr(database, "read", read)
    clock.advance(EVERY_S)
    assert chainer.tick(clock.boottime_ns()) == clock.boottime_ns() + 10**9
    assert len(said) == 1 and "audit_links" not in said[0] and "count" not in said[0].lower()
    monkeypatch.undo()
    write(database, "c")
    assert chainer.tick(clock.boottime_ns()) == clock.boottime_ns()
    assert seen(database) == ["a", "b", "c"]


def test_rows_that_become_visible_late_find_a_place_at_the_end(
    services: Services, database: Database, clock: FakeClock
) -> None:
    write(database, "first", "late", "third")

    def take(connection: sa.Connection) -> sa.RowMapping:
        row = connection.execute(sa.select(tables.audit).where(tables.audit.c.subject == "late")).mappings().one()
        connection.execute(tables.audit.delete().where(tables.audit.c.subject == "late"))
        return row

    late = database.write(take)
    chainer = chain_all(services, clock)
    assert seen(database) == ["first", "third"]
    database.write(lambda connection: connection.execute(tables.audit.insert(), dict(late)))
    clock.advance(BACK_S)
    chainer.tick(clock.boottime_ns())
    assert seen(database) == ["first", "third", "late"]
    assert whole(database).number == 3


def test_many_rows_are_chained_in_several_transactions_and_by_the_next_server(
    services: Services, database: Database, clock: FakeClock
) -> None:
    write(database, *(f"s{number}" for number in range(AT_ONCE + 20)))
    chainer = services.make(AuditChainWriter)
    assert chainer.tick(7) == 7
    assert database.read(audit.head).number == AT_ONCE
    chain_all(services, clock)  # another server goes on
    assert database.read(audit.head).number == AT_ONCE + 20


def test_a_row_that_is_changed_or_removed_is_seen(
    services: Services, database: Database, clock: FakeClock, open_again: Callable[[], Database]
) -> None:
    write(database, "a", "b", "c")
    chain_all(services, clock)
    changed = tables.audit.update().where(tables.audit.c.subject == "b").values(principal="eve")
    open_again().write(lambda connection: connection.execute(changed))
    links = database.read(lambda connection: audit.links(connection, AuditFilter()))
    assert follow(links, after=ChainHead())[0].number == 1

    def cut(connection: sa.Connection) -> None:
        connection.execute(tables.audit_links.delete().where(tables.audit_links.c.number == 2))
        connection.execute(tables.audit.delete().where(tables.audit.c.principal == "eve"))

    open_again().write(cut)
    links = database.read(lambda connection: audit.links(connection, AuditFilter()))
    assert follow(links, after=ChainHead())[1].startswith("entry 2 is missing")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"detail": {"role": "admin"}}, ": they differ in detail"),
        ({"detail": {"role": "admin"}, "sha256": "f" * 64}, ": they differ in detail and sha256"),
        ({"principal": "eve"}, "the server's entry is user.create of eve on bob: they differ in principal"),
    ],
)
def test_a_copy_that_differs_is_told_in_what(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    known = ChainedEntry(
        number=1, seq=1, at_ns=1, principal="root", action="user.create", subject="bob", detail={}, token=""
    )
    other = msgspec.structs.replace(known, **change)
    with pytest.raises(AuditBroken) as refused:
        list(cli_audit.compare_links([other], iter([known]), tmp_path / "audit.jsonl"))
    assert refused.value.message.endswith(said) and refused.value.hint


def test_entries_are_found_by_time_and_before_a_number(
    services: Services, database: Database, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(connection: sa.Connection) -> None:
        for at_ns in (10, 20, 20, 30, 40):
            subject = f"at {at_ns}"
            audit.record(connection, who=SERVER, action=Action.TEAM_CREATE, subject=subject, now_ns=at_ns)

    database.write(work)
    chain_all(services, clock)
    for few in (audit.FEW, 1):  # A search uses the index of rare values, and reads the chain for frequent values.
        monkeypatch.setattr(audit, "FEW", few)
        monkeypatch.setattr(audit, "_BACK", 0)
        assert seen(database, from_ns=20, to_ns=40, principal="server") == ["at 20", "at 20", "at 30"]
        assert seen(database, from_ns=41) == seen(database, to_ns=10) == []
        assert seen(database, from_ns=0, to_ns=1_000) == seen(database)
        assert seen(database, newest=True, limit=2, before=4) == ["at 20", "at 20"]
        assert seen(database, action="team.create", subject="at 30") == ["at 30"]


def test_a_verification_continues_where_it_ended_and_names_the_first_defect(
    services: Services, database: Database, clock: FakeClock
) -> None:
    write(database, "a", "b", "c")
    chain_all(services, clock)
    api = Api(services, database, clock)
    with api.client:
        chain_all(services, clock)
        whole_chain = api.do(api.admin, "GET", "/audit/verification")
        assert (whole_chain["problem"], whole_chain["number"]) == ("", whole_chain["last"])
        two = database.read(lambda connection: audit.links(connection, AuditFilter(limit=2)))[-1]
        rest = api.do(api.admin, "GET", f"/audit/verification?after=2&sha256={two.sha256}")
        assert (rest["entries"], rest["sha256"]) == (rest["last"] - 2, whole_chain["sha256"])
        assert api.ask(api.admin, "GET", "/audit/verification?after=2")[0] == 400
        assert api.ask(api.user("mia"), "GET", "/audit/verification")[0] == 403
        change = tables.audit.update().where(tables.audit.c.subject == "c").values(subject="d")
        database.write(lambda connection: connection.execute(change))
        broken = api.do(api.admin, "GET", "/audit/verification")
        assert broken["number"] == 2
        assert "entry 3" in broken["problem"]
