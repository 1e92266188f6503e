"""A token bucket that does not read a clock: allows a burst, then a constant rate.

    level ──take──▶ empty: closed ──time──▶ level ≥ resume: open again

An empty bucket stays closed until it contains `resume` tokens. Ranks' output therefore arrives in long pieces, with one
notice about missing output before each piece.
"""

from __future__ import annotations

_NS = 1_000_000_000


class TokenBucket:
    """A token bucket that begins with `burst` tokens, gains `per_s` per second, and reopens at `resume`."""

    def __init__(self, *, per_s: int, burst: int, resume: int, now_ns: int) -> None:
        self._per_s = per_s
        # The bucket counts billionths of a token to avoid rounding errors of frequent calls.
        self._full = burst * _NS
        self._resume = min(resume, burst) * _NS
        self._level = self._full
        self._at_ns = now_ns
        self._closed = False

    def is_open(self, now_ns: int) -> bool:
        """Return True if `take` would return more than zero."""
        passed_ns = max(0, now_ns - self._at_ns)
        self._level = min(self._full, self._level + passed_ns * self._per_s)
        self._at_ns = max(self._at_ns, now_ns)
        if self._closed and self._level >= self._resume:
            self._closed = False
        return not self._closed

    def take(self, wanted: int, now_ns: int) -> int:
        """Remove up to `wanted` tokens from the bucket. Return the number of removed tokens."""
        if not self.is_open(now_ns):
            return 0
        given = min(wanted, self._level // _NS)
        self._level -= given * _NS
        self._closed = given < wanted
        return given
