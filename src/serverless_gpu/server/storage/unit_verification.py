"""Verifies the content of units for the server: each document once, a few at a time, never on the event loop.

    a unit arrives ─ verified already? done
                   ├ small ─ one of SMALL_AT_ONCE turns ─┐
                   └ large ─ one of LARGE_AT_ONCE turns ─┴─▶ read its packs, compare every file with its row

A large unit takes seconds of one core, so large units wait for each other and small ones pass them. A client whose
request ends before that asks again; the second request finds the answer of the first.

Failure cases: `Unequal` (packs hold something else), StoreUnavailable (no turn within WAIT_S; the client asks again).
"""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator

from blake3 import blake3

from serverless_gpu.environment.documents import Unit
from serverless_gpu.environment.stores.content import ReadPack, check_content
from serverless_gpu.errors import StoreUnavailable

SMALL_AT_ONCE = 4
LARGE_AT_ONCE = 2
LARGE_BYTES = 64 * 1024 * 1024
LARGE_ROWS = 20_000
"""Above this content, or so many rows, a unit is large: it takes a good part of a second, or of a hundred MB."""
WAIT_S = 10.0
_KNOWN_MAX = 50_000


class ContentChecks:
    """Checks of units against the packs of one store; safe to use from several threads.

    Args:
        read: returns the beginning of a pack.
    """

    def __init__(self, read: ReadPack) -> None:
        self._read = read
        self._lock = threading.Lock()
        self._known: OrderedDict[str, None] = OrderedDict()  # digests of documents that were verified
        self._small = threading.Semaphore(SMALL_AT_ONCE)
        self._large = threading.Semaphore(LARGE_AT_ONCE)

    def check(self, data: bytes | memoryview, decode: Callable[[], Unit]) -> None:
        """Verify the content of a unit unless that has been done.

        Args:
            data: its document.
            decode: returns the unit; called again for a large one, which is not held in memory while it waits.

        Raises:
            Unequal: its packs hold something else than its rows say.
            StoreUnavailable: too many are being verified.
        """
        digest = blake3(data).hexdigest()
        if self._is_known(digest):
            return
        unit: Unit | None = decode()
        assert unit is not None
        is_large = len(unit.rows) > LARGE_ROWS or sum(row.size for row in unit.rows) > LARGE_BYTES
        if is_large:
            unit = None
        with self._turn(self._large if is_large else self._small):
            if not self._is_known(digest):
                check_content(unit or decode(), self._read)
                self._remember(digest)

    def compare(self, unit: Unit, read: ReadPack) -> None:
        """Verify a unit whatever is known of it, with packs that are read anew.

        Raises:
            Unequal: its packs hold something else than its rows say.
            StoreUnavailable: too many are being verified.
        """
        with self._turn(self._large):
            check_content(unit, read)

    def _is_known(self, digest: str) -> bool:
        with self._lock:
            if digest not in self._known:
                return False
            self._known.move_to_end(digest)
            return True

    def _remember(self, digest: str) -> None:
        with self._lock:
            self._known[digest] = None
            while len(self._known) > _KNOWN_MAX:
                self._known.popitem(last=False)

    @contextlib.contextmanager
    def _turn(self, turns: threading.Semaphore) -> Iterator[None]:
        if not turns.acquire(timeout=WAIT_S):
            raise StoreUnavailable(
                f"the server verifies other units; this one has waited for {WAIT_S:.0f} s",
                hint="it is sent again by itself; a large environment takes the server a few seconds",
            )
        try:
            yield
        finally:
            turns.release()
