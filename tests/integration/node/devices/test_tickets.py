"""Tickets: first come first served, and the dead do not wait."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from serverless_gpu.node.devices.locks import Ticket
from tests.support.second_process import other

WAIT = 'with Ticket(directory, "H100") as ticket: say("waiting"); sys.stdin.read()'


def test_dead_waiter_is_skipped_and_its_ticket_cleared_away(tmp_path: Path) -> None:
    with other(WAIT, tmp_path) as dead, other(WAIT, tmp_path) as living:
        assert dead.hear() == "waiting"
        with Ticket(tmp_path, "H100") as mine:
            assert living.hear() == "waiting"
            ahead = mine.ahead()
            assert ahead in (1, 2)  # the second process may be faster or slower than we are
            dead.kill()
            assert mine.ahead() == ahead - 1
            living.end()
            assert mine.ahead() == 0
            assert len([name for name in os.listdir(tmp_path) if name.endswith(".ticket")]) == 1


def test_many_processes_get_different_places(tmp_path: Path) -> None:
    script = """
with Ticket(directory, "H100") as ticket:
    say("in"); sys.stdin.readline(); say(ticket.ahead()); sys.stdin.read()
"""
    with contextlib.ExitStack() as stack:
        crowd = [stack.enter_context(other(script, tmp_path)) for _ in range(6)]
        assert [waiter.hear() for waiter in crowd] == ["in"] * 6
        for waiter in crowd:
            assert waiter.process.stdin is not None
            waiter.process.stdin.write("go\n")
            waiter.process.stdin.flush()
        assert sorted(int(waiter.hear()) for waiter in crowd) == [0, 1, 2, 3, 4, 5]
