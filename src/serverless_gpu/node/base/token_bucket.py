"""A token bucket as a plain value: a burst, then a rate per second. Times are passed in.

    level ──take──▶ empty: closed ──time──▶ level ≥ resume: open again

Once empty it stays closed until `resume` has gathered, so that output passes in long runs, each after one notice of
what is missing.
"""

from __future__ import annotations

_NS = 1_000_000_000


class TokenBucket:
    """Token bucket; begins full with `burst`, gains `per_s`, reopens at `resume`."""

    def __init__(self, *, per_s: int, burst: int, resume: int, now_ns: int) -> None:
        self._per_s = per_s
        self._full = burst * _NS  # in billionths, so that no rounding is lost between two looks
        self._resume = min(resume, burst) * _NS
        self._level = self._full
        self._at_ns = now_ns
        self._closed = False

    def is_open(self, now_ns: int) -> bool:
        """Return whether something would be given now."""
        passed_ns = max(0, now_ns - self._at_ns)
        self._level = min(self._full, self._level + passed_ns * self._per_s)
        self._at_ns = max(self._at_ns, now_ns)
        if self._closed and self._level >= self._resume:
            self._closed = False
        return not self._closed

    def take(self, wanted: int, now_ns: int) -> int:
        """Return how much of what is wanted may pass now."""
        if not self.is_open(now_ns):
            return 0
        given = min(wanted, self._level // _NS)
        self._level -= given * _NS
        self._closed = given < wanted
        return given
