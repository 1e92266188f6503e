"""How gangs on several nodes get on, as this process has heard of them: memory that is meant to be lost with it.

Crews say all of it again to a server that starts. All methods may be called from any thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping

import msgspec

from serverless_gpu.model.hangs.gang_hang_detection import GangWatch
from serverless_gpu.model.telemetry.idleness import IdleVerdict
from serverless_gpu.server.records.runs.crews import Gang


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of how a gang on several nodes gets on.

    Attributes:
        heard_ns: when each crew was heard of, by number.
        hangs: whether its ranks stand still.
        idle: how long each crew's devices have done nothing, by number.
        told: what its crews are told of that.
    """

    heard_ns: Mapping[int, int] = msgspec.field(default_factory=dict)
    hangs: GangWatch = GangWatch()
    idle: Mapping[int, IdleVerdict] = msgspec.field(default_factory=dict)
    told: IdleVerdict | None = None


class GangProgress:
    """How gangs on several nodes get on, as this process has heard of them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[Gang, Progress] = {}

    def find(self, gang: Gang) -> Progress:
        """Return what is known of a gang; what is so at first, where nothing is."""
        with self._lock:
            return self._known.get(gang, Progress())

    def change(self, gang: Gang, work: Callable[[Progress], Progress]) -> tuple[Progress, Progress]:
        """Change what is known of a gang; return what it was, and what it is now."""
        with self._lock:
            before = self._known.get(gang, Progress())
            now = self._known[gang] = work(before)
            return before, now

    def keep(self, gangs: Collection[Gang]) -> None:
        """Forget all gangs but these."""
        with self._lock:
            self._known = {gang: known for gang, known in self._known.items() if gang in gangs}
