"""A run with a Ray cluster, seen from around the cluster: what a death, a stop or a loan makes of it, and what is left.

Ray itself is a fake of two processes (`fake_ray.py`); with the real one the same is asked in tests/e2e/ray.
"""

from __future__ import annotations

import ast
import atexit
import os
import re
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from serverless_gpu import Run, attach, distributed
from serverless_gpu.client.session import session
from serverless_gpu.errors import EngineHeadLost, NodeLost, RunCancelled, RunError, RunTimedOut
from serverless_gpu.node.inside import linux
from serverless_gpu.ray import ray_launch
from serverless_gpu.testing import stop_agent
from tests.support.golden import golden
from tests.support.local import fake_ray
from tests.support.local.observe import Process, agent, nothing_of_a_run, supervisor, wait_for
from tests.support.local.ranks import announce, wait_for_file
from tests.support.local.small_environment import SmallEnvironment


@pytest.fixture(autouse=True)
def ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a Ray in the caller's environment."""
    site = fake_ray.install(tmp_path)
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")])))


def stay(where: str) -> dict[str, str]:
    """Say that the driver is there, and return its environment once the file `go` is."""
    announce(where, "driver")
    wait_for_file(where, "go")
    return dict(os.environ)


def fail_and_stay() -> None:
    """Raise, in a process that does not end by itself then."""
    atexit.register(time.sleep, 600)
    raise ValueError("raised in the driver")


class Going:
    """A run whose driver stays until it is told to go."""

    def __init__(self, where: str, **options: Any) -> None:
        self.where = Path(where)
        self.run: Run[dict[str, str]] = ray_launch(gpus=2, gpu_type="H100", quiet=True, **options)(stay).submit(where)
        wait_for((self.where / "driver").exists, "the driver is there")
        self.directory = (self.run.directory / "ray" / "directory").read_text().strip()
        self.processes = fake_ray.pids(self.directory)
        # By kinship: in its own namespace the driver has other numbers.
        task = next(parent for pid in self.processes["gcs_server"] if (parent := _parent(_parent(pid))))
        self.task, self.stem = Process(task), Process(_parent(task))
        self.driver = Process(next(pid for pid in linux.descendants(task) if _name(pid) == "sgpu-driver"))

    def go(self) -> None:
        """Let the driver return."""
        (self.where / "go").touch()

    def gone(self) -> bool:
        """Return whether neither a process of the cluster is left nor its directory."""
        return not fake_ray.pids(self.directory) and not os.path.lexists(self.directory)

    def assert_kept(self) -> None:
        """Fail unless what Ray wrote is where it is kept, and its directory is gone."""
        assert_kept(self.run.directory)


def assert_kept(attempt: Path) -> None:
    assert (attempt / "ray" / "0" / "gcs_server.out").read_text() == golden("local.ray_runs.last-words-gcs")
    assert not os.path.lexists((attempt / "ray" / "directory").read_text().strip())


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _name(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()


@pytest.fixture
def going(own: Path, where: str) -> Iterator[Going]:
    """Yield a run that is going on, in a home of its own."""
    yield Going(where)


# --- in order ---------------------------------------------------------------------------------------------------------


def test_a_driver_is_alone_and_has_all_devices_and_its_cluster_goes_with_it(warm: Path, where: str) -> None:
    going = Going(where)
    assert {"gcs_server", "raylet"} <= going.processes.keys() and os.path.isdir(going.directory)
    assert os.stat(going.directory).st_mode & 0o777 == 0o700
    going.go()
    [environ] = going.run.results(50)
    assert going.gone()
    assert environ["CUDA_VISIBLE_DEVICES"] == "0,1" and environ["SGPU_GPU_UUIDS"].count(",") == 1
    assert not environ.keys() & {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "TORCHELASTIC_RUN_ID"}
    assert environ["RAY_ADDRESS"].startswith("127.0.0.1:")
    receipt = going.run.receipt(50)
    assert (receipt.state, receipt.world_size, len(receipt.gpus)) == ("SUCCEEDED", 1, 2)
    going.assert_kept()
    assert ray_launch(gpus=2, gpu_type="H100")(stay).estimate(where).seconds == 0.0


@pytest.mark.long
def test_what_ray_is_made_of_is_said_while_somebody_waits_but_not_when_quiet(
    warm: Path, where: str, capfd: pytest.CaptureFixture[str]
) -> None:
    Path(where, "go").touch()
    for quiet in (False, True):
        ray_launch(gpus=2, gpu_type="H100", quiet=quiet)(stay).distributed(where)
        said = capfd.readouterr().err
        assert (golden("local.ray_runs.serverless-gpu-ray") in said) is not quiet, said


@pytest.mark.long
def test_two_runs_have_clusters_of_their_own(warm: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    one, two = Going(str(tmp_path / "one")), Going(str(tmp_path / "two"))
    assert one.directory != two.directory
    one.go()
    one.run.results(50)
    assert one.gone() and not two.gone()
    assert {"gcs_server", "raylet"} <= fake_ray.pids(two.directory).keys()
    two.go()
    two.run.results(50)
    assert two.gone()


@pytest.mark.long
def test_a_session_lends_its_devices(warm: Path, where: str) -> None:
    Path(where, "go").touch()
    with session(gpus=2, gpu_type="H100", quiet=True) as held:
        run = held.submit(ray_launch(gpus=2, gpu_type="H100", quiet=True)(stay), where)
        [environ] = run.results(50)
        assert environ["CUDA_VISIBLE_DEVICES"] == "0,1" and environ["SGPU_GPU_UUIDS"].split(",") == list(held.devices)
        assert run.receipt(50).gpus == held.devices
        assert not os.path.lexists((run.directory / "ray" / "directory").read_text().strip())


@pytest.mark.long
def test_a_function_beside_it_has_no_part_in_a_cluster(warm: Path, where: str) -> None:
    Path(where, "go").touch()
    run = distributed(gpus=1, gpu_type="H100", quiet=True)(stay).submit(where)
    [environ] = run.results(50)
    assert "RAY_ADDRESS" not in environ and environ["RANK"] == "0"
    assert not (run.directory / "ray").exists()


DRIVER = """
import os, sys
from serverless_gpu.ray import ray_launch

@ray_launch(gpus=2, gpu_type="H100", env="snapshot")
def drive():
    import ray
    return ray.__file__, sys.prefix

if __name__ == "__main__":
    print(drive.distributed())
"""


@pytest.mark.long
def test_a_restored_environment_has_its_own_ray_and_ray_that_environment(own: Path, tmp_path: Path) -> None:
    small = SmallEnvironment(tmp_path / "here")
    small.install("ray", fake_ray.VERSION, fake_ray.FILES)
    small.write("driver.py", DRIVER)
    said, _ = small.run("driver.py")
    view = own / "environments" / "view"
    [(file, prefix)] = ast.literal_eval(said)
    assert prefix == str(view) and Path(file).is_relative_to(view)
    [attempt] = (own / "runs").glob("*/1")
    assert (attempt / "ray" / "0" / "prefix.out").read_text() == str(view)
    assert not os.path.lexists((attempt / "ray" / "directory").read_text().strip())


# --- stopped ----------------------------------------------------------------------------------------------------------


def test_a_cancelled_run_leaves_nothing(warm: Path, where: str) -> None:
    going = Going(where, grace=5)
    going.run.cancel()
    with pytest.raises(RunCancelled):
        going.run.results(50)
    assert going.gone() and not going.driver.alive()


@pytest.mark.long
def test_a_time_limit_leaves_nothing(warm: Path, where: str) -> None:
    run = ray_launch(gpus=2, gpu_type="H100", quiet=True, timeout=1, grace=1)(stay).submit(where)
    wait_for((run.directory / "ray" / "directory").exists, "its cluster has a directory")
    directory = (run.directory / "ray" / "directory").read_text().strip()
    with pytest.raises(RunTimedOut):  # the clock starts with the driver, that one when its cluster is there
        run.results(50)
    assert not fake_ray.pids(directory) and not os.path.lexists(directory)


@pytest.mark.long
def test_what_ray_wrote_is_kept_of_a_driver_that_fails_and_has_to_be_killed(warm: Path) -> None:
    run = ray_launch(gpus=2, gpu_type="H100", quiet=True)(fail_and_stay).submit()
    with pytest.raises(ValueError, match=re.escape(golden("local.ray_runs.raised-driver"))):
        run.results(50)
    assert_kept(run.directory)


# --- deaths -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gcs_server", "raylet"])
def test_F45_a_cluster_that_lost_its_head_ends_the_run_and_names_node_and_process(going: Going, name: str) -> None:
    Process(going.processes[name][0]).kill()
    with pytest.raises(EngineHeadLost) as caught:
        going.run.results(50)
    error = caught.value
    assert (error.reason, error.rank, going.run.status()) == ("engine_head_lost", 0, "FAILED")
    assert socket.gethostname() in error.message and name in error.message
    assert f"{going.run.directory}/ray" in error.hint
    assert f"Its logs: {going.run.directory}/ray/0" in error.message
    going.assert_kept()
    assert going.gone() and not going.driver.alive()
    assert going.run.receipt(50).reason == "engine_head_lost"


def test_a_killed_supervisor_leaves_nothing(own: Path, going: Going) -> None:
    looker = supervisor(own, going.run.id)
    agent(own).kill()  # which would sweep
    looker.kill()
    wait_for(going.gone, "the stem has removed the cluster")
    wait_for(lambda: not going.task.alive() and not going.driver.alive(), "what ran in it is gone, too")
    with pytest.raises(NodeLost):
        going.run.results(50)


@pytest.mark.parametrize(("who", "reason"), [("stem", "runtime_lost"), ("task", "rank_signal")])
def test_a_killed_stem_or_node_task_leaves_nothing(own: Path, going: Going, who: str, reason: str) -> None:
    agent(own).kill()  # which would sweep
    getattr(going, who).kill()
    with pytest.raises(RunError) as caught:
        going.run.results(50)
    assert caught.value.reason == reason
    wait_for(going.gone, "the supervisor has removed the cluster")
    going.assert_kept()


def test_what_supervisor_and_stem_leave_when_both_are_killed_the_agent_sweeps(own: Path, going: Going) -> None:
    looker = supervisor(own, going.run.id)
    looker.send(signal.SIGSTOP)  # so that it does not tidy up after the other
    going.stem.kill()
    assert os.path.isdir(going.directory)
    looker.kill()
    wait_for(going.gone, "the agent has swept")


def test_what_all_of_them_leave_the_next_agent_sweeps(own: Path, where: str, going: Going) -> None:
    looker, before = supervisor(own, going.run.id), agent(own)
    looker.send(signal.SIGSTOP)  # so that it does not tidy up after the other
    before.kill()
    going.stem.kill()
    looker.kill()
    assert os.path.isdir(going.directory)
    going.go()
    distributed(gpus=1, gpu_type="H100", quiet=True)(stay).distributed(where)
    wait_for(going.gone, "the next agent has swept")
    assert attach(going.run.id).status() == "LOST"


def test_an_agent_that_ends_leaves_a_run_its_cluster(own: Path, going: Going) -> None:
    stop_agent(own)
    assert {"gcs_server", "raylet"} <= fake_ray.pids(going.directory).keys() and os.path.isdir(going.directory)
    going.go()
    assert len(going.run.results(50)) == 1
    assert going.gone()
    wait_for(lambda: nothing_of_a_run(own), "it is over")
