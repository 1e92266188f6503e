"""Wakes readers when the data of a key has changed. Each key has an increasing version number.

    writer (any thread):  the transaction is committed, then  hub.touch(run_key(run_id))
    reader (event loop):  seen = hub.version(key);  read;  show;  seen = await hub.changed(key, seen, timeout_s)

A reader notes the key's version *before* reading the data. If the key changes between the read and the wait, the wait
ends immediately. A touch transfers no data. A lost touch only delays a reader, because every reader has a timeout.

After the server closes the hub, every wait ends immediately. A stream checks `closed` before each wait, because the
server may be stopping. The hub drops the least recently touched keys. A reader of a dropped key wakes up once without a
change.
"""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Callable

SCHEDULER = "scheduler"
"""Hub key that wakes the scheduler when a run may be ready for placement."""
RECONCILER = "reconciler"
COLLECTOR = "collector"
RETENTION = "retention"
AUDIT = "audit"
LEDGER = "ledger"
"""Hub key that wakes the ledger loop for ended or settled attempts."""
CHARGED = "charged"
"""Hub key that signals new ledger entries."""
SELF_CHECK = "self-check"
USAGE = "usage"
BUDGETS = "budgets"
ALARMS = "alarms"
NOTICES = "notices"
"""Hub key that signals a waiting webhook notice."""
KEYS_MAX = 20_000


def run_key(run_id: str) -> str:
    """Return the hub key for a run's row, events, logs and files."""
    return f"run:{run_id}"


def node_key(node_id: str) -> str:
    """Return the hub key that signals new orders for a node."""
    return f"node:{node_id}"


class Hub:
    """Wakes readers that wait for a new version of a key. All methods except `changed` are thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._closed = False
        self._forgotten = 0  # Highest version among dropped keys.
        self._versions: OrderedDict[str, int] = OrderedDict()
        self._waiting: dict[str, list[_Waiting]] = {}
        self._listeners: dict[str, list[Callable[[], None]]] = {}

    def touch(self, key: str) -> None:
        """Increment the version of a key. Call `touch` after the commit, never inside a transaction."""
        with self._lock:
            self._count += 1
            self._versions[key] = self._count
            self._versions.move_to_end(key)
            while len(self._versions) > KEYS_MAX:
                self._forgotten = max(self._forgotten, self._versions.popitem(last=False)[1])
            waiting = self._waiting.pop(key, [])
            listeners = list(self._listeners.get(key, []))
        for one in waiting:
            one.wake()
        for listener in listeners:
            listener()

    @property
    def closed(self) -> bool:
        """Return True once the hub is closed, so that streams end."""
        return self._closed

    def close(self) -> None:
        """End all current and future waits."""
        with self._lock:
            self._closed = True
            waiting = [one for ones in self._waiting.values() for one in ones]
            self._waiting.clear()
        for one in waiting:
            one.wake()

    def sizes(self) -> dict[str, tuple[int, int]]:
        """Return the current and maximum size of each in-memory table, by description."""
        with self._lock:
            return {"keys of the hub": (len(self._versions), KEYS_MAX)}

    def version(self, key: str) -> int:
        """Return the current version of a key. Call `version` before reading the key's data."""
        with self._lock:
            return self._versions.get(key, self._forgotten)

    def listen(self, key: str, listener: Callable[[], None]) -> None:
        """Register a listener for a key. `touch` calls the listener, which must not block."""
        with self._lock:
            self._listeners.setdefault(key, []).append(listener)

    async def changed(self, key: str, seen: int, timeout_s: float) -> int:
        """Wait until a key's version differs from the reader's last known version.

        Args:
            key: the key to wait for.
            seen: the version that `version` or an earlier call returned.
            timeout_s: seconds after which the wait ends without a change.

        Returns:
            The current version; equal to `seen` if nothing changed or the hub is closed.
        """
        one = _Waiting()
        with self._lock:
            version = self._versions.get(key, self._forgotten)
            if version != seen or self._closed:
                return version
            self._waiting.setdefault(key, []).append(one)
        try:
            async with asyncio.timeout(timeout_s):
                await one.future
        except TimeoutError:
            pass
        finally:
            self._leave(key, one)
        return self.version(key)

    def _leave(self, key: str, one: _Waiting) -> None:
        with self._lock:
            others = self._waiting.get(key, [])
            if one in others:
                others.remove(one)
            if not others:
                self._waiting.pop(key, None)


class _Waiting:
    """A waiting reader and its event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.future: asyncio.Future[None] = self._loop.create_future()

    def wake(self) -> None:
        try:
            self._loop.call_soon_threadsafe(self._done)
        except RuntimeError:
            return  # The reader's event loop has ended.

    def _done(self) -> None:
        if not self.future.done():
            self.future.set_result(None)
