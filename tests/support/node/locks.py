"""Helpers of the tests of locks that other tests use as well."""

from __future__ import annotations

from serverless_gpu.node.devices.locks import DeviceLocks, LockedDevices, LockHolder

ME = LockHolder(uuid="", run_id="run-me", user="ada", pid=11, since_wall_ns=5)


class FixedClock:
    def boottime_ns(self) -> int:
        return 1

    def wall_ns(self) -> int:
        return 1234

    def boot_id(self) -> str:
        return "boot"


def take(locks: DeviceLocks, *uuids: str, count: int = 1) -> LockedDevices:
    taken = locks.try_lock(uuids, count, ME)
    assert isinstance(taken, LockedDevices)
    return taken
