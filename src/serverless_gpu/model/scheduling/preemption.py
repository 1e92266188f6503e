"""Preemption: the runs that leave so that another one finds room, and the right to be on a node.

    a run is blocked ─▶ where could it be (sites) ─▶ who there may be asked ─▶ the cheapest set that makes room
                                                     │
      by right      the own runs of a pool that lends, the owner of a node whose owner is first: at once
      by class      CRITICAL > NORMAL > BEST_EFFORT: after a minimum time, and a few times in the life of a run

Only runs that can go on later leave (`preemptible`). What is lost is device-seconds since the start; the set with the
least is taken, by right before by class and of the lowest class that will do, and no run in it that could stay. So the
youngest leave first.

What makes loops impossible: on each node there is one order, standing there and then class, and only who is above in it
pushes out who is below; what becomes free is kept for whom it was made free; and a guest is let in only while no run
waits that could push it out by right.

Failure cases: those who could make room are too young, then it is said when they are not. Devices that a run which
cannot leave has borrowed come back by themselves: it was let in because the time limit that it declared is no longer
than the pool's time; what it takes to start, and to be gone at the end, comes on top of that.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence

import msgspec

from serverless_gpu.model.placement import NODES_MAX
from serverless_gpu.model.scheduling.values import (
    BEST_EFFORT,
    CLASSES,
    DeviceShare,
    Node,
    Pool,
    Preemption,
    QueuedRun,
    QueuePolicy,
    RunningRun,
)

NO_CLAIM = (True, True)
"""The least right to a node that there is: a guest of its owner who borrows from its pool."""
FULL_CLAIM = (False, False)
_NOBODY = BEST_EFFORT + 1  # as the highest class that is asked: nobody by class
_NS = 1_000_000_000


class PoolTerms(msgspec.Struct, frozen=True, kw_only=True):
    """The operator's decisions; a pool without an entry is an on-demand one."""

    policy: QueuePolicy
    pools: Mapping[str, Pool] = {}


class Site(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A node where a gang, or a part of one, could be."""

    node: Node
    gpu_type: str  # of the devices that it would have there
    need: int  # how many; of a gang that needs several nodes all that the node has to give
    free: int  # those that it could have at once, and those of runs that are leaving already, promised to no other run
    holders: tuple[RunningRun, ...] = ()  # who has devices there


class PreemptionPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The steps that make room for a blocked gang."""

    preemptions: tuple[Preemption, ...] = ()  # runs to ask to leave; none when enough is coming already
    # What is then to be kept for the gang until it starts; empty when nothing can be done now.
    shares: tuple[DeviceShare, ...] = ()
    wake_ns: int | None = None  # when to ask again, because a run will have run for long enough; None for never


class _Plan(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The steps that make room on a site."""

    site: Site
    victims: tuple[RunningRun, ...] = ()
    lost: int = 0


# --- who may be where -------------------------------------------------------------------------------------------------


def could_use(wanted: QueuedRun, node: Node, terms: PoolTerms) -> bool:
    """Return whether a run may ever use a node, as far as pools have a say."""
    pool = terms.pools.get(node.pool)
    if pool is not None and pool.single_principal and wanted.second_principal:
        return False
    if wanted.pool:
        return wanted.pool == node.pool
    if pool is None or not pool.reserved:
        return True
    in_time = wanted.preemptible and wanted.grace_s <= pool.return_s
    # What its owner declares counts, without what may come on top: to start alone may take longer than most pools give.
    is_short = wanted.limit_s is not None and wanted.limit_s - wanted.beyond_s <= pool.return_s
    return pool.lends and wanted.priority >= BEST_EFFORT and (in_time or is_short)


def is_open(wanted: QueuedRun, node: Node) -> bool:
    """Return whether a node is ever open to a run, as far as its owner has a say."""
    if node.owner and node.owner == wanted.owner:
        return True
    can_leave = wanted.preemptible or not (node.owner and node.owner_first)
    return can_leave and (node.shared or node.turns_ns is not None)


def may_use(wanted: QueuedRun, node: Node, terms: PoolTerms, now_ns: int) -> bool:
    """Return whether a run may start on a node now, as far as pools, owners and calendars have a say."""
    if not could_use(wanted, node, terms):
        return False
    if node.owner and wanted.owner == node.owner:
        return True
    if not node.shared or (node.owner and node.owner_first and not wanted.preemptible):
        return False
    left_s = None if node.turns_ns is None else (node.turns_ns - now_ns) / _NS
    if left_s is None or (left_s > 0 and wanted.preemptible):
        return True
    return left_s > 0 and wanted.limit_s is not None and wanted.limit_s <= left_s


def standing(wanted: QueuedRun, node: Node, terms: PoolTerms) -> tuple[bool, bool]:
    """Return how far a run is from having a right to be on a node: the nearer run pushes out the farther one.

    Returns whether it is a guest of the node's owner, and whether it borrows from the pool.
    """
    pool = terms.pools.get(node.pool)
    return (
        bool(node.owner) and node.owner_first and wanted.owner != node.owner,
        pool is not None and pool.reserved and wanted.pool != pool.name,
    )


def has_guests(node: Node, terms: PoolTerms) -> bool:
    """Return whether runs may differ in how far they are from having a right to a node: see `standing`."""
    pool = terms.pools.get(node.pool)
    return (bool(node.owner) and node.owner_first) or (pool is not None and pool.reserved)


# --- who leaves -------------------------------------------------------------------------------------------------------


def plan_preemption(wanted: QueuedRun, sites: Sequence[Site], terms: PoolTerms, now_ns: int) -> PreemptionPlan | None:
    """Return the runs to preempt so that a blocked gang can start, or None."""
    search = _Search(wanted, terms, now_ns)
    for highest in search.levels(sites):
        search.highest = highest
        found = _cheapest_sites(search, sites)
        if found:
            return _preemption_plan(wanted, found, terms)
    wakes = [wake for site in sites if (wake := _ripe_at(wanted, site, terms)) is not None and wake > now_ns]
    return PreemptionPlan(wake_ns=min(wakes)) if wakes else None


def may_ask(wanted: QueuedRun, running: RunningRun, node: Node, terms: PoolTerms) -> int | None:
    """Return from when on a run may be asked to leave a node for another one, or None for never."""
    if has_guests(node, terms):
        mine, other = standing(wanted, node, terms), standing(running.wanted, node, terms)
        if mine < other:
            return running.since_ns if _can_leave(wanted, running) else None
        if mine > other:
            return None
    return _by_class(wanted, running, terms.policy)


def _by_class(wanted: QueuedRun, running: RunningRun, policy: QueuePolicy) -> int | None:
    """Return from when on a run may be asked to leave for another one of a higher class, or None for never."""
    held = running.wanted
    if held.priority <= wanted.priority or held.preemptions >= policy.preemptions_max:
        return None
    return running.since_ns + round(policy.preempt_after_s * _NS) if _can_leave(wanted, running) else None


def _can_leave(wanted: QueuedRun, running: RunningRun) -> bool:
    held = running.wanted
    return held.preemptible and not running.is_leaving and held.run_id != wanted.run_id


class _Search:
    """Preemptible runs for one wanted run, looked up once for each site."""

    def __init__(self, wanted: QueuedRun, terms: PoolTerms, now_ns: int) -> None:
        # `highest`: the highest class that is asked at the moment.
        self.wanted, self.terms, self.now_ns, self.highest = wanted, terms, now_ns, _NOBODY
        self._count = wanted.gpus or 0
        self._known: dict[int, tuple[Site, list[tuple[int, _Candidate]]]] = {}

    def levels(self, sites: Sequence[Site]) -> list[int]:
        """Return the classes to ask, the lowest class first; before them nobody by class, where that may do."""
        classes = {level for site in sites for level, _ in self._askable(site)}
        if any(site.free >= site.need for site in sites) or sum(max(0, site.free) for site in sites) >= self._count:
            classes.add(_NOBODY)
        return sorted(classes, reverse=True)

    def candidates(self, site: Site) -> list[_Candidate]:
        """Return those on a site that may be asked to leave now."""
        return [candidate for level, candidate in self._askable(site) if level >= self.highest]

    def _askable(self, site: Site) -> list[tuple[int, _Candidate]]:
        """Return who may be asked on a site, with their class; those that leave by right count as below all classes."""
        known = self._known.get(id(site))
        if known is not None:
            return known[1]
        found: list[tuple[int, _Candidate]] = []
        wanted, node, terms, now_ns = self.wanted, site.node, self.terms, self.now_ns
        is_host = has_guests(node, terms)
        for running in site.holders:
            ripe_ns = may_ask(wanted, running, node, terms) if is_host else _by_class(wanted, running, terms.policy)
            if ripe_ns is None or ripe_ns > now_ns:
                continue
            by_right = is_host and standing(wanted, node, terms) < standing(running.wanted, node, terms)
            level = _NOBODY if by_right else running.wanted.priority
            count = _count(running, site)
            devices = count if len(running.shares) == 1 else sum(share.count for share in running.shares)
            found.append((level, ((now_ns - running.since_ns) * devices, count, running)))
        self._known[id(site)] = (site, found)  # the site is kept, so that its identity stays its own
        return found


def _cheapest_sites(search: _Search, sites: Sequence[Site]) -> list[_Plan]:
    """Return where room is made with the least loss."""
    wanted = search.wanted
    alone = [site for site in sites if not _is_part(wanted, site)]
    plans = [plan for site in alone if (plan := _clear(search, site)) is not None]
    if plans:
        return [min(plans, key=_cost)]
    kinds: dict[tuple[str, str], list[Site]] = {}
    for site in sites:
        if _is_part(wanted, site):
            kinds.setdefault((site.node.pool, site.gpu_type), []).append(site)
    ways = [way for _, some in sorted(kinds.items()) if (way := _MultiNodeSearch(search, some).plans())]
    return min(ways, key=lambda way: (_lost(way, search.now_ns), len(way)), default=[])


def _lost(plans: Sequence[_Plan], now_ns: int) -> int:
    """Return the device-nanoseconds that are thrown away; who leaves several nodes counts once."""
    leaving = {victim.wanted.run_id: victim for plan in plans for victim in plan.victims}
    return sum((now_ns - one.since_ns) * sum(share.count for share in one.shares) for one in leaving.values())


class _MultiNodeSearch:
    """Whole nodes and a part of another one, of one pool and type, that are together what a gang needs.

    The nodes that lose the least for each device come first. A run that leaves one node leaves the others: these are
    looked at again without them. All of it is found, or no run is asked.

    search: whose devices may be asked for. sites: nodes; what each needs is all that it has to give.
    """

    def __init__(self, search: _Search, sites: Sequence[Site]) -> None:
        self._search = search
        self._left = search.wanted.gpus or 0
        self._rest = {site.node.id: site for site in sites}
        self._chosen: list[_Plan] = []

    def plans(self) -> list[_Plan]:
        """Return how room is made on each of the nodes; none where that cannot be."""
        heap: list[tuple[float, int, str, str]] = []
        known: dict[str, _Plan] = {}
        stale = set(self._rest)
        while self._left and len(self._chosen) < NODES_MAX:
            for node_id in sorted(stale & self._rest.keys()):
                plan = self._plan(self._rest[node_id])
                if plan is not None:
                    known[node_id] = plan
                    site = plan.site
                    heapq.heappush(heap, (plan.lost / site.need, -site.need, site.node.name, node_id))
            stale = set()
            while heap and not stale:
                each, size, _, node_id = heapq.heappop(heap)
                if node_id in self._rest and -size <= self._left and known[node_id].lost / -size == each:
                    stale = self._take(known[node_id])
                    break
            else:
                break
        if self._left and len(self._chosen) < NODES_MAX:
            parts = [site for site in self._rest.values() if site.need > self._left]
            rest = [msgspec.structs.replace(site, need=self._left) for site in parts]
            plans = [plan for site in rest if (plan := self._plan(site)) is not None]
            if plans:
                self._take(min(plans, key=_cost))
        return [] if self._left else self._chosen

    def _plan(self, site: Site) -> _Plan | None:
        return _clear(self._search, site)

    def _take(self, plan: _Plan) -> set[str]:
        """Choose a node; return those where a run that leaves it was, too."""
        self._chosen.append(plan)
        self._left -= plan.site.need
        del self._rest[plan.site.node.id]
        leaving = {victim.wanted.run_id for victim in plan.victims}
        changed = {share.node_id for victim in plan.victims for share in victim.shares} & self._rest.keys()
        for node_id in changed:
            site = self._rest[node_id]
            gone = [held for held in site.holders if held.wanted.run_id in leaving]
            stay = tuple(held for held in site.holders if held.wanted.run_id not in leaving)
            free = site.free + sum(_count(held, site) for held in gone)
            self._rest[node_id] = msgspec.structs.replace(site, free=free, holders=stay)
        return changed


def _is_part(wanted: QueuedRun, site: Site) -> bool:
    return wanted.several_nodes and wanted.gpus is not None and site.need < wanted.gpus


def _cost(plan: _Plan) -> tuple[int, int, int, str]:
    site = plan.site
    return (plan.lost, len(plan.victims), site.free, site.node.name)


def _clear(search: _Search, site: Site) -> _Plan | None:
    """Return the cheapest way to make room on a site, or None."""
    lacking = site.need - site.free
    if lacking <= 0:
        return _Plan(site=site)
    victims = _cheapest(search.candidates(site), lacking)
    if victims is None:
        return None
    return _Plan(site=site, victims=tuple(victim for *_, victim in victims), lost=sum(lost for lost, *_ in victims))


_Candidate = tuple[int, int, RunningRun]
"""What is lost when a run leaves, how many devices that frees on the site, and the run."""


def _cheapest(candidates: Sequence[_Candidate], lacking: int) -> list[_Candidate] | None:
    """Return a set that frees what is lacking and loses little, at most twice of what would be the least.

    Those that lose the least for each device come first. Whoever would complete the set at some point is one way to do
    it, and is passed over for the next way: so one large run is taken instead of many small ones where that is cheaper.
    """
    most = sum(count for _, count, _ in candidates)
    if most < lacking:
        return None
    if most == lacking:
        return sorted(candidates, key=lambda found: (-found[0], found[2].wanted.run_id))
    ordered = sorted(candidates, key=lambda found: (found[0] / found[1], found[2].wanted.run_id))
    best: list[_Candidate] | None = None
    chosen: list[_Candidate] = []
    covered = 0
    for candidate in ordered:
        if covered + candidate[1] < lacking:
            chosen.append(candidate)
            covered += candidate[1]
            continue
        way = _needed([*chosen, candidate], lacking)
        if best is None or _weight(way) < _weight(best):
            best = way
    return best


def _needed(way: Sequence[_Candidate], lacking: int) -> list[_Candidate]:
    """Return a set without those who could stay."""
    spare = sum(count for _, count, _ in way) - lacking
    kept: list[_Candidate] = []
    for candidate in sorted(way, key=lambda found: (-found[0], found[2].wanted.run_id)):
        if candidate[1] <= spare:
            spare -= candidate[1]
        else:
            kept.append(candidate)
    return kept


def _weight(way: Sequence[_Candidate]) -> tuple[int, int]:
    return sum(lost for lost, *_ in way), len(way)


def _count(running: RunningRun, site: Site) -> int:
    if len(running.shares) == 1:  # it is there
        return running.shares[0].count
    return sum(
        share.count for share in running.shares if share.node_id == site.node.id and share.gpu_type == site.gpu_type
    )


def _ripe_at(wanted: QueuedRun, site: Site, terms: PoolTerms) -> int | None:
    """Return from when on those on a site who may be asked make room together, or None when they never do."""
    lacking = site.need - site.free
    ripening = [
        (ripe_ns, _count(running, site))
        for running in site.holders
        if (ripe_ns := may_ask(wanted, running, site.node, terms)) is not None
    ]
    for ripe_ns, count in sorted(ripening):
        lacking -= count
        if lacking <= 0:
            return ripe_ns
    return None


def _preemption_plan(wanted: QueuedRun, plans: Sequence[_Plan], terms: PoolTerms) -> PreemptionPlan:
    preemptions = {
        victim.wanted.run_id: Preemption(
            run_id=victim.wanted.run_id,
            for_run=wanted.run_id,
            sentence=_reason_text(wanted, victim.wanted, plan.site.node, terms),
        )
        for plan in plans
        for victim in plan.victims
    }
    shares = [
        DeviceShare(node_id=plan.site.node.id, gpu_type=plan.site.gpu_type, count=plan.site.need) for plan in plans
    ]
    return PreemptionPlan(preemptions=tuple(preemptions.values()), shares=tuple(shares))


def _reason_text(wanted: QueuedRun, held: QueuedRun, node: Node, terms: PoolTerms) -> str:
    """Return why a run has to leave, as its owner reads it."""
    is_visitor, borrows = standing(held, node, terms)
    if is_visitor and wanted.owner == node.owner:
        return f"{node.name} is {node.owner}'s, whose {wanted.title} comes first there; it goes on when there is room"
    if borrows and wanted.pool == node.pool:
        return f"pool {node.pool!r} had lent the devices, and its own {wanted.title} wants them; it goes on elsewhere"
    return f"makes room for {wanted.title}, which is {CLASSES[wanted.priority]}; it goes on when there is room"
