"""The guard of conftest.py lets nothing out, and `home` is fresh."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from tests.support.homes import PRELOAD


@pytest.mark.parametrize("address", [("192.0.2.1", 80), ("example.org", 80), ("", 0), ("0.0.0.0", 0)])
def test_an_address_outside_this_machine_is_refused(address: tuple[str, int]) -> None:
    with socket.socket() as ours:
        for method in (ours.connect, ours.connect_ex, ours.bind):
            with pytest.raises(AssertionError, match=r"tests may use 127\.0\.0\.1"):
                method(address)
    with socket.socket(type=socket.SOCK_DGRAM) as ours, pytest.raises(AssertionError, match="tests may use"):
        ours.sendto(b"x", address)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_loopback_works(host: str) -> None:
    with socket.socket() as listening:
        listening.bind((host, 0))
        listening.listen()
        socket.create_connection(listening.getsockname()).close()


def test_unix_sockets_work(home: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listening, socket.socket(socket.AF_UNIX) as client:
        listening.bind(str(home / "s"))
        listening.listen()
        client.connect(str(home / "s"))


def test_home_is_empty_short_and_in_the_environment(home: Path) -> None:
    assert list(home.iterdir()) == []
    assert len(str(home)) < 40
    ours = {name: value for name, value in os.environ.items() if name.startswith(("SERVERLESS_GPU_", "SGPU_"))}
    assert ours == {
        "SERVERLESS_GPU_HOME": str(home),
        "SERVERLESS_GPU_PREWARM": "0",
        "SERVERLESS_GPU_PRELOAD": PRELOAD,
    }
