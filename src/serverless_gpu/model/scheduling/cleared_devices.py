"""Clears devices for a waiting run: preempts other runs and holds the released devices for that run.

    blocked ─▶ possible nodes, and runs there that may be preempted (`preemption.py`) ─▶ `PlannerState.clearing`
    at the start of each pass, in the order of the preemptions
      all devices are free          ─▶ the run starts on these devices
      some will be free later       ─▶ the scheduler holds them, whichever run is ahead in the queue
      some will not become free     ─▶ discarded: a node or run did not release them; the run preempts again later
    the run starts elsewhere (as a guest, on other released devices) ─▶ the pass is stale: `take_back`, and a new pass

The planner keeps the clearing state between passes. A new planner starts without clearing state. The first entitled run
in a new planner's queue may take the released devices, even if another run caused the preemption.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterator

import msgspec

from serverless_gpu.model.scheduling import gang_placement
from serverless_gpu.model.scheduling.capacity import NodeDevices, NodeGroup, Row, together
from serverless_gpu.model.scheduling.gang_placement import are_one, is_several
from serverless_gpu.model.scheduling.planner_state import PlannerState
from serverless_gpu.model.scheduling.preemption import (
    FULL_CLAIM,
    NO_CLAIM,
    PreemptionPlan,
    Site,
    may_ask,
    may_use,
    plan_preemption,
    standing,
)
from serverless_gpu.model.scheduling.values import (
    BEST_EFFORT,
    DeviceShare,
    Preemption,
    QueuedRun,
    Reservation,
    RunningRun,
    TimedShape,
)

SITES_MAX = 32
"""Maximum number of suitable nodes that one search compares for the least lost work."""
LOOKED_MAX = 512
"""Maximum number of nodes that one scheduler pass examines for preemption."""

Claim = tuple[bool, bool]
"""Claim of a run to a node, as returned by `preemption.standing`, where the smallest value is a full right."""

Start = Callable[[QueuedRun, TimedShape, tuple[DeviceShare, ...]], None]


class Clearing:
    """Clears devices for blocked runs during one pass.

    In `state`, preempted runs immediately count as stopping. `start` is the callback that starts a run.
    """

    def __init__(self, state: PlannerState, start: Start) -> None:
        self._state, self._start = state, start
        self._vain: set[object] = set()
        self._hosts = [group for group in state.capacity.groups.values() if _has_guests(group, state)]
        self._host_ids = {id(group) for group in self._hosts}
        self._claims: list[Claim] | None = None
        self._is_last = not self._hosts
        self._looked = 0
        self._stayers: list[RunningRun] = []  # Preempted runs in their state before the preemption.
        self._cleared: list[str] = []  # Runs for which the current pass has cleared devices.
        self.preemptions: list[Preemption] = []  # Preemptions that the current pass has decided.
        # Next useful time for another preemption attempt without a state change, or None.
        self.wake_ns: int | None = None

    def serve(self) -> None:
        """Start runs on free cleared devices, and hold cleared devices that other runs will release later."""
        state = self._state
        for run_id, shares in list(state.clearing.items()):
            found = state.queue.where(run_id)
            if found is None or found[1] is None:
                del state.clearing[run_id]
                continue
            wanted, ask = found[0], found[1].ask
            missing = [self._missing(wanted, ask, share) for share in shares]
            is_whole = ask.shape.gpus is None or ask.shape.gpus == sum(share.count for share in shares)
            is_coming = None not in missing and is_whole and are_one(state.capacity, shares)
            if is_coming and any(missing):
                self._keep(run_id, shares)
                continue
            del state.clearing[run_id]
            if is_coming:
                self._start(wanted, ask, shares)

    def again(self) -> None:
        """Begin the second round of the pass, in which guest runs start and may preempt other guest runs."""
        self._vain.clear()
        self._is_last = True

    def clear(self, wanted: QueuedRun, ask: TimedShape) -> bool:
        """Preempt runs for a blocked run, and return True if the preemptions free enough devices."""
        state = self._state
        key = (
            ask.shape,
            "" if state.capacity.is_plain else wanted.owner,
        )  # If a priority class may not preempt for the shape, lower classes may not preempt either.
        is_late = self._looked >= LOOKED_MAX or len(state.clearing) >= state.policy.reservations
        if not state.capacity.leavers or is_late or key in self._vain or self._is_guest_soon(wanted, ask):
            return False
        found = self._search(wanted, ask)
        if not found.shares:
            self._vain.add(key)
            if found.wake_ns is not None:
                self.wake_ns = found.wake_ns if self.wake_ns is None else min(self.wake_ns, found.wake_ns)
            return False
        for preemption in found.preemptions:
            self._ask(preemption)
        state.clearing[wanted.run_id] = found.shares
        self._cleared.append(wanted.run_id)
        self._keep(wanted.run_id, found.shares)
        return True

    def take_back(self) -> None:
        """Withdraw all preemptions of the pass, because the next pass decides again from a changed state.

        The method withdraws even preemptions that still seem useful, because some runs rely on preemptions for other
        runs.
        """
        state = self._state
        for held in self._stayers:
            state.capacity.give(state.running[held.wanted.run_id])
            state.running[held.wanted.run_id] = held
            state.capacity.take(held)
        for run_id in self._cleared:
            if state.clearing.pop(run_id, None) is not None:
                del state.reservations[run_id]

    def _is_guest_soon(self, wanted: QueuedRun, ask: TimedShape) -> bool:
        """Return True if a run can start as a guest in the next round without preempting other runs."""
        if self._is_last:
            return False
        if self._claims is None:
            self._claims = _claims(self._state, self._hosts)
        terms, now_ns = self._state.capacity.terms, self._state.now_ns
        for group, types, _ in self._state.capacity.reach(ask.shape).entries:
            if id(group) not in self._host_ids or not may_use(wanted, group.sample, terms, now_ns):
                continue
            claim = self._claims[self._hosts.index(group)]
            if FULL_CLAIM < standing(wanted, group.sample, terms) <= claim and _has_room(group, types, wanted):
                return True
        return False

    def _search(self, wanted: QueuedRun, ask: TimedShape) -> PreemptionPlan:
        """Return the preemptions that free devices for a run, on nodes with the fewest missing devices."""
        state = self._state
        if is_several(state.capacity, wanted, ask):
            usable = gang_placement.usable(state.capacity, wanted, ask, state.now_ns)
            parts = [(where, name) for where, name in usable if where.node.crews and where.usable(name) > 0]
            # Consider nodes with a failed attempt of the run only if all other nodes have too few devices.
            well = [(where, name) for where, name in parts if where.node.id not in wanted.avoid]
            if sum(where.usable(name) for where, name in well) >= (wanted.gpus or 0):
                parts = well
            parts.sort(key=lambda part: (*part[0].entry[:2], part[1]))
            found = [self._site(where, name, ask) for where, name in parts]
            self._looked += len(found)
            sites = [site for site in found if site is not None]
            return plan_preemption(wanted, sites, state.capacity.terms, state.now_ns) or PreemptionPlan()
        ripe: list[Site] = []
        green: list[Site] = []
        for where, name in self._nodes(wanted, ask):
            site = self._site(where, name, ask)
            if site is not None:
                self._looked += 1
                (ripe if self._is_ripe(wanted, site) else green).append(site)
            if len(ripe) >= SITES_MAX or self._looked >= LOOKED_MAX:
                break
        return (
            plan_preemption(wanted, ripe or green[:SITES_MAX], state.capacity.terms, state.now_ns) or PreemptionPlan()
        )

    def _nodes(self, wanted: QueuedRun, ask: TimedShape) -> Iterator[tuple[NodeDevices, str]]:
        """Yield usable nodes where enough devices could become free, by ascending missing devices."""
        capacity, count = self._state.capacity, ask.shape.gpus
        reach, leavers = capacity.reach(ask.shape), capacity.leavers
        orders: list[list[Row]] = []
        for group, types, pool in reach.entries:
            if group.rank(capacity.terms, wanted, pool, self._state.now_ns) is not None:
                orders += [self._order(group, name, is_whole=count is None) for name in types]
        beside: list[Row] = []
        for where, *_ in reach.singles.values():
            found = reach.of(where)
            if found is None or where.group.rank(capacity.terms, wanted, found[1], self._state.now_ns) is None:
                continue  # The waiting run may not use the node now.
            for name in found[0]:
                if (where.node.id, name) in leavers.counts:
                    beside.append(_lacking(where, name, is_whole=count is None))
        for _, _, node_id, name, where in heapq.merge(*orders, sorted(beside)):
            need = where.node.total.get(name, 0) if count is None else count
            above = -1 if id(where.group) in self._host_ids else wanted.priority
            is_enough = need > 0 and where.free[name] + leavers.most(node_id, name, above) >= need
            if is_enough and node_id not in wanted.avoid and not where.node.away:
                yield where, name

    def _order(self, group: NodeGroup, gpu_type: str, *, is_whole: bool) -> list[Row]:
        """Return a group's nodes with preemptible runs, by ascending number of missing devices."""
        counts = self._state.capacity.leavers.counts

        def look(where: NodeDevices, _now_ns: int) -> tuple[Row | None, float]:
            is_there = (where.node.id, gpu_type) in counts
            return _lacking(where, gpu_type, is_whole=is_whole) if is_there else None, math.inf

        return group.rows(gpu_type, is_whole, look, self._state.now_ns)

    def _site(self, where: NodeDevices, gpu_type: str, ask: TimedShape) -> Site | None:
        """Return a preemption site for a node, or None if the node has reservations without preemption."""
        capacity, count = self._state.capacity, ask.shape.gpus
        book = capacity.books.get((where.node.id, gpu_type))
        if book is not None and not all(run_id in self._state.clearing for run_id, _ in book.names):
            return None
        total = where.node.total[gpu_type]
        return Site(
            node=where.node,
            gpu_type=gpu_type,
            need=total if count is None else min(count, total if count <= total else where.usable(gpu_type)),
            free=gang_placement.unkept(capacity, where, gpu_type) + capacity.leavers.leaving(where.node.id, gpu_type),
            holders=tuple(held.running for held in where.runs.get(gpu_type, {}).values()),
        )

    def _is_ripe(self, wanted: QueuedRun, site: Site) -> bool:
        """Return True if the scheduler may now preempt enough runs on a node for the waiting run."""
        terms, now_ns = self._state.capacity.terms, self._state.now_ns
        missing = site.need - site.free
        for running in site.holders:
            if missing <= 0:
                break
            ripe_ns = may_ask(wanted, running, site.node, terms)
            if ripe_ns is not None and ripe_ns <= now_ns:
                here = (share for share in running.shares if share.node_id == site.node.id)
                missing -= sum(share.count for share in here if share.gpu_type == site.gpu_type)
        return missing <= 0

    def _ask(self, preemption: Preemption) -> None:
        state = self._state
        held = state.running[preemption.run_id]
        state.capacity.give(held)
        leaving = state.running[preemption.run_id] = msgspec.structs.replace(
            held, is_leaving=True, leaving_ns=state.now_ns
        )
        state.capacity.take(leaving)
        self._stayers.append(held)
        self.preemptions.append(preemption)

    def _keep(self, run_id: str, shares: tuple[DeviceShare, ...]) -> None:
        state = self._state
        for share in shares:
            book = state.capacity.book(state.capacity.places[share.node_id], share.gpu_type, state.now_ns)
            book.keep(run_id, share.count, state.now_ns)
        state.reservations[run_id] = Reservation(run_id=run_id, shares=shares, at_ns=None, is_bound=False)

    def _missing(self, wanted: QueuedRun, ask: TimedShape, share: DeviceShare) -> int | None:
        """Return the number of missing devices of a share, or None if no stopping run will release them."""
        state = self._state
        where = state.capacity.places.get(share.node_id)
        found = None if where is None else state.capacity.reach(ask.shape).of(where)
        if where is None or found is None or share.gpu_type not in found[0] or where.node.away:
            return None
        if not may_use(wanted, where.node, state.capacity.terms, state.now_ns):
            return None
        missing = share.count - gang_placement.unkept(state.capacity, where, share.gpu_type)
        return None if missing > state.capacity.leavers.leaving(share.node_id, share.gpu_type) else max(0, missing)


def _has_room(group: NodeGroup, types: tuple[str, ...], wanted: QueuedRun) -> bool:
    indexes = [group.index[name] for name in types]
    if wanted.gpus is None:
        return any(index.whole for index in indexes)
    if wanted.several_nodes and group.sample.crews and any(index.free >= wanted.gpus for index in indexes):
        return True  # Several nodes together may have enough free devices for the gang.
    return any(index.best(wanted.gpus, wanted.avoid) is not None for index in indexes)


def close_to_guests(state: PlannerState) -> list[NodeGroup]:
    """Close owned and lent nodes to guest runs, and return the groups of those nodes."""
    hosts = [group for group in state.capacity.groups.values() if _has_guests(group, state)]
    for group in hosts:
        group.claim = FULL_CLAIM
    return hosts


def open_to_guests(state: PlannerState, hosts: list[NodeGroup]) -> bool:
    """Admit guest runs to nodes for which no run with a stronger right waits.

    Returns True if more guest runs may start than before, and a waiting run could start as a guest.
    """
    before = [group.claim for group in hosts]
    claims = _claims(state, hosts)
    for group, claim in zip(hosts, claims, strict=True):
        group.claim = claim
    if claims == before:
        return False
    if any(group.sample.owner_first for group in hosts):
        return True
    return any(line.key[0] >= BEST_EFFORT and not line.ask.shape.pool for line in state.queue.lines())


def _claims(state: PlannerState, hosts: list[NodeGroup]) -> list[Claim]:
    """Return the strongest right of a waiting run that could start, by node group.

    Two gangs could otherwise exclude each other forever, each with the stronger right to a node that the other needs.
    A run therefore claims nodes only if the claims of the runs before it leave enough nodes for the run. Runs that
    borrow from a pool come last, otherwise the higher class and then the older run comes first.
    """
    capacity, claims = state.capacity, [NO_CLAIM] * len(hosts)
    owners = {group.sample.owner for group in hosts if group.sample.owner_first}
    # A run without a pool is a guest on every node if the run's owner has no node.
    lines = [line for line in state.queue.lines() if line.ask.shape.pool or line.owner in owners]
    lines.sort(key=lambda line: (capacity.reach(line.ask.shape).is_lent, line.key[0], line.rows[0][:2]))
    known: dict[tuple[str, str], list[Claim]] = {}
    for line in lines:
        if all(claim == FULL_CLAIM for claim in claims):
            break
        wanted, key = line.rows[0][2], (line.ask.shape.pool, line.owner)
        if key not in known:
            known[key] = [standing(wanted, group.sample, capacity.terms) for group in hosts]
        rights = list(zip(hosts, known[key], claims, strict=True))
        numbers = {number for number, _ in capacity.reach(line.ask.shape).kind}
        if any(right < claim and group.number in numbers for group, right, claim in rights):
            closed = {id(group) for group, right, claim in rights if right > claim}
            serving = _serving(state, wanted, line.ask, closed)
            claims = [min(right, claim) if id(group) in serving else claim for group, right, claim in rights]
    return claims


def _serving(state: PlannerState, wanted: QueuedRun, ask: TimedShape, closed: set[int]) -> set[int]:
    """Return the groups, by `id`, that could serve a run without the closed groups, including busy nodes."""
    capacity, found = state.capacity, set[int]()
    reach, is_gang = capacity.reach(ask.shape), is_several(capacity, wanted, ask)
    parts = [(group, name, group.index[name].totals) for group, types, _ in reach.entries for name in types]
    parts += [
        (where.group, name, Counter([where.node.total[name]]))
        for where, types, _ in reach.singles.values()
        for name in types
    ]
    kinds: dict[gang_placement.Kind, tuple[Counter[int], set[int]]] = {}
    for group, name, totals in parts:
        if id(group) in closed or not may_use(wanted, group.sample, capacity.terms, state.now_ns):
            continue
        if not is_gang and max(totals, default=0) >= (wanted.gpus or 1):
            found.add(id(group))
        elif is_gang and group.sample.crews:
            sizes, groups = kinds.setdefault((group.sample.pool, name), (Counter(), set()))
            sizes.update(totals)
            groups.add(id(group))
    for sizes, groups in kinds.values():
        found |= groups if together(sizes) >= (wanted.gpus or 1) else set()
    return found


def _has_guests(group: NodeGroup, state: PlannerState) -> bool:
    pool = state.capacity.terms.pools.get(group.sample.pool)
    lends = pool is not None and pool.reserved and pool.lends
    return lends or (group.sample.owner_first and bool(group.sample.owner))


def _lacking(where: NodeDevices, gpu_type: str, *, is_whole: bool) -> Row:
    """Return a node's sort row by its missing devices, counted from a whole node if `is_whole`."""
    all_there = where.node.total[gpu_type] if is_whole else 0
    return (all_there - where.free[gpu_type], where.node.name, where.node.id, gpu_type, where)
