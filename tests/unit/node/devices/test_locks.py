"""Device locks and quarantine, with real second processes wherever two parties matter."""

from __future__ import annotations

import fcntl
import json
import os
import re
import time
from pathlib import Path

import pytest

from serverless_gpu.errors import InvalidValue, StorageError
from serverless_gpu.node.devices.locks import Busy, DeviceLocks, LockHolder, Quarantine
from tests.support.golden import golden
from tests.support.node.locks import ME, FixedClock, take

FOUR = ("GPU-0", "GPU-1", "GPU-2", "GPU-3")


@pytest.fixture
def locks(tmp_path: Path) -> DeviceLocks:
    return DeviceLocks(tmp_path / "locks", clock=FixedClock())


# --- taking and giving back ---


def test_takes_the_first_free_devices_in_the_order_given(locks: DeviceLocks) -> None:
    with take(locks, "GPU-2"), take(locks, "GPU-3", "GPU-2", "GPU-0", "GPU-1", count=2) as taken:
        assert taken.uuids == ("GPU-3", "GPU-0")
        assert len(taken.fds) == 2
        assert [os.path.basename(os.readlink(f"/proc/self/fd/{fd}")) for fd in taken.fds] == [
            "GPU-3.lock",
            "GPU-0.lock",
        ]


def test_release_frees_and_closes_and_can_be_repeated(locks: DeviceLocks) -> None:
    before = os.listdir("/proc/self/fd")
    taken = take(locks, *FOUR, count=4)
    taken.release()
    taken.release()

    assert taken.fds == ()
    assert os.listdir("/proc/self/fd") == before
    take(locks, *FOUR, count=4).release()


def test_too_few_free_devices_take_none_and_say_who_holds_the_others(locks: DeviceLocks) -> None:
    before = os.listdir("/proc/self/fd")
    with take(locks, "GPU-1"):
        answer = locks.try_lock(FOUR, 4, ME)
        assert answer == Busy((LockHolder(uuid="GPU-1", run_id="run-me", user="ada", pid=11, since_wall_ns=5),))
        take(locks, "GPU-0", "GPU-2", "GPU-3", count=3).release()
    assert os.listdir("/proc/self/fd") == before


@pytest.mark.parametrize("count", [0, -1, 3])
def test_impossible_counts_are_refused(locks: DeviceLocks, count: int) -> None:
    with pytest.raises(InvalidValue, match=golden("node.locks.devices-cannot-taken", count=count)):
        locks.try_lock(["GPU-0", "GPU-1", "GPU-0"], count, ME)


@pytest.mark.parametrize("uuid", ["", "../GPU-0", "a/b", ".hidden", "GPU\n0", "x" * 200])
def test_uuid_that_could_leave_the_directory_is_refused(locks: DeviceLocks, uuid: str) -> None:
    with pytest.raises(InvalidValue, match=re.escape(golden("node.locks.device-uuid"))):
        locks.try_lock([uuid], 1, ME)
    with pytest.raises(InvalidValue):
        locks.quarantine(uuid, "x")


def test_holder_note_of_somebody_else_is_not_trusted(locks: DeviceLocks) -> None:
    with take(locks, "GPU-0", "GPU-1", count=2):
        (locks.directory / "GPU-0.lock").write_text("rubbish")
        note = {"uuid": "GPU-9", "run_id": "\x1b[2J", "user": "u" * 2000, "pid": 3, "since_wall_ns": 4}
        (locks.directory / "GPU-1.lock").write_text(json.dumps(note))
        assert locks.try_lock(["GPU-0", "GPU-1"], 1, ME) == Busy(
            (
                LockHolder(uuid="GPU-0", run_id="", user="", pid=0, since_wall_ns=0),
                LockHolder(uuid="GPU-1", run_id="?[2J", user="u" * 1000, pid=3, since_wall_ns=4),
            )
        )


def test_lock_whose_file_was_deleted_does_not_count_for_the_new_file(locks: DeviceLocks) -> None:
    with take(locks, "GPU-0"):
        inode = (locks.directory / "GPU-0.lock").stat().st_ino
        (locks.directory / "GPU-0.lock").unlink()
        with take(locks, "GPU-0") as taken:
            assert os.fstat(taken.fds[0]).st_ino == (locks.directory / "GPU-0.lock").stat().st_ino != inode


def delete_before_locking(monkeypatch: pytest.MonkeyPatch, path: Path, times: int) -> None:
    """Delete `path` between its being opened and its being locked, so many times."""
    real, left = fcntl.flock, [None] * times

    def flock(fd: int, operation: int) -> None:
        if left and os.readlink(f"/proc/self/fd/{fd}") == str(path):
            left.pop()
            path.unlink()
        real(fd, operation)

    monkeypatch.setattr(fcntl, "flock", flock)


def test_file_deleted_while_it_is_being_taken_is_made_again(
    locks: DeviceLocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = locks.directory / "GPU-0.lock"
    delete_before_locking(monkeypatch, path, times=2)
    with take(locks, "GPU-0") as taken:
        assert os.fstat(taken.fds[0]).st_ino == path.stat().st_ino


def test_file_that_is_always_deleted_is_an_error_not_a_lock(
    locks: DeviceLocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    delete_before_locking(monkeypatch, locks.directory / "GPU-0.lock", times=99)
    with pytest.raises(StorageError, match=re.escape(golden("node.locks.gpu-lock-deleted"))):
        locks.try_lock(["GPU-0"], 1, ME)


# --- other processes ---


def test_only_one_process_at_a_time_gathers_devices(locks: DeviceLocks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two that gather at once could get half of the devices each, and both go away with nothing."""
    real, while_gathering = fcntl.flock, []

    def flock(fd: int, operation: int) -> None:
        if os.readlink(f"/proc/self/fd/{fd}").endswith(".lock"):
            with (locks.directory / "devices.mutex").open() as mutex, pytest.raises(BlockingIOError):
                real(mutex, fcntl.LOCK_EX | fcntl.LOCK_NB)
            while_gathering.append(fd)
        real(fd, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    with take(locks, *FOUR, count=3), (locks.directory / "devices.mutex").open() as mutex:
        real(mutex, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert len(while_gathering) == 3


def test_process_stopped_while_gathering_holds_others_up_for_a_second_at_most(
    locks: DeviceLocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    take(locks, "GPU-0").release()
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    with (locks.directory / "devices.mutex").open() as mutex:
        fcntl.flock(mutex, fcntl.LOCK_EX)
        take(locks, "GPU-0").release()
    assert sum(pauses) == pytest.approx(1.0)


# --- quarantine ---


def test_F11_device_in_quarantine_is_not_taken_until_lifted(locks: DeviceLocks) -> None:
    with take(locks, "GPU-0"):
        locks.quarantine("GPU-0", "pid 4242 (python) still holds 2.0 GiB")
    assert locks.quarantined() == {"GPU-0": Quarantine("pid 4242 (python) still holds 2.0 GiB", 1234)}
    assert locks.try_lock(["GPU-0"], 1, ME) == Busy((), ("GPU-0",))
    assert take(locks, "GPU-0", "GPU-1").uuids == ("GPU-1",)

    locks.lift("GPU-0")
    assert locks.quarantined() == {}
    assert take(locks, "GPU-0").uuids == ("GPU-0",)


def test_device_in_quarantine_stays_free_of_locks(locks: DeviceLocks) -> None:
    locks.quarantine("GPU-0", "dirty")
    with take(locks, "GPU-0", "GPU-1"):
        locks.lift("GPU-0")
        take(locks, "GPU-0").release()


def test_later_and_shorter_reason_replaces_the_first(locks: DeviceLocks) -> None:
    locks.quarantine("GPU-0", "a long reason " * 20)
    locks.quarantine("GPU-0", "short")
    assert locks.quarantined()["GPU-0"].reason == "short"
    locks.quarantine("GPU-0", "ä" * 5000)
    assert locks.quarantined()["GPU-0"].reason == "ä" * 1000


def test_quarantine_note_that_cannot_be_read_counts_as_quarantine(locks: DeviceLocks) -> None:
    locks.quarantine("GPU-0", "x")
    (locks.directory / "GPU-0.quarantine").write_text("rubbish")
    (locks.directory / "GPU-1.quarantine").symlink_to("/nowhere")
    (locks.directory / "GPU-2.quarantine").mkdir()

    assert sorted(locks.quarantined()) == ["GPU-0", "GPU-1", "GPU-2"]
    assert all(golden("node.locks.could-read-quarantine") in note.reason for note in locks.quarantined().values())
    assert locks.try_lock(FOUR, 2, ME) == Busy((), ("GPU-0", "GPU-1", "GPU-2"))


def test_lifting_what_is_not_in_quarantine_does_nothing(locks: DeviceLocks) -> None:
    locks.lift("GPU-0")
    assert locks.quarantined() == {}
