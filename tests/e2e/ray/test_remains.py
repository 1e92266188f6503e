"""Nothing of a run's Ray cluster outlives the run, however it ends, and nothing of it meets another Ray. Row F45.

What a run leaves is looked for from outside: processes (also in other pid namespaces, without our variables, in other
sessions), ports, temporary directories, shared memory, cgroups.
"""

from __future__ import annotations

import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from serverless_gpu import attach, distributed
from serverless_gpu.testing import stop_agent
from tests.e2e.ray.launched import READY_S, Launched, supervisor_of
from tests.e2e.ray.plain_ray import PlainRay, ask, own_variables, plain_ray
from tests.e2e.ray.remains_caller import OBJECT_BYTES
from tests.support.homes import use_home
from tests.support.local.observe import agent, held_locks, nothing_of_a_run, processes_of, wait_for

LIMIT_S = 400

pytestmark = [pytest.mark.heavy, pytest.mark.slow, pytest.mark.timeout(LIMIT_S)]

FAKES = "H100:4"


@pytest.fixture(scope="module")
def home() -> Iterator[Path]:
    """Yield one home for all tests here, in which nothing is left of them but its agent."""
    with pytest.MonkeyPatch.context() as patch:
        directory = Path(tempfile.mkdtemp(prefix="sg-", dir="/tmp"))
        use_home(patch, directory, FAKES)
        yield directory
        stop_agent(directory)
        wait_for(lambda: not processes_of(directory), "agent and supervisors are gone")
        shutil.rmtree(directory)


@pytest.fixture
def launched(home: Path, tmp_path: Path) -> Iterator[list[Launched]]:
    """Yield a list of calls; whatever is in it is ended with the test, and must have left nothing."""
    calls: list[Launched] = []
    yield calls
    for call in calls:
        call.close()
    wait_for(lambda: nothing_of_a_run(home), "no run is left in the home")


def start(launched: list[Launched], home: Path, where: Path, act: str, **more: object) -> Launched:
    """Call, and wait until the driver uses its cluster."""
    launched.append(Launched(home, where, act, **more))  # type: ignore[arg-type]  # its keywords, passed on
    launched[-1].ready()
    return launched[-1]


# --- ends that a run can have -----------------------------------------------------------------------------------------


def test_nothing_is_left_of_a_driver_that_raises(launched: list[Launched], home: Path, tmp_path: Path) -> None:
    call = start(launched, home, tmp_path, "raise")
    outcome = call.ended()
    assert (outcome["error"], outcome["text"].splitlines()[0]) == ("ValueError", "from the driver")
    call.nothing_left()


def test_nothing_is_left_of_a_driver_that_is_killed(launched: list[Launched], home: Path, tmp_path: Path) -> None:
    call = start(launched, home, tmp_path, "die")
    outcome = call.ended()
    assert outcome["error"] == "RankCrashed" and "SIGKILL" in outcome["text"]
    call.nothing_left()


def test_nothing_is_left_after_ctrl_c(launched: list[Launched], home: Path, tmp_path: Path) -> None:
    call = start(launched, home, tmp_path, "get")
    call.interrupt()
    assert call.ended()["error"] == "KeyboardInterrupt"
    call.nothing_left()
    assert attach(call.run_id).status() == "CANCELLED"


def test_nothing_is_left_after_a_cancel(launched: list[Launched], home: Path, tmp_path: Path) -> None:
    call = start(launched, home, tmp_path, "get")
    attach(call.run_id).cancel()
    assert call.ended()["error"] == "RunCancelled"
    call.nothing_left()


def test_nothing_is_left_after_the_time_limit(launched: list[Launched], home: Path, tmp_path: Path) -> None:
    call = Launched(home, tmp_path, "get", options={"timeout": 5})
    launched.append(call)
    # The clock starts with the driver, and on a busy machine a driver does not use its cluster after so many seconds.
    wait_for(lambda: call.footprint.named("[raylet]"), "there is a cluster", limit_s=READY_S)
    assert call.ended()["error"] == "RunTimedOut"
    call.nothing_left()


# --- kill -9 ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gcs_server", "raylet"])
def test_F45_a_head_that_dies_is_the_reason_and_names_its_node(
    launched: list[Launched], home: Path, tmp_path: Path, name: str
) -> None:
    call = start(launched, home, tmp_path, "get")
    call.one(name).kill()
    outcome = call.ended()
    assert (outcome["error"], outcome["reason"]) == ("EngineHeadLost", "engine_head_lost"), outcome
    assert socket.gethostname() in outcome["text"] and name in outcome["text"]
    call.nothing_left()


def test_nothing_is_left_when_the_supervisor_is_killed(launched: list[Launched], home: Path, tmp_path: Path) -> None:
    call = start(launched, home, tmp_path, "get")
    supervisor_of(home, call.run_id).kill()
    outcome = call.ended()
    assert (outcome["error"], outcome["reason"]) == ("NodeLost", "supervisor_killed")
    call.nothing_left()


def test_nothing_is_left_when_the_stem_is_killed(launched: list[Launched], home: Path, tmp_path: Path) -> None:
    call = start(launched, home, tmp_path, "get")
    call.stem().kill()
    outcome = call.ended()
    assert (outcome["error"], outcome["reason"]) == ("RuntimeLost", "runtime_lost")
    call.nothing_left()


def test_nothing_is_left_when_the_node_task_is_killed(launched: list[Launched], home: Path, tmp_path: Path) -> None:
    call = start(launched, home, tmp_path, "get")
    call.node_task().kill()
    outcome = call.ended()
    assert outcome["error"] == "RankCrashed" and "SIGKILL" in outcome["text"]
    call.nothing_left()


def test_the_next_agent_removes_what_a_run_left_of_which_all_were_killed(
    launched: list[Launched], home: Path, tmp_path: Path
) -> None:
    call = start(launched, home, tmp_path, "get")
    for process in (agent(home), supervisor_of(home, call.run_id), call.stem()):
        process.kill()
    assert call.ended()["error"] == "NodeLost"
    wait_for(lambda: not call.footprint.alive(), "no process of the run is left")
    assert distributed(gpus=1, quiet=True)(len).distributed("ab") == [2], "the next call starts the next agent"
    call.nothing_left()
    assert held_locks(home) == []


# --- beside others ----------------------------------------------------------------------------------------------------


@pytest.fixture
def outer() -> Iterator[PlainRay]:
    """Yield somebody else's Ray on this machine."""
    with plain_ray() as ray:
        yield ray


def test_two_runs_and_a_ray_outside_do_not_meet(
    launched: list[Launched], home: Path, tmp_path: Path, outer: PlainRay
) -> None:
    """One of two runs stops every Ray it can find: the other goes on with what it had, and so does the one outside."""
    of_ray = {name: value for name, value in outer.variables.items() if name.startswith("RAY_")}
    theirs = {**of_ray, "RAY_ADDRESS": outer.address, "RAY_TMPDIR": str(outer.directory), "RAY_TEMP_DIR": "/tmp/ray"}
    stays = Launched(home, tmp_path / "stays", "stay", environ=theirs)
    launched.append(stays)
    stops = Launched(home, tmp_path / "stops", "stop", environ=theirs)
    launched.append(stops)
    told, others = stays.ready(), stops.ready()
    outside = set(outer.footprint.look().processes)

    assert len({told["environ"]["RAY_ADDRESS"], others["environ"]["RAY_ADDRESS"], outer.address}) == 3
    assert (told["resources"]["GPU"], told["resources"]["accelerator_type:H100"]) == (2, 1)
    assert told["gpu"] in ("0", "1") and others["gpu"] in ("2", "3"), "each has the GPUs of its run"
    for call in (stays, stops):
        assert call.footprint.listeners and all(listener.private for listener in call.footprint.listeners.values())
    asking = Asked(told["environ"])

    stops.go()
    assert stops.ended()["reason"] == "engine_head_lost", "the run ends that stopped its own Ray, and says how"
    stops.nothing_left()

    asking.check()
    stays.go()
    assert stays.ended() == {"results": ["done"]}
    told_after = (stays.where / "after").read_text()
    assert told_after == f'{{"actor": {told["actor"]}, "kept": {OBJECT_BYTES}}}'
    stays.nothing_left()
    assert set(outer.footprint.look().processes) == outside and outer.answers()


class Asked:
    """Drivers outside of a run that ask its cluster for a task: without a token, with a wrong one, with its own."""

    def __init__(self, environ: dict[str, str]) -> None:
        self._with = (
            {"RAY_AUTH_MODE": "disabled"},
            {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64},
            {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": environ["RAY_AUTH_TOKEN_PATH"]},
        )
        self._address = environ["RAY_ADDRESS"]

    def check(self) -> None:
        """Require that the last one only is answered."""
        answered = []
        for variables in self._with:
            done = ask(own_variables(), self._address, **variables)
            answered.append("answer 42" in done.stdout)
        assert answered == [False, False, True], answered
