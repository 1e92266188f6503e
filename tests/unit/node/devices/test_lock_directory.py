"""Where locks live, and what happens when a directory or a file there is hostile or broken."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from serverless_gpu.errors import StorageError
from serverless_gpu.model.hardware import DeviceKind
from serverless_gpu.node.devices.locks import DeviceLocks, LockedDevices, LockHolder, Ticket, lock_directory
from tests.support.golden import golden

ME = LockHolder(uuid="", run_id="run-me", user="ada", pid=11, since_wall_ns=5)


def take(locks: DeviceLocks, *uuids: str, count: int = 1) -> LockedDevices:
    taken = locks.try_lock(uuids, count, ME)
    assert isinstance(taken, LockedDevices)
    return taken


def plant_symlink(path: Path, victim: Path) -> None:
    path.symlink_to(victim)


def plant_hard_link(path: Path, victim: Path) -> None:
    path.hardlink_to(victim)


def plant_dangling(path: Path, victim: Path) -> None:
    path.symlink_to(victim.with_name("not-there"))


def plant_pipe(path: Path, victim: Path) -> None:
    os.mkfifo(path)


@pytest.mark.parametrize("plant", [plant_symlink, plant_dangling, plant_hard_link, plant_pipe])
@pytest.mark.parametrize("name", ["GPU-1.lock", "devices.mutex", "GPU-1.quarantine", "H100.mutex"])
def test_planted_file_is_refused_and_its_target_untouched(
    tmp_path: Path, plant: Callable[[Path, Path], None], name: str
) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    locks = DeviceLocks(tmp_path / "locks")
    locks.directory.mkdir()
    plant(locks.directory / name, victim)
    before = os.listdir("/proc/self/fd")

    with pytest.raises(StorageError, match=re.escape(golden("node.lock_files.link-plain-file"))) as caught:
        if name == "GPU-1.quarantine":
            locks.quarantine("GPU-1", "x")
        elif name == "H100.mutex":
            Ticket(locks.directory, "H100").__enter__()
        else:
            locks.try_lock(["GPU-0", "GPU-1"], 2, ME)

    assert "then remove the lock file" in caught.value.hint
    assert os.listdir("/proc/self/fd") == before
    assert os.listdir(tmp_path) in (["locks", "victim"], ["victim", "locks"])
    assert victim.read_text() == "precious"
    if name == "GPU-1.lock":
        take(locks, "GPU-0").release()  # what was taken before the refusal was given back


def test_directory_that_is_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "locks").symlink_to("elsewhere")
    with pytest.raises(StorageError):
        DeviceLocks(tmp_path / "locks").try_lock(["GPU-0"], 1, ME)
    assert os.listdir(tmp_path / "elsewhere") == []


@pytest.mark.parametrize("directory", ["file/locks", "/proc/locks", "/sys/locks"])
def test_unwritable_directory_says_what_to_do(tmp_path: Path, directory: str) -> None:
    (tmp_path / "file").touch()
    path = tmp_path / directory
    actions: list[Callable[[], object]] = [
        lambda: DeviceLocks(path).try_lock(["GPU-0"], 1, ME),
        lambda: DeviceLocks(path).quarantine("GPU-0", "x"),
        lambda: DeviceLocks(path).quarantined(),
        lambda: DeviceLocks(path).lift("GPU-0"),
        lambda: Ticket(path, "H100").__enter__(),
    ]
    for action in actions:
        with pytest.raises(StorageError) as caught:
            action()
        assert golden("node.lock_files.lock-directory-cannot", path=path) in str(caught.value)
        assert golden("node.lock_files.hint-user-must") in str(caught.value)


def test_directory_is_made_for_this_user_only(tmp_path: Path) -> None:
    locks = DeviceLocks(tmp_path / "home" / "locks")
    take(locks, "GPU-0").release()
    assert stat.S_IMODE(locks.directory.stat().st_mode) == 0o700


def test_files_are_open_to_every_user_whatever_the_umask(tmp_path: Path) -> None:
    locks = DeviceLocks(tmp_path)
    mask = os.umask(0o077)
    try:
        take(locks, "GPU-0").release()
    finally:
        os.umask(mask)
    assert stat.S_IMODE((locks.directory / "GPU-0.lock").stat().st_mode) == 0o666


# --- where ---


def test_fakes_and_cpu_slots_are_locked_at_home(tmp_path: Path) -> None:
    for kind in (DeviceKind.FAKE, DeviceKind.CPU):
        assert lock_directory(kind, tmp_path) == tmp_path / "locks"


def test_gpus_are_locked_in_the_best_machine_wide_directory(tmp_path: Path) -> None:
    best, second = tmp_path / "best", tmp_path / "second"
    mask = os.umask(0o077)
    try:
        assert lock_directory(DeviceKind.GPU, tmp_path, machine=(best, second)) == best
    finally:
        os.umask(mask)
    assert stat.S_IMODE(best.stat().st_mode) == 0o1777
    assert not second.exists()
    assert lock_directory(DeviceKind.GPU, tmp_path, machine=(best, second)) == best


def test_gpus_are_locked_where_the_first_user_had_to(tmp_path: Path) -> None:
    missing, second = tmp_path / "no" / "best", tmp_path / "second"
    assert lock_directory(DeviceKind.GPU, tmp_path, machine=(missing, second)) == second
    missing.parent.mkdir()
    assert lock_directory(DeviceKind.GPU, tmp_path, machine=(missing, second)) == second


def test_machine_wide_directory_that_is_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    link = tmp_path / "link"
    link.symlink_to("target")
    with pytest.raises(StorageError, match=re.escape(golden("node.lock_files.must-directory-gpu"))) as caught:
        lock_directory(DeviceKind.GPU, tmp_path, machine=(link,))
    assert f"`ls -ld {link}`" in caught.value.hint


def test_no_machine_wide_directory_says_how_to_make_one(tmp_path: Path) -> None:
    first, second = tmp_path / "a" / "locks", tmp_path / "b" / "locks"
    with pytest.raises(StorageError) as caught:
        lock_directory(DeviceKind.GPU, tmp_path, machine=(first, second))
    assert str(first) in caught.value.message
    assert str(second) in caught.value.message
    assert caught.value.hint == golden("node.lock_files.make-one-everybody", first=first)
