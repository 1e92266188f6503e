"""F09: a process that cannot be ended. Its run is over after a minute, and its devices are not free."""

from __future__ import annotations

import subprocess
from pathlib import Path

from serverless_gpu.node.devices.inventory import CpuProvider
from serverless_gpu.node.devices.locks import DeviceLocks
from serverless_gpu.node.devices.reservation import retest_quarantined
from serverless_gpu.node.processes.process_tree import left_in


def test_F09_a_device_is_lent_again_when_what_was_left_is_gone(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        (left,) = left_in(None, [process.pid])
        assert left.name == "sleep" and left.is_there()
        locks, provider = DeviceLocks(tmp_path / "locks"), CpuProvider()
        uuid = provider.devices()[0].uuid
        locks.quarantine(uuid, "process 4242 (sleep) could not be ended", (left,))
        assert retest_quarantined(locks, provider, [uuid])[uuid].left == (left,)
        process.kill()
        process.wait()
    assert not left.is_there()
    assert retest_quarantined(locks, provider, [uuid]) == {} == locks.quarantined()
