"""How many more runs each principal may have waiting: a bound on the queue that costs nothing until it is near."""

from __future__ import annotations

import threading

_OWNERS_MAX = 10_000


class WaitingRoom:
    """Room that is certainly there, by owner. What waits is counted when that is used up, not for every run.

    Between two counts runs of an owner only leave the queue, but for those that are counted down here and the few that
    go back into it, so the count is never wrong by more than those.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._room: dict[str, int] = {}

    def enter(self, owner: str) -> bool:
        """Take a place; return whether one was certainly there, else somebody has to count."""
        with self._lock:
            room = self._room.get(owner, 0)
            if room > 0:
                self._room[owner] = room - 1
            return room > 0

    def counted(self, owner: str, free: int) -> None:
        """Note how many places an owner has, as was counted just now."""
        with self._lock:
            if len(self._room) >= _OWNERS_MAX:
                self._room.clear()
            self._room[owner] = free
