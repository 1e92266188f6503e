"""Crews meet by sockets: each reaches all others, strangers reach nobody, and what fails says why.

Scenes run in a process of their own (`meeting_crews.py`).
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from serverless_gpu.model.meeting import ADDRESSES_MAX, PROBE_S, Address
from serverless_gpu.node import addresses
from serverless_gpu.node.meeting import GUESTS_MAX, SETTLE_S
from tests.support.golden import golden
from tests.support.paths import REPOSITORY


def scene(name: str) -> Any:
    """Return what came of a scene."""
    command = [sys.executable, "-m", "tests.support.node.meeting_crews", name]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_sixteen_crews_meet_in_less_than_200_ms() -> None:
    came = scene("all_meet")
    assert came["met"] and came["answered"] == 16 * 15
    assert came["took_s"] < 0.2, "an attempt waits for that before user code"


def test_a_crew_of_another_gang_is_not_taken_for_one_of_ours() -> None:
    assert scene("another_gang") == [["it hung up"], ["it hung up"]]


def test_who_does_not_answer_is_waited_for_once_and_names_are_not_looked_up() -> None:
    came = scene("nobody")
    assert came["problems"][:2] == [golden("unit.node_meeting.answer"), "Connection refused"]
    assert len(came["problems"]) == 3 and came["problems"][2]
    assert PROBE_S <= came["took_s"] < PROBE_S + 2


def test_a_dead_address_is_not_waited_for_where_another_one_lives() -> None:
    came = scene("settles")
    for problems in came["problems"]:
        assert problems[0] == "" and problems[1], problems
    assert came["took_s"] < SETTLE_S + 1


def test_a_network_that_loses_large_packets_is_found_before_user_code_hangs_on_it() -> None:
    came = scene("large_is_lost")
    assert came["said"]
    assert came["problems"] == [golden("unit.node_meeting.answers-but-large")]


def test_strangers_garbage_and_floods_are_told_nothing_and_stop_nobody() -> None:
    came = scene("strangers")
    assert came["told"] == 0 and came["left"] == 0
    assert came["guests"] <= GUESTS_MAX and came["took_s"] < PROBE_S


def test_what_is_no_list_of_all_crews_is_left_alone() -> None:
    assert scene("nonsense") == {"untouched": True, "same": True}


def test_a_port_of_the_rendezvous_that_is_closed_is_found_and_an_open_one_is_rank_0s() -> None:
    assert scene("rendezvous_is_closed") == {"problems": ["Connection refused"], "listens": True}


def test_a_crew_without_an_address_is_waited_for_by_nobody() -> None:
    assert scene("alone") == [0, 1]


def test_own_addresses_end_with_loopback_and_are_bounded() -> None:
    own = addresses.own_addresses()
    assert len(own) <= ADDRESSES_MAX and len(set(own)) == len(own)
    assert [addresses.is_loopback(one) for one in own] == sorted(addresses.is_loopback(one) for one in own)
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
    assert [one.address for one in addresses._inet6(path)] == ["fd00::2"]
    assert list(addresses._inet6(tmp_path / "missing")) == []


def test_an_interface_that_no_variable_can_name_is_not_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server would refuse each report that has it, until the lease is over."""
    there = [("lo", "127.0.0.1"), ("eth0,eth1", "10.0.0.1"), ("eth0:1", "10.0.0.2"), ("n\ufffd", "10.0.0.3")]
    monkeypatch.setattr(addresses, "_inet", lambda: [Address(interface=name, address=at) for name, at in there])
    monkeypatch.setattr(addresses, "_inet6", lambda path: [])
    assert [one.interface for one in addresses.own_addresses()] == ["eth0:1", "lo"]


def test_interfaces_of_containers_come_after_those_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    there = [("lo", "127.0.0.1"), ("docker0", "172.17.0.1"), *((f"eth{n}", f"10.0.0.{n}") for n in range(20))]
    made = [Address(interface=name, address=address) for name, address in there]
    monkeypatch.setattr(addresses, "_inet", lambda: made)
    monkeypatch.setattr(addresses, "_inet6", lambda path: [Address(interface="eth0", address="fd00::1")])
    own = addresses.own_addresses()
    assert len(own) == ADDRESSES_MAX and own[-1].interface == "lo"
    assert {one.interface for one in own[:-1]} == {f"eth{n}" for n in range(ADDRESSES_MAX - 1)}
    monkeypatch.setattr(addresses, "_inet", lambda: made[:3])
    assert [one.interface for one in addresses.own_addresses()] == ["eth0", "eth0", "docker0", "lo"]
