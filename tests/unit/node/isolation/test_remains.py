"""What the sweeper does with each kind of remain: keep, remove or report."""

from __future__ import annotations

import itertools

import pytest

from serverless_gpu.node.isolation.remains import LEFT_S, Remain, RemainAction, RemainKind, judge
from tests.support.golden import golden

OWNERS = {5000: "ana of s"}
THINGS = [
    *(RemainKind.FILE, RemainKind.SHARED_MEMORY, RemainKind.SEMAPHORES, RemainKind.MESSAGES, RemainKind.POSIX_QUEUE)
]
OLD, YOUNG = LEFT_S, LEFT_S - 1


@pytest.mark.parametrize("kind", THINGS)
@pytest.mark.parametrize(
    ("uid", "age_s", "is_busy", "is_removable", "action"),
    [
        (5000, OLD, False, True, RemainAction.REMOVE),
        (5000, OLD, False, False, RemainAction.REPORT),
        (5000, OLD, True, True, RemainAction.KEEP),
        (5000, YOUNG, False, True, RemainAction.KEEP),
        (5001, OLD, False, True, RemainAction.REPORT),
        (5001, OLD, True, True, RemainAction.KEEP),
        (5001, YOUNG, False, True, RemainAction.KEEP),
    ],
)
def test_a_thing_is_removed_only_if_it_certainly_is_of_an_ended_attempt(
    kind: RemainKind, uid: int, age_s: float, is_busy: bool, is_removable: bool, action: RemainAction
) -> None:
    thing = Remain(kind, uid, "x", age_s, is_removable=is_removable)
    process = Remain(RemainKind.PROCESS, uid if is_busy else 5999, "7 (sleep)", is_expected=True)
    assert judge([thing, process], OWNERS)[0].action is action


def test_every_kind_has_a_verdict_and_processes_and_schedules_are_never_removed() -> None:
    for kind, uid, expected in itertools.product(RemainKind, (5000, 5001), (False, True)):
        (verdict,) = judge([Remain(kind, uid, "7 (x)", OLD, is_expected=expected)], OWNERS)
        if kind not in THINGS:
            assert verdict.action is (
                RemainAction.KEEP if expected and kind is RemainKind.PROCESS else RemainAction.REPORT
            )


def test_a_finding_names_the_thing_its_owner_and_the_remedy() -> None:
    verdicts = judge(
        [
            Remain(RemainKind.PROCESS, 5000, "7 (sleep)"),
            Remain(RemainKind.SCHEDULE, 5001, "/var/spool/cron/5001"),
            Remain(RemainKind.FILE, 5002, "/tmp/x", OLD),
        ],
        OWNERS,
    )
    assert [each.sentence for each in verdicts] == [
        golden(f"node.remains.{name}") for name in ("process", "schedule", "file")
    ]
