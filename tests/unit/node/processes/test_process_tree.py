"""Cgroups and memory counters: on the real cgroup v2 where it can be written to, and on files that look like one."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from serverless_gpu.node.processes import process_tree
from serverless_gpu.node.processes.process_tree import (
    CgroupRoot,
    CpuLimit,
    MemoryWatch,
    cgroup_empty,
    find_cgroup_root,
    kill_cgroup,
    remove_cgroup,
)
from tests.support.golden import golden


@pytest.fixture
def real() -> Iterator[CgroupRoot]:
    name = f"serverless_gpu-test-{os.getpid()}"
    root = find_cgroup_root(name, {"SERVERLESS_GPU_TASKS_MAX": "200"})
    try:
        if root.path is None:
            pytest.skip(f"no cgroup v2 to write to: {root.problem}")
        yield root
    finally:
        for directory in {*Path("/sys/fs/cgroup").glob(f"*/{name}"), *([] if root.path is None else [root.path])}:
            assert remove_cgroup(directory)


@pytest.fixture
def cgroup(real: CgroupRoot) -> Iterator[Path]:
    path = real.make()[0]
    yield path
    kill_cgroup(path)


# --- the real thing --------------------------------------------------------------------------------------------------


def test_cgroups_are_numbered_and_swept_when_empty(real: CgroupRoot) -> None:
    assert real.path is not None
    made = [*real.make(), *real.make()]
    numbered = [real.path / f"{os.getpid()}-{number}" for number in (1, 2)]
    assert [path for path in made if path.parent == real.path] == numbered
    assert cgroup_empty(numbered[0])
    real.sweep()
    assert [path for path in made if path.exists()] == []


def test_F12_processes_are_bounded_where_there_is_a_pids_controller(real: CgroupRoot) -> None:
    limits = [path / "pids.max" for path in real.make() if (path / "pids.max").exists()]
    if not limits:
        pytest.skip("no pids controller to write to")
    assert [limit.read_text() for limit in limits] == ["200\n"]


def test_a_cgroup_that_is_gone_is_empty_and_has_nothing_to_kill(real: CgroupRoot) -> None:
    assert real.path is not None
    gone = real.path / "gone"
    kill_cgroup(gone)
    assert cgroup_empty(gone)
    assert remove_cgroup(gone)


def test_a_watch_on_a_real_cgroup_without_a_limit(cgroup: Path) -> None:
    watch = MemoryWatch(cgroup, os.getpid(), None)
    assert (watch.out_of_memory(), watch.note) == (False, "")
    watch.close()


# --- where there is none ---------------------------------------------------------------------------------------------


def test_without_cgroups_none_is_made() -> None:
    root = CgroupRoot(None, problem="why")
    assert root.make() == ()
    root.sweep()


def test_a_place_that_cannot_be_written_to_makes_none(tmp_path: Path) -> None:
    root = CgroupRoot(tmp_path / "gone", tmp_path / "gone, too")
    assert root.make() == ()
    root.sweep()


def test_of_two_places_one_may_fail(tmp_path: Path) -> None:
    (tmp_path / "v2").mkdir()
    assert CgroupRoot(tmp_path / "v2", tmp_path / "gone").make() == (tmp_path / "v2" / f"{os.getpid()}-1",)


def test_cgroups_can_be_switched_off() -> None:
    root = find_cgroup_root("any", {"SERVERLESS_GPU_CGROUPS": "0"})
    assert (root.path, root.problem) == (None, golden("node.processes.switched-off-serverless"))


def test_a_name_that_cannot_be_a_directory_is_a_problem_in_words() -> None:
    root = find_cgroup_root("no/such/parent/at/all", {})
    assert (root.path, root.problem) == (None, golden("node.processes.cgroup-v2-directory"))


# --- files that look like a cgroup -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "empty"),
    [("populated 0\nfrozen 0\n", True), ("populated 1\nfrozen 0\n", False), ("", False)],
    ids=["empty", "F09 populated", "unknown is not empty"],
)
def test_F09_empty_is_what_the_kernel_says(tmp_path: Path, text: str, empty: bool) -> None:
    (tmp_path / "cgroup.events").write_text(text)
    assert cgroup_empty(tmp_path) is empty


def test_a_kill_is_one_write(tmp_path: Path) -> None:
    (tmp_path / "cgroup.kill").touch()
    kill_cgroup(tmp_path)
    assert (tmp_path / "cgroup.kill").read_text() == "1"


def test_groups_below_are_removed_first(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    assert remove_cgroup(tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_a_group_in_use_stays(tmp_path: Path) -> None:
    (tmp_path / "cgroup.procs").touch()  # a real cgroup's files vanish with it; this one refuses as a busy one does
    assert not remove_cgroup(tmp_path)


def v2(path: Path, **files: str) -> Path:
    for name, text in {"memory.max": "max\n", "memory.oom.group": "0\n", **files}.items():
        (path / name.replace("_", ".", 1) if name.startswith("memory_") else path / name).write_text(text)
    return path


def test_a_limit_goes_to_the_v2_controller_and_a_breach_ends_the_whole_group(tmp_path: Path) -> None:
    watch = MemoryWatch(v2(tmp_path), 1, 1 << 30)
    assert ((tmp_path / "memory.max").read_text(), (tmp_path / "memory.oom.group").read_text()) == ("1073741824", "1")
    assert watch.note == ""


def test_without_a_limit_nothing_is_written(tmp_path: Path) -> None:
    MemoryWatch(v2(tmp_path), 1, None)
    assert (tmp_path / "memory.max").read_text() == "max\n"


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ("low 0\nhigh 3\nmax 7\noom 2\noom_kill 0\noom_group_kill 0\n", False),
        ("low 0\nhigh 0\nmax 7\noom 1\noom_kill 1\n", True),
        ("oom_kill nonsense\n", False),
        ("", False),
    ],
)
def test_F02_memory_is_the_reason_only_when_the_kernel_counted_a_kill(
    tmp_path: Path, events: str, expected: bool
) -> None:
    watch = MemoryWatch(v2(tmp_path, memory_events=events), 1, None)
    assert watch.out_of_memory() is expected


@pytest.mark.parametrize(("text", "peak"), [("123456\n", 123456), ("max\n", None), (None, None)])
def test_the_peak_is_known_where_the_controller_knows_it(tmp_path: Path, text: str | None, peak: int | None) -> None:
    watch = MemoryWatch(v2(tmp_path), 1, None)
    if text is not None:
        (tmp_path / "memory.peak").write_text(text)
    assert watch.peak_bytes() == peak


def test_F02_without_a_controller_only_kills_since_the_start_count(tmp_path: Path) -> None:
    watch = MemoryWatch(tmp_path, 1, None)  # a cgroup without the memory controller
    assert (watch.peak_bytes(), watch.note) == (None, "")
    with contextlib.suppress(AssertionError):  # somebody else's process may be killed for memory at this very moment
        assert watch.out_of_memory() is False
    watch.close()


def test_27_a_limit_of_cores_goes_to_the_v2_controller(tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert CpuLimit(tmp_path, 1, None).note == ""
    assert (tmp_path / "cpu.max").read_text() == "max 100000\n"
    limit = CpuLimit(tmp_path, 1, 3)
    assert ((tmp_path / "cpu.max").read_text(), limit.note) == ("300000 100000", "")
    limit.close()


def test_27_a_limit_of_cores_that_nothing_enforces_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_tree, "_directory", lambda *_: None)
    assert CpuLimit(tmp_path, 1, 2).note == golden("node.processes.cpus-not-enforced")


def test_27_each_delegated_controller_of_v2_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cgroup.kill").touch()
    asked: list[str] = []

    def write(path: Path, text: str) -> int:
        asked.append(text)
        raise OSError("this cgroup delegates nothing")

    monkeypatch.setattr(process_tree, "_directory", lambda kind, *_: tmp_path if kind == "cgroup2" else None)
    monkeypatch.setattr(Path, "write_text", write)
    assert find_cgroup_root("name", {}).path == tmp_path
    assert asked == ["+memory", "+pids", "+cpu"], "a missing controller does not keep the others away"


# --- what the whole machine may use -----------------------------------------------------------------------------------

NONE_V1 = "9223372036854771712"


@pytest.mark.parametrize(
    ("limits", "found"),
    [
        ({}, None),
        ({"v2/a/b/memory.max": "max", "v2/memory.max": "max"}, None),
        ({"v2/a/b/memory.max": "max", "v2/a/memory.max": "2000", "v2/memory.max": "9000"}, 2000),
        ({"v1/memory.limit_in_bytes": "3000"}, 3000),  # a container sees its own group only, as the mount itself
        ({"v1/c/memory.limit_in_bytes": NONE_V1, "v2/a/memory.max": "2000"}, 2000),
        ({"memory.max": "1"}, None),  # not a cgroup's
    ],
)
def test_the_least_limit_of_all_groups_around_this_process_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limits: dict[str, str], found: int | None
) -> None:
    for name, text in limits.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    mounts = {"cgroup2": tmp_path / "v2", "cgroup": tmp_path / "v1"}
    monkeypatch.setattr(process_tree, "mount_point", lambda kind, _: mounts[kind])
    monkeypatch.setattr(process_tree, "own_place", lambda controller, _pid: "/c" if controller else "/a/b")
    assert process_tree.memory_limit_bytes() == found


def test_the_memory_limit_here_is_a_number_or_none() -> None:
    limit = process_tree.memory_limit_bytes()
    assert limit is None or limit > 1 << 20


def test_27_processes_of_a_delegated_unit_move_to_a_cgroup_of_their_own_so_that_attempts_have_limits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "unit.scope"
    own.mkdir()
    (own / "cgroup.controllers").write_text("cpuset memory io")
    (own / "cgroup.subtree_control").write_text("")
    (own / "cgroup.procs").write_text("")
    assert process_tree._distributor(own) == own
    assert list(own.glob("serverless*")) == [], "a unit without Delegate=yes belongs to systemd"
    monkeypatch.setattr(os, "getxattr", lambda path, name: b"1")
    assert process_tree._distributor(own) == own
    assert (own / "cgroup.subtree_control").read_text() == "+memory"
    [moved] = own.glob("serverless*")
    assert process_tree._distributor(moved) == own, "a process that has moved uses the cgroup of the unit"
    (own / "cgroup.subtree_control").write_text("cpuset memory")
    moved.rmdir()
    process_tree._distributor(own)
    assert not moved.exists(), "all controllers are there"
