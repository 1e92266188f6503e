"""Device locks and quarantine, with real second processes wherever two parties matter."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from pathlib import Path

import pytest

from serverless_gpu.node.devices.locks import Busy, DeviceLocks
from tests.support.node.locks import ME, FixedClock, take
from tests.support.second_process import other

HOLD = "held = locks.try_lock(sys.argv[3:], int(sys.argv[2]), me); say(type(held).__name__); sys.stdin.read()"


@pytest.fixture
def locks(tmp_path: Path) -> DeviceLocks:
    return DeviceLocks(tmp_path / "locks", clock=FixedClock())


def test_cleaner_of_temporary_files_finds_the_directory_locked(locks: DeviceLocks) -> None:
    script = """
import fcntl
fd = os.open(directory, os.O_RDONLY)
try:
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB); say("cleans")
except BlockingIOError:
    say("skips")
"""
    with take(locks, "GPU-0"), take(locks, "GPU-1"), other(script, locks.directory) as cleaner:
        assert cleaner.hear() == "skips"
    with other(script, locks.directory) as cleaner:
        assert cleaner.hear() == "cleans"


def test_device_held_by_another_process_is_busy_and_free_when_it_is_killed(locks: DeviceLocks) -> None:
    with other(HOLD, locks.directory, 2, "GPU-0", "GPU-1") as holder:
        assert holder.hear() == "LockedDevices"
        answer = locks.try_lock(["GPU-0", "GPU-1"], 1, ME)
        assert isinstance(answer, Busy)
        assert [(held.uuid, held.run_id, held.user, held.pid) for held in answer.holders] == [
            ("GPU-0", "run-other", "bob", holder.process.pid),
            ("GPU-1", "run-other", "bob", holder.process.pid),
        ]
        holder.kill()
        assert take(locks, "GPU-0", "GPU-1", count=2).uuids == ("GPU-0", "GPU-1")


def test_descriptors_handed_on_keep_the_device_when_the_holder_is_killed(locks: DeviceLocks) -> None:
    ours, theirs = socket.socketpair()
    script = """
held = locks.try_lock(["GPU-0", "GPU-1"], 2, me)
with socket.socket(fileno=int(sys.argv[2])) as to:
    socket.send_fds(to, [b"x"], held.fds)
say("sent"); sys.stdin.read()
"""
    with ours, theirs, other(script, locks.directory, theirs.fileno(), fds=(theirs.fileno(),)) as holder:
        assert holder.hear() == "sent"
        _, fds, _, _ = socket.recv_fds(ours, 1, 2)
        holder.kill()
        assert isinstance(locks.try_lock(["GPU-0", "GPU-1"], 1, ME), Busy)
        os.close(fds[0])
        take(locks, "GPU-0").release()
        assert isinstance(locks.try_lock(["GPU-1"], 1, ME), Busy)
        os.close(fds[1])
        take(locks, "GPU-1").release()


def test_descriptors_do_not_leak_into_programs_that_are_started(locks: DeviceLocks) -> None:
    taken = take(locks, "GPU-0")
    with other("say(sorted(os.listdir('/proc/self/fd'))[:3]); sys.stdin.read()", locks.directory) as child:
        assert child.hear()
        taken.release()
        take(locks, "GPU-0").release()


RACE = """
markers = Path(sys.argv[2]); rounds = int(sys.argv[3])
uuids = ["GPU-0", "GPU-1", "GPU-2", "GPU-3"]
say("ready"); sys.stdin.readline()
won = 0
while won < rounds:
    held = locks.try_lock(uuids, 3, me)
    if isinstance(held, Busy):
        continue
    won += 1
    for uuid in held.uuids:  # fails when another process has the same device
        os.close(os.open(markers / uuid, os.O_CREAT | os.O_EXCL))
    for uuid in held.uuids:
        os.unlink(markers / uuid)
    held.release()
say("done")
"""


def test_two_processes_racing_for_three_of_four_devices_never_overlap(locks: DeviceLocks, tmp_path: Path) -> None:
    markers = tmp_path / "markers"
    markers.mkdir()
    with other(RACE, locks.directory, markers, 150) as one, other(RACE, locks.directory, markers, 150) as two:
        for racer in (one, two):
            assert racer.hear() == "ready"
        for racer in (one, two):
            assert racer.process.stdin is not None
            racer.process.stdin.write("go\n")
            racer.process.stdin.flush()
        assert [one.hear(), two.hear()] == ["done", "done"]


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to become another user")
def test_another_user_meets_the_same_lock() -> None:
    shared = Path(tempfile.mkdtemp())  # pytest's own directories are closed to other users
    try:
        shared.chmod(0o1777)
        locks = DeviceLocks(shared)
        taken = take(locks, "GPU-0")
        locks.quarantine("GPU-2", "dirty")
        script = (
            "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
            + """
held = locks.try_lock(["GPU-0", "GPU-1", "GPU-2"], 1, me); say(held.uuids)
busy = locks.try_lock(["GPU-0", "GPU-2"], 1, me); say((busy.holders[0].user, busy.quarantined))
locks.lift("GPU-2"); say(locks.quarantined()); sys.stdin.read()
"""
        )
        with other(script, shared) as stranger:
            assert stranger.hear() == "('GPU-1',)"
            assert stranger.hear() == "('ada', ('GPU-2',))"
            assert stranger.hear() == "{}"
            assert isinstance(locks.try_lock(["GPU-1"], 1, ME), Busy)
        taken.release()
    finally:
        shutil.rmtree(shared)
