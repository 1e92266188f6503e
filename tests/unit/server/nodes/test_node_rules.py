"""What follows from a node's rules, and how the command line reads and shows them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest

from serverless_gpu.ambient import format_soon_zoned
from serverless_gpu.cli.nodes import calendar_lines, find_device, local_zone, owner_text
from serverless_gpu.errors import InvalidValue
from serverless_gpu.model.hardware import Device, DeviceKind
from serverless_gpu.server.nodes.node_rules import LeaveRequest, SharingState, leaves, may_concern, sharing
from serverless_gpu.wire.nodes import NodeCalendar, NodeDrain, NodeRules, NodeView
from tests.support.golden import golden

MINUTE_NS = 60 * 10**9
BERLIN = NodeCalendar(owner="alice", shared=("mon-fri 19:00-07:00", "sat-sun"), zone="Europe/Berlin")


@pytest.fixture(autouse=True)
def in_utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have this process's clock show UTC."""
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def at(text: str, zone: str = "Europe/Berlin") -> int:
    return round(datetime.fromisoformat(text).replace(tzinfo=ZoneInfo(zone)).timestamp()) * 10**9


@pytest.mark.parametrize(
    ("now", "shared", "turns"),
    [
        ("2026-11-24 12:00", False, "2026-11-24 19:00"),
        ("2026-11-24 18:59", False, "2026-11-24 19:00"),
        ("2026-11-24 19:00", True, "2026-11-25 07:00"),
        ("2026-11-27 20:00", True, "2026-11-30 00:00"),  # over the weekend; on Sunday evening no window begins
        ("2026-11-30 06:59", False, "2026-11-30 19:00"),
    ],
)
def test_a_node_is_shared_as_its_calendar_says(now: str, shared: bool, turns: str) -> None:
    rules = NodeRules(calendar=BERLIN)
    assert sharing(rules, at(now) + 59 * 10**9) == SharingState(shared=shared, turns_ns=at(turns))


def test_a_node_without_windows_is_always_shared() -> None:
    rules = NodeRules(calendar=NodeCalendar(owner="alice", owner_first=True))
    assert sharing(rules, at("2026-11-24 12:00")) == SharingState(shared=True)
    assert not may_concern(rules, at("2026-11-24 12:00"))


def test_who_has_to_leave() -> None:
    rules, night = NodeRules(calendar=BERLIN), at("2026-11-25 06:00")

    def asked(now: int, owner: str = "bob") -> LeaveRequest | None:
        return leaves(rules, node="n3", owner=owner, at_ns=now)

    turns = at("2026-11-25 07:00")
    assert asked(night) is None
    assert asked(turns - 5 * MINUTE_NS - 1) is None
    assert asked(turns - 5 * MINUTE_NS) == LeaveRequest(at_ns=turns, because="n3 is alice's")
    assert asked(turns) == LeaveRequest(at_ns=turns, because="n3 is alice's")
    assert (asked(turns, "alice"), asked(turns - MINUTE_NS, "alice")) == (None, None)


def test_a_drain_with_stop_is_for_everybody_and_at_once() -> None:
    drain = NodeDrain(by="root", since_ns=0, note="new fan")
    rules = NodeRules(calendar=BERLIN, drain=drain)
    assert leaves(rules, node="n3", owner="bob", at_ns=at("2026-11-25 06:00")) is None
    rules = NodeRules(calendar=BERLIN, drain=NodeDrain(by="root", since_ns=0, note="new fan", stop=True))
    expected = LeaveRequest(at_ns=None, because="root drains n3 (new fan)")
    assert [leaves(rules, node="n3", owner=owner, at_ns=0) for owner in ("alice", "bob")] == [expected] * 2


def test_a_moment_to_come_is_told_with_its_zone_where_others_may_be_in_another() -> None:
    now = at("2026-11-24 12:00")
    assert format_soon_zoned(at("2026-11-24 19:00"), now) == "18:00 UTC"
    assert format_soon_zoned(at("2026-11-25 07:00"), now) == "25 Nov 06:00 UTC"


def view(calendar: NodeCalendar, *, shared: bool = True, turns_ns: int | None = None) -> NodeView:
    return NodeView(
        id="1",
        name="n3",
        state="UP",
        sentence="",
        pool="default",
        devices=(),
        unavailable=(),
        busy=0,
        runs=(),
        version="1",
        seen_ns=0,
        rules=NodeRules(calendar=calendar),
        shared=shared,
        turns_ns=turns_ns,
    )


def test_for_whom_a_node_is_and_its_calendar_read_as_text() -> None:
    turns = at("2031-11-25 07:00", "UTC")
    first = NodeCalendar(owner="alice", owner_first=True)
    assert owner_text(view(NodeCalendar())) == "all"
    assert owner_text(view(first)) == "all, alice first"
    assert owner_text(view(BERLIN, turns_ns=turns)) == "all until 25 Nov 2031 07:00"
    assert owner_text(view(BERLIN, shared=False, turns_ns=turns)) == "alice until 25 Nov 2031 07:00"
    assert owner_text(view(NodeCalendar(shared=("sat",)), shared=False)) == "none"
    assert calendar_lines(view(NodeCalendar())) == [golden("model.node_rules.n3-nobody-particular")]
    assert calendar_lines(view(first)) == [
        golden("model.node_rules.n3-alice-everybody"),
        golden("model.node_rules.runs-alice-come"),
    ]
    assert calendar_lines(view(BERLIN, shared=False, turns_ns=turns)) == [
        golden("model.node_rules.n3-alice-others"),
        golden("model.node_rules.shared-now-until"),
    ]


def device(uuid: str, index: int, kind: DeviceKind = DeviceKind.GPU) -> Device:
    return Device(uuid=uuid, index=index, type="CPU" if kind is DeviceKind.CPU else "H100", memory_bytes=0, kind=kind)


def test_a_gpu_is_found_by_number_uuid_or_a_beginning_that_is_its_own() -> None:
    cards = [device("cpu-0", 0, DeviceKind.CPU), device("GPU-11a", 0), device("GPU-11b", 1)]
    for asked, uuid in (("0", "GPU-11a"), ("1", "GPU-11b"), ("GPU-11b", "GPU-11b"), ("cpu-", "cpu-0")):
        assert find_device(cards, asked, "n3") == uuid
    assert find_device(cards[:1], "0", "n3") == "cpu-0"
    for asked, words in (("2", "no device '2'"), ("GPU-11", "several devices"), ("GPU", "no device")):
        with pytest.raises(InvalidValue, match=f"n3 has {words}") as caught:
            find_device(cards, asked, "n3")
        assert caught.value.hint == golden("model.node_rules.devices-gpu-11a")


def test_the_zone_of_this_machine_is_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", ":Asia/Kolkata")
    assert local_zone() == "Asia/Kolkata"
    monkeypatch.setenv("TZ", "CET-1CEST")  # a rule, which is no name
    assert ZoneInfo(local_zone()).key == local_zone()
    monkeypatch.setattr("os.path.realpath", lambda path: "/usr/share/zoneinfo/posix/Europe/Berlin")
    assert local_zone() == "Europe/Berlin"
    monkeypatch.setattr("os.path.realpath", lambda path: path)
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: (_ for _ in ()).throw(OSError))
    assert local_zone() == "UTC"
