"""The scheduler: load → decide → write the intents, a few placements in a transaction → tell.

    runs wait, a node came, devices are free ── ring ─▶ tick
        load      nodes, who has what, who waits           one read
        decide    model/queueing.py                        pure
        place     attempt + order + event, if it still waits   some in a transaction  ← the intent is durable here
        submit    the engine gets an agent running there   outside of any transaction
        tell      the node's stream, the run's stream, the sentences of those who wait

Killed anywhere in between, the next server finds either a run that waits or an order that was not taken, and goes on
from there: nothing is started by memory. What is to start and the engine does not have is asked for at each tick. What
an engine refuses is given back to the queue, if its order has not left.

Values that do not change (what a run wants) are remembered from tick to tick, so that a queue of 10,000 costs one
query of identifiers.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import msgspec
import sqlalchemy as sa

from serverless_gpu import faults
from serverless_gpu.ambient import format_clock
from serverless_gpu.engines.base import Engine, Gang, Impossible, Placed, Request, Share
from serverless_gpu.errors import SecretMissing, StaleAttempt
from serverless_gpu.model.attempt import Reason, State
from serverless_gpu.model.queueing import Placement, Wanted, decide
from serverless_gpu.model.run_lifecycle import Ended, pause_s
from serverless_gpu.model.spec import Function
from serverless_gpu.server import (
    attempts,
    draining,
    floor,
    keys,
    log_context,
    nodes,
    owners,
    runs,
    secret_store,
    transitions,
)
from serverless_gpu.server.attempts import NewAttempt
from serverless_gpu.server.floor import Floor
from serverless_gpu.server.giving_back import give_back
from serverless_gpu.server.hub import node_key, run_key
from serverless_gpu.server.nodes import StoredNode, by_id
from serverless_gpu.server.runs import StoredRun
from serverless_gpu.server.sealing import Sealer
from serverless_gpu.server.services import Services
from serverless_gpu.server.transitions import Note, Told

AT_ONCE = 64
"""Placements of one tick; the next one follows at once."""
TOGETHER = 8
"""Placements of one transaction: they share its commit, and whoever else writes waits for no more than these."""
SECRETS = "secrets"
"""What a node says that it takes, or it gets no run that has some."""
LOOK_AGAIN_S = 5.0
ENGINE_AGAIN_S = 1.0
_log = logging.getLogger(__name__)


class Scheduler:
    """Places what waits.

    Args:
        services: the server's.
        engine: gets agents running; nodes that it does not know have joined by themselves.
    """

    def __init__(self, services: Services, *, engine: Engine | None = None) -> None:
        self._services, self._engine = services, engine
        self._wanted: dict[str, tuple[int, Wanted, str]] = {}  # fence, what it wants, its owner
        self._asked: dict[str, Request] = {}

    def tick(self, now_ns: int) -> int | None:
        """Place what can be placed, and say to everybody else what they wait for.

        Args:
            now_ns: boottime, nanoseconds.

        Returns:
            When to look again at the latest.
        """
        services = self._services
        there, queue = services.database.read(self._load)
        self._ask_again(there)
        times = floor.now(services)
        decision = decide(queue, floor.offers(there, services.presence, times), now_ns=now_ns)
        stored = by_id(there.nodes)
        for first in range(0, min(AT_ONCE, len(decision.placements)), TOGETHER):
            self._place(decision.placements[first : first + TOGETHER], stored)
        for run_id in services.sentences.replace(decision.waiting):
            services.hub.touch(run_key(run_id))
        if len(decision.placements) > AT_ONCE:
            return now_ns
        after_s = ENGINE_AGAIN_S if self._asked else LOOK_AGAIN_S
        held = (wanted.not_before_ns for wanted in queue if wanted.not_before_ns > now_ns)
        return min((now_ns + round(after_s * 1e9), *held))

    def placeable(self, now_ns: int) -> list[str]:
        """Return the runs that a tick would place now; nothing is placed.

        Args:
            now_ns: boottime, nanoseconds.
        """
        services = self._services
        there, queue = services.database.read(self._load)
        decision = decide(queue, floor.offers(there, services.presence, floor.now(services)), now_ns=now_ns)
        return [placement.run_id for placement in decision.placements]

    def _load(self, connection: sa.Connection) -> tuple[Floor, list[Wanted]]:
        waiting = runs.queue(connection)
        known = self._wanted
        unknown = [run_id for run_id, fence in waiting if run_id not in known or known[run_id][0] != fence]
        failed = attempts.failed_nodes(connection, unknown) if unknown else {}
        clock = self._services.clock
        now = (clock.boottime_ns(), clock.wall_ns())
        found = {
            run.id: (run.fence, _wanted(run, failed, now=now), run.owner) for run in runs.find_many(connection, unknown)
        }
        self._wanted = {
            run_id: entry for run_id, _ in waiting if (entry := found.get(run_id) or known.get(run_id)) is not None
        }
        shut_out = owners.shut_out(connection) if self._wanted else frozenset()
        drain = draining.find(connection) if self._wanted else None
        queue = [
            _kept_back(wanted, drain.sentence, now[0])
            if drain is not None
            else wanted
            if owner not in shut_out
            else _kept_back(wanted, f"{owner} may start no runs now", now[0])
            for _, wanted, owner in self._wanted.values()
        ]
        return floor.load(connection, self._services.leases), queue

    def _place(self, placements: Sequence[Placement], stored: Mapping[str, StoredNode]) -> None:
        """Write the intents, then do what follows from each; one that cannot be any more does not hinder the others."""
        services = self._services
        at_ns = services.clock.wall_ns()

        def intend(connection: sa.Connection) -> list[int | Told | None]:
            return [self._intend(connection, one, stored[one.node_id], at_ns) for one in placements]

        written = zip(placements, services.database.write(intend), strict=True)
        placed: list[tuple[Placement, int]] = []
        for placement, came in written:
            services.hub.touch(run_key(placement.run_id))  # also of one that ended without an order
            if isinstance(came, Told):
                came.announce(services)
            elif came is not None:
                placed.append((placement, came))
        services.measures.placed.inc(len(placed))
        for placement, fence in placed:
            with log_context.bound(run=placement.run_id, attempt=fence, node=stored[placement.node_id].name):
                _log.info("placed")
            services.deliveries.made(placement.run_id, fence)
            services.leases.renew(placement.run_id, fence, now_ns=services.clock.boottime_ns())
        for placement, fence in placed:
            faults.reach("after_commit_before_launch")
            self._submit(placement, fence, stored[placement.node_id])
            services.hub.touch(node_key(placement.node_id))
            services.hub.touch(run_key(placement.run_id))

    def _intend(
        self, connection: sa.Connection, placement: Placement, node: StoredNode, at_ns: int
    ) -> int | Told | None:
        """Return the fence of the attempt, what followed when it was over at once, or None: there is none."""
        run = runs.find(connection, placement.run_id)
        if run is None or run.state is not State.QUEUED:
            return None  # cancelled meanwhile
        if run.owner in owners.shut_out(connection, run.owner):
            return None  # they were shut out meanwhile
        if draining.find(connection) is not None:
            return None
        if not nodes.is_still(connection, node):
            return None  # it restarted, or was forgotten; its next hello rings
        token = self._services.keys.attempt_token(run.id, run.fence + 1)
        new = NewAttempt(
            node_id=node.id,
            gpu_type=placement.gpu_type,
            world_size=placement.count,
            token_sha256=keys.sha256(token),
            boot_id=node.boot_id,
            grace_s=self._services.settings.partition_grace_s,
        )
        reason, problem = None, ""
        try:
            new = _with_secrets(connection, self._services.sealer, run, new)
        except SecretMissing as error:
            reason, problem = Reason.SECRET_MISSING, error.message
        if run.spec.secrets and SECRETS not in node.hello.takes:
            reason = reason or Reason.REFUSED
            problem = problem or f"{node.name} is of a version that has no secrets"
        try:
            fence = transitions.place(connection, run, new=new, node=node.name, at_ns=at_ns)
        except StaleAttempt:
            return None
        if reason is not None:
            return _end_at_once(connection, run.id, reason, Note(at_ns=at_ns, detail=problem))
        return fence

    def _submit(self, placement: Placement, fence: int, node: StoredNode) -> None:
        engine = self._engine
        if engine is None or node.name not in {known.name for known in engine.nodes()}:
            return
        share = Share(node=node.name, gpu_type=placement.gpu_type, count=placement.count)
        gang = f"{placement.run_id}:{fence}"
        self._asked[gang] = engine.plan(Gang(id=gang, shares=(share,)))
        self._ask(gang)

    def _ask_again(self, there: Floor) -> None:
        """Ask for every gang that is to start and that the engine does not have, whichever server placed it.

        What runs has its agent, and what has ended meanwhile needs none.
        """
        engine = self._engine
        if engine is None:
            return
        names, reserved = {node.name for node in engine.nodes()}, set(engine.recover())
        self._asked = {}
        for run in there.active:
            gang = f"{run.id}:{run.fence}"
            if run.state is not State.STARTING or run.node not in names or gang in reserved:
                continue
            share = Share(node=run.node, gpu_type=run.gpu_type, count=run.world_size)
            self._asked[gang] = engine.plan(Gang(id=gang, shares=(share,)))
        for gang in list(self._asked):
            self._ask(gang)

    def _ask(self, gang: str) -> None:
        """Ask the engine for a gang; what waits is asked for again, what can never be goes back to the queue."""
        if self._engine is None:
            return
        answer = self._engine.submit(self._asked[gang])
        run_id, _, fence = gang.rpartition(":")
        if isinstance(answer, Placed):
            del self._asked[gang]
        elif isinstance(answer, Impossible):
            del self._asked[gang]
            self.give_back(run_id, int(fence), answer.sentence)
        else:
            self._note(run_id, int(fence), answer.sentence)

    def _note(self, run_id: str, fence: int, sentence: str) -> None:
        self._services.database.write(lambda connection: attempts.note(connection, run_id, fence, sentence=sentence))
        self._services.hub.touch(run_key(run_id))

    def give_back(self, run_id: str, fence: int, why: str) -> bool:
        """Put a run back into the queue whose order has not left this process; return whether that was so."""
        return give_back(self._services, run_id, fence, why)


def _wanted(run: StoredRun, failed: dict[str, frozenset[str]], *, now: tuple[int, int]) -> Wanted:
    """Return what a run wants, as decisions take it; `now` by boottime and by the wall clock, nanoseconds."""
    resources = run.spec.resources
    not_before_ns, held = _held(run, *now)
    return Wanted(
        run_id=run.id,
        title=floor.title(run),
        priority=run.priority,
        queued_ns=run.queued_ns,
        gpus=resources.gpus,
        gpu_type=resources.gpu_type,
        pool=run.pool,
        machine=run.target.machine,
        platform=run.target.platform,
        python=_python(run),
        caller=run.target.caller,
        avoid=failed.get(run.id, frozenset()),
        not_before_ns=not_before_ns,
        held=held,
    )


def _python(run: StoredRun) -> str:
    """Return the version of Python a node has to have for a run, or "": the caller's files name their interpreter."""
    travels = run.snapshot or (isinstance(run.spec.payload, Function) and not run.target.machine)
    return ".".join(run.target.python.split(".")[:2]) if travels else ""


def _with_secrets(connection: sa.Connection, sealer: Sealer, run: StoredRun, new: NewAttempt) -> NewAttempt:
    """Return an attempt with the versions of its secrets that there are now."""
    if not run.spec.secrets:
        return new
    pinned = secret_store.pins(connection, sealer, run.owner, run.team, run.spec.secrets)
    return msgspec.structs.replace(new, secrets_json=msgspec.json.encode(pinned).decode())


def _end_at_once(connection: sa.Connection, run_id: str, reason: Reason, note: Note) -> Told:
    """End an attempt in the transaction that made it: its order is never seen, and nothing will come of it."""
    run = runs.find(connection, run_id)
    assert run is not None
    told = transitions.tell(connection, run, Ended(reason=reason, began=False), note=note)
    transitions.settle(connection, run_id, run.fence, receipt=None, at_ns=note.at_ns)
    return told


def _kept_back(wanted: Wanted, why: str, boottime_ns: int) -> Wanted:
    """Return what waits beside the line because it may not start now."""
    until_ns = boottime_ns + round(LOOK_AGAIN_S * 1e9)
    return msgspec.structs.replace(wanted, not_before_ns=until_ns, held=why)


def _held(run: StoredRun, boottime_ns: int, wall_ns: int) -> tuple[int, str]:
    """Return until when a run is left alone after an attempt that failed to start, by boottime, and what it is told."""
    last = run.attempt
    if last is None or last.ended_ns is None:
        return 0, ""
    pause_ns = round(pause_s(run.infra_retries_used, last.reason, began=last.began) * 1e9)
    left_ns = min(pause_ns, last.ended_ns + pause_ns - wall_ns)  # no longer than that, whatever was done to the clock
    if left_ns <= 0:
        return 0, ""
    at = format_clock(wall_ns + left_ns)
    return boottime_ns + left_ns, f"attempt {last.fence} did not start on {last.node}; it is tried again at {at}"
