"""Helpers of the tests of monitor that other tests use as well."""

from __future__ import annotations

from serverless_gpu.node.base.home import Home
from serverless_gpu.node.base.lock_files import held_note
from serverless_gpu.node.monitor import messages
from tests.support.local.observe import Process, wait_for


def monitor(home: Home) -> Process:
    """Return the monitor of a home."""
    path = messages.monitor_socket(home.sockets()).with_suffix(".lock")
    note = wait_for(lambda: held_note(path), "a monitor runs")
    assert note is not None
    return Process(int(note.split()[0]))
