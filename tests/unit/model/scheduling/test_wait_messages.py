"""What people are told who wait, word for word."""

from __future__ import annotations

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given

from serverless_gpu.model.scheduling.values import DeviceHolder, StartEstimate, Wait, WaitReason
from serverless_gpu.model.scheduling.wait_messages import estimate_text, latest, ordinal, sentence
from tests.support.golden import golden

_HOUR, _MINUTE = 3_600_000_000_000, 60_000_000_000


def clock(at_ns: int) -> str:
    """Return hours and minutes since the first day began."""
    return f"{at_ns // _HOUR:02d}:{at_ns % _HOUR // _MINUTE:02d}"


def at(text: str) -> int:
    """Return the time that the clock writes so."""
    hours, minutes = text.split(":")
    return int(hours) * _HOUR + int(minutes) * _MINUTE


def holder(title: str, count: int, until: str = "", **others: object) -> DeviceHolder:
    """Return somebody who has devices."""
    base = DeviceHolder(title=title, count=count, until_ns=at(until) if until else None)
    return msgspec.structs.replace(base, **others)


def wait(reason: WaitReason = WaitReason.CAPACITY, **others: object) -> Wait:
    """Return a wait for 8 H100 on n3, on which 5 are free."""
    base = Wait(run_id="r1", reason=reason, count=8, gpu_type="H100", node="n3", free=5, place=2)
    return msgspec.structs.replace(base, **others)


_BERT = holder("alice/bert-ft", 3, "14:20", is_bound=True)
_NEEDS = "needs 8 H100 on one node; "


@pytest.mark.parametrize(
    ("waits", "told"),
    [
        (
            wait(holders=(_BERT,)),
            "needs 8 H100 on one node; 5 free on n3; alice/bert-ft holds 3 until 14:20 at the latest; you are 2nd",
        ),
        (wait(holders=(holder("alice/bert-ft", 3),)), _NEEDS + "5 free on n3; alice/bert-ft holds 3; you are 2nd"),
        (
            wait(holders=(holder("alice/bert-ft", 3, "14:20"),)),
            _NEEDS + "5 free on n3; alice/bert-ft holds 3 until about 14:20; you are 2nd",
        ),
        (
            wait(holders=(_BERT,), at_ns=at("14:20"), is_bound=True),
            _NEEDS + "5 free on n3; alice/bert-ft holds 3 until 14:20 at the latest; "
            "it starts at 14:20 at the latest; you are 2nd",
        ),
        (
            wait(holders=(_BERT,), at_ns=at("16:00"), is_bound=True),
            _NEEDS + "5 free on n3; alice/bert-ft holds 3 until 14:20 at the latest; "
            "it starts at 16:00 at the latest; you are 2nd",
        ),
        (
            wait(holders=(_BERT,), at_ns=at("14:10")),
            _NEEDS + "5 free on n3; alice/bert-ft holds 3 until 14:20 at the latest; "
            "it starts at about 14:10; you are 2nd",
        ),
        (
            wait(at_ns=at("12:40"), is_bound=True, place=1),
            _NEEDS + "5 free on n3; it starts at 12:40 at the latest; you are 1st",
        ),
        (
            wait(count=1, free=0, holders=(holder("alice/r1", 1),), place=1),
            "needs 1 H100; none free on n3; alice/r1 holds 1; you are 1st",
        ),
        (
            wait(count=8, whole=True, free=7, holders=(holder("alice/bert-ft", 1),)),
            "needs every H100 of a node (8); 7 free on n3; alice/bert-ft holds 1; you are 2nd",
        ),
        (wait(count=0, whole=True, gpu_type=""), "needs every GPU of a node; 5 free on n3; you are 2nd"),
        (wait(count=16, one_node=False, node="", free=12), "needs 16 H100; 12 free; you are 2nd"),
        (wait(count=16, one_node=False, node="", free=0), "needs 16 H100; none free; you are 2nd"),
        (
            wait(free=2, outside=2, place=1),
            _NEEDS + "2 free on n3; 2 in use outside of this server, or in quarantine; you are 1st",
        ),
        (
            wait(free=0, holders=tuple(holder(f"bob/{number}", 1) for number in range(6)), place=1),
            _NEEDS + "none free on n3; bob/0 holds 1; bob/1 holds 1; bob/2 holds 1; 3 more; you are 1st",
        ),
        (
            wait(
                free=0, holders=(holder("bob/x", 1, "14:00", is_bound=True), holder("bob/x", 2, "15:00", is_bound=True))
            ),
            _NEEDS + "none free on n3; bob/x holds 3 until 15:00 at the latest; you are 2nd",
        ),
        (
            wait(free=0, holders=(holder("bob/x", 1, "14:00", is_bound=True), holder("bob/x", 2))),
            _NEEDS + "none free on n3; bob/x holds 3; you are 2nd",
        ),
        (
            wait(WaitReason.RESERVED, ahead="alice/r1", holders=(holder("alice/bert-ft", 3),)),
            _NEEDS + "5 free on n3, kept for alice/r1, which is ahead; alice/bert-ft holds 3; you are 2nd",
        ),
        (
            wait(WaitReason.RESERVED, count=2, free=5, ahead="dave/llm", kept_ns=at("14:20"), spare_s=8_400.0),
            "needs 2 H100 on one node; 5 free on n3, kept for dave/llm, which is ahead, from 14:20 on; "
            "with timeout= of at most 2 h 20 min it would start now; you are 2nd",
        ),
        (wait(WaitReason.RESERVED), _NEEDS + "5 free on n3, kept for runs that are ahead; you are 2nd"),
        (wait(WaitReason.TURN), _NEEDS + "5 free on n3, and other runs are ahead; you are 2nd"),
        (wait(WaitReason.TURN, node="", free=0), _NEEDS + "the scheduler has not examined the run yet; you are 2nd"),
        (
            wait(WaitReason.MAKING_ROOM, holders=(holder("bob/sweep", 3, "14:20", is_leaving=True),), place=1),
            _NEEDS + "5 free on n3; bob/sweep was asked to release its 3 by about 14:20; you are 1st",
        ),
        (
            wait(WaitReason.MAKING_ROOM, holders=(holder("bob/sweep", 3, is_leaving=True),), place=1),
            _NEEDS + "5 free on n3; bob/sweep was asked to release its 3; you are 1st",
        ),
        (
            wait(holders=(holder("bob/be", 3, asked_ns=at("14:20")),), place=1),
            _NEEDS + "5 free on n3; bob/be holds 3 and is preempted at 14:20; you are 1st",
        ),
        (
            wait(holders=(holder("bob/be", 3, "14:50", is_bound=True, asked_ns=at("14:20")),), place=1),
            _NEEDS + "5 free on n3; bob/be holds 3 until 14:50 at the latest, and is preempted at 14:20; you are 1st",
        ),
        (
            wait(holders=(holder("bob/be", 3, "14:10", asked_ns=at("14:20")),), place=1),
            _NEEDS + "5 free on n3; bob/be holds 3 until about 14:10; you are 1st",
        ),
        (
            wait(WaitReason.CALENDAR, free=0, owner="alice", turns_ns=at("19:00")),
            _NEEDS + "n3 is alice's until 19:00; you are 2nd",
        ),
        (wait(WaitReason.CALENDAR, free=0), _NEEDS + "n3 is its owner's now; you are 2nd"),
        (
            wait(WaitReason.CALENDAR, free=8, owner="alice", turns_ns=at("07:00")),
            _NEEDS
            + "8 free on n3, which is alice's from 07:00 on: only runs that end before may start there; you are 2nd",
        ),
        (
            wait(WaitReason.AWAY, node="", free=0, words="n1 has been silent since 12:03:05", place=1),
            _NEEDS + "n1 has been silent since 12:03:05; you are 1st",
        ),
        (
            wait(WaitReason.HELD, words="it is tried again at 12:00:05", place=0),
            "it is tried again at 12:00:05",
        ),
        (
            wait(WaitReason.UNSATISFIABLE, words="no node has H100; the nodes have 6 A10", place=0),
            "no node has H100; the nodes have 6 A10",
        ),
        (Wait(run_id="r1", reason=WaitReason.CAPACITY), "the scheduler has not examined the run yet"),
        (wait(words="the rest is in pool search"), _NEEDS + "5 free on n3; the rest is in pool search; you are 2nd"),
    ],
)
def test_each_wait_has_its_sentence(waits: Wait, told: str) -> None:
    assert sentence(waits, clock) == told


@pytest.mark.parametrize(
    ("estimate", "told"),
    [
        (StartEstimate(at_ns=0, node="n3", basis="8 H100 are free"), "at once on n3: 8 H100 are free"),
        (
            StartEstimate(at_ns=at("14:20"), is_bound=True, node="n3", basis="declared limits", place=3),
            "at 14:20 at the latest on n3: declared limits; 3rd in line",
        ),
        (
            StartEstimate(at_ns=at("14:20"), basis="earlier runs", place=1),
            "at about 14:20: earlier runs; 1st in line",
        ),
        (
            StartEstimate(at_ns=None, basis="alice/bert-ft has declared no timeout", place=2),
            "unknown: alice/bert-ft has declared no timeout; 2nd in line",
        ),
        (StartEstimate(at_ns=None, basis="no node has H100", impossible=True), "never: no node has H100"),
    ],
)
def test_each_estimate_says_what_it_rests_on(estimate: StartEstimate, told: str) -> None:
    assert estimate_text(estimate, clock) == told


def test_ordinals() -> None:
    numbers = (1, 2, 3, 4, 11, 12, 13, 21, 22, 101, 111)
    told = ", ".join(ordinal(number) for number in numbers)
    assert told == golden("model.telling.1st-2nd-3rd")


_TIMES = st.one_of(st.none(), st.integers(0, 48 * _HOUR))
_HOLDERS = st.lists(
    st.builds(
        DeviceHolder, title=st.sampled_from(["a/x", "b/y", "c/z", "d/w"]), count=st.integers(1, 8), until_ns=_TIMES
    ),
    max_size=40,
).map(tuple)


@given(
    st.builds(
        Wait,
        run_id=st.just("r1"),
        reason=st.sampled_from(WaitReason),
        count=st.integers(0, 64),
        whole=st.booleans(),
        gpu_type=st.sampled_from(["", "H100"]),
        one_node=st.booleans(),
        node=st.sampled_from(["", "n1"]),
        free=st.integers(0, 8),
        holders=_HOLDERS,
        ahead=st.sampled_from(["", "a/x"]),
        place=st.integers(0, 3),
        at_ns=_TIMES,
        turns_ns=_TIMES,
        words=st.sampled_from(["", "because"]),
    )
)
def test_whatever_is_waited_for_the_sentence_is_short_and_whole(waits: Wait) -> None:
    told = sentence(waits, clock)
    assert 0 < len(told) < 400
    assert "None" not in told
    assert ";;" not in told.replace(" ", "")
    assert told == told.strip("; ")
    if waits.words:
        assert waits.words in told
    if waits.place and waits.reason not in (WaitReason.HELD, WaitReason.ISOLATION, WaitReason.UNSATISFIABLE):
        assert told.endswith(f"you are {ordinal(waits.place)}")


# --- latest times, and likely ones ------------------------------------------------------------------------------------


def test_22D5_a_latest_time_is_rounded_up_to_the_minute_and_others_are_not() -> None:
    until = at("17:06") + 52_000_000_000
    bound = msgspec.structs.replace(_BERT, until_ns=until)
    told = sentence(wait(holders=(bound,), at_ns=until, is_bound=True), clock)
    assert golden("model.telling.alice-bert-ft") in told
    likely = msgspec.structs.replace(bound, is_bound=False)
    assert golden("model.telling.until-about-17") in sentence(wait(holders=(likely,), at_ns=until), clock)
    leaving = msgspec.structs.replace(bound, is_leaving=True)
    assert golden("model.telling.asked-give-back") in sentence(wait(holders=(leaving,)), clock)
    assert estimate_text(StartEstimate(at_ns=until, is_bound=True, basis="", place=1), clock).startswith(
        "at 17:07 at the"
    )


@given(st.integers(0, 24 * _HOUR - _MINUTE))
def test_22D5_no_latest_time_is_before_the_one_that_was_promised(at_ns: int) -> None:
    told = at(latest(at_ns, clock))
    assert 0 <= told - at_ns < _MINUTE


def test_22D5_what_was_learned_is_told_beside_a_latest_time() -> None:
    week = {"until_ns": at("17:06"), "is_bound": True}
    known = holder("alice/bert-ft", 3, "17:06", **week, likely_ns=at("12:10"))
    told = sentence(wait(holders=(known,), at_ns=at("17:06"), is_bound=True, likely_ns=at("12:10")), clock)
    assert told == (_NEEDS + golden("model.telling.free-n3-alice"))
    # Of several runs of one name the last counts; of one of them nothing is known.
    unknown = holder("alice/bert-ft", 1, "13:00", is_bound=True)
    told = sentence(wait(holders=(known, unknown)), clock)
    assert golden("model.telling.holds-until-17") in told
