"""Which zygotes end: after which ends of an attempt, and when they are too many or use too much memory."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serverless_gpu.model.lifecycle.attempt import MEANINGS, Reason, Stopped
from serverless_gpu.node.agent.zygote_policy import ALL_ZYGOTES_MAX, ZYGOTES_MAX, ZygoteUsage, abnormal_end, excess
from serverless_gpu.node.agent.zygotes import Key
from tests.support.golden import golden

REPLACED = {
    *(Reason.RANK_SIGNAL, Reason.HOST_OOM, Reason.NO_RESULT, Reason.START_FAILED, Reason.RUNTIME_LOST),
    *(Reason.COLLECTIVE_HANG, Reason.SUPERVISOR_LOST, Reason.SUPERVISOR_KILLED, Reason.NODE_LOST, Reason.NODE_REBOOTED),
    *(Reason.NODE_GONE, Reason.ENGINE_HEAD_LOST, Reason.SERVER_RESTORED, Reason.GPU_LOST),
}
MEMORY_MAX = 1_000


def ended(reason: Reason, *, killed: bool = False, proven: bool = True) -> Stopped:
    state = MEANINGS[reason].state
    return Stopped(state=state, reason=reason, cause=None, consequences=(), killed=killed, proven=proven)


@pytest.mark.parametrize("reason", Reason)
def test_every_end_of_an_attempt_keeps_or_ends_the_zygote(reason: Reason) -> None:
    assert bool(abnormal_end(ended(reason))) == (reason in REPLACED)
    assert abnormal_end(ended(reason, killed=True)) and abnormal_end(ended(reason, proven=False))


def test_the_reason_says_how_the_attempt_ended() -> None:
    found = [
        ended(Reason.RANK_SIGNAL),
        ended(Reason.CANCELLED, killed=True),
        ended(Reason.COMPLETED, proven=False),
        None,
    ]
    assert [abnormal_end(each) for each in found] == [
        golden(f"node.zygote_policy.{name}") for name in ("signal", "killed", "left", "unknown")
    ]


def usage(number: int, owner: str = "", memory: int = 0, *, is_kept: bool = False) -> ZygoteUsage:
    """Return the zygote that was used last but `number`."""
    return ZygoteUsage(Key(f"/python{number}", (), (), owner=owner), 1_000 - number, memory, is_kept)


def ending(*zygotes: ZygoteUsage) -> list[str]:
    return sorted(key.python for key in excess(zygotes, MEMORY_MAX))


@pytest.mark.parametrize(
    ("zygotes", "expected"),
    [
        ([], []),
        ([usage(number) for number in range(ZYGOTES_MAX)], []),
        ([usage(number) for number in range(ZYGOTES_MAX + 1)], ["/python4"]),
        ([usage(number, is_kept=number == 4) for number in range(ZYGOTES_MAX + 1)], []),
        ([usage(number, f"owner {number}") for number in range(ALL_ZYGOTES_MAX + 2)], ["/python16", "/python17"]),
        ([usage(0, "a", 600), usage(1, "b", 300), usage(2, "a", 100)], []),
        ([usage(0, "a", 600), usage(1, "b", 300), usage(2, "a", 101)], ["/python2"]),
        ([usage(0, "a", 600), usage(1, "b", 500), usage(2, "c", 1)], ["/python1", "/python2"]),
        ([usage(0, "a", 1_000), usage(1, "b", 500, is_kept=True)], []),
        ([usage(0, "a", 1_001), usage(1, "b", 900)], ["/python0"]),
    ],
)
def test_the_least_recently_used_zygotes_end(zygotes: list[ZygoteUsage], expected: list[str]) -> None:
    assert ending(*zygotes) == ending(*reversed(zygotes)) == expected


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 2_000), st.booleans()), max_size=24))
def test_what_stays_is_within_the_limits(facts: list[tuple[str, int, bool]]) -> None:
    zygotes = [usage(n, owner, memory, is_kept=kept) for n, (owner, memory, kept) in enumerate(facts)]
    found = excess(zygotes, MEMORY_MAX)
    assert all(found.values()) and not any(each.is_kept for each in zygotes if each.key in found)
    staying = [each for each in zygotes if each.key not in found and not each.is_kept]
    owners = [owner for owner, _ in itertools.groupby(sorted(each.key.owner for each in staying))]
    assert all(sum(each.key.owner == owner for each in staying) <= ZYGOTES_MAX for owner in owners)
    kept = sum(each.memory_bytes for each in zygotes if each.is_kept)
    assert len(staying) <= 1 or kept + sum(each.memory_bytes for each in staying) <= MEMORY_MAX
