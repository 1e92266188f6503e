"""A node with GPUs reports their measured values and holders, and goes on after the death of its monitor."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import pytest

from serverless_gpu.client.remote.profile import find_profile
from serverless_gpu.node.base.home import Home
from serverless_gpu.wire.connection import Connection
from serverless_gpu.wire.nodes import DeviceList, DeviceView
from tests.support.local.monitor import monitor
from tests.support.local.observe import wait_for
from tests.support.remote.commands import start

pytestmark = pytest.mark.slow


def test_the_server_shows_values_of_idle_and_of_held_gpus(served: Path) -> None:
    profile = find_profile(served, {})
    with contextlib.closing(Connection(profile.url, profile.token)) as connection:

        def devices() -> list[DeviceView]:
            there = connection.ask("GET", "/devices", answer=DeviceList).devices
            return [device for device in there if device.type == "H100"]

        idle = wait_for(lambda: [one for one in devices() if one.sample is not None], "the node reports values")
        assert len(idle) == 8
        assert all(device.holder is None and device.sample.memory_total_bytes for device in idle if device.sample)
        run = start("sh", "-c", "exec sleep 600", gpus=2)
        held = wait_for(lambda: [one for one in devices() if one.holder is not None], "the run holds its GPUs")
        assert {device.holder.run for device in held if device.holder} == {run.id}
        os.kill(monitor(Home(served)).pid, signal.SIGKILL)
        run.cancel()
        wait_for(lambda: all(device.holder is None and device.sample for device in devices()), "values come again")
