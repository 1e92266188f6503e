"""A gang of one to four ranks that lives at random, told to the lifecycle as thin code would tell it.

Ranks execute, return, fail, die and are reaped in any order, with stops, passing time and lost stems between them.
Whatever happens, the promises below hold after every step.
"""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from serverless_gpu.model.lifecycle.attempt import (
    MEANINGS,
    PASSING_STOPS,
    STOPPED_BY,
    TERMINAL,
    Attempt,
    Event,
    Failure,
    GangPlaced,
    GpuFailed,
    HangConfirmed,
    Limits,
    Phase,
    RankExecuting,
    RankExited,
    RankFailed,
    RankReturned,
    RanksNotStarted,
    Reason,
    State,
    StemLost,
    StopReason,
    StopRequested,
    Tick,
    TreeEmpty,
)
from serverless_gpu.model.lifecycle.attempt_lifecycle import (
    FAULT_NS,
    AttemptInstruction,
    IllegalAttemptTransition,
    advance,
)

S = 1_000_000_000
WAITING, EXECUTING, SPOKEN, GONE = "waiting", "executing", "spoken", "gone"


class GangMachine(RuleBasedStateMachine):
    """The world outside `advance`, and what it has been told to do."""

    @initialize(
        world_size=st.integers(1, 4),
        timeout_s=st.sampled_from([None, 4, 100]),
        grace_s=st.sampled_from([0, 1, 30]),
        begun=st.sampled_from([State.QUEUED, State.STARTING, State.RUNNING]),
    )
    def begin(self, world_size: int, timeout_s: int | None, grace_s: int, begun: State) -> None:
        timeout_ns = None if timeout_s is None else timeout_s * S
        limits = Limits(timeout_ns=timeout_ns, grace_ns=grace_s * S, failure_grace_ns=2 * S, start_ns=300 * S)
        self.attempt = Attempt(run_id="r", fence=1, world_size=world_size, limits=limits)
        self.now_ns = 1_000 * S
        self.ranks = dict.fromkeys(range(world_size), WAITING)
        self.returned: set[int] = set()
        self.stem = True
        self.issued: list[AttemptInstruction] = []
        self.due: State | None = None  # how it has to end, known from what stopped it
        self.out_of_time = False
        self.ending: Attempt | None = None
        if begun is not State.QUEUED:
            self.tell(GangPlaced())
        if begun is State.RUNNING:
            for rank in range(world_size):
                self.ranks[rank] = EXECUTING
                self.tell(RankExecuting(rank))

    # --- what thin code delivers -----------------------------------------------------------------------------------

    def tell(self, event: Event) -> None:
        before = self.attempt
        try:
            self.attempt, instructions = advance(before, event, self.now_ns)
        except IllegalAttemptTransition:
            if before.state in TERMINAL:
                return  # as the supervisor does: a late word; the outcome stands
            raise
        assert before.state not in TERMINAL
        self.issued += instructions
        if self.due is None and self.attempt.state is State.STOPPING:
            self.due = self.end_after(event, before)
            self.out_of_time = isinstance(event, Tick) and self.due is State.TIMED_OUT
        elif isinstance(event, StopRequested) and before.reason in PASSING_STOPS and before.state is State.STOPPING:
            self.due = self.end_after(event, before)
        if self.attempt.state in TERMINAL:
            assert self.ending is None
            self.ending = self.attempt

    def end_after(self, event: Event, before: Attempt) -> State:
        """Return how an attempt ends that this event stopped."""
        match event:
            case RankReturned():
                assert self.returned == set(self.ranks)
                return State.SUCCEEDED
            case StopRequested(why):
                return MEANINGS[STOPPED_BY[why]].state
            case Tick() if before.fault_ns is not None and self.now_ns >= before.fault_ns + FAULT_NS:
                return State.FAILED
            case Tick() if before.state is State.RUNNING and before.phase is Phase.NONE:
                return State.TIMED_OUT
            case _:
                return State.FAILED

    @property
    def started(self) -> bool:
        return AttemptInstruction.START_RANKS in self.issued and self.stem

    @rule()
    @precondition(lambda self: self.attempt.state is State.QUEUED)
    def place(self) -> None:
        self.tell(GangPlaced())

    @rule(reason=st.sampled_from([Reason.START_FAILED, Reason.RENDEZVOUS]))
    @precondition(lambda self: set(self.ranks.values()) == {WAITING})
    def fail_to_start(self, reason: Reason) -> None:
        self.tell(RanksNotStarted(reason, "why"))

    @rule(data=st.data())
    @precondition(lambda self: self.started and WAITING in self.ranks.values())
    def execute(self, data: st.DataObject) -> None:
        rank = self.draw(data, WAITING)
        self.ranks[rank] = EXECUTING
        self.tell(RankExecuting(rank))

    @rule(data=st.data())
    @precondition(lambda self: self.stem and EXECUTING in self.ranks.values())
    def return_(self, data: st.DataObject) -> None:
        rank = self.draw(data, EXECUTING)
        self.ranks[rank] = SPOKEN
        self.returned.add(rank)
        self.tell(RankReturned(rank))

    @rule()
    @precondition(lambda self: self.stem and EXECUTING in self.ranks.values())
    def return_everywhere(self) -> None:
        for rank in [rank for rank, is_ in self.ranks.items() if is_ == EXECUTING]:
            self.ranks[rank] = SPOKEN
            self.returned.add(rank)
            self.tell(RankReturned(rank))

    @rule(data=st.data(), peer_lost=st.booleans(), ago_ns=st.integers(0, S))
    @precondition(lambda self: self.stem and EXECUTING in self.ranks.values())
    def fail(self, data: st.DataObject, peer_lost: bool, ago_ns: int) -> None:
        rank = self.draw(data, EXECUTING)
        self.ranks[rank] = SPOKEN
        failure = Failure(rank=rank, reason=Reason.RANK_RAISED, at_ns=self.now_ns - ago_ns, peer_lost=peer_lost)
        self.tell(RankFailed(failure))

    @rule(data=st.data())
    @precondition(lambda self: self.started and WAITING in self.ranks.values())
    def fail_before_user_code(self, data: st.DataObject) -> None:
        rank = self.draw(data, WAITING)
        self.ranks[rank] = SPOKEN
        self.tell(RankFailed(Failure(rank=rank, reason=Reason.RANK_RAISED, at_ns=self.now_ns)))

    @rule(data=st.data(), signal=st.sampled_from([None, 9, 11, 15]), memory=st.booleans())
    @precondition(lambda self: self.started and set(self.ranks.values()) != {GONE})
    def exit_(self, data: st.DataObject, signal: int | None, memory: bool) -> None:
        rank = data.draw(st.sampled_from(sorted(rank for rank, is_ in self.ranks.items() if is_ != GONE)))
        self.ranks[rank] = GONE
        self.tell(RankExited(rank=rank, signal=signal, out_of_memory=memory and signal == 9))

    @rule(memory=st.booleans())
    @precondition(lambda self: self.stem)
    def lose_stem(self, memory: bool) -> None:
        self.stem = False
        if AttemptInstruction.KILL_TREE not in self.issued:  # afterwards the stem is expected to end
            self.tell(StemLost(detail="gone", out_of_memory=memory))

    @rule(why=st.sampled_from(StopReason))
    def stop(self, why: StopReason) -> None:
        self.tell(StopRequested(why))

    @rule()
    @precondition(lambda self: self.attempt.state is State.RUNNING)
    def hang(self) -> None:
        self.tell(HangConfirmed("rank 1 is elsewhere"))

    @rule()
    @precondition(lambda self: self.attempt.state in (State.STARTING, State.RUNNING, State.STOPPING))
    def break_gpu(self) -> None:
        self.tell(GpuFailed("GPU-1: Xid 79"))

    @rule(ns=st.sampled_from([0, 1, 200_000_000, 2 * S, 30 * S]))
    def tick(self, ns: int) -> None:
        self.now_ns += ns
        self.tell(Tick())

    @rule()
    @precondition(lambda self: self.attempt.wake_ns is not None)
    def sleep(self) -> None:
        assert self.attempt.wake_ns is not None
        self.now_ns = max(self.now_ns, self.attempt.wake_ns)
        self.tell(Tick())

    @rule()
    @precondition(lambda self: AttemptInstruction.KILL_TREE in self.issued and self.attempt.state is State.STOPPING)
    def empty(self) -> None:
        self.stem = False
        self.tell(TreeEmpty())
        assert self.attempt.state in TERMINAL

    def draw(self, data: st.DataObject, standing: str) -> int:
        return data.draw(st.sampled_from(sorted(rank for rank, is_ in self.ranks.items() if is_ == standing)))

    # --- promises --------------------------------------------------------------------------------------------------

    @invariant()
    def a_terminal_state_is_never_left(self) -> None:
        assert self.ending is None or self.attempt == self.ending
        assert (self.ending is not None) == (self.attempt.state in TERMINAL)

    @invariant()
    def what_stopped_it_decides_how_it_ends(self) -> None:
        assert self.attempt.state not in TERMINAL or self.attempt.state is self.due

    @invariant()
    def only_all_results_are_a_success(self) -> None:
        assert self.attempt.state is not State.SUCCEEDED or self.returned == set(self.ranks)

    @invariant()
    def a_failure_has_a_cause_and_its_reason(self) -> None:
        if self.attempt.state is State.FAILED:
            assert self.attempt.cause is not None
            assert self.attempt.reason is self.attempt.cause.reason

    @invariant()
    def time_given_is_not_more_than_was_promised(self) -> None:
        attempt, limits = self.attempt, self.attempt.limits
        if attempt.phase is Phase.TERMINATING and attempt.wake_ns is not None and attempt.stop_ns is not None:
            given_ns = attempt.wake_ns - attempt.stop_ns
            assert given_ns <= (limits.failure_grace_ns if self.due is State.FAILED else limits.grace_ns)
            assert not self.out_of_time or given_ns == limits.stop_grace_ns()
        if attempt.phase is Phase.NONE and attempt.state is State.RUNNING and limits.timeout_ns is not None:
            assert attempt.exec_ns is not None and attempt.wake_ns is not None
            stop_ns = attempt.exec_ns + limits.timeout_ns - limits.stop_grace_ns()
            due_ns = stop_ns if attempt.fault_ns is None else min(stop_ns, attempt.fault_ns + FAULT_NS)
            assert attempt.wake_ns == due_ns

    @invariant()
    def each_instruction_comes_at_most_once_and_in_order(self) -> None:
        order = list(AttemptInstruction)
        assert self.issued == [instruction for instruction in order if instruction in self.issued]
        assert len(self.issued) == len(set(self.issued))

    @invariant()
    def ranks_are_released_after_every_result_and_asked_to_end_otherwise(self) -> None:
        assert (AttemptInstruction.RELEASE_RANKS in self.issued) == (self.due is State.SUCCEEDED)
        assert AttemptInstruction.TERMINATE_RANKS not in self.issued or self.due is not State.SUCCEEDED

    @invariant()
    def the_end_is_concluded_after_everything_was_killed(self) -> None:
        assert (self.attempt.state in TERMINAL) == (AttemptInstruction.CONCLUDE in self.issued)
        assert AttemptInstruction.CONCLUDE not in self.issued or AttemptInstruction.KILL_TREE in self.issued

    @invariant()
    def the_reason_and_the_state_agree(self) -> None:
        if self.attempt.state in TERMINAL:
            assert self.attempt.reason is not None
            assert MEANINGS[self.attempt.reason].state is self.attempt.state
        assert (self.attempt.reason is not None) == (self.attempt.state in {State.STOPPING, *TERMINAL})

    @invariant()
    def whoever_waits_for_time_knows_until_when(self) -> None:
        waits = self.attempt.state is State.STARTING or self.attempt.phase in (Phase.SETTLING, Phase.TERMINATING)
        assert not waits or self.attempt.wake_ns is not None
        assert self.attempt.state not in TERMINAL or self.attempt.wake_ns is None

    @invariant()
    def phases_belong_to_states(self) -> None:
        allowed = {
            State.STOPPING: {Phase.TERMINATING, Phase.KILLING},
            State.RUNNING: {Phase.NONE, Phase.SETTLING},
        }
        assert self.attempt.phase in allowed.get(self.attempt.state, {Phase.NONE})

    @invariant()
    def killing_was_instructed(self) -> None:
        assert (self.attempt.phase is Phase.KILLING) <= (AttemptInstruction.KILL_TREE in self.issued)

    def teardown(self) -> None:
        """Once a stop has a deadline, time alone leads to the kill, and an empty tree to the end."""
        if not hasattr(self, "attempt"):
            return
        if self.attempt.state not in {State.STOPPING, *TERMINAL}:
            self.tell(StopRequested(StopReason.CANCEL))
        for _ in range(2):
            if self.attempt.wake_ns is not None:
                self.sleep()
        assert AttemptInstruction.KILL_TREE in self.issued
        if self.attempt.state is State.STOPPING:
            self.empty()
        self.a_terminal_state_is_never_left()
        self.what_stopped_it_decides_how_it_ends()
        self.only_all_results_are_a_success()
        self.a_failure_has_a_cause_and_its_reason()
        self.each_instruction_comes_at_most_once_and_in_order()
        self.the_end_is_concluded_after_everything_was_killed()
        self.the_reason_and_the_state_agree()


GangMachine.TestCase.settings = settings(max_examples=250, stateful_step_count=20, deadline=None)
TestGang = pytest.mark.slow(GangMachine.TestCase)
