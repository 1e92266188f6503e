"""The process that keeps Ray: found again, replaced when what it keeps is another, ended with what it keeps."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from serverless_gpu.engines.ray import ray_keeper
from serverless_gpu.engines.ray.ray_keeper import MARK, KeeperPlan, marked_pids
from serverless_gpu.node.base.lock_files import hold
from tests.support.golden import golden
from tests.support.local.observe import wait_for

PROGRAM = f"import os; os.makedirs(os.environ['{MARK}'], exist_ok=True); import signal; signal.pause()"


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "ray"
    place.mkdir()
    yield place
    ray_keeper.stop(place)


def plan(tmp_path: Path, **changes: object) -> KeeperPlan:
    made = KeeperPlan(
        command=(sys.executable, "-c", PROGRAM),
        environ={"PATH": "/bin", "RAY_AUTH_MODE": "token"},
        directory=str(tmp_path / "pool" / "ray"),
        log=str(tmp_path / "ray.log"),
        token="aaaa",
    )
    return msgspec.structs.replace(made, **changes)


def there(directory: Path) -> int:
    """Return the process that keeps, once it has its lock."""
    wait_for(lambda: ray_keeper.running(directory) is not None, "it runs")
    found = ray_keeper.running(directory)
    assert found is not None
    return found.pid


def test_it_is_started_once_and_found_again(tmp_path: Path, directory: Path) -> None:
    owner = tmp_path / "lock"
    lock = hold(owner, "server")
    assert lock is not None
    assert ray_keeper.ensure(directory, plan(tmp_path), owner, os.environ)
    first = there(directory)
    wait_for(lambda: len(marked_pids(str(tmp_path / "pool" / "ray"))) == 1, "it keeps something")
    assert not ray_keeper.ensure(directory, plan(tmp_path), owner, os.environ)
    assert there(directory) == first
    assert ray_keeper.ensure(directory, plan(tmp_path, token="bbbb"), owner, os.environ)
    wait_for(lambda: there(directory) != first, "another one keeps")
    assert ray_keeper.stop(directory)
    assert not ray_keeper.stop(directory)
    assert marked_pids(str(tmp_path / "pool" / "ray")) == []
    os.close(lock)


def test_what_makes_another_plan_and_what_does_not(tmp_path: Path) -> None:
    digest = ray_keeper.digest_of(plan(tmp_path))
    other_shell = plan(tmp_path, environ={"PATH": "/usr/bin", "RAY_AUTH_MODE": "token"})
    assert ray_keeper.digest_of(other_shell) == digest
    for changes in ({"token": "b"}, {"command": ("x",)}, {"environ": {"RAY_AUTH_MODE": "no"}}, {"head": "h:1"}):
        assert ray_keeper.digest_of(plan(tmp_path, **changes)) != digest


def test_it_is_needed_while_somebody_holds_the_lock_and_a_while_after(tmp_path: Path) -> None:
    owner = tmp_path / "lock"
    needed = ray_keeper.ServerNeed(owner, idle_s=0.2)
    assert needed() == ""
    wait_for(lambda: needed() == golden("engines.ray_keeping.server-ten-minutes"), "nobody needs it")
    lock = hold(owner, "server")
    assert lock is not None
    assert needed() == ""
    os.close(lock)
