"""A session lends each device once, in the order of asking, and ends when nobody has needed it for too long."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from serverless_gpu.model.hardware import Device, DeviceKind
from serverless_gpu.model.lifecycle.session import (
    DeviceRequest,
    SessionState,
    ask,
    idle_action,
    leave,
    mark_unfit,
    settle,
    waiting_text,
    wake_ns,
)
from tests.support.golden import golden

SECOND = 1_000_000_000


def devices(count: int, kind: str = "H100") -> tuple[Device, ...]:
    return tuple(
        Device(uuid=f"{kind}-{number}", index=number, type=kind, memory_bytes=0, kind=DeviceKind.FAKE)
        for number in range(count)
    )


def uuids(found: tuple[Device, ...]) -> list[str]:
    return [device.uuid for device in found]


class Lending(RuleBasedStateMachine):
    """Runs that come, are served, and go, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.book = SessionState(devices=devices(4), idle_ns=0)
        self.now_ns = 0
        self.asked: list[DeviceRequest] = []
        self.number = 0

    @rule(count=st.integers(1, 4))
    def come(self, count: int) -> None:
        self.number += 1
        asker = DeviceRequest(f"run{self.number}", count)
        self.asked.append(asker)
        self.book = ask(self.book, asker)

    @rule()
    def serve(self) -> None:
        self.book, served = settle(self.book)
        expected = self.asked[: len(served)]
        assert list(served) == [asker.run_id for asker in expected], "first come, first served"
        for asker in expected:
            assert len(self.book.loans[asker.run_id]) == asker.count
        self.asked = self.asked[len(served) :]
        assert not self.asked or self.asked[0].count > len(self.book.lendable), "nobody waits without need"

    @precondition(lambda self: self.book.loans or self.book.queue)
    @rule(data=st.data())
    def go(self, data: st.DataObject) -> None:
        known = [*self.book.loans, *(asker.run_id for asker in self.book.queue)]
        run_id = data.draw(st.sampled_from(known))
        self.asked = [asker for asker in self.asked if asker.run_id != run_id]
        self.now_ns += SECOND
        self.book = leave(self.book, run_id, self.now_ns)

    @rule(unfit=st.sets(st.integers(0, 3)))
    def look_at_devices(self, unfit: set[int]) -> None:
        self.book = mark_unfit(self.book, {f"H100-{number}" for number in unfit})

    @rule(seconds=st.integers(1, 50))
    def time_passes(self, seconds: int) -> None:
        self.now_ns += seconds * SECOND
        self.book, _, over = idle_action(self.book, 100 * SECOND, self.now_ns)
        if over:
            assert self.book.idle_ns is not None and self.now_ns - self.book.idle_ns >= 100 * SECOND
            self.book = SessionState(devices=devices(4), idle_ns=self.now_ns)
            self.asked = []

    @invariant()
    def no_device_is_lent_twice(self) -> None:
        lent = [device.uuid for held in self.book.loans.values() for device in held]
        assert len(lent) == len(set(lent))
        assert sorted([*lent, *uuids(self.book.idle)]) == uuids(devices(4))

    @invariant()
    def idle_means_that_nobody_has_or_wants_a_device(self) -> None:
        assert (self.book.idle_ns is not None) == (not self.book.loans and not self.book.queue)


TestLending = Lending.TestCase


def test_a_small_run_does_not_pass_a_large_one() -> None:
    book, served = settle(ask(SessionState(devices=devices(4), idle_ns=0), DeviceRequest("a", 2)))
    assert (served, uuids(book.loans["a"])) == (("a",), ["H100-0", "H100-1"])
    book, served = settle(ask(ask(book, DeviceRequest("large", 4)), DeviceRequest("small", 1)))
    assert served == ()
    book, served = settle(leave(book, "a", 5))
    assert (served, uuids(book.loans["large"])) == (("large",), uuids(devices(4)))


def test_why_a_run_waits() -> None:
    book, _ = settle(ask(SessionState(devices=devices(4), idle_ns=0), DeviceRequest("a", 3)))
    book = mark_unfit(ask(ask(book, DeviceRequest("b", 4)), DeviceRequest("c", 1)), {"H100-3"})
    assert waiting_text(book, book.queue[0]) == golden("model.sessions.waiting-session-h100")
    assert waiting_text(book, book.queue[1]) == golden("model.sessions.waiting-session-h100-run")
    third = ask(book, DeviceRequest("d", 1))
    assert golden("model.sessions.runs-ahead-queue") in waiting_text(third, third.queue[2])


@pytest.mark.parametrize(
    ("idle_s", "warned", "expected"),
    [
        (79.9, False, ("", False)),
        (
            80,
            False,
            (
                "the session has been idle for 1 min 20 s and will release its 4 H100 in 20.0 s. "
                "Call a function of the session to keep the devices",
                False,
            ),
        ),
        (90, True, ("", False)),
        (100, True, ("the session ended after it was idle for 1 min 40 s: it released its 4 H100", True)),
        (100, False, ("the session ended after it was idle for 1 min 40 s: it released its 4 H100", True)),
    ],
)
def test_an_idle_session_warns_once_and_ends(idle_s: float, warned: bool, expected: tuple[str, bool]) -> None:
    book = SessionState(devices=devices(4), idle_ns=0, warned=warned)
    after, sentence, over = idle_action(book, 100 * SECOND, int(idle_s * SECOND))
    assert (sentence, over) == expected
    assert after.warned == (warned or "will release" in sentence)


def test_time_matters_only_while_idle() -> None:
    book = SessionState(devices=devices(1, "CPU"), idle_ns=7 * SECOND)
    assert wake_ns(book, 100 * SECOND) == 87 * SECOND
    warned, sentence, _ = idle_action(book, 100 * SECOND, 90 * SECOND)
    assert golden("model.sessions.gives-cpu-slot") in sentence
    assert wake_ns(warned, 100 * SECOND) == 107 * SECOND
    busy = ask(warned, DeviceRequest("a", 1))
    assert (wake_ns(busy, 1), busy.warned, idle_action(busy, 1, 10**18)) == (None, False, (busy, "", False))
    assert leave(busy, "a", 9 * SECOND).idle_ns == 9 * SECOND
