"""Runs over a real connection: asked for, watched, stopped, read; by whoever may, and within limits."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from serverless_gpu.errors import (
    AlreadyFinished,
    IdempotencyConflict,
    InvalidValue,
    NotAllowed,
    NotFound,
    TooLarge,
)
from serverless_gpu.model.lifecycle.attempt import Reason, State
from serverless_gpu.server.http import routing
from serverless_gpu.server.runs import run_stream
from serverless_gpu.wire.access import PrincipalRequest, TeamRequest, TeamView, TokenMade, TokenView
from serverless_gpu.wire.agents import Ending, File, LogPiece, Report, ReportAnswer
from serverless_gpu.wire.connection import Connection
from serverless_gpu.wire.runs import (
    AcceptedMessage,
    AttemptList,
    EndedMessage,
    FileList,
    LogMessage,
    RunPage,
    RunView,
    SettledMessage,
    StateMessage,
    StopRequest,
    StreamMessage,
)
from tests.support.server.played import Played
from tests.support.server.runs_api import SECRET, Reader, request, submit
from tests.support.server.served import Served


def person(server: Served, name: str, role: Any = "member", teams: tuple[str, ...] = ()) -> Connection:
    wanted = PrincipalRequest(name=name, role=role, teams=teams)
    return server.connection(server.connection().ask("POST", "/users", wanted, answer=TokenMade).secret)


def test_a_run_is_asked_for_watched_and_read_to_its_end(server: Served) -> None:
    connection, node = server.connection(), Played(server)
    asked = request()
    reader = Reader(connection.stream("POST", "/runs", asked, answer=StreamMessage))
    first = reader.until(AcceptedMessage)[0]
    assert isinstance(first, AcceptedMessage)
    assert (first.run.id, first.run.state, first.run.deduplicated) == (asked.id, State.QUEUED, False)
    node.join()
    start = node.order()
    assert (start.run_id, start.fence, start.call) == (asked.id, 1, b"call")
    assert msgspec.json.decode(start.context) == {"variables": {"PASSWORD": SECRET}}
    piece = LogPiece(rank=0, stream="stdout", offset=0, data=b"hello\n")
    node.report(start, Report(state=State.RUNNING, world_size=1, exec_ns=5, logs=(piece,)))
    reader.until(LogMessage)
    ending = Ending(state=State.SUCCEEDED, reason=Reason.COMPLETED, began=True, stopped=msgspec.Raw(b'{"x":1}'))
    result = File(name="results/0.pkl", size=3, inline=b"abc")
    last = LogPiece(rank=0, stream="stdout", offset=6, data=b"bye\n")
    node.report(start, Report(state=State.STOPPING, world_size=1, logs=(last,), files=(result,), ending=ending))
    ended = reader.until(EndedMessage)[-1]
    assert isinstance(ended, EndedMessage)
    assert (ended.state, ended.reason, ended.files[0].inline) == (State.SUCCEEDED, Reason.COMPLETED, b"abc")
    assert msgspec.json.decode(ended.ending or b"") == {"x": 1}
    node.report(start, Report(state=State.STOPPING, receipt=msgspec.Raw(b'{"receipt":true}')))
    messages = reader.all()
    assert isinstance(messages[-1], SettledMessage)
    assert b"".join(m.data for m in messages if isinstance(m, LogMessage)) == b"hello\nbye\n"
    states = [m.state for m in messages if isinstance(m, StateMessage) and m.seq]
    assert states == [State.QUEUED, State.STARTING, State.RUNNING, State.STOPPING]
    _read_back(connection, asked.id)


def _read_back(connection: Connection, run_id: str) -> None:
    view = connection.ask("GET", f"/runs/{run_id}", answer=RunView)
    assert (view.state, view.finished) == (State.SUCCEEDED, True)
    data, headers = connection.fetch(f"/runs/{run_id}/logs/0/stdout", query={"offset": "2", "limit": "4"})
    assert (data, headers["SGPU-Next-Offset"], headers["SGPU-Complete"]) == (b"llo\n", "6", "0")
    data, headers = connection.fetch(f"/runs/{run_id}/logs/0/stdout", query={"offset": "6"})
    assert (data, headers["SGPU-Complete"]) == (b"bye\n", "1")
    assert connection.get(f"/runs/{run_id}/logs/7/stderr") == connection.get(f"/runs/{run_id}/logs/0/telemetry") == b""
    results = connection.ask("GET", f"/runs/{run_id}/results", answer=FileList)
    assert [(file.name, file.inline) for file in results.files] == [("results/0.pkl", b"abc")]
    assert connection.get(f"/runs/{run_id}/files/results/0.pkl") == b"abc"
    assert connection.get(f"/runs/{run_id}/files/results/0.pkl", start=1, length=1) == b"b"
    assert connection.get(f"/runs/{run_id}/files/results/0.pkl", start=3) == b""
    assert connection.get(f"/runs/{run_id}/receipt") == b'{"receipt":true}'
    tries = connection.ask("GET", f"/runs/{run_id}/attempts", answer=AttemptList)
    assert [(one.fence, one.reason) for one in tries.attempts] == [(1, Reason.COMPLETED)]
    again = list(connection.stream("GET", f"/runs/{run_id}/events", answer=StreamMessage))
    assert [type(m).__name__ for m in again][-2:] == ["EndedMessage", "SettledMessage"]
    place = {"after": "4", "offsets": "1.0.stdout:6"}
    rest = list(connection.stream("GET", f"/runs/{run_id}/events", query=place, answer=StreamMessage))
    assert [type(m).__name__ for m in rest] == ["AcceptedMessage", "LogMessage", "EndedMessage", "SettledMessage"]


def test_the_same_request_again_is_the_same_run_and_another_one_is_a_conflict(server: Served) -> None:
    connection, asked = server.connection(), request()
    first = connection.ask("POST", "/runs", asked, answer=RunView)
    again = connection.ask("POST", "/runs", asked, answer=RunView)
    assert (first.deduplicated, again.deduplicated, again.id) == (False, True, first.id)
    accepted = next(connection.stream("POST", "/runs", asked, answer=StreamMessage))
    assert isinstance(accepted, AcceptedMessage) and accepted.run.deduplicated
    with pytest.raises(IdempotencyConflict):
        connection.ask("POST", "/runs", request(asked.id, call=b"other"), answer=RunView)


def test_a_run_that_waits_is_cancelled_and_its_stream_ends(server: Served) -> None:
    connection = server.connection()
    run = submit(connection)
    reader = Reader(connection.stream("GET", f"/runs/{run.id}/events", answer=StreamMessage))
    reader.until(AcceptedMessage)
    stopped = connection.ask("POST", f"/runs/{run.id}/stop", StopRequest(), answer=RunView)
    assert (stopped.state, stopped.reason) == (State.CANCELLED, Reason.CANCELLED)
    assert [type(m).__name__ for m in reader.all()][-2:] == ["EndedMessage", "SettledMessage"]


def test_who_may_see_runs_and_stop_them_is_what_the_role_says(server: Served) -> None:
    server.connection().ask("POST", "/teams", TeamRequest(name="search"), answer=TeamView)
    ann, bob = person(server, "ann", teams=("search",)), person(server, "bob", teams=("search",))
    eve, vic = person(server, "eve"), person(server, "vic", "viewer", ("search",))
    private, shared = submit(ann), submit(ann, team="search")
    for other in (bob, vic):
        assert other.ask("GET", f"/runs/{shared.id}", answer=RunView).owner == "ann"
        assert [run.id for run in other.ask("GET", "/runs", answer=RunPage).runs] == [shared.id]
        with pytest.raises(NotAllowed):
            other.ask("POST", f"/runs/{shared.id}/stop", StopRequest(), answer=RunView)
    for other in (bob, vic, eve):
        for path in ("", "/attempts", "/files", "/results", "/logs/0/stdout", "/receipt", "/files/results/0.pkl"):
            with pytest.raises(NotFound):
                other.get(f"/runs/{private.id}{path}")
        for path in ("/files", "/logs/0/stdout", "/receipt", "/files/results/0.pkl"):
            with pytest.raises(NotFound):  # naming the attempt does not get anybody past
                other.get(f"/runs/{private.id}{path}", query={"fence": "1"})
        with pytest.raises(NotFound):
            list(other.stream("GET", f"/runs/{private.id}/events", answer=StreamMessage))
    with pytest.raises(NotFound):
        eve.ask("POST", f"/runs/{private.id}/stop", StopRequest(), answer=RunView)
    assert eve.ask("GET", "/runs", answer=RunPage).runs == ()
    with pytest.raises(NotAllowed):
        submit(vic)
    with pytest.raises(IdempotencyConflict):
        submit(eve, run_id=private.id)
    assert len(server.connection().ask("GET", "/runs", answer=RunPage).runs) == 2


def test_a_token_that_is_revoked_ends_its_streams(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "CHECKED_S", 0.1)
    monkeypatch.setattr(run_stream, "IDLE_S", 0.1)
    admin = server.connection()
    made = admin.ask("POST", "/users", PrincipalRequest(name="ann"), answer=TokenMade)
    ann = server.connection(made.secret)
    run = submit(ann)
    reader = Reader(ann.stream("GET", f"/runs/{run.id}/events", answer=StreamMessage))
    reader.until(StateMessage)
    admin.ask("DELETE", f"/tokens/{made.token.id}", answer=TokenView)
    assert not any(isinstance(message, EndedMessage) for message in reader.all())
    assert admin.ask("GET", f"/runs/{run.id}", answer=RunView).state is State.QUEUED


def test_who_leaves_a_team_reads_its_runs_no_longer(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "CHECKED_S", 0.1)
    monkeypatch.setattr(run_stream, "IDLE_S", 0.1)
    admin = server.connection()
    admin.ask("POST", "/teams", TeamRequest(name="search"), answer=TeamView)
    ann, bob = person(server, "ann", teams=("search",)), person(server, "bob", teams=("search",))
    run = submit(ann, team="search")
    reader = Reader(bob.stream("GET", f"/runs/{run.id}/events", answer=StreamMessage))
    reader.until(StateMessage)
    admin.ask("DELETE", "/teams/search/members/bob", answer=TeamView)
    assert not any(isinstance(message, EndedMessage) for message in reader.all())
    assert ann.ask("GET", f"/runs/{run.id}", answer=RunView).state is State.QUEUED


def test_runs_are_listed_in_pages_and_by_what_they_are(server: Served) -> None:
    connection = server.connection()
    made = [submit(connection, name=f"n{number % 2}", tags={"k": str(number)}).id for number in range(5)]

    def page(**query: str) -> RunPage:
        return connection.ask("GET", "/runs", query=query, answer=RunPage)

    first = page(limit="2")
    second = page(limit="2", cursor=first.cursor)
    third = page(limit="2", cursor=second.cursor)
    assert [run.id for part in (first, second, third) for run in part.runs] == made[::-1]
    assert third.cursor == ""
    assert [run.id for run in page(name="n1").runs] == [made[3], made[1]]
    assert [run.id for run in page(tag="k=2").runs] == [made[2]]
    assert len(page(state="queued,running").runs) == 5 and page(state="RUNNING").runs == ()


@pytest.mark.parametrize(
    "query",
    [
        {"limit": "501"},
        {"limit": "0"},
        {"limit": "x"},
        {"state": "dead"},
        {"tag": "x"},
        {"sort": "id"},
        {"name": "n" * 300},
    ],
)
def test_a_list_that_cannot_be_is_refused(server: Served, query: dict[str, str]) -> None:
    with pytest.raises(InvalidValue):
        server.connection().ask("GET", "/runs", query=query, answer=RunPage)


@pytest.mark.parametrize(
    "name",
    [
        "../../token",
        "..%2f..%2ftoken",
        "%2e%2e/token",
        "results/../../key",
        "/etc/passwd",
        "a\\b",
        "results//0.pkl",
        ";/../x",
        "x%00",
    ],
)
def test_a_name_that_leads_elsewhere_leads_nowhere(server: Served, name: str) -> None:
    connection = server.connection()
    run = submit(connection)
    with pytest.raises((NotFound, InvalidValue)):
        connection.get(f"/runs/{run.id}/files/{name}")


def test_a_body_over_the_limit_is_refused(server: Served) -> None:
    connection = server.connection()
    with pytest.raises(TooLarge):
        submit(connection, call=b"x" * ((1 << 20) + 1))
    with pytest.raises(TooLarge):
        submit(connection, call=b"x" * (9 << 20))


def test_a_run_that_has_ended_cannot_be_stopped_for_something_else(server: Served) -> None:
    connection, node = server.connection(), Played(server)
    node.join()
    run = submit(connection)
    start = node.order()
    ending = Ending(state=State.FAILED, reason=Reason.RANK_RAISED, began=True)
    node.report(start, Report(state=State.RUNNING, world_size=1, exec_ns=1))
    node.report(start, Report(state=State.STOPPING, ending=ending))
    with pytest.raises(AlreadyFinished):
        connection.ask("POST", f"/runs/{run.id}/stop", StopRequest(), answer=RunView)


def test_what_is_secret_is_in_no_log_database_or_answer(server: Served) -> None:
    connection, node = server.connection(), Played(server)
    node.join()
    run = submit(connection)
    start = node.order()
    for path in (f"/runs/{run.id}", f"/{server.token}", "/runs"):
        with pytest.raises((NotFound, InvalidValue)):
            connection.ask("GET", path, query={"token": server.token}, answer=RunPage)
    server.connection(start.token).ask(
        "POST", f"/attempts/{run.id}/1/report", Report(state=State.RUNNING), answer=ReportAnswer
    )
    secrets = [secret.encode() for secret in (SECRET, server.token, server.node_token, start.token)]
    for file in (server.home / "server").rglob("*"):
        if file.is_file() and file.name not in ("token", "node.token"):
            data = file.read_bytes()
            assert not any(secret in data for secret in secrets), file
