"""When a run stands still, and who waits for whom: decisions from values, on a clock that the test moves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import count, pairwise

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given

from serverless_gpu.model.hangs.hang_detection import (
    WARNINGS_MAX,
    HangAction,
    RankInspection,
    RunProgress,
    Step,
    begin,
    divide,
    looked,
    may_spin,
    moving,
    next_step,
    observed,
    progressed,
    returned_early,
    spared,
    warned,
)
from serverless_gpu.model.hardware import DeviceKind
from serverless_gpu.model.lifecycle.attempt import Attempt, Limits, State
from tests.support.model.hangs import HERE, THERE, Calls, S, look
from tests.support.model.stacks import ACCEPT, ALL_REDUCE, BACKWARD, BARRIER, CHILD, EVENT, LOADER, SLEEP, USERS_FORWARD

TEN_MIN = Limits(hang_warning_ns=600 * S)


Scene = Callable[[int], Sequence[RankInspection]]


def live(
    limits: Limits, scene: Scene, until_ns: int, watch: RunProgress | None = None, *, spins: bool = True
) -> tuple[RunProgress, list[tuple[int, HangAction]]]:
    """Do what is due, with looks from a scene, until a time; return what is known and what was done when (no looks)."""
    now_ns = 0
    watch = begin(0) if watch is None else watch
    done: list[tuple[int, HangAction]] = []
    while now_ns <= until_ns:
        watch = observed(watch, now_ns)
        step = next_step(watch, limits, now_ns)
        if step.action is HangAction.WAIT:
            until = until_ns + 1 if step.at_ns is None else step.at_ns
            assert until > now_ns, "it would look again and again at the same time"
            now_ns = min(until, now_ns + 5 * S)  # the supervisor's own turn
            continue
        before = watch
        watch = looked(watch, scene(now_ns), now_ns, spins=spins)
        if step.action is not HangAction.LOOK and watch.looks > before.looks:
            at_work = step.action is HangAction.END and moving(watch)
            if not (at_work and watch.warned):
                done.append((now_ns, HangAction.WARN if at_work else step.action))
            if step.action is HangAction.END and not at_work:
                return warned(watch), done
            watch = spared(watch, now_ns) if at_work else watch
            watch = warned(watch)
    return watch, done


def still(_: int) -> list[RankInspection]:
    return [look(0), look(1, THERE)]


# --- when ------------------------------------------------------------------------------------------------------------


def test_nothing_is_due_where_no_limit_is_set() -> None:
    assert next_step(begin(0), Limits(hang_warning_ns=None), 10**18) == Step(HangAction.WAIT, None)


def test_nobody_is_looked_at_before_half_the_limit() -> None:
    assert next_step(begin(7), TEN_MIN, 8) == Step(HangAction.WAIT, 300 * S + 7)
    assert next_step(begin(0), TEN_MIN, 300 * S) == Step(HangAction.LOOK)
    day = Limits(hang_warning_ns=86_400 * S)
    assert next_step(begin(0), day, 0) == Step(HangAction.WAIT, 86_100 * S)


def test_a_run_that_stands_still_is_warned_of_after_ten_minutes_and_at_twice_the_silence() -> None:
    watch, done = live(TEN_MIN, still, 100_000 * S)
    assert done == [(at * S, HangAction.WARN) for at in (600, 1200, 2400, 4800, 9600)]
    assert watch.warned_ever == WARNINGS_MAX == 5


def test_the_number_of_looks_is_bounded() -> None:
    looks = 0

    def scene(now_ns: int) -> Sequence[RankInspection]:
        nonlocal looks
        looks += 1
        return still(now_ns)

    live(TEN_MIN, scene, 600 * S)
    assert 10 <= looks <= 18


@pytest.mark.parametrize("limit_ns", [S // 10, S, 3 * S, 60 * S, 3600 * S, 36_000 * S])
def test_F04_the_end_comes_at_the_limit(limit_ns: int) -> None:
    _, done = live(Limits(hang_warning_ns=None, hang_timeout_ns=limit_ns), still, 10**18)
    [(at_ns, action)] = done
    assert action is HangAction.END
    assert limit_ns <= at_ns <= limit_ns + 350_000_000  # eight looks, whatever the limit


def test_both_limits_have_their_own_time() -> None:
    _, done = live(Limits(hang_warning_ns=60 * S, hang_timeout_ns=200 * S), still, 10**18)
    assert done == [(60 * S, HangAction.WARN), (120 * S, HangAction.WARN), (200 * S, HangAction.END)]
    _, done = live(Limits(hang_warning_ns=60 * S, hang_timeout_ns=60 * S), still, 10**18)
    assert done == [(60 * S, HangAction.END)]


def test_output_starts_the_time_anew() -> None:
    watch, done = live(TEN_MIN, still, 599 * S)
    assert (watch.looks > 10, done) == (True, [])
    watch = progressed(watch, 599 * S)
    assert (watch.looks, watch.places) == (0, {})
    assert next_step(watch, TEN_MIN, 700 * S) == Step(HangAction.WAIT, 899 * S)


def test_warnings_of_all_silences_together_are_bounded() -> None:
    watch, _ = live(TEN_MIN, still, 600 * S)
    assert (watch.warned, watch.warned_ever) == (1, 1)
    watch = progressed(watch, 601 * S)
    assert (watch.warned, watch.warned_ever) == (0, 1)
    over = msgspec.structs.replace(watch, warned_ever=WARNINGS_MAX)
    assert next_step(over, TEN_MIN, 10**18) == Step(HangAction.WAIT, None)


def test_time_in_which_nobody_watched_is_no_silence() -> None:
    watch = observed(begin(0), 20 * S)
    assert (watch.since_ns, watch.seen_ns) == (0, 20 * S)
    assert observed(watch, 51 * S).since_ns == 51 * S  # the machine slept


def test_an_observer_that_comes_late_decides_on_half_of_the_looks_at_least() -> None:
    limits = Limits(hang_warning_ns=None, hang_timeout_ns=S)
    now_ns, watch = 2 * S, begin(0)
    for looks in range(8):
        assert next_step(watch, limits, now_ns) == Step(HangAction.LOOK)
        watch = looked(watch, still(now_ns), now_ns, spins=True)
        step = next_step(watch, limits, now_ns + 1)
        if looks < 7:
            assert step.action is HangAction.WAIT and step.at_ns is not None and step.at_ns - now_ns == S // 20
            now_ns = step.at_ns
    assert next_step(watch, limits, now_ns) == Step(HangAction.END)


# --- what is movement ------------------------------------------------------------------------------------------------


def flicker(rank: int, now_ns: int, often: int = 2) -> RankInspection:
    """A rank that is seen elsewhere at every n-th look or so."""
    return look(rank, THERE if now_ns // (S // 1000) % often == 0 else HERE)


def test_ranks_that_all_move_are_left_alone_for_ever() -> None:
    seen = {0: [HERE, THERE], 1: [THERE, HERE]}

    def scene(now_ns: int) -> list[RankInspection]:
        number = now_ns // (18 * S)
        return [look(rank, calls[number % 2]) for rank, calls in seen.items()]

    watch, done = live(Limits(hang_warning_ns=600 * S, hang_timeout_ns=600 * S), scene, 100_000 * S)
    assert done == [] and watch.since_ns > 90_000 * S


def test_a_rank_that_stands_still_is_enough() -> None:
    def scene(now_ns: int) -> list[RankInspection]:
        return [look(0, (("/home/me/busy.py", now_ns // S % 7, "loop"),)), look(1)]

    watch, done = live(TEN_MIN, scene, 600 * S)
    assert done == [(600 * S, HangAction.WARN)]
    assert moving(watch) == {0}


def test_nothing_is_ended_while_a_rank_is_at_work() -> None:
    """The others may rightly wait for it; once it stands still, too, the run has one more limit."""

    def scene(now_ns: int) -> list[RankInspection]:
        return [look(0, (("/home/me/evaluate.py", min(now_ns, 1000 * S) // S % 7, "loop"),)), look(1)]

    limits = Limits(hang_warning_ns=None, hang_timeout_ns=100 * S)
    assert live(limits, scene, 990 * S)[1] == [(100 * S, HangAction.WARN)], "said once"
    ends = live(limits, scene, 3000 * S)[1][1:]
    assert [action for _, action in ends] == [HangAction.END] and 1050 * S < ends[0][0] <= 1200 * S


def test_ranks_at_the_place_where_one_that_moves_was_seen_get_on_too() -> None:
    """Eight ranks that wait for their GPU at the same line nearly all the time; one was seen elsewhere, once."""

    def scene(now_ns: int) -> list[RankInspection]:
        return [look(rank, THERE if rank == 3 and now_ns > 450 * S else HERE) for rank in range(8)]

    watch, done = live(TEN_MIN, scene, 600 * S)
    assert done == [] and 450 * S < watch.since_ns < 500 * S
    one_elsewhere: Scene = lambda now_ns: [*scene(now_ns), look(8, ALL_REDUCE)]  # noqa: E731 - a scene made of a scene
    assert live(TEN_MIN, one_elsewhere, 600 * S)[1] == [(600 * S, HangAction.WARN)]


def test_a_rank_that_waits_for_its_own_threads_moves_with_them() -> None:
    def scene(now_ns: int) -> list[RankInspection]:
        return [look(0, EVENT, passed=True, cpu_ms=now_ns // 2_000_000)]  # half of one CPU

    assert live(TEN_MIN, scene, 2000 * S)[1] == []
    spinning: Scene = lambda now_ns: [look(0, ALL_REDUCE, cpu_ms=now_ns // 2_000_000)]  # noqa: E731 - one line
    assert live(TEN_MIN, spinning, 600 * S)[1] == [(600 * S, HangAction.WARN)]


@pytest.mark.parametrize(("calls", "moves"), [(CHILD, True), (LOADER, True), (ALL_REDUCE, False), (SLEEP, False)])
def test_a_rank_that_waits_for_its_processes_moves_while_they_work(calls: Calls, moves: bool) -> None:
    def scene(now_ns: int) -> list[RankInspection]:
        return [look(0, calls, children_ms=now_ns // 10_000_000)]  # a tenth of one CPU

    assert (live(TEN_MIN, scene, 1000 * S)[1] == []) is moves


@pytest.mark.parametrize(("used", "moves"), [(0.5, True), (0.001, False)])
def test_a_rank_without_a_stack_moves_when_it_uses_its_cpu(used: float, moves: bool) -> None:
    def scene(now_ns: int) -> list[RankInspection]:
        return [RankInspection(rank=0, state="S", cpu_ms=round(used * now_ns / 1e6), note="no stack")]

    assert (live(TEN_MIN, scene, 1000 * S)[1] == []) is moves


@pytest.mark.parametrize(
    ("passes", "used", "moves"),
    [(True, 0.03, True), (True, 0.002, False), (False, 1.0, False)],
    ids=["waits for its GPU at one line", "sleeps, or polls", "spins in a collective"],
)
def test_a_rank_that_comes_by_python_and_uses_its_cpu_moves(passes: bool, used: float, moves: bool) -> None:
    def scene(now_ns: int) -> list[RankInspection]:
        return [
            look(0, passed=passes, main_us=round(used * now_ns / 1e3)),
            look(1, THERE, passed=True, main_us=now_ns // 1000),
        ]

    assert (live(TEN_MIN, scene, 1000 * S)[1] == []) is moves


@pytest.mark.parametrize("spins", [True, False])
@pytest.mark.parametrize(("used", "moves"), [(1.0, True), (0.002, False)], ids=["computes", "waits"])
def test_one_long_call_in_c_is_work_where_nobody_spins_while_waiting(spins: bool, used: float, moves: bool) -> None:
    def scene(now_ns: int) -> list[RankInspection]:
        return [look(0, main_us=round(used * now_ns / 1e3))]

    assert (live(TEN_MIN, scene, 1000 * S, spins=spins)[1] == []) is (moves and not spins)


@pytest.mark.parametrize("spins", [True, False])
@pytest.mark.parametrize(("calls", "moves"), [(EVENT, True), (HERE, False)], ids=["waits for its threads", "elsewhere"])
def test_threads_at_work_in_c_count_where_the_main_thread_waits_for_them(
    spins: bool, calls: Calls, moves: bool
) -> None:
    def scene(now_ns: int) -> list[RankInspection]:
        return [look(0, calls, cpu_ms=now_ns // 1_000_000)]

    assert (live(TEN_MIN, scene, 1000 * S, spins=spins)[1] == []) is (moves and not spins)


@pytest.mark.parametrize(
    ("world_size", "kinds", "spins"),
    [
        (2, {DeviceKind.GPU}, True),
        (1, {DeviceKind.GPU}, False),
        (8, {DeviceKind.CPU}, False),
        (8, {DeviceKind.FAKE}, False),
        (8, set[DeviceKind](), False),
    ],
)
def test_only_several_gpus_wait_for_each_other_in_a_busy_loop(
    world_size: int, kinds: set[DeviceKind], spins: bool
) -> None:
    assert may_spin(world_size, kinds) is spins


@pytest.mark.parametrize("spins", [True, False])
def test_what_looks_cost_a_rank_is_no_movement(spins: bool) -> None:
    number = count()

    def scene(_: int) -> list[RankInspection]:
        turn = next(number)
        rounded_ms = turn * 2 // 10 * 10
        return [look(0, EVENT, passed=True, main_us=2_000 * turn, cpu_ms=rounded_ms, children_ms=rounded_ms)]

    assert live(Limits(hang_warning_ns=None, hang_timeout_ns=S), scene, 5 * S, spins=spins)[1] != []


def test_looks_are_not_in_step() -> None:
    taken = []

    def scene(now_ns: int) -> Sequence[RankInspection]:
        taken.append(now_ns)
        return still(now_ns)

    live(TEN_MIN, scene, 599 * S)
    intervals = [round((after - before) / S) for before, after in pairwise(taken)]
    assert len(set(intervals)) > 10 and min(intervals) >= 9 and max(intervals) <= 29


def test_a_stack_that_did_not_come_once_is_no_movement() -> None:
    def scene(now_ns: int) -> list[RankInspection]:
        return [look(0) if now_ns < 450 * S else RankInspection(rank=0, state="S", note="no stack: it did not answer")]

    assert live(TEN_MIN, scene, 600 * S)[1] == [(600 * S, HangAction.WARN)]


@pytest.mark.parametrize("state", ["T", "t"])
def test_a_rank_that_is_stopped_does_not_move(state: str) -> None:
    def scene(now_ns: int) -> list[RankInspection]:
        return [look(0, (("/a.py", now_ns // S, "f"),)), RankInspection(rank=1, state=state)]

    watch, done = live(TEN_MIN, scene, 600 * S)
    assert done == [(600 * S, HangAction.WARN)] and moving(watch) == {0}


def test_a_run_whose_ranks_have_all_returned_is_no_hang() -> None:
    assert live(TEN_MIN, lambda _: [], 1000 * S)[1] == []


def test_a_rank_that_returns_leaves_the_first_looks() -> None:
    watch = looked(begin(0), [look(0, cpu_ms=5), look(1)], S, spins=True)
    watch = looked(watch, [look(0, cpu_ms=9)], 2 * S, spins=True)
    assert {rank: seen.cpu_ms for rank, seen in watch.first.items()} == {0: 5}
    assert (watch.began_ns, watch.looked_ns, watch.looks, list(watch.last)) == (S, 2 * S, 2, [0])


@given(
    places=st.lists(st.lists(st.integers(0, 2), min_size=3, max_size=3), min_size=1, max_size=12),
)
def test_a_silence_ends_exactly_when_no_rank_is_still(places: list[list[int]]) -> None:
    """Against the rule, said another way: over the looks since the last progress, every rank moves or stands with one
    that moves."""
    watch, since = begin(0), 0
    for number, row in enumerate(places):
        looks = [look(rank, ((f"/{place}.py", 1, "f"),)) for rank, place in enumerate(row)]
        watch = looked(watch, looks, (number + 1) * S, spins=True)
        seen = [set(column) for column in zip(*places[since : number + 1], strict=True)]
        lively = set().union(*(one for one in seen if len(one) > 1))
        gets_on = number > since and all(len(one) > 1 or one <= lively for one in seen)
        assert (watch.since_ns == (number + 1) * S) is gets_on
        if gets_on:
            since = number + 1


@pytest.mark.parametrize(
    ("returned", "first_ns", "now_ns", "early"),
    [
        (frozenset[int](), None, 100 * S, False),
        (frozenset({1}), 10 * S, 69 * S, False),
        (frozenset({1}), 10 * S, 70 * S, True),
        (frozenset({0, 1}), 10 * S, 200 * S, False),
    ],
    ids=["none returned", "a while ago", "long ago", "all returned"],
)
def test_F05_who_returned_long_before_the_others(
    returned: frozenset[int], first_ns: int | None, now_ns: int, early: bool
) -> None:
    attempt = Attempt(run_id="r", fence=1, world_size=2, limits=TEN_MIN, state=State.RUNNING, returned=returned)
    assert returned_early(attempt, first_ns, now_ns) is early
    assert not returned_early(msgspec.structs.replace(attempt, state=State.STOPPING), first_ns, now_ns)


# --- who waits for whom ----------------------------------------------------------------------------------------------

BUSY_BACKWARD: Mapping[str, object] = {"state": "R"}
DIVISIONS: dict[str, tuple[list[RankInspection], set[int], list[int]]] = {
    "F04 one sleeps, the others are in all_reduce": (
        [look(0, ALL_REDUCE), look(1, SLEEP), look(2, ALL_REDUCE)],
        set(),
        [0, 2],
    ),
    "F04 different collectives count as waiting where one is elsewhere": (
        [look(0, ALL_REDUCE), look(1, BARRIER), look(2, SLEEP)],
        set(),
        [0, 1],
    ),
    "F04 one in a busy loop, one in DDP's backward": ([look(0, BACKWARD), look(1, SLEEP, state="R")], set(), [0]),
    "a backward that computes does not wait": ([look(0, BACKWARD, **BUSY_BACKWARD), look(1, BACKWARD)], set(), [1]),
    "a backward is weaker evidence than a collective": ([look(0, BACKWARD), look(1, ALL_REDUCE)], set(), [1]),
    "F04 a socket barrier": (
        [look(0, SLEEP, channel="sk_wait_data"), look(1, SLEEP, channel="hrtimer_nanosleep")],
        set(),
        [0],
    ),
    "F04 a socket barrier of two that rank 0 does not come to": (
        [look(0, THERE, channel="hrtimer_nanosleep"), look(1, HERE, channel="unix_stream_read_generic")],
        set(),
        [1],
    ),
    "a socket barrier in the poll call": (
        [look(0, SLEEP, channel="poll_schedule_timeout.constprop.0"), look(1, CHILD, channel="do_wait")],
        set(),
        [0],
    ),
    "where the kernel does not say, frames do": ([look(0, ACCEPT), look(1, SLEEP)], set(), [0]),
    "a data loader waits at a socket, and for nobody": (
        [look(0, LOADER, channel="do_poll"), look(1, SLEEP), look(2, SLEEP)],
        set(),
        [1, 2],
    ),
    "F04 a stopped rank is elsewhere, wherever it stands": (
        [look(0, ALL_REDUCE), look(1, ALL_REDUCE, state="T")],
        set(),
        [0],
    ),
    "one under a debugger, too": ([look(0, SLEEP), look(1, SLEEP, state="t")], set(), [0]),
    "all are stopped": ([look(0, state="T"), look(1, state="T")], set(), []),
    "F05 one returned": ([look(0, ALL_REDUCE), look(1, ALL_REDUCE), look(3, ALL_REDUCE)], {2}, [0, 1, 3]),
    "F05 one returned, the others wait for something unknown": ([look(0), look(1), look(3)], {2}, [0, 1, 3]),
    "F05 one returned, one is elsewhere": ([look(0, ALL_REDUCE), look(1, SLEEP)], {2}, [0]),
    "all in the same collective": ([look(0, ALL_REDUCE), look(1, ALL_REDUCE)], set(), [0, 1]),
    "F04 two different collectives": ([look(0, BARRIER), look(1, ALL_REDUCE), look(2, ALL_REDUCE)], set(), [1, 2]),
    "all at sockets, most at the same line": (
        [
            look(0, HERE, channel="tcp_recvmsg"),
            look(1, SLEEP, channel="tcp_recvmsg"),
            look(2, SLEEP, channel="tcp_recvmsg"),
        ],
        set(),
        [1, 2],
    ),
    "nothing is known but that most stand together": ([look(0, THERE), look(1), look(2), look(3)], set(), [1, 2, 3]),
    "two places and nothing else": ([look(0, THERE), look(1, HERE)], set(), [0]),
    "a forward inside of FSDP's": ([look(0, USERS_FORWARD), look(1, ALL_REDUCE)], set(), [1]),
    "a rank without a stack is elsewhere": (
        [look(0, ALL_REDUCE), RankInspection(rank=1, state="S", channel="do_wait")],
        set(),
        [0],
    ),
    "one rank": ([look(0)], set(), [0]),
}


@pytest.mark.parametrize(("looks", "returned", "expected"), DIVISIONS.values(), ids=DIVISIONS)
def test_who_waits(looks: list[RankInspection], returned: set[int], expected: list[int]) -> None:
    everybody = sorted({seen.rank for seen in looks} | returned)
    rest = [rank for rank in everybody if rank not in expected]
    assert divide(looks, returned, ()) == (expected, rest)
    assert divide(looks[::-1], returned, ()) == (expected, rest), "the order of the looks does not matter"


def test_on_a_tie_the_one_that_moves_is_elsewhere() -> None:
    assert divide([look(0, THERE), look(1, HERE)], (), {0}) == ([1], [0])


@given(
    st.lists(
        st.tuples(st.sampled_from([ALL_REDUCE, BACKWARD, SLEEP, ACCEPT, HERE]), st.sampled_from("RSDTt")), max_size=6
    )
)
def test_every_rank_is_on_one_side(ranks: list[tuple[Calls, str]]) -> None:
    looks = [look(rank, calls, state=state) for rank, (calls, state) in enumerate(ranks)]
    waiting, elsewhere = divide(looks, {90}, ())
    assert sorted(waiting + elsewhere) == [*range(len(ranks)), 90]
    assert not any(looks[rank].state in "Tt" for rank in waiting)
    assert not waiting or 90 in elsewhere
