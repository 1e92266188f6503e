"""Whether a gang on several nodes stands still: words of its crews, put together on a clock that the test moves."""

from __future__ import annotations

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given

from serverless_gpu.model.hangs.gang_hang_detection import CrewObservation, GangWatch, Silence, decide, with_observation
from serverless_gpu.model.hangs.hang_detection import PLACES_MAX, RankSeen, Sign
from serverless_gpu.model.lifecycle.attempt import Limits
from serverless_gpu.model.placement import laid_out
from serverless_gpu.wire.agents import Report

S = 1_000_000_000
CREWS = laid_out([("n1", 2), ("n2", 2)])
LIMITS = Limits(hang_warning_ns=600 * S, hang_timeout_ns=1_000 * S)
WARNING = Limits(hang_warning_ns=600 * S)


def rank(number: int, where: str = "train.py:30 train", **fields: object) -> RankSeen:
    place = abs(hash(where)) % 1000
    made = RankSeen(rank=number, state="S", where=where, place=place, places=(place,), signs=(Sign.COLLECTIVE,))
    return msgspec.structs.replace(made, **fields)


def elsewhere(number: int) -> RankSeen:
    return rank(number, "train.py:41 load_batch", signs=())


def at_work(number: int) -> RankSeen:
    return rank(number, "train.py:41 load_batch", signs=(), places=(1, 2), moving=True)


class Scene:
    """Two crews that report every five seconds, and answer what they are asked once their looks are done."""

    def __init__(self, limits: Limits = LIMITS) -> None:
        self.limits = limits
        self.gang = GangWatch()
        self.now_ns = 7_777 * S
        self.numbers: dict[int, int] = {}
        self.since_ns: dict[int, int] = {}
        self.ranks: dict[int, tuple[RankSeen, ...]] = {0: (rank(0), rank(1)), 1: (rank(2), elsewhere(3))}
        self.returned: set[int] = set()
        self.gone: set[int] = set()
        self._asked: dict[int, tuple[int, int]] = {}

    def says_something(self, crew: int) -> None:
        self.since_ns.pop(crew, None)
        self.numbers[crew] = self.numbers.get(crew, 0) + 1
        self.report(crew)

    def report(self, crew: int) -> None:
        since_ns = self.since_ns.get(crew)
        silence = None
        if since_ns is not None:
            silence = Silence(number=self.numbers.get(crew, 1), ms=(self.now_ns - since_ns) // 1_000_000)
        ask, seen = self.gang.ask, None
        if ask is not None and silence is not None:
            number, done_ns = self._asked.setdefault(crew, (ask.number, self.now_ns + ask.window_ms * 1_000_000))
            if number != ask.number:
                self._asked[crew] = ask.number, self.now_ns + ask.window_ms * 1_000_000
            elif self.now_ns >= done_ns:
                seen = CrewObservation(
                    number=number, ranks=self.ranks[crew], stacks={self.ranks[crew][-1].rank: "a stack"}
                )
        self.gang = with_observation(self.gang, crew, silence, seen, returned=crew in self.returned, now_ns=self.now_ns)
        self.gang = decide(self.gang, self.limits, CREWS, per_node=False, now_ns=self.now_ns, fresh_ns=30 * S)

    def live(self, seconds: int) -> None:
        for _ in range(seconds // 5):
            self.now_ns += 5 * S
            for crew in {0, 1} - self.gone:
                self.report(crew)

    def fall_silent(self, *crews: int) -> None:
        for crew in crews or (0, 1):
            self.since_ns[crew] = self.now_ns

    @property
    def told(self) -> str:
        return "" if self.gang.judgement is None else self.gang.judgement.sentence


def test_nobody_is_asked_before_looks_are_due_and_the_warning_names_who_is_missed_and_where() -> None:
    scene = Scene()
    scene.fall_silent()
    scene.live(215)
    assert scene.gang.ask is None
    scene.live(20)
    assert scene.gang.ask is not None and scene.gang.ask.window_ms > 360_000
    scene.live(360)
    assert scene.told == ""
    scene.live(25)
    assert scene.told.endswith(
        ", and ranks 0, 1 on n1, rank 2 on n2 wait in train.py:30 train: "
        "rank 3 on n2 is elsewhere, in train.py:41 load_batch"
    )
    judgement = scene.gang.judgement
    assert judgement is not None and not judgement.ends and judgement.hang is not None
    assert (judgement.hang.waiting, judgement.hang.elsewhere) == ((0, 1, 2), (3,))
    assert judgement.hang.stacks == {3: "a stack"} and judgement.hang.file == "hang-*-1.txt"


def test_the_end_comes_once_no_rank_on_any_node_moves_and_stays() -> None:
    scene = Scene()
    scene.fall_silent()
    scene.live(1_000)
    assert scene.gang.judgement is not None and not scene.gang.judgement.ends
    scene.live(320)
    assert scene.gang.judgement.ends and scene.gang.judgement.number == 2
    ended = scene.gang
    scene.live(2_000)
    assert scene.gang.judgement == ended.judgement


def test_a_rank_that_waits_for_one_that_prints_on_another_node_is_no_hang() -> None:
    scene = Scene()
    scene.fall_silent(0)
    for _ in range(100):
        scene.live(60)
        scene.says_something(1)
    assert scene.gang.judgement is None and scene.gang.ask is None


def test_a_rank_at_work_on_another_node_puts_the_end_off_and_is_told_once() -> None:
    scene = Scene(Limits(hang_warning_ns=None, hang_timeout_ns=600 * S))
    scene.ranks[1] = rank(2), at_work(3)
    scene.fall_silent()
    scene.live(5_000)
    judgement = scene.gang.judgement
    assert judgement is not None and not judgement.ends and judgement.number == 1
    assert judgement.sentence.endswith("rank 3 on n2 is busy, in train.py:41 load_batch")
    scene.ranks[1] = rank(2), elsewhere(3)
    scene.live(1_300)
    assert scene.gang.judgement is not None and scene.gang.judgement.ends


def test_ranks_that_all_get_on_are_left_alone_for_ever() -> None:
    scene = Scene()
    scene.ranks = {0: (at_work(0), at_work(1)), 1: (at_work(2), rank(3, places=(1,)))}  # where one that moves was seen
    scene.fall_silent()
    scene.live(5_000)
    assert scene.gang.judgement is None


def test_a_node_that_is_silent_itself_stops_the_judgement_until_it_is_back() -> None:
    scene = Scene()
    scene.fall_silent()
    scene.live(500)
    scene.gone.add(1)
    scene.live(2_000)
    assert scene.gang.judgement is None
    scene.gone.clear()
    scene.live(700)
    assert scene.gang.judgement is not None


def test_what_a_node_saw_before_it_fell_silent_is_no_ground_to_judge_by() -> None:
    scene = Scene()
    scene.fall_silent()
    scene.live(500)
    scene.gone = {0}
    scene.live(150)
    assert scene.gang.seen.keys() == {1}
    scene.gone = {0, 1}
    scene.live(40)
    scene.gone = {1}
    scene.live(700)
    assert scene.gang.seen.keys() == {0, 1} and scene.gang.judgement is None


def test_output_after_a_warning_takes_it_back() -> None:
    scene = Scene()
    scene.fall_silent()
    scene.live(700)
    assert scene.told
    scene.says_something(0)
    assert scene.gang.judgement is not None and scene.told == ""
    scene.fall_silent()
    scene.live(700)
    assert scene.told and scene.gang.judgement.number == 2


def test_a_crew_whose_ranks_have_returned_is_waited_for_by_nobody() -> None:
    scene = Scene(WARNING)
    scene.fall_silent()
    scene.live(5)
    scene.returned.add(0)
    scene.live(900)
    assert scene.told.endswith("on n2 is elsewhere, in train.py:41 load_batch, ranks 0, 1 on n1 have returned")


def test_whoever_forgot_everything_is_told_it_again() -> None:
    scene = Scene()
    scene.fall_silent()
    scene.live(590)
    scene.gang = GangWatch()
    scene.live(700)
    assert scene.told


def test_an_answer_to_an_older_question_counts_for_nothing() -> None:
    scene = Scene()
    scene.fall_silent()
    scene.live(300)
    ask = scene.gang.ask
    assert ask is not None
    old = CrewObservation(number=ask.number - 1, ranks=scene.ranks[0])
    silence = Silence(number=1, ms=300_000)
    now = with_observation(scene.gang, 0, silence, old, returned=False, now_ns=scene.now_ns)
    assert now.seen == {}


@given(
    st.lists(
        st.tuples(st.sampled_from([0, 1]), st.sampled_from(["print", "wait", "report"]), st.integers(1, 400)),
        max_size=40,
    )
)
def test_nothing_ends_that_was_heard_of_within_the_limit(story: list[tuple[int, str, int]]) -> None:
    scene = Scene()
    last_ns = scene.now_ns
    for crew, what, seconds in story:
        if what == "print":
            scene.says_something(crew)
            last_ns = scene.now_ns
        elif what == "wait":
            scene.since_ns.setdefault(crew, scene.now_ns)
        scene.live(seconds)
        ended = scene.gang.judgement is not None and scene.gang.judgement.ends
        assert not ended or scene.now_ns - last_ns >= 1_000 * S
        if ended:
            return


@pytest.mark.parametrize("jitter_ms", [0, 300, 4_000])
def test_reports_that_take_their_time_are_no_progress(jitter_ms: int) -> None:
    scene = Scene(WARNING)
    scene.fall_silent()
    for turn in range(140):
        scene.now_ns += 5 * S
        late_ns = (turn % 3) * jitter_ms * 1_000_000 // 2
        for crew in (0, 1):
            scene.since_ns[crew] += late_ns  # what it said is so much older when it is read
            scene.report(crew)
            scene.since_ns[crew] -= late_ns
    assert scene.told


def test_a_report_with_all_of_it_is_small() -> None:
    ranks = tuple(rank(number, places=tuple(range(1 << 55, (1 << 55) + PLACES_MAX))) for number in range(8))
    report = Report(state="RUNNING", seen=CrewObservation(number=1, ranks=ranks, stacks={0: "x" * 4_000}))  # type: ignore[arg-type]  # as it travels
    assert len(msgspec.json.encode(report)) < 20_000
