"""Runs as people see them: who may see which, and what they read."""

from __future__ import annotations

import msgspec
import pytest

from serverless_gpu.errors import NotFound
from serverless_gpu.model.lifecycle.attempt import Reason, State, StopReason
from serverless_gpu.model.lifecycle.run_lifecycle import AttemptEnded, GivenUp, Silent, StopAsked, UserCodeStarted
from serverless_gpu.model.spec import BlobReference, Function
from serverless_gpu.server.core.caller import Caller
from serverless_gpu.server.db.database import Database
from serverless_gpu.server.records import attempts, crews
from serverless_gpu.server.records.runs import StoredRun
from serverless_gpu.server.runs import run_views
from serverless_gpu.server.runs.run_stream import RunSnapshot
from serverless_gpu.server.scheduling.wait_reasons import WaitNotice
from tests.support.golden import golden
from tests.support.server.stored import T0, S, add_node, add_people, add_run, place, stored, tell

pytestmark = pytest.mark.any_database

ALICE = Caller(name="alice", role="member")
BOB = Caller(name="bob", role="member", teams=("search",))
NOBODY = Caller(kind="attempt", attempt=("r", 1, 0))


@pytest.fixture
def run_id(database: Database) -> str:
    """Return a run of alice's and of the team "search" that waits."""
    add_people(database, "alice", "bob")
    add_node(database)
    return add_run(database, team="search", name="fit")


@pytest.mark.parametrize(
    ("who", "reach", "sees"),
    [
        (ALICE, "own", True),
        (ALICE, "team", True),
        (BOB, "own", False),
        (BOB, "team", True),
        (BOB, "all", True),
        (msgspec.structs.replace(BOB, teams=()), "team", False),
        (ALICE, "none", False),
        (NOBODY, "own", False),
    ],
)
def test_a_run_that_is_out_of_reach_is_not_there(
    database: Database, run_id: str, who: Caller, reach: str, sees: bool
) -> None:
    def look(wanted: str) -> StoredRun:
        return database.read(lambda connection: run_views.visible(connection, wanted, who=who, reach=reach))

    if sees:
        assert look(run_id).id == run_id
        return
    with pytest.raises(NotFound) as hidden:
        look(run_id)
    with pytest.raises(NotFound) as missing:
        look("0" * 26)
    assert str(hidden.value).replace(run_id, "") == str(missing.value).replace("0" * 26, "")


def test_what_people_read_of_a_run_as_it_goes_on(database: Database, run_id: str) -> None:
    def seen() -> tuple[State, str, str]:
        view = run_views.run_view(stored(database, run_id), told=WaitNotice(sentence="needs 8 H100; you are 2nd"))
        return view.state, view.node, view.sentence

    assert seen() == (State.QUEUED, "", golden("server.views.needs-h100-you"))
    place(database, run_id)
    assert seen() == (State.STARTING, "n1", "")
    database.write(lambda connection: crews.note(connection, (run_id, 1, 0), sentence="restoring 2 GB"))
    assert seen() == (State.STARTING, "n1", "restoring 2 GB")
    tell(database, run_id, UserCodeStarted(), exec_ns=T0)
    tell(database, run_id, Silent())
    said = "no report from n1 since 2030-03-17T17:46:41Z; the run may still be running"
    assert seen() == (State.UNREACHABLE, "n1", said)
    tell(database, run_id, StopAsked(StopReason.CANCEL))
    assert seen() == (State.UNREACHABLE, "n1", said)
    tell(database, run_id, GivenUp(Reason.NODE_GONE), detail="nothing for 960 s")
    assert seen() == (State.LOST, "n1", golden("server.views.node-never-came"))
    view = run_views.run_view(stored(database, run_id))
    assert (view.name, view.owner, view.team, view.gpu_type, view.world_size) == ("fit", "alice", "search", "H100", 2)
    assert (view.created_ns, view.started_ns, view.ended_ns, view.finished) == (T0, T0, T0 + 2 * S, True)


def test_nobody_is_shown_the_digests_by_which_a_run_could_have_the_call_of_another(database: Database) -> None:
    add_people(database, "alice")
    call = BlobReference(size=1, parts=("d" * 64,))
    view = run_views.run_view(stored(database, add_run(database, payload=Function(call=call))))
    assert view.spec.payload == Function()
    assert b"dddd" not in msgspec.json.encode(view)


def test_22A4_only_the_owner_is_shown_the_address_by_which_the_code_of_a_run_can_be_read(database: Database) -> None:
    add_people(database, "alice")
    run = msgspec.structs.replace(stored(database, add_run(database)), snapshot="d" * 64)
    assert run_views.run_view(run, reader="alice").snapshot == "d" * 64
    for reader in ("bob", ""):
        assert b"dddd" not in msgspec.json.encode(run_views.run_view(run, reader=reader))


def test_the_attempts_of_a_run_are_all_seen(database: Database) -> None:
    add_people(database, "alice")
    add_node(database)
    run_id = add_run(database, retries=1)
    place(database, run_id)
    tell(database, run_id, UserCodeStarted(), AttemptEnded(Reason.RANK_RAISED, began=True), exec_ns=T0 + S)
    place(database, run_id)
    seen = [run_views.attempt_view(one) for one in database.read(lambda it: attempts.of_run(it, run_id))]
    assert [(one.fence, one.state, one.reason, one.started_ns) for one in seen] == [
        (1, State.FAILED, Reason.RANK_RAISED, T0 + S),
        (2, State.STARTING, None, None),
    ]


def test_a_reader_gets_what_it_has_not_and_the_end_once_there_is_one(database: Database, run_id: str) -> None:
    place(database, run_id)
    tell(database, run_id, UserCodeStarted())

    def look(after: int) -> RunSnapshot:
        return database.read(
            lambda connection: run_views.look(connection, run_id, after, told=WaitNotice(sentence="waits"))
        )

    assert [message.state for message in look(0).events] == [State.STARTING, State.RUNNING]
    assert [message.seq for message in look(2).events] == [3]
    assert look(3).events == () and look(3).ended is None and look(3).run.sentence == ""
    tell(database, run_id, AttemptEnded(Reason.GPU_OOM, began=True), detail="rank 1")
    last = look(3)
    assert last.events == () and last.settled is None and last.ended is not None
    assert (last.ended.seq, last.ended.reason, last.ended.ending) == (4, Reason.GPU_OOM, msgspec.UNSET)
    assert last.ended.sentence == golden("server.views.rank-ran-out")
    with pytest.raises(NotFound):
        database.read(lambda connection: run_views.look(connection, "0" * 26, 0))
