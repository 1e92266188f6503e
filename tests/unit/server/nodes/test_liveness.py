"""What the server has heard, by its own clock."""

from __future__ import annotations

import pytest

from serverless_gpu import faults
from serverless_gpu.server.lifecycle.liveness import PRESENT_S, Leases, Presence
from serverless_gpu.server.lifecycle.requeue import OrderDeliveries

S = 1_000_000_000


def test_a_crew_that_was_never_heard_of_counts_from_the_first_look() -> None:
    leases = Leases()
    assert leases.last_ns(("r", 1, 0), now_ns=5 * S) == 5 * S
    assert leases.last_ns(("r", 1, 0), now_ns=9 * S) == 5 * S
    leases.renew(("r", 1, 0), now_ns=7 * S)
    assert leases.last_ns(("r", 1, 0), now_ns=9 * S) == 7 * S
    leases.keep({("r", 2, 0), ("r", 1, 1)})
    assert leases.last_ns(("r", 1, 0), now_ns=9 * S) == 9 * S


def test_a_node_is_there_once_it_said_something_and_not_long_after() -> None:
    presence = Presence()
    assert not presence.is_there("n", now_ns=0)
    assert presence.last_ns("n") is None
    assert presence.heard("n", now_ns=0)
    assert not presence.heard("n", now_ns=1 * S)
    assert presence.is_there("n", now_ns=20 * S)
    late = round((PRESENT_S + 2) * S)
    assert not presence.is_there("n", now_ns=late)
    assert presence.heard("n", now_ns=late)


def test_a_node_that_an_engine_lost_is_not_there_until_it_is_found_or_heard_of() -> None:
    presence = Presence()
    presence.heard("n", now_ns=0)
    presence.lose("n", "lost power")
    assert not presence.is_there("n", now_ns=0)
    assert presence.why_lost("n") == "lost power"
    presence.find("n")
    assert presence.is_there("n", now_ns=0)
    presence.lose("n", "lost power")
    assert presence.heard("n", now_ns=1)
    assert presence.is_there("n", now_ns=1)


def test_an_order_is_sent_or_taken_back_and_never_both() -> None:
    deliveries = OrderDeliveries()
    deliveries.made("a", 1)
    deliveries.made("b", 1)
    assert deliveries.hold("a", 1)
    assert not deliveries.send("a", 1)
    assert deliveries.send("b", 1)
    assert not deliveries.hold("b", 1)
    deliveries.forget(deliveries.known())
    assert deliveries.known() == frozenset()


def test_an_order_made_while_the_database_was_read_is_not_forgotten() -> None:
    deliveries = OrderDeliveries()
    deliveries.made("old", 1)
    known = deliveries.known()  # before the read, in which neither of the two is active
    for gang in ("held", "sent"):
        deliveries.made(gang, 1)
    assert deliveries.hold("held", 1)
    assert deliveries.send("sent", 1)
    deliveries.forget(known)
    assert not deliveries.send("held", 1)
    assert not deliveries.hold("sent", 1)
    assert ("old", 1) not in deliveries.known()


def test_an_order_that_an_earlier_process_wrote_may_have_left() -> None:
    assert not OrderDeliveries().hold("a", 1)


def test_a_fault_point_does_nothing_unless_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    reached: list[str] = []
    monkeypatch.setattr(faults, "crash", reached.append)
    monkeypatch.delenv(faults.VARIABLE, raising=False)
    faults.reach("after_commit_before_launch")
    monkeypatch.setenv(faults.VARIABLE, "after_commit_before_launch")
    faults.reach("after_launch_before_ack")
    assert reached == []
    faults.reach("after_commit_before_launch")
    assert reached == ["after_commit_before_launch"]
    with pytest.raises(ValueError, match="unknown fault point"):
        faults.reach("somewhere")
