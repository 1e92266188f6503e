"""A run that lives at random on nodes that fall silent, restart, die and come back, told as thin code would tell it.

The world knows what the server cannot: whether user code of an attempt really runs. Whatever happens, the promises
below hold after every step.
"""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from serverless_gpu.model.lifecycle.attempt import MEANINGS, STOPPED_BY, TERMINAL, Reason, State, StopReason
from serverless_gpu.model.lifecycle.run_lifecycle import (
    INFRA_RETRIES_MAX,
    LOST,
    AttemptEnded,
    Event,
    Forgotten,
    GivenUp,
    Heard,
    IllegalRunTransition,
    Run,
    RunInstruction,
    RunPlaced,
    Silent,
    StopAsked,
    Stopping,
    UserCodeStarted,
    advance,
)

FINAL_STOPS = (StopReason.CANCEL, StopReason.TIMEOUT, StopReason.BUDGET, StopReason.IDLE)


class RunMachine(RuleBasedStateMachine):
    """One run, its attempts as they really are, and what the server has been told."""

    @initialize(resume=st.booleans(), retries=st.integers(0, 2))
    def begin(self, resume: bool, retries: int) -> None:
        self.run = Run(run_id="r", may_resume=resume, retries_left=retries)
        self.retries = retries
        self.fences: list[int] = []  # of the attempts that were placed
        self.alive = False  # whether an attempt may still have processes
        self.began_with_code: list[int] = []  # fences whose user code began
        self.stopped_for_good = False
        self.resumed = 0
        self.ending: Run | None = None

    def tell(self, event: Event) -> tuple[RunInstruction, ...]:
        before = self.run
        try:
            self.run, instructions = advance(before, event)
        except IllegalRunTransition:
            assert before.state in TERMINAL or before.state is State.QUEUED
            return ()  # as the server does: a late word; the outcome stands
        assert before.state not in TERMINAL
        if RunInstruction.REQUEUE in instructions:
            same = (before.retries_left, before.infra_left) == (self.run.retries_left, self.run.infra_left)
            self.resumed += same
        if self.run.state in TERMINAL:
            assert RunInstruction.CONCLUDE in instructions and self.ending is None
            self.ending = self.run
        return instructions

    # --- what happens ----------------------------------------------------------------------------------------------

    @rule()
    @precondition(lambda self: self.run.state is State.QUEUED)
    def place(self) -> None:
        assert not self.alive  # never two at once
        self.tell(RunPlaced())
        self.fences.append(self.run.fence)
        self.alive = True

    @rule()
    @precondition(lambda self: self.alive)
    def begin_user_code(self) -> None:
        if self.run.fence not in self.began_with_code:
            self.began_with_code.append(self.run.fence)

    @rule(stopping=st.booleans())
    @precondition(lambda self: self.alive)
    def report(self, stopping: bool) -> None:
        began = self.run.fence in self.began_with_code
        state = State.STOPPING if stopping else State.RUNNING if began else State.STARTING
        self.tell(Heard(state))
        if began:
            self.tell(UserCodeStarted())
        if stopping:
            self.tell(Stopping())
        assert self.run.state is not State.UNREACHABLE

    @rule(reason=st.sampled_from(Reason))
    @precondition(lambda self: self.alive)
    def end(self, reason: Reason) -> None:
        began = self.run.fence in self.began_with_code
        if MEANINGS[reason].state is State.SUCCEEDED and not began:
            return
        self.alive = False
        self.tell(AttemptEnded(reason, began=began))

    @rule()
    @precondition(lambda self: self.alive)
    def fall_silent(self) -> None:
        self.tell(Silent())

    @rule(reason=st.sampled_from([Reason.NODE_GONE, Reason.NODE_REBOOTED]), by_operator=st.booleans())
    @precondition(lambda self: self.alive)
    def give_up(self, reason: Reason, by_operator: bool) -> None:
        self.alive = False
        self.tell(Forgotten() if by_operator else GivenUp(reason))

    @rule(why=st.sampled_from(StopReason))
    def stop(self, why: StopReason) -> None:
        was = self.run
        instructions = self.tell(StopAsked(why))
        self.stopped_for_good |= why in FINAL_STOPS and was.state not in TERMINAL
        assert (RunInstruction.SEND_STOP in instructions) <= self.alive

    @rule(
        event=st.sampled_from(
            [AttemptEnded(Reason.COMPLETED, began=True), UserCodeStarted(), Silent(), GivenUp(Reason.NODE_GONE)]
        )
    )
    @precondition(lambda self: self.run.state is State.QUEUED or self.run.state in TERMINAL)
    def say_something_late(self, event: Event) -> None:
        before = self.run
        assert self.tell(event) == () and self.run == before

    # --- promises --------------------------------------------------------------------------------------------------

    @invariant()
    def a_terminal_state_is_never_left(self) -> None:
        assert self.ending is None or self.run == self.ending
        assert (self.ending is not None) == (self.run.state in TERMINAL)

    @invariant()
    def attempts_are_numbered_without_a_gap(self) -> None:
        assert self.fences == list(range(1, len(self.fences) + 1))
        assert self.run.fence == len(self.fences)

    @invariant()
    def nothing_runs_while_it_waits_or_has_ended(self) -> None:
        assert not self.alive or self.run.state not in {State.QUEUED, *TERMINAL}

    @invariant()
    def a_run_that_waits_carries_nothing_of_its_last_attempt(self) -> None:
        if self.run.state is State.QUEUED:
            assert (self.run.stop, self.run.began, self.run.before, self.run.reason) == (None, False, None, None)

    @invariant()
    def only_the_unreachable_remember_where_they_were(self) -> None:
        assert (self.run.before is not None) == (self.run.state is State.UNREACHABLE)

    @invariant()
    def the_reason_and_the_state_agree(self) -> None:
        assert (self.run.reason is not None) == (self.run.state in TERMINAL)
        assert self.run.reason is None or MEANINGS[self.run.reason].state is self.run.state

    @invariant()
    def a_final_stop_is_never_forgotten(self) -> None:
        assert not self.stopped_for_good or self.run.stop in FINAL_STOPS

    @invariant()
    def attempts_are_bounded_by_what_was_asked_for(self) -> None:
        assert len(self.fences) <= 1 + self.retries + INFRA_RETRIES_MAX + self.resumed

    @invariant()
    def user_code_runs_again_only_if_asked(self) -> None:
        if not self.run.may_resume:
            # What the server was never told of (began in the dark, then lost) is LOST, which retries only if asked.
            assert len(self.began_with_code) <= 1 + self.retries

    def teardown(self) -> None:
        """A cancelled run ends as soon as its attempt does, and as cancelled unless something worse is reported."""
        if not hasattr(self, "run") or self.run.state in TERMINAL:
            return
        self.tell(StopAsked(StopReason.CANCEL))
        if self.alive:
            assert self.run.stop in FINAL_STOPS
            self.tell(AttemptEnded(STOPPED_BY[self.run.stop or StopReason.CANCEL], began=self.run.began))
        assert self.run.state in TERMINAL and self.run.reason not in LOST


RunMachine.TestCase.settings = settings(max_examples=250, stateful_step_count=30, deadline=None)
TestRun = pytest.mark.slow(RunMachine.TestCase)
