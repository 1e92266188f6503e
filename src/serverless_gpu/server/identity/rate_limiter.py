"""Limits how often an address, a user or a caller may try something, with bounded memory.

    limiter.take("address 10.0.0.7")        one attempt; raises TooManyRequests without a remaining attempt
    limiter.give_back("address 10.0.0.7")   a successful attempt does not count

Each key has a bucket of attempts, which refills at a constant rate. The limiter forgets the buckets that were unused
for the longest time. An attacker who makes the limiter forget a bucket needs more addresses than `KEYS_MAX`.
"""

from __future__ import annotations

import contextlib
import ipaddress
import math
import threading
from collections import OrderedDict
from typing import NamedTuple

from serverless_gpu.ambient import Clock
from serverless_gpu.errors import TooManyRequests

KEYS_MAX = 10_000
_IPV6_NETWORK = 64


class Rate(NamedTuple):
    """A number of attempts within a number of seconds."""

    attempts: int
    seconds: float


class _Bucket(NamedTuple):
    left: float
    at_ns: int


class RateLimiter:
    """Counts attempts by key. Thread-safe."""

    def __init__(self, rate: Rate, *, clock: Clock, keys_max: int = KEYS_MAX) -> None:
        self._rate = rate
        self._clock = clock
        self._keys_max = keys_max
        self._lock = threading.Lock()
        self._buckets: OrderedDict[str, _Bucket] = OrderedDict()

    def take(self, key: str) -> None:
        """Count an attempt, or raise `TooManyRequests`."""
        with self._lock:
            now_ns = self._clock.boottime_ns()
            left = self._left(key, now_ns)
            if left < 1:
                wait_s = math.ceil((1 - left) * self._rate.seconds / self._rate.attempts)
                raise TooManyRequests("too many attempts", hint=f"try again in {wait_s} s")
            self._put(key, _Bucket(left - 1, now_ns))

    def give_back(self, key: str) -> None:
        """Undo the count of an attempt."""
        with self._lock:
            now_ns = self._clock.boottime_ns()
            self._put(key, _Bucket(min(self._rate.attempts, self._left(key, now_ns) + 1), now_ns))

    def _left(self, key: str, now_ns: int) -> float:
        bucket = self._buckets.get(key)
        if bucket is None:
            return self._rate.attempts
        refilled = (now_ns - bucket.at_ns) / 1e9 * self._rate.attempts / self._rate.seconds
        return min(self._rate.attempts, bucket.left + refilled)

    def _put(self, key: str, bucket: _Bucket) -> None:
        self._buckets[key] = bucket
        self._buckets.move_to_end(key)
        while len(self._buckets) > self._keys_max:
            self._buckets.popitem(last=False)

    def __len__(self) -> int:
        """Return the number of stored buckets."""
        return len(self._buckets)


def network_of(address: str) -> str:
    """Return the key of an address: an IPv4 address itself, or the /64 network of an IPv6 address."""
    with contextlib.suppress(ValueError):
        found = ipaddress.ip_address(address)
        if isinstance(found, ipaddress.IPv6Address):
            if found.ipv4_mapped is not None:
                return str(found.ipv4_mapped)
            return str(ipaddress.ip_network((found, _IPV6_NETWORK), strict=False))
    return address
