"""A second look at the queue, by somebody who was not told what the scheduler was: is anybody forgotten?

    database ─▶ a planner of its own, with everybody who runs and nobody who waits
                   └─ for each that waits: would it start at once if it came alone?
                          └─ yes, and the scheduler says that there is no room ─▶ forgotten

Who is kept back by a rule (devices are kept for others, somebody is ahead, a calendar, the server is drained) is not
forgotten: that is what the scheduler says of them, and it is their wait to explain. What is found here is a scheduler
that does not know what the database knows: a change that it was not told, a node that it counts as away.
"""

from __future__ import annotations

import msgspec

from serverless_gpu.ambient import Clock
from serverless_gpu.model.scheduling.planner import Planner
from serverless_gpu.model.scheduling.values import Change, DevicesTaken, NodeSeen, PoolSeen, QueuedRun, Wait, WaitReason
from serverless_gpu.server.core.settings import Settings
from serverless_gpu.server.db.database import Transactions
from serverless_gpu.server.lifecycle.liveness import Presence
from serverless_gpu.server.nodes import capacity
from serverless_gpu.server.scheduling.queue_snapshot import Reading, Roster
from serverless_gpu.server.scheduling.wait_reasons import Sentences

_NO_ROOM = frozenset({WaitReason.CAPACITY, WaitReason.AWAY, WaitReason.ISOLATION, WaitReason.UNSATISFIABLE})


class SecondLook:
    """Looks for runs that could be placed and of which the scheduler says something else. For one thread."""

    def __init__(
        self,
        *,
        settings: Settings,
        clock: Clock,
        database: Transactions,
        presence: Presence,
        sentences: Sentences,
        roster: Roster,
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._database = database
        self._presence = presence
        self._sentences = sentences
        self._roster = roster

    def forgotten(self) -> list[str]:
        """Return the runs that could be placed now and are not, by no rule."""
        now_ns = self._clock.wall_ns()
        reading = self._database.read(lambda connection: self._roster.read(connection, now_ns=now_ns, afresh=False))
        if not reading.waiting:
            return []
        planner = Planner(reading.policy)
        planner.apply(self._everything(reading))
        fits: dict[QueuedRun, bool] = {}
        found = []
        for run_id, wanted in reading.waiting.items():
            if wanted.not_before_ns > now_ns:
                continue
            alike = msgspec.structs.replace(wanted, run_id="", title="", queued_ns=now_ns, not_before_ns=0, held="")
            if alike not in fits:
                estimate = planner.estimate(alike, now_ns)
                fits[alike] = estimate.at_ns is not None and estimate.at_ns <= now_ns and not estimate.impossible
            if fits[alike] and _is_forgotten(self._sentences.wait(run_id)):
                found.append(run_id)
        return found

    def _everything(self, reading: Reading) -> list[Change]:
        nodes = capacity.offers(reading.floor, self._presence, capacity.now(self._settings, self._clock))
        changes: list[Change] = [PoolSeen(pool.planned) for pool in reading.floor.pools]
        changes += [NodeSeen(node) for node in nodes]
        changes += [DevicesTaken(running) for running in reading.running.values()]
        return changes


def _is_forgotten(wait: Wait | None) -> bool:
    """Return whether what the scheduler says of a run that fits is no rule: nobody is ahead, and there is no room."""
    return wait is None or wait.reason in _NO_ROOM or (wait.reason is WaitReason.TURN and wait.place == 1)
