"""How often somebody may try: a bucket for each key, which refills, in bounded memory."""

from __future__ import annotations

import pytest

from serverless_gpu.errors import TooManyRequests
from serverless_gpu.server.identity.rate_limiter import Rate, RateLimiter, network_of
from serverless_gpu.testing import FakeClock


def test_a_key_has_a_number_of_attempts_that_refill_one_by_one() -> None:
    clock = FakeClock()
    limiter = RateLimiter(Rate(3, 30.0), clock=clock)
    for _ in range(3):
        limiter.take("a")
    with pytest.raises(TooManyRequests) as caught:
        limiter.take("a")
    assert "10 s" in caught.value.hint
    limiter.take("b")
    clock.advance(10)
    limiter.take("a")
    with pytest.raises(TooManyRequests):
        limiter.take("a")


def test_an_attempt_that_is_given_back_does_not_count() -> None:
    limiter = RateLimiter(Rate(1, 60.0), clock=FakeClock())
    for _ in range(5):
        limiter.take("a")
        limiter.give_back("a")
    limiter.take("a")
    with pytest.raises(TooManyRequests):
        limiter.take("a")


def test_no_number_of_keys_fills_the_memory() -> None:
    limiter = RateLimiter(Rate(2, 60.0), clock=FakeClock(), keys_max=10)
    for number in range(1_000):
        limiter.take(str(number))
    assert len(limiter) == 10


@pytest.mark.parametrize(
    ("address", "key"),
    [
        ("10.0.0.7", "10.0.0.7"),
        ("::ffff:10.0.0.7", "10.0.0.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("", ""),
        ("unix", "unix"),
    ],
)
def test_the_addresses_of_one_ipv6_network_are_one_key(address: str, key: str) -> None:
    assert network_of(address) == key
