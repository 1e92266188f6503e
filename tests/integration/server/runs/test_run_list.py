"""Lists of runs: each filter, both directions, every order; the same on both databases."""

from __future__ import annotations

from typing import Any

import pytest
import sqlalchemy as sa

from serverless_gpu.ambient import created_wall_ns, first_run_id, new_run_id
from serverless_gpu.errors import InvalidValue
from serverless_gpu.model.lifecycle.attempt import Reason, State, StopReason
from serverless_gpu.model.lifecycle.run_lifecycle import StopAsked
from serverless_gpu.model.spec import Resources
from serverless_gpu.server.db import tables
from serverless_gpu.server.db.database import Database
from serverless_gpu.server.lifecycle import transitions
from serverless_gpu.server.lifecycle.transitions import Note
from serverless_gpu.server.records import run_list, runs
from serverless_gpu.server.records.run_list import RunFilter, RunListPage, Sort
from tests.support.server.stored import T0, S, add_node, add_people, add_run, place

DAY = 86_400 * S


def run_at(second: int) -> str:
    """Return an identifier that its client made so many seconds after T0."""
    return first_run_id(T0 + second * S)[:10] + new_run_id()[10:]


def page(database: Database, wished: RunFilter | None = None, **options: Any) -> RunListPage:
    options.setdefault("limit", 100)
    return database.read(lambda connection: run_list.page(connection, wished or RunFilter(), **options))


def found(database: Database, **fields: Any) -> set[str]:
    return {run.id for run in page(database, RunFilter(**fields)).runs}


def end(database: Database, run_id: str, *, at_ns: int, detail: str = "") -> None:
    """Cancel a waiting run."""

    def work(connection: sa.Connection) -> None:
        run = runs.find(connection, run_id)
        assert run is not None
        transitions.apply(connection, run, StopAsked(StopReason.CANCEL), note=Note(at_ns=at_ns, detail=detail))

    database.write(work)


@pytest.fixture
def ten(database: Database) -> list[str]:
    """Write ten runs, of which the even ones have ended in the opposite order; return them oldest first."""
    add_people(database, "alice", "bob")
    ids = [add_run(database, run_id=run_at(n), owner="alice", at_ns=T0 + n * S, name=f"n{n}") for n in range(10)]
    for n in range(0, 10, 2):
        end(database, ids[n], at_ns=T0 + (100 - n) * S)
    return ids


@pytest.mark.parametrize("sort", run_list.SORTS)
def test_pages_lead_to_the_end_and_back_without_a_gap(database: Database, ten: list[str], sort: Sort) -> None:
    wanted = {"newest": ten[::-1], "oldest": ten, "ended": ten[::2]}[sort]
    pages, cursor = [], ""
    while True:
        pages.append(page(database, limit=3, sort=sort, cursor=cursor))
        cursor = pages[-1].following
        if not cursor:
            break
    assert [run.id for one in pages for run in one.runs] == wanted
    assert pages[0].previous == ""
    for later, earlier in zip(pages[:0:-1], pages[-2::-1], strict=True):
        back = page(database, limit=3, sort=sort, cursor=later.previous)
        assert [run.id for run in back.runs] == [run.id for run in earlier.runs]
        assert back.following == earlier.following


def test_a_page_back_is_filled_up_when_the_list_begins_before_it_is_full(database: Database, ten: list[str]) -> None:
    back = page(database, limit=3, cursor=f"-{ten[8]}")
    assert ([run.id for run in back.runs], back.previous) == (ten[:6:-1], "")


@pytest.mark.parametrize(
    ("cursor", "sort"), [("1.abc", "newest"), ("abc", "ended"), ("x.abc", "ended"), (f"{2**70}.abc", "ended")]
)
def test_a_cursor_of_another_order_is_refused(database: Database, cursor: str, sort: Sort) -> None:
    with pytest.raises(InvalidValue):
        page(database, cursor=cursor, sort=sort)


def test_a_type_is_that_of_the_attempt_and_before_that_the_requested_one(database: Database) -> None:
    add_people(database, "alice")
    add_node(database)
    waits = add_run(database, resources=Resources(gpus=1, gpu_type="A100-40"))
    placed = add_run(database, resources=Resources(gpus=1))
    place(database, placed)
    assert found(database, gpu_types=("A100-40", "A100-80")) == {waits}
    assert found(database, gpu_types=("H100",)) == {placed}
    assert found(database, gpu_types=("L4",)) == set()


def test_text_is_found_in_names_identifiers_and_final_sentences(database: Database) -> None:
    add_people(database, "alice")
    named = add_run(database, name="Größe_100%-Train")
    ended = add_run(database, name="other")
    end(database, ended, at_ns=T0, detail="Budget RED is used up")
    for text in ("größe", "GRÖSSE"[:3], "100%-", "e_1", "TRAIN"):
        assert found(database, text=text) == {named}, text
    for text in ("budget red", "was cancelled", ended[:26], ended.upper()):
        assert found(database, text=text) == {ended}, text
    for text in ("100_", "%", "zebra", "\0"):
        assert found(database, text=text) <= ({named} if text == "%" else set()), text


def test_a_time_range_counts_the_servers_time_of_submission(database: Database) -> None:
    add_people(database, "alice")
    early, late = (add_run(database, run_id=run_at(n), at_ns=T0 + n * S) for n in (10, 20))
    skewed = add_run(database, run_id=run_at(20 - 3600), at_ns=T0 + 20 * S)  # Its client's clock is an hour slow.
    assert found(database, from_ns=T0 + 15 * S) == {late, skewed}
    assert found(database, to_ns=T0 + 20 * S) == {early}
    assert found(database, from_ns=T0 + 10 * S, to_ns=T0 + 10 * S + 1) == {early}
    ordered = page(database, RunFilter(from_ns=T0 - DAY, to_ns=T0 + DAY), sort="ended")
    assert ordered.runs == []


def test_filters_add_up(database: Database) -> None:
    add_people(database, "alice", "bob")
    wanted = add_run(database, owner="bob", team="vision", name="x", tags={"a": "1", "b": "2"})
    others: list[dict[str, Any]] = [{"team": "speech"}, {"name": "y"}, {"tags": {"a": "1"}}, {"owner": "alice"}]
    for other in others:
        add_run(database, **{"owner": "bob", "team": "vision", "name": "x", "tags": {"a": "1", "b": "2"}, **other})
    both = {"a": "1", "b": "2"}
    fields: dict[str, Any] = {"owner": "bob", "team": "vision", "name": "x", "tags": both, "text": "X"}
    assert found(database, states=(State.QUEUED,), **fields) == {wanted}
    assert found(database, states=(State.FAILED,), **fields) == set()


@pytest.mark.every_case
def test_the_longest_texts_fit_into_the_indexes(database: Database) -> None:
    letter = "\U0001f9ea"  # Four bytes, and as random as the index cannot compress.
    add_people(database, "alice")

    def odd(count: int) -> str:
        return "".join(chr(ord(letter) + n * 7919 % 97) for n in range(count))

    tags = {odd(256): odd(255)}
    run = add_run(database, name=odd(256), team=odd(64), resources=Resources(gpu_type=odd(256)), tags=tags)
    end(database, run, at_ns=T0, detail=odd(5_000))
    assert found(database, name=odd(256), gpu_types=(odd(256),), tags=tags) == {run}


def test_the_previous_run_of_a_name_is_the_owners(database: Database) -> None:
    add_people(database, "alice", "bob")
    first, _, third = (
        add_run(database, run_id=run_at(n), owner=owner, name="train")
        for n, owner in enumerate(["alice", "bob", "alice"])
    )

    def previous(run_id: str) -> str:
        def work(connection: sa.Connection) -> str:
            run = runs.find(connection, run_id)
            assert run is not None
            return run_list.previous_of_name(connection, run)

        return database.read(work)

    assert (previous(third), previous(first)) == (first, "")
    nameless = [add_run(database, owner="alice") for _ in range(2)]
    assert previous(nameless[1]) == ""


def test_tags_are_removed_with_their_run(database: Database) -> None:
    add_people(database, "alice")
    gone, kept = add_run(database, tags={"k": "v"}), add_run(database, tags={"k": "v"})
    end(database, gone, at_ns=T0)
    database.write(lambda connection: connection.execute(tables.events.delete()))
    assert database.write(lambda connection: runs.remove(connection, gone))
    assert database.read(lambda connection: connection.scalars(sa.select(tables.run_tags.c.run_id)).all()) == [kept]


def test_the_first_identifier_of_a_time_has_this_time_and_sorts_first() -> None:
    first = first_run_id(T0)
    assert created_wall_ns(first) == T0
    assert first < run_at(0) < first_run_id(T0 + S)
    assert first_run_id(-1) == "0" * 26


def test_every_reason_has_a_sentence_that_a_search_finds() -> None:
    assert all(runs.searchable(transitions.reason_sentence(reason, "")) for reason in Reason)
