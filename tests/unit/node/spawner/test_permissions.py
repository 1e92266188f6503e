"""What an account without rights may ask of the spawner."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from serverless_gpu.errors import IsolationUnavailable
from serverless_gpu.node.spawner import permissions

UIDS = range(1000, 1010)


@pytest.mark.parametrize("uid", [None, -1, 0, 999, 1010])
def test_a_uid_outside_of_the_range_is_refused(uid: int | None) -> None:
    with pytest.raises(IsolationUnavailable, match="to no principal"):
        permissions.check_uid(uid, UIDS)


def test_a_uid_of_the_range_is_permitted() -> None:
    assert [permissions.check_uid(uid, UIDS) for uid in UIDS] == list(UIDS)


def test_files_of_the_account_are_permitted_and_other_files_are_refused(tmp_path: Path) -> None:
    own, link = tmp_path / "own", tmp_path / "link"
    own.touch()
    link.symlink_to(own)
    permissions.check_file(str(own), (os.getuid(),))
    permissions.check_file(str(tmp_path), (os.getuid(),))
    for path in (own, link, tmp_path, Path("/dev/null")):
        with pytest.raises(IsolationUnavailable, match="file or directory"):
            permissions.check_file(str(path), (os.getuid() + 1,))
    with pytest.raises(IsolationUnavailable, match="file or directory"):
        permissions.check_file(str(link), (os.getuid(),))
    for text in ("relative", f"{tmp_path}/../x", f"{tmp_path}//own"):
        with pytest.raises(IsolationUnavailable, match="absolute path"):
            permissions.check_file(text, (os.getuid(),))


@pytest.mark.parametrize("path", ["/dev/null", "/dev/kmsg", "/dev/sda", "/dev/nvidia/../kmsg", "/etc/shadow"])
def test_device_nodes_of_other_devices_are_refused(path: str) -> None:
    with pytest.raises(IsolationUnavailable, match="of an accelerator"):
        permissions.check_device(path)


@pytest.mark.parametrize("text", ["/run/sgpu", "/run/sgpu/", "/run/sgpu/../../etc", "/run/sgpu/0123456g", "/etc"])
def test_only_directories_of_attempts_can_be_hidden(text: str) -> None:
    with pytest.raises(IsolationUnavailable, match="of an attempt"):
        permissions.check_attempt(text)
    permissions.check_attempt("/run/sgpu/01234567")


def test_interpreters_that_every_user_can_execute_are_permitted(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    python = closed / "python3"
    python.touch(mode=0o755)
    stranger = os.getuid() + 1
    permissions.check_interpreter("/bin/sh", stranger, [])
    permissions.check_interpreter(str(python), os.getuid(), [])
    permissions.check_interpreter(str(python), stranger, [str(tmp_path)])
    with pytest.raises(IsolationUnavailable, match="for every user"):
        permissions.check_interpreter(str(python), stranger, [])


def test_the_layers_of_overlays_are_found_without_links(tmp_path: Path) -> None:
    for name in ("view", "layers", "unit"):
        (tmp_path / name).mkdir()
    (tmp_path / "layers" / "0").symlink_to(tmp_path / "unit")
    outer = {"at": f"{tmp_path}/view", "directory": f"{tmp_path}/layers", "layers": ["0"]}
    inner = outer | {"at": f"{tmp_path}/view/lib"}
    assert permissions.overlay_sources([outer, inner]) == [f"{tmp_path}/view", f"{tmp_path}/unit"]
    for wrong in (f"{tmp_path}/view/../unit", f"{tmp_path}/other", "/"):
        with pytest.raises(IsolationUnavailable, match="is not below"):
            permissions.overlay_sources([outer, outer | {"at": wrong}])
    with pytest.raises(IsolationUnavailable, match="not valid"):
        permissions.overlay_sources([{"at": 1}])
