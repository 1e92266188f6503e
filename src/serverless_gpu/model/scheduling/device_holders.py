"""Runs that hold devices of a node: when they give them back, and which of them can be asked to leave."""

from __future__ import annotations

import math

from serverless_gpu.model.scheduling.duration_estimates import Medians, over_after_s
from serverless_gpu.model.scheduling.values import BEST_EFFORT, DeviceShare, RunningRun

_S = 1_000_000_000
OVERDUE_NS = 60 * _S
"""What is over its own limit is being stopped: it counts as gone after that."""


class HeldDevices:
    """Devices of one type that a run has on a node."""

    __slots__ = ("_guess_ns", "bound_ns", "count", "likely_ns", "running", "size")

    def __init__(self, running: RunningRun, count: int) -> None:
        # `count`: how many.
        self.running, self.count = running, count
        self.size = sum(share.count for share in running.shares)  # how many it has altogether
        # `bound_ns`: when at the latest; the same.
        # `likely_ns`: when it gives them back, likely; infinite where unknown.
        self.likely_ns, self.bound_ns = ends(running)
        self._guess_ns = 0.0

    def guess(self, now_ns: int, medians: Medians) -> float:
        """Return when it likely gives them back, by what others of its size did where nobody can say."""
        if not math.isinf(self.likely_ns):
            return self.until(now_ns)[0]
        if self._guess_ns <= now_ns:
            since_ns = self.running.since_ns
            after_s = medians.over_after_s(self.size, (now_ns - since_ns) / _S)
            self._guess_ns = max(since_ns + after_s * _S, now_ns + 1)
        return self._guess_ns

    def until(self, now_ns: int) -> tuple[float, float]:
        """Return likely and latest end, as it looks now: who has run for longer than was likely may run much longer."""
        bound = self.bound_ns if self.bound_ns > now_ns else now_ns + OVERDUE_NS
        if self.likely_ns > now_ns:
            return min(self.likely_ns, bound), bound
        since_ns, wanted = self.running.since_ns, self.running.wanted
        after_s, _ = over_after_s((now_ns - since_ns) / _S, expected_s=wanted.expected_s, limit_s=wanted.limit_s)
        likely = math.inf if after_s is None else since_ns + after_s * _S
        return (min(likely, bound) if likely > now_ns else bound), bound


def ends(running: RunningRun) -> tuple[float, float]:
    """Return when a run likely gives its devices back, and when at the latest; infinite where unknown."""
    wanted = running.wanted
    bound = math.inf if wanted.limit_s is None else running.since_ns + wanted.limit_s * _S
    likely = math.inf if wanted.expected_s is None else running.since_ns + wanted.expected_s * _S
    return min(likely, bound), bound


class Leavers:
    """Devices of runs that may be stopped and go on later, and of those that are leaving already."""

    def __init__(self) -> None:
        # By node and type: of each class, and at last of those that are leaving; no entry without any.
        self.counts: dict[tuple[str, str], list[int]] = {}

    def __bool__(self) -> bool:
        return bool(self.counts)

    def count(self, running: RunningRun, share: DeviceShare, number: int) -> None:
        """Take note that a run has so many devices more, or less."""
        if not (running.wanted.preemptible or running.is_leaving):
            return
        key = (share.node_id, share.gpu_type)
        counts = self.counts.setdefault(key, [0] * (BEST_EFFORT + 2))
        counts[-1 if running.is_leaving else min(running.wanted.priority, BEST_EFFORT)] += number
        if not any(counts):
            del self.counts[key]

    def leaving(self, node_id: str, gpu_type: str) -> int:
        """Return how many devices of a node runs have that are leaving already."""
        counts = self.counts.get((node_id, gpu_type))
        return 0 if counts is None else counts[-1]

    def most(self, node_id: str, gpu_type: str, above: int) -> int:
        """Return how many devices of a node could get free at most."""
        counts = self.counts.get((node_id, gpu_type))
        return 0 if counts is None else sum(counts[above + 1 :])
