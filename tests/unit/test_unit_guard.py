"""The guard of `tests/unit/conftest.py` refuses processes, sockets and databases on disk."""

from __future__ import annotations

import os
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.conftest import NotAUnit


def connect() -> None:
    with socket.socket(socket.AF_UNIX) as ours:
        ours.connect("/nowhere")


def bind() -> None:
    with socket.socket() as ours:
        ours.bind(("127.0.0.1", 0))


def start() -> None:
    subprocess.run([sys.executable, "-V"], check=True)


@pytest.mark.parametrize("act", [os.fork, start, connect, bind])
def test_24_2_a_unit_test_starts_no_process_and_opens_no_socket(act: Callable[[], object]) -> None:
    with pytest.raises(NotAUnit):
        act()


def test_24_2_a_unit_test_uses_sqlite_in_memory_only(tmp_path: Path) -> None:
    sqlite3.connect(":memory:").close()
    with pytest.raises(NotAUnit):
        sqlite3.connect(tmp_path / "server.db")
