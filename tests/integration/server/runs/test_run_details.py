"""Details of runs over a real connection: timeline, failure, arguments, environment, comparison; bulk stop; again."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from serverless_gpu.ambient import new_run_id
from serverless_gpu.errors import AlreadyFinished, InvalidValue, NotAllowed, NotFound, TooLarge
from serverless_gpu.model.lifecycle.attempt import Failure, Hang, Reason, State, Stopped, StopReason
from serverless_gpu.model.spec import Command
from serverless_gpu.wire.access import PrincipalRequest, TeamRequest, TeamView, TokenMade
from serverless_gpu.wire.agents import Ending, File, Report
from serverless_gpu.wire.connection import Connection
from serverless_gpu.wire.runs import (
    AgainRequest,
    ArgumentsView,
    BulkStopAnswer,
    BulkStopRequest,
    ComparisonView,
    FailureView,
    RunEnvironmentView,
    RunPage,
    RunView,
    StopRequest,
    Timeline,
)
from tests.support.server.played import Played
from tests.support.server.runs_api import SECRET, request, submit
from tests.support.server.served import Served

RECORD = {
    "type": "Odd",
    "module": "train",
    "message": "<script>x()</script>",
    "notes": ["a note", 7],
    "traceback": "Traceback (most recent call last):\n  \x1b[31mboom\x1b[0m\x1b]8;;javascript:x()\x07",
    "kind": "exception",
}
PATHS = ("timeline", "failure", "arguments", "environment", "changes")


def person(server: Served, name: str, role: Any = "member", teams: tuple[str, ...] = ()) -> Connection:
    wanted = PrincipalRequest(name=name, role=role, teams=teams)
    return server.connection(server.connection().ask("POST", "/users", wanted, answer=TokenMade).secret)


def fail(node: Played, stopped: Stopped, *files: File) -> str:
    """Take the next run, and let it fail."""
    start = node.order()
    node.report(start, Report(state=State.RUNNING, world_size=2, exec_ns=5))
    encoded = msgspec.Raw(msgspec.json.encode(stopped))
    ending = Ending(state=stopped.state, reason=stopped.reason, began=True, stopped=encoded)
    node.report(start, Report(state=State.STOPPING, world_size=2, files=files, ending=ending))
    return start.run_id


def raised(**fields: Any) -> Stopped:
    cause = Failure(rank=1, reason=Reason.RANK_RAISED, at_ns=1, detail="Odd: it broke", exit_code=3)
    other = Failure(rank=0, reason=Reason.RANK_SIGNAL, at_ns=2, signal=9)
    return Stopped(
        state=State.FAILED, reason=Reason.RANK_RAISED, cause=cause, consequences=(other,) * 9, log_tail="last", **fields
    )


def test_a_failure_has_the_ranks_exception_and_what_to_do(server: Served) -> None:
    connection, node = server.connection(), Played(server)
    run = submit(connection, name="train")
    node.join()
    data = msgspec.json.encode(RECORD)
    files = (
        File(name="failures/1.json", size=len(data), inline=data),
        File(name="failures/1.stack", size=2, inline=b"at"),
    )
    hang = Hang(waiting=(0,), elsewhere=(1,), stacks={0: "here"}, file="hang-1.txt")
    assert fail(node, raised(hint="out of luck", hang=hang), *files) == run.id
    failure: FailureView = connection.ask("GET", f"/runs/{run.id}/failure", answer=FailureView)
    assert (failure.rank, failure.node, failure.exception) == (1, "played", "train.Odd")
    assert (failure.message, failure.traceback, failure.stack) == (
        RECORD["message"],
        "Traceback (most recent call last):\n  boom",
        "at",
    )
    assert (failure.notes, failure.hint, failure.log_tail) == (("a note", "7"), "out of luck", "last")
    assert f"{run.id} --rank 1" in failure.advice
    assert len(failure.consequences) == 9 and failure.consequences[0].startswith("rank 0")
    assert failure.hang is not None and failure.hang.stacks == {0: "here"}


@pytest.mark.parametrize("data", [b"", b"{", b"[1]", b'{"message": 7}', b"\xff\xfe", b"\x80\x04N."])
def test_a_failure_without_a_readable_description_still_has_its_reason(server: Served, data: bytes) -> None:
    connection, node = server.connection(), Played(server)
    run = submit(connection)
    node.join()
    fail(node, raised(), File(name="failures/1.json", size=len(data), inline=data))
    failure: FailureView = connection.ask("GET", f"/runs/{run.id}/failure", answer=FailureView)
    assert (failure.reason, failure.message, failure.exception) == (Reason.RANK_RAISED, "Odd: it broke", "")


def test_a_timeline_has_the_events_and_who_asked_to_stop(server: Served) -> None:
    ann = person(server, "ann")
    run = submit(ann)
    server.connection().ask("POST", f"/runs/{run.id}/stop", StopRequest(), answer=RunView)
    timeline: Timeline = ann.ask("GET", f"/runs/{run.id}/timeline", answer=Timeline)
    assert [event.state for event in timeline.events] == [State.QUEUED, State.CANCELLED]
    assert [(stop.principal, stop.reason) for stop in timeline.stops] == [("root", "cancel")]
    with pytest.raises(NotFound):
        ann.get(f"/runs/{run.id}/failure")


def test_arguments_are_text_that_the_client_sent(server: Served) -> None:
    connection = server.connection()

    def arguments(asked: Any) -> ArgumentsView:
        run = connection.ask("POST", "/runs", asked, answer=RunView)
        return connection.ask("GET", f"/runs/{run.id}/arguments", answer=ArgumentsView)

    odd = {"<b>": '"\0\ud83d\u202e', "n": "1"}
    told = msgspec.structs.replace(request(), arguments={**odd, "<b>": '"\0\u202e'})
    assert arguments(told).arguments == told.arguments
    assert arguments(request()) == ArgumentsView()
    program = request(call=None, payload=Command(argv=("python", "x y", "--token", "hunter2")))
    assert arguments(program).command == "python 'x y' --token …"
    for many in ({str(n): "" for n in range(201)}, {"x": "y" * 200_001}):
        with pytest.raises(TooLarge):
            arguments(msgspec.structs.replace(request(), arguments=many))


def test_a_live_environment_is_the_callers_interpreter(server: Served) -> None:
    connection = server.connection()
    run = submit(connection)
    found: RunEnvironmentView = connection.ask("GET", f"/runs/{run.id}/environment", answer=RunEnvironmentView)
    assert (found.kind, found.python, found.platform, found.units) == ("live", "3.11", "linux-x86_64", ())


def test_runs_are_compared_by_what_differs(server: Served) -> None:
    connection = server.connection()
    runs = [submit(connection, name="x", retries=n, tags={"k": str(n)}) for n in range(3)]
    ids = ",".join(run.id for run in runs)
    found: ComparisonView = connection.ask("GET", "/comparisons", query={"runs": ids}, answer=ComparisonView)
    assert [run.id for run in found.runs] == [run.id for run in runs]
    rows = {(section.name, row.label): row for section in found.sections for row in section.rows}
    assert rows["Spec", "retries"].values == ("0", "1", "2") and rows["Spec", "retries"].differs
    assert rows["Tags", "k"].values == ("0", "1", "2")
    assert not rows["Spec", "gpus"].differs
    changes: ComparisonView = connection.ask("GET", f"/runs/{runs[1].id}/changes", answer=ComparisonView)
    assert [run.id for run in changes.runs] == [runs[0].id, runs[1].id]
    assert [(s.name, [row.label for row in s.rows]) for s in changes.sections] == [
        ("Spec", ["retries"]),
        ("Tags", ["k"]),
    ]
    first: ComparisonView = connection.ask("GET", f"/runs/{runs[0].id}/changes", answer=ComparisonView)
    assert first == ComparisonView()
    for wanted in ("", runs[0].id, f"{runs[0].id},{runs[0].id}", ",".join(new_run_id() for _ in range(9))):
        with pytest.raises(InvalidValue):
            connection.get("/comparisons", query={"runs": wanted})


def test_several_runs_are_stopped_each_by_its_own_right(server: Served) -> None:
    server.connection().ask("POST", "/teams", TeamRequest(name="search"), answer=TeamView)
    ann, bob = person(server, "ann", teams=("search",)), person(server, "bob", teams=("search",))
    own, ended, shared, private = submit(ann), submit(ann), submit(bob, team="search"), submit(bob)
    ann.ask("POST", f"/runs/{ended.id}/stop", StopRequest(), answer=RunView)
    asked = BulkStopRequest(runs=(own.id, ended.id, own.id, shared.id, private.id, "nothing"))
    answer: BulkStopAnswer = ann.ask("POST", "/runs/stop", asked, answer=BulkStopAnswer)
    outcomes = [(one.id, one.state, one.code) for one in answer.outcomes]
    assert outcomes == [
        (own.id, State.CANCELLED, ""),
        (ended.id, State.CANCELLED, ""),
        (shared.id, None, NotAllowed.code),
        (private.id, None, NotFound.code),
        ("nothing", None, NotFound.code),
    ]
    assert bob.ask("GET", f"/runs/{shared.id}", answer=RunView).stop is None
    ran_out = BulkStopRequest(runs=(ended.id,), reason=StopReason.PREEMPT)
    late: BulkStopAnswer = ann.ask("POST", "/runs/stop", ran_out, answer=BulkStopAnswer)
    assert late.outcomes[0].code == AlreadyFinished.code
    with pytest.raises(TooLarge):
        ann.ask("POST", "/runs/stop", BulkStopRequest(runs=tuple(map(str, range(101)))), answer=BulkStopAnswer)
    with pytest.raises(InvalidValue):
        timeout = BulkStopRequest(runs=(own.id,), reason=StopReason.TIMEOUT)
        ann.ask("POST", "/runs/stop", timeout, answer=BulkStopAnswer)


def test_a_run_is_run_again_with_its_spec_call_and_variables(server: Served) -> None:
    connection, node = server.connection(), Played(server)
    asked = msgspec.structs.replace(request(name="train", retries=2, tags={"k": "v"}), arguments={"lr": "0.1"})
    first = connection.ask("POST", "/runs", asked, answer=RunView)
    connection.ask("POST", f"/runs/{first.id}/stop", StopRequest(), answer=RunView)
    again = AgainRequest(id=new_run_id())
    second: RunView = connection.ask("POST", f"/runs/{first.id}/again", again, answer=RunView)
    repeated: RunView = connection.ask("POST", f"/runs/{first.id}/again", again, answer=RunView)
    assert (second.id, second.state, second.deduplicated) == (again.id, State.QUEUED, False)
    assert (repeated.id, repeated.deduplicated) == (again.id, True)
    assert second.spec == first.spec
    arguments: ArgumentsView = connection.ask("GET", f"/runs/{second.id}/arguments", answer=ArgumentsView)
    assert arguments.arguments == {"lr": "0.1"}
    node.join()
    start = node.order()
    assert (start.run_id, start.call) == (second.id, b"call")
    assert msgspec.json.decode(start.context) == {"variables": {"PASSWORD": SECRET}}


def test_only_the_owner_runs_a_run_again(server: Served) -> None:
    server.connection().ask("POST", "/teams", TeamRequest(name="search"), answer=TeamView)
    ann, bob = person(server, "ann", teams=("search",)), person(server, "bob", teams=("search",))
    vic = person(server, "vic", "viewer", ("search",))
    shared, private = submit(ann, team="search"), submit(ann)
    for other in (server.connection(), bob):
        with pytest.raises((NotAllowed, NotFound)):
            other.ask("POST", f"/runs/{shared.id}/again", AgainRequest(id=new_run_id()), answer=RunView)
    with pytest.raises(NotFound):
        bob.ask("POST", f"/runs/{private.id}/again", AgainRequest(id=new_run_id()), answer=RunView)
    with pytest.raises(NotAllowed):
        vic.ask("POST", f"/runs/{shared.id}/again", AgainRequest(id=new_run_id()), answer=RunView)
    with pytest.raises(InvalidValue):
        ann.ask("POST", f"/runs/{shared.id}/again", AgainRequest(id="x"), answer=RunView)
    assert len(server.connection().ask("GET", "/runs", answer=RunPage).runs) == 2


def test_what_others_may_not_see_is_missing_on_every_path(server: Served) -> None:
    server.connection().ask("POST", "/teams", TeamRequest(name="search"), answer=TeamView)
    ann, eve = person(server, "ann", teams=("search",)), person(server, "eve")
    bob = person(server, "bob", teams=("search",))
    private, own = submit(ann, name="train"), submit(eve)
    shared = submit(ann, name="train", team="search")
    for path in PATHS:
        with pytest.raises(NotFound):
            eve.get(f"/runs/{private.id}/{path}")
    with pytest.raises(NotFound):
        eve.get("/comparisons", query={"runs": f"{own.id},{private.id}"})
    # A member of the team sees the run, but not its owner's previous run outside of the team.
    assert bob.ask("GET", f"/runs/{shared.id}/changes", answer=ComparisonView) == ComparisonView()


def test_a_file_is_an_attachment_with_a_plain_name(server: Served) -> None:
    connection, node = server.connection(), Played(server)
    run = submit(connection)
    node.join()
    fail(node, raised(), File(name="failures/1.json", size=2, inline=b"{}"))
    _, headers = connection.fetch(f"/runs/{run.id}/files/failures/1.json")
    assert headers["Content-Disposition"] == f'attachment; filename="{run.id}-failures-1.json"'
    assert headers["X-Content-Type-Options"] == "nosniff"


def test_a_list_is_filtered_and_ordered(server: Served) -> None:
    connection = server.connection()
    runs = [submit(connection, name=name) for name in ("alpha", "beta", "alphabet")]

    def page(**query: str) -> RunPage:
        return connection.ask("GET", "/runs", query=query, answer=RunPage)

    assert [run.id for run in page(text="ALPHA", sort="oldest").runs] == [runs[0].id, runs[2].id]
    assert len(page(type="cpu").runs) == 3 and page(type="H100").runs == ()
    assert page(to_ns="1").runs == () and len(page(from_ns="1").runs) == 3
    second = page(limit="1", cursor=page(limit="1").cursor)
    assert [run.id for run in page(limit="1", cursor=second.previous).runs] == [runs[2].id]
    for query in ({"sort": "random"}, {"from_ns": "-1"}, {"cursor": "1.x"}):
        with pytest.raises(InvalidValue):
            page(**query)
