"""Hub: wakes readers when something changed. Each key has a version that only grows.

    writer (any thread):  the transaction is committed, then  hub.touch(run_key(run_id))
    reader (event loop):  seen = hub.version(key);  read;  show;  seen = await hub.changed(key, seen, timeout_s)

A reader notes the version *before* it reads: a change between its reading and its waiting then ends the wait at once.
Nothing is carried here but "look again", so a touch that is lost with the process costs a reader one timeout at most,
and every reader has one. Once the hub is closed every wait ends at once: that is how streams learn that the server is
to stop, and a stream looks at `closed` before it waits again. Keys that were not touched for long are forgotten; who
waits for one of them looks once for nothing.
"""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Callable

SCHEDULER = "scheduler"
"""Touch it when there may be something to place: the scheduler looks at once."""
RECONCILER = "reconciler"
COLLECTOR = "collector"
RETENTION = "retention"
AUDIT = "audit"
LEDGER = "ledger"
"""Touch it when an attempt has ended, or was settled: what it used is charged."""
CHARGED = "charged"
"""Touched when entries of the ledger were written."""
SELF_CHECK = "self-check"
USAGE = "usage"
BUDGETS = "budgets"
ALARMS = "alarms"
NOTICES = "notices"
"""Touch it when there is something to tell the webhook."""
KEYS_MAX = 20_000


def run_key(run_id: str) -> str:
    """Return the key of a run: its row, events, logs and files."""
    return f"run:{run_id}"


def node_key(node_id: str) -> str:
    """Return the key of a node: orders wait for it."""
    return f"node:{node_id}"


class Hub:
    """Versions by key, and who waits for them. Every method but `changed` may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._closed = False
        self._forgotten = 0  # the highest version of a key that was forgotten
        self._versions: OrderedDict[str, int] = OrderedDict()
        self._waiting: dict[str, list[_Waiting]] = {}
        self._listeners: dict[str, list[Callable[[], None]]] = {}

    def touch(self, key: str) -> None:
        """Say that what a key stands for has changed; after the commit, never inside of a transaction."""
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
        """Return whether the server is to stop: what waits for news has to end."""
        return self._closed

    def close(self) -> None:
        """End every wait, now and from now on."""
        with self._lock:
            self._closed = True
            waiting = [one for ones in self._waiting.values() for one in ones]
            self._waiting.clear()
        for one in waiting:
            one.wake()

    def sizes(self) -> dict[str, tuple[int, int]]:
        """Return what is remembered here, in words → (how much, how much there may be)."""
        with self._lock:
            return {"keys of the hub": (len(self._versions), KEYS_MAX)}

    def version(self, key: str) -> int:
        """Return the version of a key now, to be noted before what it stands for is read."""
        with self._lock:
            return self._versions.get(key, self._forgotten)

    def listen(self, key: str, listener: Callable[[], None]) -> None:
        """Call `listener` at every touch of a key, in the thread that touches: it must return at once."""
        with self._lock:
            self._listeners.setdefault(key, []).append(listener)

    async def changed(self, key: str, seen: int, timeout_s: float) -> int:
        """Wait until the version of a key is another one than the reader has seen.

        Args:
            key: what is waited for.
            seen: the version as `version` or an earlier call returned it.
            timeout_s: seconds after which the wait ends without a change.

        Returns:
            The version now: `seen` when nothing changed, or the hub is closed.
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
    """One reader, in its event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.future: asyncio.Future[None] = self._loop.create_future()

    def wake(self) -> None:
        try:
            self._loop.call_soon_threadsafe(self._done)
        except RuntimeError:
            return  # the loop has ended, and with it its readers

    def _done(self) -> None:
        if not self.future.done():
            self.future.set_result(None)
