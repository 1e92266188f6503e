"""The directory of a run's Ray cluster: who has it, who removes it, and what a node offers to the cluster."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from serverless_gpu.model.hardware import CPU, Device, DeviceKind
from serverless_gpu.model.spec import OBJECT_STORE_BYTES_MIN, RayCluster, Resources, RunSpec
from serverless_gpu.node.base.protocol import Context, Launch
from serverless_gpu.node.inside.raycluster import share
from serverless_gpu.node.inside.raycluster.share import read_share
from serverless_gpu.node.supervisor import ray_cluster
from serverless_gpu.node.supervisor.ray_cluster import (
    AttemptCluster,
    ClusterSweeper,
    NoDirectory,
    is_left,
    store_note,
    sweep,
)
from serverless_gpu.testing import FakeClock
from tests.support.golden import golden

GB = 10**9
CONTEXT = Context(python="python3", flags=(), environ={}, cwd="/", umask=0o022, argv=(), sys_path=())


@pytest.fixture(autouse=True)
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Have directories of clusters made here, where no other's are."""
    monkeypatch.setattr(share, "DIRECTORY_PARENT", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    return tmp_path / "tmp"


def devices(count: int, kind: str = "H100") -> tuple[Device, ...]:
    of = DeviceKind.CPU if kind == CPU else DeviceKind.FAKE
    return tuple(Device(uuid=f"D-{n}", index=n, type=kind, kind=of, memory_bytes=0) for n in range(count))


def launched(where: Path, spec: RunSpec, having: tuple[Device, ...], of_type: int) -> Launch:
    return Launch(
        run_id="01run",
        fence=1,
        directory=str(where),
        spec=spec,
        candidates=having,
        world_size=len(having),
        of_type=of_type,
        context=CONTEXT,
        called_ns=0,
    )


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[AttemptCluster]:
    """Yield a cluster's directory, held as the supervisor holds it."""
    made = AttemptCluster(launched(tmp_path, RunSpec(ray=RayCluster()), devices(2), 8), devices(2))
    yield made
    made.close()


def filled(path: str) -> None:
    """Write what Ray and its tasks leave: sockets, links, directories for everybody, or for nobody to write."""
    session = Path(path, "1", "session_x", "sockets")
    session.mkdir(parents=True)
    os.chmod(Path(path, "1"), 0o777)
    os.mkfifo(session / "raylet")
    (session / "gone").symlink_to("/nowhere")
    (session / "out").symlink_to(Path(path).parent / "kept", target_is_directory=True)
    closed = Path(path, "1", "runtime_resources")
    closed.mkdir()
    (closed / "file").write_text("x")
    closed.chmod(0o500)


# --- one run's --------------------------------------------------------------------------------------------------------


def test_only_its_owner_can_enter_it_its_path_is_short_and_the_attempt_names_it(
    cluster: AttemptCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status = os.stat(cluster.path)
    assert (stat.S_IMODE(status.st_mode), status.st_uid) == (0o700, os.getuid())
    assert (tmp_path / "ray" / "directory").read_text() == f"{cluster.path}\n"
    monkeypatch.undo()
    assert len(f"{share.DIRECTORY_PARENT}/{os.path.basename(cluster.path)}") <= 107 - 62 - len("/1/")


def test_it_goes_with_everything_in_it_and_nothing_beside_it(tmp_path: Path, parent: Path) -> None:
    (parent / "kept").mkdir()
    (parent / "kept" / "file").touch()
    made = AttemptCluster(launched(tmp_path, RunSpec(ray=RayCluster()), devices(1), 1), devices(1))
    filled(made.path)
    made.close()
    assert os.listdir(parent) == ["kept"] and (parent / "kept" / "file").exists()


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
def test_a_directory_that_may_not_be_written_to_goes_too(parent: Path) -> None:
    (parent / "sgpu-ray-0123abcd").mkdir()
    filled(str(parent / "sgpu-ray-0123abcd"))
    assert share.remove_directory(str(parent / "sgpu-ray-0123abcd"))


@pytest.mark.parametrize(
    "name", ["", "x", "sgpu-ray-", "sgpu-ray-0123abcX", "sgpu-ray-0123abcd/..", "sgpu-ray-0123abcd/"]
)
def test_what_is_not_called_as_one_is_left_alone(parent: Path, name: str) -> None:
    (parent / "sgpu-ray-0123abcd").mkdir()
    (parent / "x").mkdir()
    assert not share.remove_directory(f"{parent}/{name}")
    assert not share.remove_directory("")
    assert sorted(os.listdir(parent)) == ["sgpu-ray-0123abcd", "x"]


@pytest.fixture
def home() -> Iterator[Path]:
    """Yield a directory on another disk than that of the clusters."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as path:
        yield Path(path)


@pytest.mark.parametrize(("free", "there"), [({"shm": 2, "tmp": 1}, True), ({"shm": 1, "tmp": 1}, False)])
def test_objects_are_spilled_to_the_home_where_that_has_more_room_and_go_with_the_run(
    parent: Path, home: Path, monkeypatch: pytest.MonkeyPatch, free: dict[str, int], there: bool
) -> None:
    monkeypatch.setattr(ray_cluster, "free_bytes", lambda path: free["shm" if "/dev/shm" in str(path) else "tmp"])
    made = AttemptCluster(launched(home, RunSpec(ray=RayCluster()), devices(1), 1), devices(1))
    spill = Path(made.path, "spill")
    (spill / "ray_spilled_objects_0").mkdir()
    (spill / "ray_spilled_objects_0" / "object").write_text("x")
    assert spill.is_symlink() is there
    assert len([*(home / "ray").rglob("object")]) == there
    os.close(made.fd)
    sweep()
    assert os.listdir(parent) == []
    assert [path.name for path in (home / "ray").iterdir()] == ["directory"]


@pytest.mark.parametrize("name", ["sgpu-ray-0123abcd", "mine"])
def test_what_spill_leads_to_goes_only_by_the_name_of_its_cluster(parent: Path, home: Path, name: str) -> None:
    cluster, led = parent / "sgpu-ray-0123abcd", home / name
    for path in (cluster, led):
        path.mkdir()
    (cluster / "spill").symlink_to(led)
    assert share.remove_directory(str(cluster))
    assert led.exists() is (name == "mine")


def test_what_leads_to_spilled_objects_stays_as_long_as_they_do(
    parent: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster, led = parent / "sgpu-ray-0123abcd", home / "sgpu-ray-0123abcd"
    for path in (cluster, led):
        path.mkdir()
    (cluster / "spill").symlink_to(led)
    rmtree = shutil.rmtree
    monkeypatch.setattr(share, "REMOVE_PAUSE_MS", 0)
    monkeypatch.setattr(shutil, "rmtree", lambda path, **how: None if str(path) == str(led) else rmtree(path, **how))
    assert not share.remove_directory(str(cluster))
    assert (cluster / "spill").exists()
    monkeypatch.undo()
    monkeypatch.setattr(share, "DIRECTORY_PARENT", str(parent))
    assert share.remove_directory(str(cluster)) and not led.exists()


def test_a_link_of_its_name_is_left_alone(parent: Path, tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "file").touch()
    (parent / "sgpu-ray-0123abcd").symlink_to(tmp_path / "own")
    assert not share.remove_directory(str(parent / "sgpu-ray-0123abcd"))
    assert not is_left(str(parent / "sgpu-ray-0123abcd"))
    sweep()
    assert (tmp_path / "own" / "file").exists()


def test_what_is_gone_is_gone(parent: Path) -> None:
    assert share.remove_directory(str(parent / "sgpu-ray-0123abcd"))


def test_somebody_who_still_writes_there_is_waited_for(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, tried, really = parent / "sgpu-ray-0123abcd", list[str](), shutil.rmtree
    path.mkdir()

    def written_to_again(where: str, *, ignore_errors: bool) -> None:
        really(where, ignore_errors=ignore_errors)
        tried.append(where)
        if len(tried) < 3:
            filled(where)

    monkeypatch.setattr(shutil, "rmtree", written_to_again)
    assert share.remove_directory(str(path))
    assert tried == [str(path)] * 3


def test_a_name_that_is_taken_is_not_used(
    cluster: AttemptCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = iter([os.path.basename(cluster.path).removeprefix(share.DIRECTORY_PREFIX), "89abcdef"])
    monkeypatch.setattr(secrets, "token_hex", lambda _: next(names))
    other = AttemptCluster(launched(tmp_path, RunSpec(ray=RayCluster()), devices(1), 1), devices(1))
    assert os.path.basename(other.path) == "sgpu-ray-89abcdef"
    other.close()
    assert os.path.isdir(cluster.path)


def test_where_no_name_is_free_the_run_cannot_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parent: Path
) -> None:
    (parent / "sgpu-ray-89abcdef").mkdir()
    monkeypatch.setattr(secrets, "token_hex", lambda _: "89abcdef")
    with pytest.raises(OSError, match=re.escape(golden("node.ray_directory.directory-could-made"))):
        AttemptCluster(launched(tmp_path, RunSpec(ray=RayCluster()), devices(1), 1), devices(1))


def test_no_room_for_it_is_said_as_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parent: Path) -> None:
    monkeypatch.setattr(share, "DIRECTORY_PARENT", "/proc")
    with pytest.raises(NoDirectory, match=re.escape(golden("node.ray_directory.directory-can-made"))):
        AttemptCluster(launched(tmp_path, RunSpec(ray=RayCluster()), devices(1), 1), devices(1))


# --- left ones --------------------------------------------------------------------------------------------------------


def test_one_that_is_held_is_not_swept_and_one_that_is_not_is(cluster: AttemptCluster, parent: Path) -> None:
    left = parent / "sgpu-ray-0123abcd"
    left.mkdir()
    filled(str(left))
    (parent / "sgpu-ray-file").touch()
    assert (is_left(cluster.path), is_left(str(left))) == (False, True)
    sweep()
    assert sorted(os.listdir(parent)) == sorted([os.path.basename(cluster.path), "sgpu-ray-file"])


def test_the_stems_copy_of_the_descriptor_holds_it_too(tmp_path: Path, parent: Path) -> None:
    made = AttemptCluster(launched(tmp_path, RunSpec(ray=RayCluster()), devices(1), 1), devices(1))
    stems = os.dup(made.fd)
    os.close(made.fd)
    sweep()
    assert os.path.isdir(made.path)
    os.close(stems)
    sweep()
    assert os.listdir(parent) == []


def test_a_directory_that_was_swept_before_it_was_held_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parent: Path
) -> None:
    mkdir, made = os.mkdir, []

    def swept(path: str | Path, mode: int = 0o777) -> None:
        mkdir(path, mode)
        if os.path.dirname(path) == str(parent):
            made.append(str(path))
            if len(made) == 1:
                sweep()

    monkeypatch.setattr(os, "mkdir", swept)
    cluster = AttemptCluster(launched(tmp_path, RunSpec(ray=RayCluster()), devices(1), 1), devices(1))
    assert (made, os.path.isdir(cluster.path)) == ([made[0], cluster.path], True)
    cluster.close()


class Pass:
    """A process that sweeps, as the agent sees it."""

    def __init__(self) -> None:
        self.ended = False

    def poll(self) -> int | None:
        return 0 if self.ended else None


def test_the_agent_looks_now_and_then_and_when_an_attempt_has_ended_and_starts_nothing_in_vain(parent: Path) -> None:
    clock, passes = FakeClock(), list[Pass]()

    def start() -> Pass:
        passes.append(Pass())
        return passes[-1]

    sweeper = ClusterSweeper(clock, start)
    sweeper.tend(ended=False)
    assert not passes, "nothing is left"
    (parent / "sgpu-ray-0123abcd").mkdir()
    sweeper.tend(ended=False)
    assert not passes, "it has just looked"
    clock.advance(60)
    sweeper.tend(ended=False)
    assert len(passes) == 1
    sweeper.tend(ended=True)
    assert len(passes) == 1, "one at a time"
    passes[0].ended = True
    sweeper.tend(ended=False)
    assert len(passes) == 1
    sweeper.tend(ended=True)
    assert len(passes) == 2


def test_the_agent_gives_up_what_cannot_be_removed_and_looks_at_no_others(parent: Path) -> None:
    clock, started = FakeClock(), list[str]()

    def start() -> Pass:
        started.append("sweep")
        done = Pass()
        done.ended = True  # and has removed nothing
        return done

    sweeper = ClusterSweeper(clock, start)
    (parent / "sgpu-ray-of-a-user").mkdir()
    sweeper.tend(ended=True)
    assert not started
    (parent / "sgpu-ray-0123abcd").mkdir()
    for _ in range(10):
        sweeper.tend(ended=True)
    assert len(started) == 3
    (parent / "sgpu-ray-89abcdef").mkdir()
    sweeper.tend(ended=True)
    assert len(started) == 4, "another one"


# --- what a node offers -----------------------------------------------------------------------------------------------


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Be a machine of 16 cores, 64 GB, 60 of them available, and 50 GB of /dev/shm, 40 of them free."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    monkeypatch.setattr(ray_cluster, "memory_bytes", lambda: (64 * GB, 60 * GB))
    monkeypatch.setattr(ray_cluster, "shared_memory_bytes", lambda: (50 * GB, 40 * GB))


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(
    ("spec", "having", "of_type", "expected"),
    [
        (RunSpec(), devices(2), 8, (2, "H100", 4, round(0.3 * 16 * GB))),
        (RunSpec(), devices(8), 8, (8, "H100", 16, round(0.3 * 60 * GB))),  # what is available is less
        (RunSpec(resources=Resources(cpus=3)), devices(4), 8, (4, "H100", 5, round(0.3 * 32 * GB))),
        (RunSpec(resources=Resources(memory_bytes=10 * GB)), devices(1), 8, (1, "H100", 2, 3 * GB)),
        (RunSpec(ray=RayCluster(object_store_bytes=39 * GB)), devices(8), 8, (8, "H100", 16, 36 * GB)),  # what is free
        (RunSpec(ray=RayCluster(object_store_bytes=39 * GB)), devices(2), 10, (2, "H100", 3, 9 * GB)),  # its part
        (RunSpec(ray=RayCluster(object_store_bytes=1)), devices(1), 8, (1, "H100", 2, OBJECT_STORE_BYTES_MIN)),
        (RunSpec(), devices(2, CPU), 2, (0, "", 16, round(0.3 * 60 * GB))),
    ],
)
def test_what_goes_with_the_devices(
    tmp_path: Path, spec: RunSpec, having: tuple[Device, ...], of_type: int, expected: tuple[int, str, int, int]
) -> None:
    cluster = AttemptCluster(launched(tmp_path, spec, having, of_type), having)
    given = read_share({**cluster.share(), "head": ["127.0.0.1", 0]})
    cluster.close()
    assert (given.devices, given.accelerator, given.cpus, given.object_store_bytes) == expected
    assert (given.directory, given.node_rank, given.num_nodes, given.address) == (cluster.path, 0, 1, "127.0.0.1")
    assert len(given.secret) == 64 and given.host == os.uname().nodename


@pytest.mark.parametrize(
    ("size", "shared", "asked", "said"),
    [
        (36 * GB, 40 * GB, None, ""),
        (20 * GB, 40 * GB, 20 * GB, ""),
        (OBJECT_STORE_BYTES_MIN, 40 * GB, 1, ""),
        (OBJECT_STORE_BYTES_MIN, 40 * GB, None, ""),  # of a machine of little memory
        (
            36 * GB,
            40 * GB,
            39 * GB,
            "/dev/shm has 40.0 GB for this run, so Ray's object store is 36.0 GB, not 39.0 GB. In",
        ),
        (
            OBJECT_STORE_BYTES_MIN,
            60_000_000,
            20 * GB,
            "is 80.0 MB, not 20.0 GB, in /tmp. In a container, enlarge it with --shm-",
        ),
        (
            OBJECT_STORE_BYTES_MIN,
            60_000_000,
            None,
            "has 60.0 MB for this run, so Ray's object store is 80.0 MB, in",
        ),
        (200 * GB, 900 * GB, 300 * GB, "the object store is 200.0 GB, the maximum, instead of 300.0 GB"),
    ],
)
def test_an_object_store_that_was_cut_says_so(size: int, shared: int, asked: int | None, said: str) -> None:
    note = store_note(size, shared, asked)
    assert said in note and bool(said) == bool(note)


def test_the_page_is_started_where_it_was_asked_for(tmp_path: Path) -> None:
    for dashboard in (False, True):
        spec = RunSpec(ray=RayCluster(dashboard=dashboard))
        cluster = AttemptCluster(launched(tmp_path, spec, devices(1), 1), devices(1))
        assert cluster.share()["dashboard"] is dashboard
        cluster.close()


def test_memory_is_what_the_kernel_says_within_what_the_container_may_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = tmp_path / "meminfo"
    figures.write_text("MemTotal:       64000 kB\nMemFree: 1 kB\nMemAvailable:   60000 kB\nHugePages_Total: 0\n")
    monkeypatch.setattr(ray_cluster, "MEMORY_FIGURES", figures)
    monkeypatch.setattr(ray_cluster, "memory_limit_bytes", lambda: None)
    assert ray_cluster.memory_bytes() == (64000 * 1024, 60000 * 1024)
    monkeypatch.setattr(ray_cluster, "memory_limit_bytes", lambda: 50000 * 1024)
    assert ray_cluster.memory_bytes() == (50000 * 1024, 50000 * 1024)
    figures.write_text("nonsense")
    assert ray_cluster.memory_bytes() == (0, 0)
