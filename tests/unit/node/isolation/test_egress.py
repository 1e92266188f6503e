"""Addresses of allowed names over time, name servers of a node, and a gang's addresses."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from serverless_gpu.errors import IsolationUnavailable
from serverless_gpu.node.isolation.egress_rules import GANG_S
from serverless_gpu.node.isolation.machine_egress import ADDRESSES_MAX, KEEP_S, REFRESH_S, NameCache, resolvers
from serverless_gpu.node.isolation.principals import PLACE, RANGE, ranges_of
from serverless_gpu.node.spawner.verbs import RootSpawner
from serverless_gpu.node.supervisor.gang_network import GangNetwork
from serverless_gpu.testing import FakeClock
from tests.support.node import account


class Names:
    """A name server."""

    def __init__(self) -> None:
        self.answers: dict[str, Sequence[str]] = {}
        self.asked: list[str] = []

    def __call__(self, name: str) -> Sequence[str]:
        self.asked.append(name)
        if name not in self.answers:
            raise OSError("no such name")
        return self.answers[name]


def test_an_address_stays_open_for_a_while_after_its_name_had_it_last() -> None:
    clock, names = FakeClock(), Names()
    cache = NameCache(clock, names)
    names.answers["a.example"] = ["10.0.0.1"]
    assert cache.addresses(["a.example"]) == {"a.example": ("10.0.0.1",)}
    names.answers["a.example"] = ["10.0.0.2"]
    assert cache.addresses(["a.example"]) == {"a.example": ("10.0.0.1",)}, "not asked again so soon"
    clock.advance(REFRESH_S)
    assert cache.addresses(["a.example"]) == {"a.example": ("10.0.0.1", "10.0.0.2")}
    clock.advance(KEEP_S - REFRESH_S + 1)
    assert cache.addresses(["a.example"]) == {"a.example": ("10.0.0.2",)}
    assert len(names.asked) == 3


def test_a_name_server_that_fails_closes_nothing_at_once_and_opens_nothing() -> None:
    clock, names = FakeClock(), Names()
    cache = NameCache(clock, names)
    names.answers["a.example"] = ["10.0.0.1"]
    assert cache.addresses(["a.example", "b.example"]) == {"a.example": ("10.0.0.1",), "b.example": ()}
    cache.addresses(["b.example"])
    assert names.asked.count("b.example") == 1, "not every start waits for a name server that fails"
    del names.answers["a.example"]
    clock.advance(REFRESH_S)
    assert cache.addresses(["a.example", "b.example"])["a.example"] == ("10.0.0.1",)
    assert names.asked.count("b.example") == 2
    clock.advance(KEEP_S)
    assert cache.addresses(["a.example"]) == {"a.example": ()}


def test_a_name_opens_a_bounded_number_of_addresses_the_newest_first() -> None:
    clock, names = FakeClock(), Names()
    cache = NameCache(clock, names)
    for turn in range(3):
        names.answers["a.example"] = [
            f"10.{turn}.{number // 250}.{number % 250}" for number in range(ADDRESSES_MAX // 2)
        ]
        found = cache.addresses(["a.example"])["a.example"]
        clock.advance(REFRESH_S)
    assert len(found) == ADDRESSES_MAX
    assert not [address for address in found if address.startswith("10.0.")]


def test_name_servers_come_from_the_file_of_the_node(tmp_path: Path) -> None:
    path = tmp_path / "resolv.conf"
    path.write_text("# nameserver 1.1.1.1\nsearch x\nnameserver 10.0.0.53\nnameserver fe80::1%eth0\nnameserver x\n")
    assert resolvers(path) == ("10.0.0.53", "fe80::1")
    assert resolvers(tmp_path / "none") == ("127.0.0.1",)


def test_uids_outside_the_range_keep_their_rules_after_the_range_was_changed(tmp_path: Path) -> None:
    (tmp_path / "uids.json").write_text('{"alice": 5000, "bob": 7000}')
    assert ranges_of({PLACE: str(tmp_path), RANGE: "6000-7000"}) == ((5000, 5000), (6000, 7000))


class Opener(RootSpawner):
    """A spawner that records the opened addresses."""

    def __init__(self) -> None:
        super().__init__({})
        self.opened: list[tuple[int, Sequence[str]]] = []
        self.error: Exception | None = None

    def admit(self, uid: int, addresses: Sequence[str]) -> None:
        if self.error is not None:
            raise self.error
        self.opened.append((uid, tuple(addresses)))


@pytest.mark.parametrize("problem", [None, "nft is missing"])
def test_a_gang_without_rules_opens_nothing(tmp_path: Path, problem: str | None) -> None:
    spawner = Opener()
    launch = msgspec.structs.replace(account.launch(tmp_path), egress_problem=problem)
    network = GangNetwork(launch, 7, FakeClock(), spawner)
    network.open(("10.0.0.2",))
    assert (network.renew(), spawner.opened) == ("", [])


def test_a_gangs_addresses_are_renewed_long_before_their_time_is_over(tmp_path: Path) -> None:
    clock, spawner = FakeClock(), Opener()
    network = GangNetwork(msgspec.structs.replace(account.launch(tmp_path), egress_problem=""), 7, clock, spawner)
    network.open(("10.0.0.2",))
    for _ in range(GANG_S):
        clock.advance(1)
        assert network.renew() == ""
    assert spawner.opened == [(7, ("10.0.0.2",))] * 7
    for error in (IsolationUnavailable("nft is gone"), OSError("nft is gone")):
        spawner.error = error
        clock.advance(GANG_S)
        assert network.renew() == "nft is gone"
        with pytest.raises(type(error)):
            network.open(("10.0.0.2",))
