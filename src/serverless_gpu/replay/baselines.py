"""Baseline schedulers from papers and other systems, to compare with the planner.

    fifo        in the order of arrival; the first job that does not fit blocks all others        no preemption
    first-fit   in the order of arrival; jobs that do not fit are skipped                         no preemption
    srtf        shortest remaining time first    ┐ each arrival and each end places all jobs again on an empty
    srsf        least remaining GPU time first   ┘ cluster, in that order; jobs that do not fit are skipped

`srtf` and `srsf` know the duration of each job, and preempt and resume jobs at no cost. A real scheduler does not know
durations and cannot preempt for free. `srtf` and `srsf` therefore show the possible improvement. A job that fits on one
node starts on the first node with enough free GPUs. A larger job gets whole free nodes. The remaining GPUs of a larger
job come from the next node with enough free GPUs.

A job that does not fit the empty cluster never reaches this module, because `simulation` leaves out such jobs.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from serverless_gpu.replay.clusters import Cluster
from serverless_gpu.replay.traces import Job

Spans = list[list[tuple[float, float]]]
"""Periods (start, end) during which each job had its GPUs, in the order of the jobs."""

Parts = tuple[tuple[int, int], ...]
"""Placement of a job: pairs of node and number of GPUs."""

Key = Callable[[Job, float], float]
"""Sort key of a job, given its remaining seconds."""

KEYS: dict[str, Key] = {
    "srtf": lambda _job, left_s: left_s,
    "srsf": lambda job, left_s: left_s * job.gpus,
}


class Nodes:
    """The free GPUs of each node."""

    def __init__(self, cluster: Cluster) -> None:
        self._sizes = [machine.gpus for machine in cluster.machines]
        self._free = list(self._sizes)
        self._whole = max(self._sizes)
        self.free = sum(self._sizes)

    def empty(self) -> None:
        """Release the GPUs of all nodes."""
        self._free[:] = self._sizes
        self.free = sum(self._sizes)

    def take(self, gpus: int) -> Parts | None:
        """Allocate GPUs and return their placement, or None when too few GPUs are free."""
        if gpus > self.free:
            return None
        parts: Parts | None
        if gpus <= self._whole:
            parts = next((((node, gpus),) for node, free in enumerate(self._free) if free >= gpus), None)
        else:
            parts = self._on_several(gpus)
        for node, count in parts or ():
            self._free[node] -= count
            self.free -= count
        return parts

    def give(self, parts: Parts) -> None:
        """Release the GPUs of a placement."""
        for node, count in parts:
            self._free[node] += count
            self.free += count

    def _on_several(self, gpus: int) -> Parts | None:
        parts: list[tuple[int, int]] = []
        taken: set[int] = set()
        for node, free in enumerate(self._free):
            if free == self._sizes[node] == self._whole and gpus >= self._whole:
                parts.append((node, free))
                taken.add(node)
                gpus -= free
        if gpus >= self._whole:
            return None
        if gpus:
            rest = next((node for node, free in enumerate(self._free) if node not in taken and free >= gpus), None)
            if rest is None:
                return None
            parts.append((rest, gpus))
        return tuple(parts)


# --- schedulers without preemption ------------------------------------------------------------------------------------


def in_order(jobs: Sequence[Job], cluster: Cluster, *, strict: bool) -> Spans:
    """Return the run times of jobs that start in the order of arrival and keep their GPUs.

    With `strict`, the first job that does not fit blocks all later jobs.
    """
    nodes, spans = Nodes(cluster), _no_spans(jobs)
    waiting: dict[int, deque[int]] = {}
    ends: list[tuple[float, int, Parts]] = []
    arrived = 0
    while arrived < len(jobs) or ends:
        now = min(jobs[arrived].submit_s if arrived < len(jobs) else math.inf, ends[0][0] if ends else math.inf)
        while ends and ends[0][0] <= now:
            nodes.give(heapq.heappop(ends)[2])
        while arrived < len(jobs) and jobs[arrived].submit_s <= now:
            waiting.setdefault(jobs[arrived].gpus, deque()).append(arrived)
            arrived += 1
        for place, parts in _that_fit(waiting, nodes, strict=strict):
            end = now + jobs[place].duration_s
            spans[place].append((now, end))
            heapq.heappush(ends, (end, place, parts))
    return spans


def _that_fit(waiting: dict[int, deque[int]], nodes: Nodes, *, strict: bool) -> Iterator[tuple[int, Parts]]:
    """Yield the jobs that start now, with their placement.

    When a job does not fit, the pass skips all jobs of its size.
    """
    heads = [(queue[0], gpus) for gpus, queue in waiting.items() if queue]
    heapq.heapify(heads)
    while heads and nodes.free:
        place, gpus = heads[0]
        parts = nodes.take(gpus)
        if parts is not None:
            queue = waiting[gpus]
            queue.popleft()
            yield place, parts
        elif strict:
            return
        if parts is None or not queue:
            heapq.heappop(heads)
        else:
            heapq.heapreplace(heads, (queue[0], gpus))


# --- schedulers with preemption ---------------------------------------------------------------------------------------


def placed_again(jobs: Sequence[Job], cluster: Cluster, key: Key) -> Spans:
    """Return the run times of jobs if all jobs are placed again after each job arrival and end.

    Each pass sorts the jobs by `key`, smallest key first. Jobs with equal keys keep the order of the previous pass,
    before new jobs.
    """
    replay = _PlacedAgain(jobs, cluster, key)
    return replay.run()


Rank = tuple[float, tuple[int, int, int]]
"""Key of a job, and its order among jobs with equal keys: pass number, 0 or 1, and a sequence number."""


class _PlacedAgain:
    """Replays jobs and places all jobs again after each job arrival and end.

    Each job size has a heap of waiting jobs, because waiting jobs keep their key. Each job arrival and end sorts the
    running jobs. A pass sorts jobs with equal keys by their key in the previous pass, smaller key first. A waiting job
    had the same key in the previous pass, while a running job had a larger key.
    """

    def __init__(self, jobs: Sequence[Job], cluster: Cluster, key: Key) -> None:
        self._jobs, self._key, self._nodes = jobs, key, Nodes(cluster)
        self._left = [job.duration_s for job in jobs]
        self._waiting: dict[int, list[tuple[Rank, int]]] = {}
        self._began: dict[int, float] = {}
        self._ranks: dict[int, Rank] = {}  # Position of each running job in the previous pass.
        self._spans = _no_spans(jobs)
        self._passes = self._turns = 0

    def run(self) -> Spans:
        jobs, arrived = self._jobs, 0
        while arrived < len(jobs) or self._began:
            end = min((began + self._left[place] for place, began in self._began.items()), default=math.inf)
            now = min(end, jobs[arrived].submit_s if arrived < len(jobs) else math.inf)
            self._passes += 1
            for place in [place for place, began in self._began.items() if began + self._left[place] <= now]:
                self._stop(place, now)
            while arrived < len(jobs) and jobs[arrived].submit_s <= now:
                self._wait(arrived, (self._key(jobs[arrived], self._left[arrived]), (self._passes, 1, arrived)))
                arrived += 1
            self._place(now)
        return self._spans

    def _wait(self, place: int, rank: Rank) -> None:
        heapq.heappush(self._waiting.setdefault(self._jobs[place].gpus, []), (rank, place))

    def _stop(self, place: int, now: float) -> None:
        began = self._began.pop(place)
        self._left[place] -= now - began
        self._spans[place].append((began, now))

    def _place(self, now: float) -> None:
        """Place all jobs again, and let running jobs that do not fit wait."""
        nodes, full = self._nodes, set[int]()
        nodes.empty()
        running = sorted(
            (self._key(self._jobs[place], self._left[place] - (now - began)), *self._ranks[place], place)
            for place, began in self._began.items()
        )
        heads = [heap[0] for heap in self._waiting.values() if heap]
        heapq.heapify(heads)
        following = 0
        while following < len(running) or heads:
            if heads and (following == len(running) or self._as_before(heads[0][0]) < running[following][:3]):
                self._place_head(heads, full, now)
                continue
            key, *_, place = running[following]
            following += 1
            gpus, rank = self._jobs[place].gpus, self._rank(key)
            if gpus in full or nodes.take(gpus) is None:
                full.add(gpus)
                self._stop(place, now)
                self._wait(place, rank)
            else:
                self._ranks[place] = rank

    def _rank(self, key: float) -> Rank:
        self._turns += 1
        return key, (self._passes, 0, self._turns)

    def _as_before(self, rank: Rank) -> tuple[float, float, tuple[int, int, int]]:
        """Return a waiting job's key, its key in the previous pass, and its order among equal keys."""
        key, turn = rank
        return key, math.inf if turn[:2] == (self._passes, 1) else key, turn

    def _place_head(self, heads: list[tuple[Rank, int]], full: set[int], now: float) -> None:
        """Place the first waiting job, or skip all jobs of its size in this pass if the job does not fit."""
        (key, _), place = heads[0]
        gpus = self._jobs[place].gpus
        if gpus in full or self._nodes.take(gpus) is None:
            full.add(gpus)
            heapq.heappop(heads)
            return
        heap = self._waiting[gpus]
        heapq.heappop(heap)
        self._began[place], self._ranks[place] = now, self._rank(key)
        if heap:
            heapq.heapreplace(heads, heap[0])
        else:
            heapq.heappop(heads)


def _no_spans(jobs: Sequence[Job]) -> Spans:
    return [[] for _ in jobs]
