"""What an account without rights may ask of the spawner."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from serverless_gpu.errors import IsolationUnavailable
from serverless_gpu.model.egress import EgressPolicy
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


@pytest.mark.parametrize(
    "policy",
    [
        EgressPolicy(allow=("169.254.169.254:80",)),
        EgressPolicy(allow=("fd00:ec2::254",)),
        EgressPolicy(allow=("10.0.0.0/8 } accept",)),
        EgressPolicy(closed=("a; flush ruleset",)),
        EgressPolicy(allow=tuple(f"10.0.0.{number}" for number in range(200))),
        EgressPolicy(closed=("10.0.0.1",) * (permissions.CLOSED_MAX + 1)),
    ],
)
def test_27_an_invalid_network_policy_is_refused(policy: EgressPolicy) -> None:
    with pytest.raises(IsolationUnavailable):
        permissions.checked_policy(policy)


def test_27_a_network_policy_becomes_canonical() -> None:
    policy = EgressPolicy(mode="pool", allow=("PyPI.org:443", "pypi.org:443"), closed=("[2001:DB8::1]:80",))
    expected = EgressPolicy(mode="pool", allow=("pypi.org:443",), closed=("[2001:db8::1]:80",))
    assert permissions.checked_policy(policy) == expected


@pytest.mark.parametrize(
    "address",
    ["169.254.169.254", "168.63.129.16", "fe80::1", "fd00:ec2::254", "::ffff:10.0.0.1", "0.0.0.0", "224.0.0.1",
     "10.0.0.0/8", "10.0.0.1 } ; flush ruleset", "node7", "2001:db8::1%eth0"],
)  # fmt: skip
def test_27_only_addresses_of_machines_join_a_gang(address: str) -> None:
    permissions.check_gang(("10.0.0.1", "127.0.0.1", "2001:db8::1"))
    with pytest.raises(IsolationUnavailable):
        permissions.check_gang((address,))


def test_27_a_gang_has_a_bounded_number_of_addresses() -> None:
    with pytest.raises(IsolationUnavailable):
        permissions.check_gang(("10.0.0.1",) * (permissions.GANG_MAX + 1))
