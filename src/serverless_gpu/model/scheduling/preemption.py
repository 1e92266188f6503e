"""Preemption: selects runs that stop for another run, and defines the right to use a node.

    a run is blocked ─▶ possible nodes (sites) ─▶ runs there that may be preempted ─▶ the cheapest sufficient set
                                                  │
      by right      for runs of the lending pool, or of a node's owner with priority: at once
      by class      CRITICAL > NORMAL > BEST_EFFORT: after a minimum time, and a few times for each run

The scheduler preempts only runs that can resume later (`preemptible`). The lost work of a preemption is the preempted
run's device-seconds since its start. The scheduler prefers preemption by right over preemption by class, and prefers
the lowest sufficient class. Among the remaining candidates, the scheduler preempts the set of runs with the least lost
work, and never more runs than necessary.

Preemption cannot loop. The scheduler orders the runs on a node by their right to the node and then by priority class. A
run can preempt only runs with a weaker right to the node or, for equal rights, a lower class. A gang on several nodes
never uses released devices to which the preempted run has the stronger right. The scheduler holds the released devices
for the run that caused the preemption. A guest run starts only while no waiting run could start by preempting the guest
by right (`cleared_devices.py`).

If all preemption candidates are too young, the plan contains the time at which a candidate is old enough. A
non-preemptible run releases borrowed devices only at its end. A non-preemptible run may therefore borrow devices only
if its declared time limit is at most the pool's `return_s`. The declared time limit excludes the time for starting and
stopping the run.
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
"""Weakest right to a node: a guest of the node's owner that also borrows from the node's pool."""
FULL_CLAIM = (False, False)
_NOBODY = BEST_EFFORT + 1  # Class number below all priority classes, with which the search preempts no run by class.
_NS = 1_000_000_000


class PoolTerms(msgspec.Struct, frozen=True, kw_only=True):
    """The operator's queue and pool settings. A pool without settings is an on-demand pool."""

    policy: QueuePolicy
    pools: Mapping[str, Pool] = {}


class Site(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A node on which all or some ranks of a gang could run."""

    node: Node
    gpu_type: str  # Device type that the gang would use on the node.
    need: int  # Number of needed devices, or all usable devices of the node for a multi-node gang.
    free: int  # Number of unreserved devices that are free or belong to stopping runs.
    holders: tuple[RunningRun, ...] = ()  # Runs with devices on the node.


class PreemptionPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The preemptions that free devices for a blocked gang."""

    # Runs to preempt. `preemptions` is empty if enough devices become free without preemption.
    preemptions: tuple[Preemption, ...] = ()
    # Devices to hold for the gang until its start. `shares` is empty if no preemption is possible now.
    shares: tuple[DeviceShare, ...] = ()
    wake_ns: int | None = None  # Time at which a run is old enough for preemption, or None.


class _Plan(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The preemptions that free devices on one site."""

    site: Site
    victims: tuple[RunningRun, ...] = ()
    lost: int = 0


# --- access to nodes --------------------------------------------------------------------------------------------------


def could_use(wanted: QueuedRun, node: Node, terms: PoolTerms) -> bool:
    """Return True if the pool rules ever allow a run to use a node."""
    pool = terms.pools.get(node.pool)
    if pool is not None and pool.single_principal and wanted.second_principal:
        return False
    if wanted.pool:
        return wanted.pool == node.pool
    if pool is None or not pool.reserved:
        return True
    in_time = wanted.preemptible and wanted.grace_s <= pool.return_s
    # Compare only the declared limit, because starting a run may take longer than most pools' `return_s`.
    is_short = wanted.limit_s is not None and wanted.limit_s - wanted.beyond_s <= pool.return_s
    return pool.lends and wanted.priority >= BEST_EFFORT and (in_time or is_short)


def is_open(wanted: QueuedRun, node: Node) -> bool:
    """Return True if the owner and the calendar of a node ever allow a run to use the node."""
    if node.owner and node.owner == wanted.owner:
        return True
    can_leave = wanted.preemptible or not (node.owner and node.owner_first)
    return can_leave and (node.shared or node.turns_ns is not None)


def may_use(wanted: QueuedRun, node: Node, terms: PoolTerms, now_ns: int) -> bool:
    """Return True if pools, owners and calendars allow a run to start on a node now."""
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
    """Return a run's distance from a full right to a node. Runs may preempt runs with a larger distance.

    The distance has two flags: the run is a guest of the node's owner, and the run borrows from the pool.
    """
    pool = terms.pools.get(node.pool)
    return (
        bool(node.owner) and node.owner_first and wanted.owner != node.owner,
        pool is not None and pool.reserved and wanted.pool != pool.name,
    )


def has_guests(node: Node, terms: PoolTerms) -> bool:
    """Return True if runs can differ in their right to a node, as in `standing`."""
    pool = terms.pools.get(node.pool)
    return (bool(node.owner) and node.owner_first) or (pool is not None and pool.reserved)


# --- selection of runs ------------------------------------------------------------------------------------------------


def plan_preemption(wanted: QueuedRun, sites: Sequence[Site], terms: PoolTerms, now_ns: int) -> PreemptionPlan | None:
    """Return the runs to preempt so that a blocked gang can start, or None if preemption can never help."""
    search = _Search(wanted, terms, now_ns)
    for highest in search.levels(sites):
        search.highest = highest
        found = _cheapest_sites(search, sites)
        if found:
            return _preemption_plan(wanted, found, terms)
    wakes = [wake for site in sites if (wake := _ripe_at(wanted, site, terms)) is not None and wake > now_ns]
    return PreemptionPlan(wake_ns=min(wakes)) if wakes else None


def may_ask(wanted: QueuedRun, running: RunningRun, node: Node, terms: PoolTerms) -> int | None:
    """Return the earliest time at which a run may preempt another run on a node, or None if forbidden."""
    if has_guests(node, terms):
        mine, other = standing(wanted, node, terms), standing(running.wanted, node, terms)
        if mine < other:
            return running.since_ns if _can_leave(wanted, running) else None
        if mine > other:
            return None
    return _by_class(wanted, running, terms.policy)


def _by_class(wanted: QueuedRun, running: RunningRun, policy: QueuePolicy) -> int | None:
    """Return the earliest time at which a higher-class run may preempt another run, or None if forbidden."""
    held = running.wanted
    if held.priority <= wanted.priority or held.preemptions >= policy.preemptions_max:
        return None
    return running.since_ns + round(policy.preempt_after_s * _NS) if _can_leave(wanted, running) else None


def _can_leave(wanted: QueuedRun, running: RunningRun) -> bool:
    held = running.wanted
    return held.preemptible and not running.is_leaving and held.run_id != wanted.run_id


class _Search:
    """Finds the runs that one waiting run may preempt, and caches the result per site."""

    def __init__(self, wanted: QueuedRun, terms: PoolTerms, now_ns: int) -> None:
        # `highest`: the highest priority class that the search may currently preempt.
        self.wanted, self.terms, self.now_ns, self.highest = wanted, terms, now_ns, _NOBODY
        self._count = wanted.gpus or 0
        self._known: dict[int, tuple[Site, list[tuple[int, _Candidate]]]] = {}

    def levels(self, sites: Sequence[Site]) -> list[int]:
        """Return the class levels to try, the lowest class first, with `_NOBODY` for no preemption by class."""
        classes = {level for site in sites for level, _ in self._askable(site)}
        if any(site.free >= site.need for site in sites) or sum(max(0, site.free) for site in sites) >= self._count:
            classes.add(_NOBODY)
        return sorted(classes, reverse=True)

    def candidates(self, site: Site) -> list[_Candidate]:
        """Return the runs on a site that the search may preempt now."""
        return [candidate for level, candidate in self._askable(site) if level >= self.highest]

    def _askable(self, site: Site) -> list[tuple[int, _Candidate]]:
        """Return the preemptible runs on a site with their class.

        Runs that the waiting run may preempt by right have a class below all priority classes.
        """
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
        # The stored reference to the site prevents Python from reusing the site's id.
        self._known[id(site)] = (site, found)
        return found


def _cheapest_sites(search: _Search, sites: Sequence[Site]) -> list[_Plan]:
    """Return the preemption plans that free enough devices with the least lost work."""
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
    """Return the lost work in device-nanoseconds. A preempted run on several nodes counts once."""
    leaving = {victim.wanted.run_id: victim for plan in plans for victim in plan.victims}
    return sum((now_ns - one.since_ns) * sum(share.count for share in one.shares) for one in leaving.values())


class _MultiNodeSearch:
    """Finds nodes of one pool and type for a gang: whole nodes and a partly used node.

    The search tries nodes with the least lost work per device first. The search re-examines all nodes of a preempted
    run, because the run releases devices on each node. The search preempts no run unless the whole gang fits.

    `search` finds the preemptible runs. `sites` are the nodes, each with all its usable devices.
    """

    def __init__(self, search: _Search, sites: Sequence[Site]) -> None:
        self._search = search
        self._left = search.wanted.gpus or 0
        self._rest = {site.node.id: site for site in sites}
        self._chosen: list[_Plan] = []

    def plans(self) -> list[_Plan]:
        """Return a preemption plan per node, or no plans if the gang does not fit."""
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
        """Choose a node for the gang. Return the other nodes of runs that the plan preempts on that node."""
        self._chosen.append(plan)
        self._left -= plan.site.need
        del self._rest[plan.site.node.id]
        leaving = {victim.wanted.run_id for victim in plan.victims}
        changed = {share.node_id for victim in plan.victims for share in victim.shares} & self._rest.keys()
        for node_id in changed:
            site = self._rest[node_id]
            # Devices to which the preempted run has the stronger right stay available for the preempted run. Two
            # gangs that each have the stronger right to one node would otherwise preempt each other in turn.
            gone = [held for held in site.holders if held.wanted.run_id in leaving and self._may_follow(held, site)]
            gone_ids = {held.wanted.run_id for held in gone}
            stay = tuple(held for held in site.holders if held.wanted.run_id not in gone_ids)
            free = site.free + sum(_count(held, site) for held in gone)
            self._rest[node_id] = msgspec.structs.replace(site, free=free, holders=stay)
        return changed

    def _may_follow(self, held: RunningRun, site: Site) -> bool:
        """Return True if the waiting run has at least the right of a running run to a node."""
        wanted, terms = self._search.wanted, self._search.terms
        return standing(wanted, site.node, terms) <= standing(held.wanted, site.node, terms)


def _is_part(wanted: QueuedRun, site: Site) -> bool:
    return wanted.several_nodes and wanted.gpus is not None and site.need < wanted.gpus


def _cost(plan: _Plan) -> tuple[int, int, int, str]:
    site = plan.site
    return (plan.lost, len(plan.victims), site.free, site.node.name)


def _clear(search: _Search, site: Site) -> _Plan | None:
    """Return the cheapest plan that frees enough devices on a site, or None."""
    lacking = site.need - site.free
    if lacking <= 0:
        return _Plan(site=site)
    victims = _cheapest(search.candidates(site), lacking)
    if victims is None:
        return None
    return _Plan(site=site, victims=tuple(victim for *_, victim in victims), lost=sum(lost for lost, *_ in victims))


_Candidate = tuple[int, int, RunningRun]
"""Lost work of preempting a run, number of devices that the run releases on the site, and the run."""


def _cheapest(candidates: Sequence[_Candidate], lacking: int) -> list[_Candidate] | None:
    """Return runs that free the missing devices with at most twice the minimum lost work.

    The search adds runs in ascending order of lost work per device. Each run that frees the last missing devices
    produces a candidate set. The search then continues without the run that completed the candidate set. The search
    therefore selects one large run instead of many small runs if the large run has less lost work.
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
    """Return the given runs without those whose preemption is unnecessary."""
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
    if len(running.shares) == 1:  # The run has devices only on this site.
        return running.shares[0].count
    return sum(
        share.count for share in running.shares if share.node_id == site.node.id and share.gpu_type == site.gpu_type
    )


def _ripe_at(wanted: QueuedRun, site: Site, terms: PoolTerms) -> int | None:
    """Return the time at which preemption on a site can free enough devices, or None if impossible."""
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
    """Return a text that explains a preemption to the owner of the preempted run."""
    is_visitor, borrows = standing(held, node, terms)
    if is_visitor and wanted.owner == node.owner:
        return (
            f"node {node.name} gives priority to its owner {node.owner}, whose run {wanted.title} preempts this run "
            "until devices are free"
        )
    if borrows and wanted.pool == node.pool:
        return (
            f"pool {node.pool!r} needs its lent devices for the run {wanted.title}, so this run resumes on other "
            "devices"
        )
    return f"the run {wanted.title} of class {CLASSES[wanted.priority]} preempts this run until devices are free"
