"""What systemd is told."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from serverless_gpu.server.operations.systemd import notify, taken_from


def test_systemd_is_told_where_it_listens_and_nobody_else_learns_where(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "notify"))
        notify(str(tmp_path / "notify"), "READY=1", "STATUS=x")
        assert listener.recv(100) == b"READY=1\nSTATUS=x"
    notify(str(tmp_path / "notify"), "READY=1")  # nobody listens
    notify("", "READY=1")


def test_a_place_in_the_abstract_namespace_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"sgpu-test-{id(monkeypatch)}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(f"\0{name}")
        notify(f"@{name}", "READY=1")
        assert listener.recv(100) == b"READY=1"


def test_the_variable_is_taken_so_that_children_do_not_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", "/run/x")
    assert taken_from(os.environ) == "/run/x"
    assert "NOTIFY_SOCKET" not in os.environ
