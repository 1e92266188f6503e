"""Crews meet by sockets: each reaches all others, strangers reach nobody, and what fails says why.

Scenes run in a process of their own (`meeting_crews.py`).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from serverless_gpu.model.lifecycle.rendezvous import ADDRESSES_MAX, Address
from serverless_gpu.node.base import network


def test_own_addresses_end_with_loopback_and_are_bounded() -> None:
    own = network.own_addresses()
    assert len(own) <= ADDRESSES_MAX and len(set(own)) == len(own)
    assert [network.is_loopback(one) for one in own] == sorted(network.is_loopback(one) for one in own)
    assert ("lo", "127.0.0.1") in [(one.interface, one.address) for one in own]


def test_addresses_of_the_link_alone_and_those_that_are_not_ready_are_not_offered(tmp_path: Path) -> None:
    rows = [
        ("fe8000000000000000fc00fffe000001", "20", "80", "eth0"),
        ("fd000000000000000000000000000002", "00", "80", "eth0"),
        ("20010db8000000000000000000000001", "00", "40", "eth0"),
        ("20010db8000000000000000000000002", "00", "20", "eth0"),
        ("00000000000000000000000000000001", "10", "80", "lo"),
    ]
    path = tmp_path / "if_inet6"
    path.write_text("".join(f"{digits} 02 40 {scope} {flags}  {name}\n" for digits, scope, flags, name in rows))
    assert [one.address for one in network.ipv6_addresses(path)] == ["fd00::2"]
    assert list(network.ipv6_addresses(tmp_path / "missing")) == []


def test_an_interface_that_no_variable_can_name_is_not_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server would refuse each report that has it, until the lease is over."""
    there = [("lo", "127.0.0.1"), ("eth0,eth1", "10.0.0.1"), ("eth0:1", "10.0.0.2"), ("n\ufffd", "10.0.0.3")]
    monkeypatch.setattr(network, "ipv4_addresses", lambda: [Address(interface=name, address=at) for name, at in there])
    monkeypatch.setattr(network, "ipv6_addresses", lambda path: [])
    assert [one.interface for one in network.own_addresses()] == ["eth0:1", "lo"]


def test_interfaces_of_containers_come_after_those_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    there = [("lo", "127.0.0.1"), ("docker0", "172.17.0.1"), *((f"eth{n}", f"10.0.0.{n}") for n in range(20))]
    made = [Address(interface=name, address=address) for name, address in there]
    monkeypatch.setattr(network, "ipv4_addresses", lambda: made)
    monkeypatch.setattr(network, "ipv6_addresses", lambda path: [Address(interface="eth0", address="fd00::1")])
    own = network.own_addresses()
    assert len(own) == ADDRESSES_MAX and own[-1].interface == "lo"
    assert {one.interface for one in own[:-1]} == {f"eth{n}" for n in range(ADDRESSES_MAX - 1)}
    monkeypatch.setattr(network, "ipv4_addresses", lambda: made[:3])
    assert [one.interface for one in network.own_addresses()] == ["eth0", "eth0", "docker0", "lo"]
