"""What a node reports becomes what the server knows: whole or not at all, once, and only from who may."""

from __future__ import annotations

import errno
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
from blake3 import blake3

from serverless_gpu.errors import InvalidValue, NotFound, ServerlessGpuError, TooLarge
from serverless_gpu.model.lifecycle.attempt import Reason, State, StopReason
from serverless_gpu.model.lifecycle.run_lifecycle import AttemptEnded, GivenUp, Silent, StopAsked
from serverless_gpu.model.spec import BlobReference, Command
from serverless_gpu.server.composition import Services
from serverless_gpu.server.core.hub import SCHEDULER, run_key
from serverless_gpu.server.db import tables
from serverless_gpu.server.db.database import Database
from serverless_gpu.server.records import audit, crews, facts, files
from serverless_gpu.server.records.files import StoredFile
from serverless_gpu.server.runs import run_views
from serverless_gpu.testing import FakeClock
from serverless_gpu.wire.agents import Ending, File
from serverless_gpu.wire.base import INLINE_BYTES_MAX
from tests.support.golden import golden
from tests.support.server.made import made_services
from tests.support.server.reporting import CALM, COMPLETED, RESULTS, clock, fact, piece, run_id, say, services
from tests.support.server.stored import T0, S, add_run, outcome, place, rows, stored, tell

__all__ = ["clock", "run_id", "services"]

FAILED = Ending(state=State.FAILED, reason=Reason.RANK_RAISED, began=True, stopped=msgspec.Raw(b'{"a":2}'))


def test_an_attempt_starts_runs_and_completes(
    services: Services, database: Database, clock: FakeClock, run_id: str
) -> None:
    clock.advance(5)
    assert say(services, run_id, State.STARTING, sentence="restoring the environment") == CALM
    run = stored(database, run_id)
    assert run.state is State.STARTING and run_views.sentence(run) == "restoring the environment"
    assert say(services, run_id, exec_ns=T0 + 3 * S) == CALM
    run = stored(database, run_id)
    assert (run.state, run.started_ns, run_views.sentence(run)) == (State.RUNNING, T0 + 3 * S, "")
    assert say(services, run_id, State.STOPPING, exec_ns=T0 + 3 * S, files=RESULTS, ending=COMPLETED) == CALM
    run = stored(database, run_id)
    assert (run.state, run.reason, run.finished) == (State.SUCCEEDED, Reason.COMPLETED, False)
    assert say(services, run_id, State.STOPPING, receipt=msgspec.Raw(b'{"gpu_ms":7}')) == CALM
    assert stored(database, run_id).finished
    assert outcome(database, run_id) == crews.CrewOutcome(stopped='{"a":1}', receipt='{"gpu_ms":7}')


def test_a_whole_life_in_one_report_is_told_in_order(services: Services, database: Database, run_id: str) -> None:
    say(services, run_id, State.STOPPING, exec_ns=T0, files=RESULTS, ending=COMPLETED, receipt=msgspec.Raw(b"{}"))
    assert stored(database, run_id).finished
    states = [row["state"] for row in rows(database, tables.events)]
    assert states == ["STARTING", "RUNNING", "STOPPING", "SUCCEEDED"]
    look = database.read(lambda connection: run_views.look(connection, run_id, 2))
    assert [message.state for message in look.events] == [State.RUNNING, State.STOPPING]
    assert look.ended is not None and look.settled is not None
    assert (look.ended.seq, look.ended.state, look.ended.ending) == (5, State.SUCCEEDED, msgspec.Raw(b'{"a":1}'))
    assert [(file.name, file.inline) for file in look.ended.files] == [
        ("results/0.pkl", b"r0"),
        ("results/1.pkl", b"r1"),
    ]
    again = database.read(lambda connection: run_views.look(connection, run_id, 5))
    assert again.events == () and again.ended is not None and again.settled is not None


def test_22C9_the_scheduler_looks_once_at_all_that_an_ending_report_changed(
    services: Services, database: Database, run_id: str
) -> None:
    found: list[bool] = []
    services.hub.listen(SCHEDULER, lambda: found.append(stored(database, run_id).finished))
    receipt = msgspec.Raw(b"{}")
    say(services, run_id, State.STOPPING, exec_ns=T0, files=RESULTS, ending=COMPLETED, receipt=receipt, freed=True)
    assert found and all(found), "no look before the transaction, which would find devices without their run's end"


def test_F33_a_completion_that_is_sent_again_changes_nothing(
    services: Services, database: Database, run_id: str
) -> None:
    said: dict[str, Any] = {
        "exec_ns": T0,
        "logs": (piece(b"hello\n"),),
        "facts": (fact(run_id, 0), fact(run_id, 1)),
        "files": RESULTS,
        "ending": COMPLETED,
        "receipt": msgspec.Raw(b"{}"),
    }
    assert say(services, run_id, State.STOPPING, **said) == CALM
    before = {table.name: rows(database, table) for table in tables.metadata.sorted_tables}
    assert say(services, run_id, State.STOPPING, **said) == CALM
    assert {table.name: rows(database, table) for table in tables.metadata.sorted_tables} == before
    assert services.logs.read(run_id, 1, rank=0, stream="stdout", limit=100) == b"hello\n"


def test_F33_logs_that_were_taken_before_the_server_died_are_not_taken_twice(
    services: Services, database: Database, run_id: str, tmp_path: Path, clock: FakeClock
) -> None:
    """The logs are appended before the transaction: here the transaction never happened."""
    services.logs.append(run_id, 1, rank=0, stream="stdout", offset=0, data=b"hello\n")
    after_restart = made_services(database, tmp_path, clock=clock)
    answer = say(
        after_restart, run_id, State.STOPPING, logs=(piece(b"hello\nworld\n"),), files=RESULTS, ending=COMPLETED
    )
    assert answer == CALM
    assert after_restart.logs.read(run_id, 1, rank=0, stream="stdout", limit=100) == b"hello\nworld\n"
    assert stored(database, run_id).state is State.SUCCEEDED


def test_F33_an_ending_is_acknowledged_once_its_logs_are_durable(
    services: Services, database: Database, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.EIO, "the disk is broken")

    said: dict[str, Any] = {"exec_ns": T0, "logs": (piece(b"hello\n"),), "files": RESULTS, "ending": COMPLETED}
    with monkeypatch.context() as broken:
        broken.setattr(services.logs, "sync", full)
        for _ in range(2):  # the node keeps what it has, and reports again
            with pytest.raises(OSError, match=re.escape(golden("server.reporting.disk-broken"))):
                say(services, run_id, State.STOPPING, **said)
    assert say(services, run_id, State.STOPPING, **said) == CALM
    assert (stored(database, run_id).state, stored(database, run_id).events) == (State.SUCCEEDED, 5)


def test_F64_a_report_of_an_attempt_that_was_given_up_is_kept_out_and_audited(
    services: Services, database: Database, run_id: str
) -> None:
    tell(database, run_id, GivenUp(Reason.NODE_REBOOTED))
    before = rows(database, tables.runs)
    answer = say(
        services,
        run_id,
        State.STOPPING,
        logs=(piece(b"late\n"),),
        facts=(fact(run_id, 0),),
        files=RESULTS,
        ending=COMPLETED,
        receipt=msgspec.Raw(b"{}"),
    )
    assert answer.stale and answer.stop is None
    assert rows(database, tables.runs) == before and rows(database, tables.files) == []
    # What it used and wrote is the truth, and kept.
    assert services.logs.read(run_id, 1, rank=0, stream="stdout", limit=100) == b"late\n"
    assert len(database.read(lambda connection: facts.of_crew(connection, (run_id, 1, 0)))) == 1
    say(services, run_id, State.STOPPING, ending=COMPLETED)
    (entry,) = database.read(audit.entries)  # once, however often it comes
    assert (entry.action, entry.subject) == ("run.stale", run_id)
    assert entry.detail == {"fence": 1, "reason": "completed", "given_up_as": "node_rebooted"}


def test_F64_a_stale_report_does_not_touch_the_attempt_that_followed(services: Services, database: Database) -> None:
    run_id = add_run(database, resume=True)
    place(database, run_id)
    say(services, run_id, exec_ns=T0)
    tell(database, run_id, GivenUp(Reason.NODE_GONE))
    assert place(database, run_id) == 2
    say(services, run_id, State.STARTING, fence=2, sentence="starting")
    before = stored(database, run_id)
    assert say(services, run_id, fence=1, exec_ns=T0, sentence="still here").stale
    assert say(services, run_id, State.STOPPING, fence=1, exec_ns=T0, files=RESULTS, ending=COMPLETED).stale
    assert stored(database, run_id) == before
    assert not say(services, run_id, State.STARTING, fence=2, sentence="starting").stale


def test_an_attempt_that_was_refused_is_stale_while_it_seems_to_run_and_user_code_never_begins(
    services: Services, database: Database, run_id: str
) -> None:
    """Its order was delivered twice, say: the run is placed again, and this one must not be confirmed."""
    tell(database, run_id, AttemptEnded(Reason.REFUSED, began=False))
    assert place(database, run_id) == 2
    assert say(services, run_id, State.STARTING).stale
    assert say(services, run_id, exec_ns=T0).stale
    ending = Ending(state=State.FAILED, reason=Reason.REFUSED, began=False)
    assert not say(services, run_id, State.STOPPING, ending=ending).stale
    assert not say(services, run_id, State.STARTING, fence=2).stale


def test_a_longer_grace_is_written_before_it_is_granted_and_never_shortened(
    services: Services, database: Database, run_id: str, tmp_path: Path, clock: FakeClock
) -> None:
    def grace_s() -> float:
        attempt = stored(database, run_id).attempt
        assert attempt is not None
        return attempt.crews[0].grace_s

    say(services, run_id, exec_ns=T0)
    assert grace_s() == 900
    for granted_s, longest_s in ((7200.0, 7200.0), (60.0, 7200.0)):
        following = made_services(database, tmp_path, clock=clock, partition_grace_s=granted_s)
        assert say(following, run_id, exec_ns=T0).partition_grace_s == granted_s
        assert grace_s() == longest_s


def test_an_attempt_that_never_was_is_stale(services: Services, run_id: str) -> None:
    assert say(services, run_id, fence=2).stale
    assert say(services, "0" * 26).stale


def test_a_receipt_comes_after_the_run_has_gone_on(services: Services, database: Database) -> None:
    run_id = add_run(database, retries=1)
    place(database, run_id)
    say(services, run_id, State.STOPPING, exec_ns=T0, ending=FAILED)
    assert stored(database, run_id).state is State.QUEUED
    assert place(database, run_id) == 2
    answer = say(services, run_id, State.STOPPING, exec_ns=T0, ending=FAILED, receipt=msgspec.Raw(b'{"n":1}'))
    assert not answer.stale and answer.stop is None
    run = stored(database, run_id)
    assert (run.state, run.fence, run.settled_ns) == (State.STARTING, 2, None)
    assert outcome(database, run_id).receipt == '{"n":1}'


def test_a_stop_is_told_with_every_answer_until_the_end(services: Services, database: Database, run_id: str) -> None:
    say(services, run_id, exec_ns=T0)
    tell(database, run_id, StopAsked(StopReason.PREEMPT))
    assert say(services, run_id, exec_ns=T0).stop is StopReason.PREEMPT
    tell(database, run_id, StopAsked(StopReason.CANCEL))
    assert say(services, run_id, State.STOPPING, exec_ns=T0).stop is StopReason.CANCEL
    cancelled = Ending(state=State.CANCELLED, reason=Reason.CANCELLED, began=True)
    assert say(services, run_id, State.STOPPING, exec_ns=T0, ending=cancelled).stop is None
    run = stored(database, run_id)
    assert (run.state, run.finished) == (State.CANCELLED, True)  # nobody will send a receipt


def test_who_was_silent_is_heard_again(services: Services, database: Database, run_id: str) -> None:
    say(services, run_id, exec_ns=T0)
    tell(database, run_id, Silent())
    assert golden("server.reporting.word-n1-since") in run_views.sentence(stored(database, run_id))
    say(services, run_id, exec_ns=T0)
    assert stored(database, run_id).state is State.RUNNING


def test_who_was_silent_may_have_ended_meanwhile(services: Services, database: Database, run_id: str) -> None:
    tell(database, run_id, Silent())
    say(services, run_id, State.STOPPING, exec_ns=T0 + S, files=RESULTS, ending=COMPLETED)
    states = [row["state"] for row in rows(database, tables.events)]
    assert states == ["STARTING", "UNREACHABLE", "STOPPING", "SUCCEEDED"]
    assert stored(database, run_id).started_ns == T0 + S


def test_a_life_sign_is_written_now_and_then(
    services: Services, database: Database, run_id: str, clock: FakeClock
) -> None:
    say(services, run_id, exec_ns=T0)

    def lease_ns() -> int:
        attempt = stored(database, run_id).attempt
        assert attempt is not None
        return attempt.crews[0].lease_ns

    written_ns = lease_ns()
    clock.advance(10)
    say(services, run_id, exec_ns=T0)
    assert lease_ns() == written_ns
    clock.advance(10)
    say(services, run_id, exec_ns=T0)
    assert lease_ns() == written_ns + 20 * S
    # The lease itself is renewed with every report, by the clock of this process.
    clock.advance(10)
    say(services, run_id, exec_ns=T0)
    assert services.leases.last_ns((run_id, 1, 0), now_ns=0) == clock.boottime_ns()


def test_logs_say_where_they_want_to_go_on(services: Services, run_id: str) -> None:
    assert say(services, run_id, logs=(piece(b"0123"), piece(b"4567", 4))).offsets == {}
    assert say(services, run_id, logs=(piece(b"zz", 100),)).offsets == {"0.stdout": 8}
    assert say(services, run_id, logs=(piece(b"0123"),)).offsets == {"0.stdout": 8}
    assert say(services, run_id, logs=(piece(b"6789", 6), piece(b"r1", rank=1))).offsets == {}
    assert services.logs.read(run_id, 1, rank=0, stream="stdout", limit=100) == b"0123456789"


def test_a_large_file_is_a_blob_whose_parts_are_here(services: Services, database: Database, run_id: str) -> None:
    data = b"x" * 1000
    digest = blake3(data).hexdigest()
    large = File(name="results/0.pkl", size=1000, blob=BlobReference(size=1000, parts=(digest,)))
    with pytest.raises(NotFound, match=re.escape(golden("server.reporting.parts-files"))):
        say(services, run_id, State.STOPPING, files=(large, RESULTS[1]), ending=COMPLETED, logs=(piece(b"x"),))
    assert stored(database, run_id).state is State.STARTING
    assert services.logs.sizes(run_id, 1) == {}
    services.blobs.put(digest, data)
    say(services, run_id, State.STOPPING, files=(large, RESULTS[1]), ending=COMPLETED)
    found = database.read(lambda connection: files.find(connection, run_id, 1, "results/0.pkl"))
    assert found == StoredFile(name="results/0.pkl", size=1000, parts=(digest,))
    assert digest in set(database.read(lambda connection: list(files.parts_in_use(connection))))


def test_a_run_has_not_completed_without_the_results_of_all_ranks(
    services: Services, database: Database, run_id: str
) -> None:
    with pytest.raises(InvalidValue, match=re.escape(golden("server.reporting.results-here"))):
        say(services, run_id, State.STOPPING, exec_ns=T0, files=RESULTS[:1], ending=COMPLETED)
    assert stored(database, run_id).state is State.STARTING
    assert rows(database, tables.files) == []
    say(services, run_id, State.STOPPING, exec_ns=T0, files=RESULTS[:1])
    say(services, run_id, State.STOPPING, exec_ns=T0, files=RESULTS[1:], ending=COMPLETED)
    assert stored(database, run_id).state is State.SUCCEEDED


def test_a_command_has_no_results(services: Services, database: Database) -> None:
    run_id = add_run(database, payload=Command(argv=("true",)))
    place(database, run_id)
    say(services, run_id, State.STOPPING, exec_ns=T0, ending=COMPLETED)
    assert stored(database, run_id).state is State.SUCCEEDED


def test_results_of_an_ended_attempt_stay_what_they_are(services: Services, database: Database, run_id: str) -> None:
    say(services, run_id, State.STOPPING, exec_ns=T0, files=RESULTS, ending=COMPLETED)
    other = (File(name="results/0.pkl", size=4, inline=b"evil"), File(name="receipt.json", size=2, inline=b"{}"))
    say(services, run_id, State.STOPPING, files=other, receipt=msgspec.Raw(b"{}"))
    found = database.read(lambda connection: files.of_attempt(connection, run_id, 1))
    assert [(file.name, file.inline) for file in found] == [
        ("receipt.json", b"{}"),
        ("results/0.pkl", b"r0"),
        ("results/1.pkl", b"r1"),
    ]


def test_a_fact_that_contradicts_another_is_said_and_left_out(
    services: Services, database: Database, run_id: str, caplog: pytest.LogCaptureFixture
) -> None:
    say(services, run_id, facts=(fact(run_id, 1), fact(run_id, 0)))
    say(services, run_id, facts=(fact(run_id, 1), fact(run_id, 2)))
    assert not caplog.records
    say(services, run_id, facts=(fact(run_id, 1, cpus=9),))
    assert golden("server.reporting.fact-attempt-came", run_id=run_id) in caplog.text
    found = database.read(lambda connection: facts.of_crew(connection, (run_id, 1, 0)))
    assert [(one.seq, one.cpus) for one in found] == [(0, 0), (1, 0), (2, 0)]


def test_a_failure_is_told_with_what_the_node_says(services: Services, database: Database, run_id: str) -> None:
    say(services, run_id, State.STOPPING, exec_ns=T0, ending=FAILED, sentence="rank 1: ValueError: no")
    run = stored(database, run_id)
    assert run_views.sentence(run) == golden("server.reporting.rank-raised-exception")


@pytest.mark.parametrize(
    ("stopped", "told"),
    [
        (b'{"cause":{"rank":1,"detail":"ValueError: no\\n  at line 3"}}', ": rank 1: ValueError: no"),
        (b'{"cause":{"rank":null,"detail":"zero \\u0000 byte"}}', ": zero  byte"),
        (b'{"cause":{"rank":1,"detail":""}}', ""),
        (b'{"cause":null}', ""),
        (b'{"cause":"of another version"}', ""),
        (b'"of another version"', ""),
    ],
)
def test_which_rank_it_was_and_why_is_read_from_what_the_supervisor_said(
    services: Services, database: Database, run_id: str, stopped: bytes, told: str
) -> None:
    ending = msgspec.structs.replace(FAILED, stopped=msgspec.Raw(stopped))
    say(services, run_id, State.STOPPING, exec_ns=T0, ending=ending)
    assert run_views.sentence(stored(database, run_id)) == golden("server.reporting.rank-raised-exception-2") + told


def test_no_text_of_a_node_is_too_long_or_odd_to_be_stored(services: Services, database: Database, run_id: str) -> None:
    say(services, run_id, State.STARTING, sentence="zero \0 byte " + "x" * 10_000)
    assert run_views.sentence(stored(database, run_id)).startswith("zero  byte xx")
    assert len(run_views.sentence(stored(database, run_id))) < 2_001


def test_those_who_wait_are_woken_by_news_only(services: Services, run_id: str) -> None:
    def woken(**said: Any) -> tuple[bool, bool]:
        before = services.hub.version(run_key(run_id)), services.hub.version(SCHEDULER)
        say(services, run_id, **said)
        after = services.hub.version(run_key(run_id)), services.hub.version(SCHEDULER)
        return before[0] != after[0], before[1] != after[1]

    assert woken(exec_ns=T0) == (True, False)
    assert woken(exec_ns=T0) == (False, False)
    assert woken(exec_ns=T0, sentence="waits for rank 1") == (True, False)
    assert woken(exec_ns=T0, sentence="waits for rank 1", logs=(piece(b"x"),)) == (True, False)
    assert woken(exec_ns=T0, files=RESULTS) == (True, False)
    assert woken(exec_ns=T0, ending=COMPLETED) == (True, True)
    assert woken(exec_ns=T0, receipt=msgspec.Raw(b"{}")) == (True, True)
    assert woken(exec_ns=T0, receipt=msgspec.Raw(b"{}")) == (False, False)


REFUSED: dict[str, tuple[dict[str, Any], type[ServerlessGpuError], str]] = {
    "rank": ({"logs": (piece(b"x", rank=2),)}, InvalidValue, "has no rank 2"),
    "name": (
        {"files": (File(name="../x", size=1, inline=b"x"),)},
        InvalidValue,
        "is not a valid name of an attempt's file",
    ),
    "absolute": ({"files": (File(name="/etc/x", size=1, inline=b"x"),)}, InvalidValue, "is not a valid name"),
    "hidden": ({"files": (File(name=".x", size=1, inline=b"x"),)}, InvalidValue, "is not a valid name"),
    "deep": ({"files": (File(name="a/b/c", size=1, inline=b"x"),)}, InvalidValue, "is not a valid name"),
    "newline": ({"files": (File(name="a\n", size=1, inline=b"x"),)}, InvalidValue, "is not a valid name"),
    "long": ({"files": (File(name="a" * 257, size=1, inline=b"x"),)}, InvalidValue, "is not a valid name"),
    "size": ({"files": (File(name="a", size=2, inline=b"x"),)}, InvalidValue, "does not have the stated size"),
    "neither": ({"files": (File(name="a", size=0),)}, InvalidValue, "must contain either its bytes or a blob"),
    "blob": (
        {"files": (File(name="a", size=9, blob=BlobReference(size=9, parts=("../x",))),)},
        InvalidValue,
        "is not a digest",
    ),
    "large": (
        {"files": (File(name="a", size=INLINE_BYTES_MAX + 1, inline=b"x" * (INLINE_BYTES_MAX + 1)),)},
        TooLarge,
        "send the files as blobs",
    ),
    "fact": ({"facts": (fact("r" * 26, 0),)}, InvalidValue, "a fact of another attempt"),
    "receipt": ({"receipt": msgspec.Raw(b"{}")}, InvalidValue, "sent a receipt before its end"),
    "began": ({"exec_ns": 1 << 70}, InvalidValue, "an invalid start time of user code"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused_and_nothing_of_the_report_is_applied(
    services: Services, database: Database, run_id: str, name: str
) -> None:
    said, error, message = REFUSED[name]
    before = {table.name: rows(database, table) for table in tables.metadata.sorted_tables}
    said = {"logs": (piece(b"x"),), "sentence": "new", **said}
    with pytest.raises(error, match=message):
        say(services, run_id, **said)
    assert {table.name: rows(database, table) for table in tables.metadata.sorted_tables} == before
    assert services.logs.sizes(run_id, 1) == {}


def test_F51_ten_thousand_ranks_end_in_a_few_writes(services: Services, database: Database) -> None:
    run_id = add_run(database)
    place(database, run_id, world_size=10_000)
    for first in range(0, 10_000, 500):
        some = tuple(File(name=f"results/{n}.pkl", size=4, inline=b"%04d" % n) for n in range(first, first + 500))
        say(services, run_id, exec_ns=T0, files=some)
    say(services, run_id, State.STOPPING, exec_ns=T0, ending=COMPLETED)
    look = database.read(lambda connection: run_views.look(connection, run_id, 0))
    assert look.ended is not None and len(look.ended.files) == 10_000
    assert {file.name: file.inline for file in look.ended.files}["results/9999.pkl"] == b"9999"


def test_files_are_listed_with_their_bytes_as_far_as_they_are_few(
    services: Services, database: Database, run_id: str
) -> None:
    some = tuple(File(name=f"hang-{n}.txt", size=n, inline=b"x" * n) for n in (4, 5, 6))
    say(services, run_id, exec_ns=T0, files=some)
    found = database.read(lambda it: files.of_attempt(it, run_id, 1, inline_max=10))
    assert [(file.size, file.inline) for file in found] == [(4, b"xxxx"), (5, b"xxxxx"), (6, None)]
    whole = database.read(lambda it: files.of_attempt(it, run_id, 1))
    assert [file.inline for file in whole] == [b"x" * n for n in (4, 5, 6)]
    assert database.read(lambda it: files.of_attempt(it, run_id, 1, prefix="results/")) == []


def test_reports_of_many_attempts_at_once_do_not_disturb_each_other(services: Services, database: Database) -> None:
    ids = [add_run(database) for _ in range(8)]
    for one_id in ids:
        place(database, one_id)

    def live(one_id: str) -> None:
        for number in range(4):
            logs = (piece(b"line\n", 5 * number),)
            say(services, one_id, exec_ns=T0, logs=logs, facts=(fact(one_id, number),), sentence=f"step {number}")
        say(services, one_id, State.STOPPING, exec_ns=T0, files=RESULTS, ending=COMPLETED, receipt=msgspec.Raw(b"{}"))

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(live, ids * 2))  # each of them twice, as if every request was sent twice
    for one_id in ids:
        run = stored(database, one_id)
        assert (run.state, run.finished, run.events) == (State.SUCCEEDED, True, 5)
        assert services.logs.read(one_id, 1, rank=0, stream="stdout", limit=100) == b"line\n" * 4
    assert len(rows(database, tables.facts)) == 4 * len(ids)


def test_22D2_a_checkpoint_that_a_node_sees_is_progress_of_the_run(services: Services, database: Database) -> None:
    run_id = add_run(database, resume=True, max_run_s=8.0)
    at_limit = Ending(state=State.TIMED_OUT, reason=Reason.TIMEOUT, began=True, stopped=msgspec.Raw(b"{}"))
    for fence, saved, unsaved in ((1, 0, 1), (2, 0, 2), (3, 3, 0), (4, 3, 1), (5, 3, 2), (6, 3, 3)):
        place(database, run_id)
        say(services, run_id, fence=fence, exec_ns=T0)
        say(services, run_id, State.STOPPING, fence=fence, ending=at_limit, saved=saved, freed=True)
        run = stored(database, run_id)
        assert (run.saved, run.unsaved) == (saved, unsaved)
    assert (run.state, run.reason) == (State.FAILED, Reason.NO_PROGRESS)


def test_22D2_the_next_attempt_says_what_a_lost_one_had_saved(services: Services, database: Database) -> None:
    run_id = add_run(database, resume=True)
    for fence in range(1, 7):
        place(database, run_id)
        say(services, run_id, fence=fence, exec_ns=T0, saved=fence - 1)
        tell(database, run_id, GivenUp(Reason.NODE_GONE))
        assert stored(database, run_id).unsaved == 1


def test_22D2_no_report_speaks_of_attempts_that_were_not_made(services: Services, run_id: str) -> None:
    for saved in (-1, 2):
        with pytest.raises(InvalidValue, match=re.escape(golden("server.reporting.said-see-checkpoints"))):
            say(services, run_id, saved=saved)
