"""Index of preemptible devices by node, type and class, updated as runs come and go."""

from __future__ import annotations

from serverless_gpu.model.scheduling.values import BEST_EFFORT, DeviceShare, RunningRun


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
