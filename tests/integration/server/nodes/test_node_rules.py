"""What people decide about a node: who may, what follows for those who wait and those who run, and that it stays."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import sqlalchemy as sa

from serverless_gpu.errors import InvalidValue, NotAllowed, NotFound
from serverless_gpu.model.lifecycle.attempt import Reason, State, StopReason
from serverless_gpu.model.lifecycle.run_lifecycle import AttemptEnded, StopAsked
from serverless_gpu.model.spec import Resources
from serverless_gpu.server.composition import Services, make_scheduler
from serverless_gpu.server.core.caller import Caller
from serverless_gpu.server.nodes import node_rules, node_service
from serverless_gpu.server.nodes.node_service import NodeCommand
from serverless_gpu.server.records import active_runs, audit, events, runs
from serverless_gpu.server.records.runs import StoredRun
from serverless_gpu.server.runs import run_views
from serverless_gpu.server.scheduling.reconciler import Reconciler
from serverless_gpu.testing import FakeClock
from serverless_gpu.wire.agents import Heartbeat, Start
from serverless_gpu.wire.nodes import CalendarRequest, LeftOut, NodeDrainRequest, NodeRules, NodeView, QuarantineRequest
from tests.support.golden import golden
from tests.support.server.agents import H100, NODE, hello, tell
from tests.support.server.late import before_next_write
from tests.support.server.stored import add_people, new_run

ROOT = Caller(name="root", role="admin")
ALICE = Caller(name="alice", role="member")
BOB = Caller(name="bob", role="member")
NIGHTS = CalendarRequest(owner="alice", shared=("18:00-09:00",))  # it is Friday, 08:00, when a test begins
WARNED_S, HOUR_S = 3600 - 300, 3600


@pytest.fixture
def node_id(services: Services) -> str:
    add_people(services.database, "node", "alice", "bob", "root")  # type: ignore[arg-type] # the fixture's is a Database
    return join(services)


def join(services: Services, name: str = "n1") -> str:
    said = hello(name, machine=f"machine of {name}", takes=(node_service.WITHOUT,))
    return services.agents.hello(NODE, said).node


def by(who: Caller, reach: str = "", node: str = "n1") -> NodeCommand:
    return NodeCommand(who=who, reach=reach or ("all" if who is ROOT else "own"), node=node)


def submit(services: Services, *, owner: str = "bob", gpus: int = 2, **spec: Any) -> str:
    new = new_run(owner=owner, resources=Resources(gpus=gpus, gpu_type="H100"), **spec)
    new = msgspec.structs.replace(new, context_sealed=services.sealer.seal(b'{"environ":{}}', about=new.id))
    services.database.write(lambda connection: runs.insert(connection, new, at_ns=services.clock.wall_ns()))
    return new.id


def find(services: Services, run_id: str) -> StoredRun:
    run = services.database.read(lambda connection: runs.find(connection, run_id))
    assert run is not None
    return run


def placed(services: Services, **wanted: object) -> str:
    run_id = submit(services, **wanted)  # type: ignore[arg-type] # as they are
    tick(services)
    assert find(services, run_id).state is State.STARTING
    return run_id


def tick(services: Services) -> None:
    """Do what both loops would, with all nodes heard of."""
    for node in services.nodes.view_nodes():
        services.presence.heard(node.id, now_ns=services.clock.boottime_ns())
    for run in services.database.read(active_runs.active_briefly):
        services.leases.renew((run.id, run.fence, 0), now_ns=services.clock.boottime_ns())
    scheduler = make_scheduler(services)
    services.make(Reconciler, scheduler=scheduler).tick(services.clock.boottime_ns())
    scheduler.tick(services.clock.boottime_ns())


def later(services: Services, clock: FakeClock, seconds: float) -> None:
    clock.advance(seconds)
    tick(services)


def sentence(services: Services, run_id: str) -> str:
    return run_views.sentence(find(services, run_id), waits_for=services.sentences.of(run_id))


def leave_ns(services: Services, run_id: str) -> int | None:
    attempt = find(services, run_id).attempt
    assert attempt is not None
    return attempt.crews[0].leave_ns


def end(services: Services, run_id: str, reason: Reason = Reason.DRAINED, *, began: bool = True) -> None:
    """Let a node say that it ended an attempt."""
    tell(services, run_id, AttemptEnded(reason, began=began))


def last_event(services: Services, run_id: str) -> str:
    return services.database.read(lambda connection: events.after(connection, run_id, 0))[-1].sentence


def actions(services: Services) -> list[tuple[str, str]]:
    found = services.database.read(audit.entries)
    return [(entry.action, entry.principal) for entry in found if entry.action != "node.join"]


# --- draining ---------------------------------------------------------------------------------------------------------


def test_a_drained_node_gets_nothing_new_and_keeps_what_runs_there(services: Services, node_id: str) -> None:
    going = placed(services)
    view = services.node_rules.drain(by(ROOT), NodeDrainRequest(on=True, note="new fan"))
    assert (view.state, len(view.runs)) == ("DRAINING", 1)
    assert view.sentence.startswith("starts no new runs: root drains it since ") and view.sentence.endswith("(new fan)")
    waiting = submit(services)
    tick(services)
    assert (find(services, going).state, find(services, waiting).state) == (State.STARTING, State.QUEUED)
    assert "root drains it" in services.sentences.of(waiting)
    services.agents.hello(NODE, hello("n1", machine="machine of n1", boot="b1", takes=(node_service.WITHOUT,)))
    tick(services)  # the node has said hello again, which changes nothing about it
    assert find(services, waiting).state is State.QUEUED
    assert services.node_rules.drain(by(ROOT), NodeDrainRequest(on=False)).state == "UP"
    tick(services)
    assert find(services, waiting).state is State.STARTING
    assert actions(services) == [("node.drain", "root"), ("node.resume", "root")]


def test_drain_with_stop_has_runs_leave_and_go_on_elsewhere_with_resume(services: Services, node_id: str) -> None:
    stays, goes_on = placed(services, gpus=4), placed(services, gpus=4, resume=True)
    services.node_rules.drain(by(ROOT), NodeDrainRequest(on=True, stop=True, note="new fan"))
    tick(services)
    for run_id in (stays, goes_on):
        assert (find(services, run_id).state, find(services, run_id).stop) == (State.STOPPING, StopReason.DRAIN)
        assert last_event(services, run_id) == golden("server.node_rules.asked-stop-drain")
        assert sentence(services, run_id) == golden("server.node_rules.asked-stop-drain")
        end(services, run_id)
    assert sentence(services, stays) == golden("server.node_rules.run-leave-node")
    join(services, "n2")
    tick(services)
    again = find(services, goes_on)
    assert (again.state, again.fence, again.stop, again.detail) == (State.STARTING, 2, None, "")
    assert again.attempt is not None and again.attempt.node == "n2"
    assert [name for name, who in actions(services) if who == "server"] == ["run.stop", "run.stop"]


def test_stop_can_be_said_after_the_drain_and_what_is_said_stays(services: Services, node_id: str) -> None:
    run_id = placed(services)
    first = services.node_rules.drain(by(ROOT), NodeDrainRequest(on=True, note="new fan"))
    tick(services)
    assert find(services, run_id).stop is None
    again = services.node_rules.drain(
        by(Caller(name="bob", role="operator"), "all"), NodeDrainRequest(on=True, stop=True)
    )
    assert again.rules.drain is not None and first.rules.drain is not None
    assert again.rules.drain == msgspec.structs.replace(first.rules.drain, stop=True)
    services.node_rules.drain(by(ROOT), NodeDrainRequest(on=True, stop=True))
    tick(services)
    assert find(services, run_id).stop is StopReason.DRAIN
    assert [name for name, _ in actions(services)] == [
        "node.drain",
        "node.drain",
        "run.stop",
    ]  # and nothing new


def test_a_placement_that_was_decided_before_the_drain_is_not_written_after(
    services: Services, node_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id, scheduler = submit(services), make_scheduler(services)
    before_next_write(
        monkeypatch, services.database, lambda: services.node_rules.drain(by(ROOT), NodeDrainRequest(on=True))
    )
    scheduler.tick(services.clock.boottime_ns())
    assert find(services, run_id).state is State.QUEUED


def _resume(services: Services, run_id: str) -> None:
    services.node_rules.drain(by(ROOT), NodeDrainRequest(on=False))


def _go_elsewhere(services: Services, run_id: str) -> None:
    end(services, run_id, Reason.REFUSED, began=False)
    join(services, "n2")
    services.clock.advance(5)  # type: ignore[attr-defined] # the test's
    services.presence.heard(services.nodes.view_nodes()[1].id, now_ns=services.clock.boottime_ns())
    make_scheduler(services).tick(services.clock.boottime_ns())
    attempt = find(services, run_id).attempt
    assert attempt is not None and (attempt.node, attempt.fence) == ("n2", 2)


@pytest.mark.parametrize("happens", [_resume, _go_elsewhere])
def test_what_happens_between_the_look_and_the_stop_counts(
    services: Services, node_id: str, monkeypatch: pytest.MonkeyPatch, happens: Callable[[Services, str], None]
) -> None:
    run_id = placed(services)
    services.node_rules.drain(by(ROOT), NodeDrainRequest(on=True, stop=True))
    read = services.database.read

    def read_then(work: Callable[[sa.Connection], object]) -> object:
        found = read(work)
        monkeypatch.setattr(services.database, "read", read)
        happens(services, run_id)
        return found

    monkeypatch.setattr(services.database, "read", read_then)
    services.evacuation.look()
    assert find(services, run_id).stop is None


def test_who_has_given_its_devices_back_or_was_asked_already_is_left_alone(services: Services, node_id: str) -> None:
    sends_results, asked = placed(services), placed(services)
    services.leases.free((sends_results, 1, 0))
    services.node_rules.drain(by(ROOT), NodeDrainRequest(on=True, stop=True))
    tick(services)
    before = find(services, asked)
    tell(services, asked, StopAsked(StopReason.CANCEL))
    tick(services)
    assert (find(services, sends_results).stop, before.stop) == (None, StopReason.DRAIN)
    assert find(services, asked).stop is StopReason.CANCEL
    assert [name for name, _ in actions(services)] == ["node.drain", "run.stop"]


def test_those_who_leave_are_asked_a_few_at_a_time(
    services: Services, node_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave = [placed(services) for _ in range(3)]
    services.node_rules.drain(by(ROOT), NodeDrainRequest(on=True, stop=True))
    monkeypatch.setattr(node_rules, "TOGETHER", 2)
    write, writes = services.database.write, list[int]()

    def counted(work: Callable[[sa.Connection], object]) -> object:
        writes.append(1)
        return write(work)

    monkeypatch.setattr(services.database, "write", counted)
    services.evacuation.look()
    assert [find(services, run_id).stop for run_id in leave] == [StopReason.DRAIN] * 3
    assert len(writes) == 2


# --- the calendar -----------------------------------------------------------------------------------------------------


def test_when_a_node_ceases_to_be_shared_others_are_told_and_then_stopped_and_its_owner_is_not(
    services: Services, node_id: str, clock: FakeClock
) -> None:
    view = services.node_rules.put_calendar(by(ROOT), NIGHTS)
    assert (view.shared, view.turns_ns) == (True, clock.wall_ns() + HOUR_S * 10**9)
    others, own = placed(services, owner="bob", resume=True), placed(services, owner="alice")
    later(services, clock, WARNED_S - 1)
    assert sentence(services, others) == ""
    later(services, clock, 1)
    assert sentence(services, others).startswith("must leave n1 at ")
    tick(services)
    later(services, clock, 299)
    assert find(services, others).stop is None
    later(services, clock, 1)
    assert (find(services, others).stop, find(services, own).stop) == (StopReason.DRAIN, None)
    assert last_event(services, others) == golden("server.node_rules.asked-stop-drain-n1")
    assert sentence(services, own) == ""


def test_nobody_leaves_without_a_warning_also_when_the_calendar_is_new_or_the_server_was_away(
    services: Services, node_id: str, clock: FakeClock
) -> None:
    run_id = placed(services)
    services.node_rules.put_calendar(by(ROOT), CalendarRequest(shared=("22:00-06:00",), zone="Europe/Berlin"))
    tick(services)
    assert sentence(services, run_id).startswith("must leave n1 at ")
    told_ns = leave_ns(services, run_id)
    assert told_ns == clock.wall_ns() + 300 * 10**9
    later(services, clock, 299)
    assert (find(services, run_id).stop, leave_ns(services, run_id)) == (None, told_ns)
    later(services, clock, 1)
    assert find(services, run_id).stop is StopReason.DRAIN
    assert last_event(services, run_id) == golden("server.node_rules.asked-stop-drain-n1-2")


def test_who_lived_through_a_turn_is_told_anew_before_the_next(
    services: Services, node_id: str, clock: FakeClock
) -> None:
    run_id = placed(services)
    gap = ("08:02-12:00", "13:00-24:00")  # it is not shared for two minutes, which is less than the warning
    services.node_rules.put_calendar(by(ROOT), CalendarRequest(shared=gap))
    tick(services)
    later(services, clock, 360)
    assert find(services, run_id).stop is None
    later(services, clock, 4 * HOUR_S - 360 - 300)
    assert (find(services, run_id).stop, leave_ns(services, run_id)) == (None, clock.wall_ns() + 300 * 10**9)
    later(services, clock, 299)
    assert find(services, run_id).stop is None
    later(services, clock, 1)
    assert find(services, run_id).stop is StopReason.DRAIN


def test_a_warning_is_taken_back_when_the_calendar_says_otherwise(
    services: Services, node_id: str, clock: FakeClock
) -> None:
    services.node_rules.put_calendar(by(ROOT), NIGHTS)
    run_id = placed(services, resume=True)
    later(services, clock, WARNED_S)
    assert sentence(services, run_id)
    services.node_rules.put_calendar(by(ALICE), msgspec.structs.replace(NIGHTS, shared=("18:00-10:00",)))
    assert sentence(services, run_id) == ""
    later(services, clock, HOUR_S)
    assert (find(services, run_id).stop, sentence(services, run_id)[:10]) == (None, "must leave")


def test_nothing_of_others_is_placed_on_a_node_that_is_not_shared_and_they_are_told(
    services: Services, node_id: str, clock: FakeClock
) -> None:
    services.node_rules.put_calendar(by(ROOT), msgspec.structs.replace(NIGHTS, shared=("sat-sun",)))
    run_id = submit(services, resume=True)
    tick(services)
    assert find(services, run_id).state is State.QUEUED
    assert "alice's until" in services.sentences.of(run_id)
    later(services, clock, 16 * HOUR_S)
    assert find(services, run_id).state is State.STARTING


def test_others_start_only_what_can_be_gone_by_the_turn_and_the_owner_whatever_they_like(
    services: Services, node_id: str, clock: FakeClock
) -> None:
    services.node_rules.put_calendar(by(ROOT), NIGHTS)  # shared for an hour still
    unknown, short, own = submit(services), submit(services, timeout_s=1800.0), submit(services, owner="alice")
    tick(services)
    assert [find(services, run_id).state for run_id in (unknown, short, own)] == [
        State.QUEUED,
        State.STARTING,
        State.STARTING,
    ]
    assert golden("server.node_rules.alice") in services.sentences.of(unknown)
    later(services, clock, 2 * HOUR_S)
    more = submit(services, owner="alice")
    tick(services)
    assert find(services, more).state is State.STARTING  # it is hers alone now
    assert "alice's until" in services.sentences.of(unknown)


def test_on_a_node_whose_owner_is_first_others_leave_for_them_and_come_back(
    services: Services, node_id: str, clock: FakeClock
) -> None:
    services.node_rules.put_calendar(by(ROOT), CalendarRequest(owner="alice", owner_first=True))
    guest, stays = submit(services, gpus=8, resume=True), submit(services, gpus=1)
    tick(services)
    assert (find(services, guest).state, find(services, stays).state) == (State.STARTING, State.QUEUED)
    own = submit(services, owner="alice", gpus=4)
    tick(services)
    assert find(services, guest).stop is StopReason.PREEMPT
    assert "alice/" in last_event(services, guest)
    tick(services)
    end(services, guest, Reason.PREEMPTED)
    tick(services)
    assert (find(services, own).state, find(services, guest).state) == (State.STARTING, State.QUEUED)
    end(services, own, Reason.COMPLETED)
    tick(services)
    assert (find(services, guest).state, find(services, guest).fence) == (State.STARTING, 2)
    assert find(services, stays).state is State.QUEUED  # it could not leave if she came


def test_a_calendar_that_cannot_be_read_any_more_lets_nobody_in_and_says_so(
    services: Services, node_id: str, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    going = placed(services)
    services.node_rules.put_calendar(by(ROOT), msgspec.structs.replace(NIGHTS, zone="Europe/Berlin"))

    def gone(key: str) -> object:
        raise KeyError(key)

    monkeypatch.setattr("serverless_gpu.server.nodes.node_rules.ZoneInfo", gone)
    clock.advance(60)  # what holds is remembered for its minute
    waiting = submit(services)
    tick(services)
    assert (find(services, going).stop, find(services, waiting).state) == (None, State.QUEUED)
    assert golden("server.node_rules.calendar-cannot-read") in (services.sentences.of(waiting))
    assert view_of(services).sentence.startswith("has an invalid calendar")


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (CalendarRequest(shared=("mo-fr 19-7",)), "is not a valid window of a calendar"),
        (CalendarRequest(shared=("sat",), zone="Berlin"), "knows no time zone 'Berlin'"),
        (CalendarRequest(zone="Europe"), "knows no time zone 'Europe'"),
        (CalendarRequest(zone="../../etc/passwd"), "knows no time zone"),
        (CalendarRequest(owner_first=True), "without an owner"),
        (CalendarRequest(owner="a" * 65), "64 characters"),
    ],
)
def test_a_calendar_that_cannot_be_is_refused(
    services: Services, node_id: str, said: CalendarRequest, words: str
) -> None:
    with pytest.raises(InvalidValue, match=words):
        services.node_rules.put_calendar(by(ROOT), said)
    assert services.nodes.view_nodes()[0].rules == NodeRules()


def test_an_owner_is_somebody_who_is_there(services: Services, node_id: str) -> None:
    with pytest.raises(NotFound):
        services.node_rules.put_calendar(by(ROOT), CalendarRequest(owner="carol"))
    with pytest.raises(NotFound, match=re.escape(golden("server.node_rules.node-n9"))):
        services.node_rules.put_calendar(by(ROOT, node="n9"), CalendarRequest())


# --- whose it is ------------------------------------------------------------------------------------------------------


def test_an_owner_decides_about_their_node_and_takes_nothing_back_that_others_decided(
    services: Services, node_id: str
) -> None:
    with pytest.raises(NotAllowed, match=re.escape(golden("server.node_rules.n1-alice"))):
        services.node_rules.drain(by(ALICE), NodeDrainRequest(on=True))
    with pytest.raises(NotAllowed, match=re.escape(golden("server.node_rules.n1-alice"))):
        services.node_rules.put_calendar(by(ALICE), CalendarRequest(owner="alice"))
    with pytest.raises(NotAllowed, match=re.escape(golden("server.node_rules.n1-alice"))):
        services.node_rules.quarantine(by(ALICE), QuarantineRequest(uuid=H100[0].uuid, on=True))
    services.node_rules.put_calendar(by(ROOT), CalendarRequest(owner="alice"))
    assert services.node_rules.put_calendar(by(ALICE), NIGHTS).rules.calendar.shared == NIGHTS.shared
    with pytest.raises(NotAllowed, match=re.escape(golden("server.node_rules.operator-says-whose"))):
        services.node_rules.put_calendar(by(ALICE), CalendarRequest(owner="bob"))
    with pytest.raises(NotAllowed, match=re.escape(golden("server.node_rules.n1-bob"))):
        services.node_rules.drain(by(BOB), NodeDrainRequest(on=True))
    services.node_rules.drain(by(ALICE), NodeDrainRequest(on=True))
    assert services.node_rules.drain(by(ALICE), NodeDrainRequest(on=False)).rules.drain is None
    services.node_rules.drain(by(ROOT), NodeDrainRequest(on=True))
    with pytest.raises(NotAllowed, match="root drains n1"):
        services.node_rules.drain(by(ALICE), NodeDrainRequest(on=False))
    with pytest.raises(NotAllowed, match="root drains n1"):
        services.node_rules.drain(by(ALICE), NodeDrainRequest(on=True, stop=True, note="root said so"))
    services.node_rules.quarantine(by(ROOT), QuarantineRequest(uuid=H100[0].uuid, on=True))
    with pytest.raises(NotAllowed, match="root has quarantined"):
        services.node_rules.quarantine(by(ALICE), QuarantineRequest(uuid=H100[0].uuid, on=False))


# --- devices that are left out ----------------------------------------------------------------------------------------


def view_of(services: Services) -> NodeView:
    return services.nodes.view_nodes()[0]


def test_a_gpu_that_is_left_out_is_not_counted_and_the_node_is_told_so(services: Services, node_id: str) -> None:
    uuid, at_ns = H100[3].uuid, services.clock.wall_ns()
    view = services.node_rules.quarantine(by(ROOT), QuarantineRequest(uuid=uuid, on=True, note="ECC"))
    assert view.rules.quarantined == (LeftOut(uuid=uuid, by="root", since_ns=at_ns, note="ECC"),)
    most_of_it = placed(services, gpus=7)
    all_of_it = submit(services, gpus=8)
    [order] = services.agents.waiting(NODE, node_id)
    assert isinstance(order, Start) and order.without == (uuid,)
    services.agents.heartbeat(NODE, node_id, Heartbeat(devices=H100, unavailable=(uuid,)))
    assert view_of(services).rules == view.rules  # what a node says changes nothing about it
    end(services, most_of_it, Reason.COMPLETED)
    services.agents.heartbeat(NODE, node_id, Heartbeat(devices=H100))  # for the node there is nothing wrong with it
    tick(services)
    assert find(services, all_of_it).state is State.QUEUED
    told = services.sentences.of(all_of_it)
    assert golden("server.node_rules.used-others-server") in told
    assert golden("server.node_rules.root-left-out", uuid=uuid) in told
    again = services.node_rules.quarantine(by(ROOT), QuarantineRequest(uuid=uuid, on=True))
    assert again.rules == view.rules  # the note stays where no other one comes
    assert services.node_rules.quarantine(by(ROOT), QuarantineRequest(uuid=uuid, on=False)).rules == NodeRules()
    tick(services)
    assert find(services, all_of_it).state is State.STARTING
    decided = [(action, who) for action, who in actions(services) if action.startswith("node.")]
    assert decided == [("node.quarantine", "root"), ("node.release", "root")]


def test_only_a_device_of_a_node_that_can_do_without_is_left_out(services: Services, node_id: str) -> None:
    with pytest.raises(NotFound, match=re.escape(golden("server.node_rules.n1-device-gpu"))):
        services.node_rules.quarantine(by(ROOT), QuarantineRequest(uuid="GPU-x", on=True))
    services.agents.hello(NODE, hello("n1", machine="machine of n1", takes=("secrets",)))
    with pytest.raises(InvalidValue, match=re.escape(golden("server.node_rules.n1-version-leaves"))):
        services.node_rules.quarantine(by(ROOT), QuarantineRequest(uuid=H100[0].uuid, on=True))


@pytest.mark.parametrize("note", ["x" * 257, "a\nb", "a\x1b[2J"])
def test_a_note_is_one_line(services: Services, node_id: str, note: str) -> None:
    with pytest.raises(InvalidValue, match="printable"):
        services.node_rules.drain(by(ROOT), NodeDrainRequest(on=True, note=note))
    with pytest.raises(InvalidValue, match="printable"):
        services.node_rules.quarantine(by(ROOT), QuarantineRequest(uuid=H100[0].uuid, on=True, note=note))
