"""What is always true of gangs is found true of what a server wrote, and found out when it is not."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any, Protocol

import msgspec
import pytest
import sqlalchemy as sa

from serverless_gpu.model.lifecycle.attempt import Fact, FactKind, Reason
from serverless_gpu.model.lifecycle.gang_lifecycle import Cause
from serverless_gpu.model.lifecycle.run_lifecycle import AttemptEnded, UserCodeStarted
from serverless_gpu.server.billing import charging
from serverless_gpu.server.db import tables
from serverless_gpu.server.db.database import Database
from serverless_gpu.server.invariants import invariant_inputs
from serverless_gpu.server.invariants.invariant_inputs import RecordedRuns, Violation
from serverless_gpu.server.invariants.run_invariants import History, Lendings, Stretch, violations
from serverless_gpu.server.lifecycle import transitions
from serverless_gpu.server.records import facts, files
from serverless_gpu.server.records.files import StoredFile
from tests.support.golden import golden
from tests.support.server.ganged import happened, place_met
from tests.support.server.invariants import submitted
from tests.support.server.stored import T0, S, add_node, add_people, place_gang

KINDS = (FactKind.RESERVED, FactKind.EXEC, FactKind.EXITED, FactKind.FREED)


@pytest.fixture
def people(database: Database) -> Database:
    add_people(database, "alice")
    for number in (1, 2, 3):
        add_node(database, f"node-{number}", name=f"n{number}")
    return database


def used(run_id: str, fence: int, number: int, *devices: str) -> list[Fact]:
    """Return what a crew used, a second after the other; each is on a node with a boot of its own."""
    return [
        Fact(
            attempt=f"{run_id}:{fence}",
            seq=seq,
            kind=kind,
            boot_id=f"boot-{number}",
            boottime_ns=(fence * 10 + seq) * S,
            wall_ns=T0 + (fence * 10 + seq) * S,
            gpus=devices,
            cpus=0,
            memory_bytes=0,
        )
        for seq, kind in enumerate(KINDS)
    ]


def finished(database: Database) -> str:
    """Write the whole life of a run with two devices on n1 and one on n2, which succeeded at its second attempt."""
    run_id = submitted(database, retries=1)
    reasons = (Reason.RANK_RAISED, Reason.COMPLETED)
    for reason in reasons:
        place_met(database, run_id, 2, 1)
        for number in (0, 1):
            returned = reason is Reason.COMPLETED
            happened(database, run_id, number, UserCodeStarted(), exec_ns=T0 + 2 * S, returned=returned)
        others = Reason.PEER_FAILED if reason is Reason.RANK_RAISED else reason
        for number, why in enumerate((reason, others)):
            happened(database, run_id, number, AttemptEnded(why, began=True))

    def write(connection: sa.Connection) -> None:
        files.put(connection, run_id, 2, [StoredFile(name=f"results/{n}.pkl", size=2, inline=b"ok") for n in range(3)])
        crews = [(run_id, fence, number) for fence in (1, 2) for number in (0, 1)]
        for crew in crews:
            devices = ("GPU-0", "GPU-1") if crew[2] == 0 else ("GPU-2",)
            facts.add(connection, crew, used(run_id, crew[1], crew[2], *devices))
            receipt = f'{{"gpu_ms": {2000 * len(devices)}, "facts": 4}}'
            transitions.settle(connection, crew, receipt=receipt, at_ns=T0 + 9 * S)
        due = charging.load(connection, crews, currency="USD")
        charging.charge(connection, due, at_ns=T0 + 10 * S, final_before_ns=0)

    database.write(write)
    return run_id


class Break(Protocol):
    """Writes something that is never true of a run."""

    def __call__(self, connection: sa.Connection, run_id: str) -> None: ...


def in_attempt(fence: int, **values: Any) -> Break:
    table = tables.attempts

    def write(connection: sa.Connection, run_id: str) -> None:
        own = sa.and_(table.c.run_id == run_id, table.c.fence == fence)
        connection.execute(table.update().where(own).values(**values))

    return write


def in_crew(fence: int, number: int, **values: Any) -> Break:
    table = tables.crews

    def write(connection: sa.Connection, run_id: str) -> None:
        own = sa.and_(table.c.run_id == run_id, table.c.fence == fence, table.c.crew == number)
        connection.execute(table.update().where(own).values(**values))

    return write


def in_run(**values: Any) -> Break:
    def write(connection: sa.Connection, run_id: str) -> None:
        connection.execute(tables.runs.update().where(tables.runs.c.id == run_id).values(**values))

    return write


def without_a_crew(connection: sa.Connection, run_id: str) -> None:
    for table in (tables.orders, tables.facts, tables.charges, tables.crews):
        connection.execute(table.delete().where(table.c.run_id == run_id, table.c.fence == 2, table.c.crew == 1))


def charged_again(connection: sa.Connection, run_id: str) -> None:
    """Write the entry of the second crew once more, under its next number."""
    table = tables.charges
    own = sa.select(table).where(table.c.run_id == run_id, table.c.fence == 2, table.c.crew == 1)
    row = dict(connection.execute(own).mappings().one())
    del row["seq"]
    connection.execute(table.insert(), row | {"number": 2})


def lent_to_both(connection: sa.Connection, run_id: str) -> None:
    """Have both crews of an attempt on one device."""
    connection.execute(tables.facts.delete().where(tables.facts.c.run_id == run_id, tables.facts.c.fence == 2))
    for number in (0, 1):
        facts.add(connection, (run_id, 2, number), used(run_id, 2, 0, "GPU-0"))


def cause(reason: Reason, crew: int | None) -> str:
    return msgspec.json.encode(Cause(crew=crew, reason=reason)).decode()


OPEN = {"state": "RUNNING", "ended_ns": None, "reason": None}
BROKEN: dict[str, tuple[str, str, Break]] = {
    "a crew is missing": ("I3", "has 1 of 2 nodes, and 2 of 3 devices", without_a_crew),
    "devices do not add up": ("I3", "has 2 of 2 nodes, and 4 of 3 devices", in_crew(2, 1, gpus=2)),
    "ranks leave one out": ("I3", "has nodes whose ranks are not consecutive", in_crew(2, 1, first_rank=3)),
    "ranks are had twice": ("I3", "has nodes whose ranks are not consecutive", in_crew(2, 1, first_rank=1)),
    "nobody knows whom it meets": ("I3", "is on 2 nodes, and its nonce is missing", in_attempt(2, nonce="")),
    "it is over, and a crew goes on": ("I3", "has ended, but is still open on 1 nodes", in_crew(2, 1, **OPEN)),
    "no crew goes on, and it is not over": ("I3", "has ended on every node, but is still open", in_attempt(2, **OPEN)),
    "a process may be left, and it is tried again": (
        "I3",
        "may have left a process on n2",
        in_crew(1, 1, proven=False),
    ),
    "it began, and nobody has met": ("I3", "has begun without a rendezvous", in_attempt(2, chosen_json=None)),
    "it was called off, and they met": (
        "I3",
        "the server cancelled the rendezvous, but the gang finished the rendezvous",
        in_attempt(2, called_off=True),
    ),
    "it was called off, and ran": (
        "I3",
        "the server cancelled the rendezvous, but the gang finished the rendezvous",
        in_attempt(2, called_off=True, chosen_json=None),
    ),
    "one address is missing": (
        "I3",
        "is on 2 nodes, but its rendezvous has 1 addresses",
        in_attempt(2, chosen_json='{"master": ["a", 1], "interfaces": ["a"], "addresses": ["a"]}'),
    ),
    "it was released early": (
        "I3",
        "the server released the gang, but not all ranks had returned: n1",
        in_attempt(1, released=True),
    ),
    "it was released, and stopped": (
        "I3",
        "the server released the gang, but the attempt ended early (cancelled)",
        in_attempt(2, cause_json=cause(Reason.CANCELLED, None)),
    ),
    "it was released, and one failed that succeeded": (
        "I3",
        "the server released the gang, but the attempt ended early (rank_raised)",
        in_attempt(2, cause_json=cause(Reason.RANK_RAISED, 1)),
    ),
    "it ends because of a crew that is not there": (
        "I3",
        "ends because of node 2, which does not belong to the attempt",
        in_attempt(1, cause_json=cause(Reason.RANK_RAISED, 2)),
    ),
    "the cause is a peer": (
        "I3",
        "but no node reported the cause",
        in_attempt(1, cause_json=cause(Reason.PEER_FAILED, 1)),
    ),
    "an attempt ends by a peer": ("I3", "but no node reported the cause", in_attempt(1, reason="peer_failed")),
    "a run ends by a peer": (
        "I3",
        "ended because of a failed peer, which is not a valid reason for a run",
        in_run(state="FAILED", reason="peer_failed"),
    ),
    "one is silent, and nobody says so": (
        "I3",
        "is SUCCEEDED, began True, but the states on its nodes are SUCCEEDED, UNREACHABLE",
        in_crew(2, 1, **(OPEN | {"state": "UNREACHABLE"})),
    ),
    "a device of two crews": ("I4", "had the device at the same time", lent_to_both),
    "a crew is charged twice": ("I7", "both belong to day", charged_again),
    "an order of another crew is missing": (
        "I3",
        "attempt 2 (node 1) has 0 start orders instead of one",
        lambda connection, run_id: connection.execute(
            tables.orders.delete().where(tables.orders.c.run_id == run_id, tables.orders.c.crew == 1)
        ),
    ),
}


class _Enough(Exception):
    """What was written is not wanted any more."""


def broken(database: Database, run_id: str, write: Break) -> list[Violation]:
    """Return what is wrong with a run once something was written, and take that back."""
    found: list[Violation] = []

    def work(connection: sa.Connection) -> None:
        write(connection, run_id)
        found[:] = violations(invariant_inputs.of_runs(connection, [run_id]))
        raise _Enough

    with contextlib.suppress(_Enough):
        database.write(work)
    return found


def test_what_is_wrong_with_a_gang_is_found(people: Database) -> None:
    run_id = finished(people)
    not_found = {}
    for what, (invariant, sentence, write) in BROKEN.items():
        found = broken(people, run_id, write)
        if not any(one.invariant == invariant and sentence in one.sentence for one in found):
            not_found[what] = [str(one) for one in found]
    assert not_found == {}
    assert broken(people, run_id, lambda connection, run_id: None) == []


def test_a_device_that_two_crews_of_a_gang_have_is_found_pages_apart(people: Database) -> None:
    run_id = finished(people)
    page = people.read(partial(invariant_inputs.of_runs, run_ids=[run_id]))
    assert Lendings().look(page) == []
    people.write(partial(lent_to_both, run_id=run_id))
    page = people.read(partial(invariant_inputs.of_runs, run_ids=[run_id]))
    sentences = [one.sentence for one in Lendings().look(page)]
    assert sentences == [golden("server.gang_invariants.attempts-crew-same", run_id=run_id)]


def stretch(fence: int, crew: int, began: int, ended: int | None, *, device: str = "") -> Stretch:
    devices = (device or f"n{crew}/0",)
    return Stretch(
        run_id="r",
        fence=fence,
        crew=crew,
        node=f"n{crew}",
        devices=devices,
        began_ns=began,
        ended_ns=ended,
        freed_ns=ended,
    )


def of_stretches(*stretches: Stretch) -> list[str]:
    return [str(one) for one in violations(RecordedRuns(), History(stretches=stretches))]


def test_crews_of_one_attempt_run_beside_each_other_and_of_two_never() -> None:
    first = (stretch(1, 0, 0, 5), stretch(1, 1, 2, 4))
    assert of_stretches(*first, stretch(2, 0, 5, 9), stretch(2, 1, 6, None)) == []
    later = stretch(2, 1, 4, None)  # the crew of its own node has ended, and the other one not
    assert of_stretches(*first, later) == [golden("server.gang_invariants.i3-run-attempts")]
    assert of_stretches(*first, stretch(1, 1, 7, 8)) == [golden("server.gang_invariants.i3-run-one")]
    assert of_stretches(stretch(1, 0, 0, 5, device="n/0"), stretch(1, 1, 0, 5, device="n/0")) == [
        golden("server.gang_invariants.i4-device-attempts")
    ]


def test_user_code_of_a_gang_that_was_called_off_is_found_though_nobody_reported_it(people: Database) -> None:
    run_id = submitted(people)
    place_gang(people, run_id, 1, 1)
    called_off = partial(in_attempt(1, called_off=True), run_id=run_id)
    people.write(called_off)
    page = people.read(partial(invariant_inputs.of_runs, run_ids=[run_id]))
    assert violations(page) == []
    ran = msgspec.structs.replace(stretch(1, 1, 0, None), run_id=run_id)
    assert [one.sentence for one in violations(page, History(stretches=(ran,)))] == [
        golden("server.gang_invariants.attempt-called-off")
    ]


def test_a_server_that_was_restored_need_not_know_that_they_met(people: Database) -> None:
    run_id = finished(people)
    unmet = in_attempt(2, chosen_json=None)

    def restored(connection: sa.Connection, run_id: str) -> None:
        unmet(connection, run_id)
        in_run(restored_ns=T0)(connection, run_id)

    assert broken(people, run_id, unmet) and broken(people, run_id, restored) == []
