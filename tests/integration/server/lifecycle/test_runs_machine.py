"""Runs under a server at random: asked for, placed, reported about, stopped, given up; old words come again any time.

The world has what really happened to each attempt. What the server says of it, and what lies in its tables, must agree
with that after every step.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import msgspec
import pytest
import sqlalchemy as sa
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from serverless_gpu.errors import AlreadyFinished, IdempotencyConflict
from serverless_gpu.model.lifecycle.attempt import ACTIVE, MEANINGS, TERMINAL, Reason, State, StopReason
from serverless_gpu.model.lifecycle.run_lifecycle import GivenUp, IllegalRunTransition, Silent
from serverless_gpu.model.spec import RunSpec
from serverless_gpu.server.core.caller import Caller
from serverless_gpu.server.db import tables
from serverless_gpu.server.db.database import Database
from serverless_gpu.testing import FakeClock
from serverless_gpu.wire.agents import Ending, File, LogPiece, Report
from serverless_gpu.wire.runs import RunRequest, Target
from tests.support.server.made import made_services
from tests.support.server.stored import add_node, add_people, place, rows, stored, tell

ALICE = Caller(name="alice", role="member")
IDS = [f"01m8000000000000000000000{n}" for n in range(3)]
RESULTS = tuple(File(name=f"results/{rank}.pkl", size=1, inline=b"r") for rank in range(2))
LINE = b"0123456789\n"
ENDINGS = [
    Reason.COMPLETED,
    Reason.RANK_RAISED,
    Reason.CANCELLED,
    Reason.PREEMPTED,
    Reason.REFUSED,
    Reason.NODE_PARTITIONED,
    Reason.SUPERVISOR_KILLED,
]


class World(msgspec.Struct):
    """What really is, of one attempt."""

    began: bool = False
    written: int = 0
    ending: Reason | None = None
    given_up: bool = False


class ServerMachine(RuleBasedStateMachine):
    """A server, a node, and a network that repeats itself."""

    @initialize()
    def begin(self) -> None:
        self.home = Path(tempfile.mkdtemp(prefix="sg-", dir="/tmp"))
        (self.home / "server").mkdir()
        self.clock = FakeClock()
        self.database = Database("sqlite://", clock=self.clock)
        self.database.migrate()
        add_people(self.database, "alice")
        add_node(self.database)
        self.services = made_services(self.database, self.home, clock=self.clock)
        self.asked: dict[str, RunRequest] = {}
        self.attempts: dict[tuple[str, int], World] = {}
        self.sent: list[tuple[str, int, Report]] = []
        self.ended: dict[str, Any] = {}

    def teardown(self) -> None:
        if hasattr(self, "database"):
            self.database.close()
            shutil.rmtree(self.home, ignore_errors=True)

    def some(self, data: st.DataObject, *states: State) -> str | None:
        found = [run_id for run_id in self.asked if stored(self.database, run_id).state in states]
        return data.draw(st.sampled_from(found)) if found else None

    def alive(self, data: st.DataObject) -> tuple[str, int] | None:
        found = [gang for gang, world in self.attempts.items() if world.ending is None and not world.given_up]
        return data.draw(st.sampled_from(found)) if found else None

    def send(self, run_id: str, fence: int, said: Report) -> None:
        who = Caller(kind="attempt", attempt=(run_id, fence, 0))
        answer = self.services.reports.receive(who, run_id=run_id, fence=fence, said=said)
        assert answer.stale == self.attempts[run_id, fence].given_up
        self.sent.append((run_id, fence, said))

    # --- what happens ----------------------------------------------------------------------------------------------

    @rule(run_id=st.sampled_from(IDS), retries=st.integers(0, 1), resume=st.booleans())
    def submit(self, run_id: str, retries: int, resume: bool) -> None:
        request = RunRequest(
            id=run_id,
            spec=RunSpec(remote=True, retries=retries, resume=resume, wait=True),
            target=Target(machine="m", python="3.11", platform="linux"),
            context=msgspec.Raw(b"{}"),
            call=b"call",
        )
        before = self.asked.setdefault(run_id, request)
        if before == request:
            self.services.submissions.submit(ALICE, request)
            return
        with pytest.raises(IdempotencyConflict):
            self.services.submissions.submit(ALICE, request)

    @rule(data=st.data())
    def schedule(self, data: st.DataObject) -> None:
        run_id = self.some(data, State.QUEUED)
        if run_id is not None:
            fence = place(self.database, run_id, at_ns=self.clock.wall_ns())
            assert (run_id, fence) not in self.attempts
            self.attempts[run_id, fence] = World()

    @rule(data=st.data(), lines=st.integers(0, 2), begins=st.booleans(), stopping=st.booleans())
    def report(self, data: st.DataObject, lines: int, begins: bool, stopping: bool) -> None:
        gang = self.alive(data)
        if gang is None:
            return
        world = self.attempts[gang]
        world.began |= begins
        piece = LogPiece(rank=0, stream="stdout", offset=world.written, data=LINE * lines)
        world.written += len(piece.data)
        state = State.STOPPING if stopping else State.RUNNING if world.began else State.STARTING
        exec_ns = self.clock.wall_ns() if world.began else None
        self.send(*gang, Report(state=state, exec_ns=exec_ns, logs=(piece,) if lines else ()))

    @rule(data=st.data(), reason=st.sampled_from(ENDINGS), told=st.booleans())
    def end(self, data: st.DataObject, reason: Reason, told: bool) -> None:
        gang = self.alive(data)
        if gang is None:
            return
        world = self.attempts[gang]
        world.began |= reason is Reason.COMPLETED
        world.ending = reason
        stopped = msgspec.Raw(b"{}") if told else msgspec.UNSET
        ending = Ending(state=MEANINGS[reason].state, reason=reason, began=world.began, stopped=stopped)
        files = RESULTS if reason is Reason.COMPLETED else ()
        exec_ns = self.clock.wall_ns() if world.began else None
        self.send(*gang, Report(state=State.STOPPING, exec_ns=exec_ns, files=files, ending=ending))

    @rule(data=st.data())
    @precondition(lambda self: self.sent)
    def say_again(self, data: st.DataObject) -> None:
        """Any report comes once more, however old."""
        self.send(*data.draw(st.sampled_from(self.sent[-8:])))

    @rule(data=st.data())
    def account(self, data: st.DataObject) -> None:
        over = [gang for gang, world in self.attempts.items() if world.ending is not None]
        if over:
            gang = data.draw(st.sampled_from(over))
            self.send(*gang, Report(state=State.STOPPING, receipt=msgspec.Raw(b'{"gpu_ms":1}')))

    @rule(run_id=st.sampled_from(IDS), why=st.sampled_from([StopReason.CANCEL, StopReason.PREEMPT]))
    def stop(self, run_id: str, why: StopReason) -> None:
        if run_id not in self.asked:
            return
        before = stored(self.database, run_id)
        try:
            view = self.services.stops.request(ALICE, "own", run_id=run_id, why=why)
        except AlreadyFinished:
            assert before.state in TERMINAL
            return
        assert view.state is not State.RUNNING

    @rule(data=st.data(), reason=st.sampled_from([Reason.NODE_GONE, Reason.NODE_REBOOTED]), silent=st.booleans())
    def fall_silent_or_give_up(self, data: st.DataObject, reason: Reason, silent: bool) -> None:
        gang = self.alive(data)
        if gang is None:
            return
        if silent:
            tell(self.database, gang[0], Silent(), at_ns=self.clock.wall_ns())
            return
        tell(self.database, gang[0], GivenUp(reason), at_ns=self.clock.wall_ns())
        self.attempts[gang].given_up = True

    @rule(seconds=st.sampled_from([1, 20, 2000]))
    def wait(self, seconds: int) -> None:
        self.clock.advance(seconds)

    @rule(run_id=st.sampled_from(IDS))
    def something_impossible(self, run_id: str) -> None:
        if run_id in self.asked and stored(self.database, run_id).state in {State.QUEUED, *TERMINAL}:
            with pytest.raises(IllegalRunTransition):
                tell(self.database, run_id, Silent())

    # --- promises --------------------------------------------------------------------------------------------------

    @invariant()
    def what_was_accepted_is_there_with_one_event_after_the_other(self) -> None:
        if not hasattr(self, "asked"):
            return
        found = {row["id"]: row for row in rows(self.database, tables.runs)}
        assert set(found) == set(self.asked)
        told: dict[str, list[sa.RowMapping]] = {run_id: [] for run_id in found}
        for event in rows(self.database, tables.events):
            told[event["run_id"]].append(event)
        for run_id, row in found.items():
            assert [event["seq"] for event in told[run_id]] == list(range(1, row["events"] + 1))
            assert told[run_id][-1]["state"] == row["state"]
            assert sum(event["state"] in TERMINAL for event in told[run_id]) == (row["state"] in TERMINAL)

    @invariant()
    def an_end_is_final(self) -> None:
        for run_id in getattr(self, "asked", {}):
            run = stored(self.database, run_id)
            if run.state in TERMINAL:
                final = msgspec.structs.replace(run, settled_ns=None, attempt=None)
                assert self.ended.setdefault(run_id, final) == final

    @invariant()
    def attempts_follow_each_other_and_only_the_last_may_go_on(self) -> None:
        for run_id in getattr(self, "asked", {}):
            run = stored(self.database, run_id)
            fences = [fence for one, fence in self.attempts if one == run_id]
            assert fences == list(range(1, run.fence + 1))
            for fence in fences:
                world = self.attempts[run_id, fence]
                over = world.ending is not None or world.given_up
                assert over or (fence == run.fence and run.state in ACTIVE)
            going_on = run.state in ACTIVE
            last = self.attempts.get((run_id, run.fence))
            assert not going_on or (last is not None and last.ending is None and not last.given_up)

    @invariant()
    def success_means_that_all_results_are_here(self) -> None:
        for run_id in getattr(self, "asked", {}):
            run = stored(self.database, run_id)
            if run.state is State.SUCCEEDED:
                names = [row["name"] for row in rows(self.database, tables.files) if row["run_id"] == run_id]
                assert sorted(names) == ["results/0.pkl", "results/1.pkl"]
                assert self.attempts[run_id, run.fence].ending is Reason.COMPLETED

    @invariant()
    def every_line_is_there_once(self) -> None:
        for (run_id, fence), world in getattr(self, "attempts", {}).items():
            assert self.services.logs.sizes(run_id, fence).get((0, "stdout"), 0) == world.written

    @invariant()
    def orders_to_stop_are_for_attempts_that_go_on(self) -> None:
        if not hasattr(self, "asked"):
            return
        for row in rows(self.database, tables.orders):
            assert (row["run_id"], row["fence"]) in self.attempts


ServerMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
TestServer = pytest.mark.slow(ServerMachine.TestCase)
