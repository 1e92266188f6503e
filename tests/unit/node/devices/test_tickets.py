"""Tickets: first come first served, and the dead do not wait."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

import pytest

from serverless_gpu.errors import StorageError
from serverless_gpu.node.devices.locks import Ticket
from tests.support.golden import golden


def test_tickets_are_first_come_first_served_per_queue(tmp_path: Path) -> None:
    with Ticket(tmp_path, "H100") as first, Ticket(tmp_path, "H100") as second, Ticket(tmp_path, "A10") as elsewhere:
        with Ticket(tmp_path, "H100") as third:
            assert [ticket.ahead() for ticket in (first, second, third, elsewhere)] == [0, 1, 2, 0]
        with Ticket(tmp_path, "H100") as fourth:
            assert fourth.ahead() == 2
        assert second.ahead() == 1
    assert [name for name in os.listdir(tmp_path) if name.endswith(".ticket")] == []


def test_numbers_are_never_used_twice(tmp_path: Path) -> None:
    names = []
    for _ in range(3):
        with Ticket(tmp_path, "H100"):
            names += [name for name in os.listdir(tmp_path) if name.endswith(".ticket")]
    assert names == [f"H100.{number:018d}.ticket" for number in (1, 2, 3)]


@pytest.mark.parametrize("counter", ["", "rubbish", "1", "-5"])
def test_spoilt_counter_lets_nobody_jump_the_queue(tmp_path: Path, counter: str) -> None:
    with Ticket(tmp_path, "H100"), Ticket(tmp_path, "H100"):
        third = Ticket(tmp_path, "H100").__enter__()
    with third:
        (tmp_path / "H100.mutex").write_text(counter)
        with Ticket(tmp_path, "H100") as fourth:
            assert (third.ahead(), fourth.ahead()) == (0, 1)


def test_full_disk_leaves_no_ticket_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, data: bytes, offset: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(StorageError, match=re.escape(golden("rows.full_disk_mid_run.space-left-device"))):
        Ticket(tmp_path, "H100").__enter__()
    assert os.listdir("/proc/self/fd") == before
    assert os.listdir(tmp_path) == ["H100.mutex"]


def test_queue_names_become_file_names(tmp_path: Path) -> None:
    directory = tmp_path / "locks"
    with Ticket(directory, "../NVIDIA H100.5 [x]") as one, Ticket(directory, "../NVIDIA H100.5 [x]") as two:
        assert (one.ahead(), two.ahead()) == (0, 1)
    assert os.listdir(tmp_path) == ["locks"]
    assert os.listdir(directory) == ["___NVIDIA_H100_5__x_.mutex"]
