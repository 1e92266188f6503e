"""An MLflow server and its keeper, with an MLflow that only pretends: starting, ending, and who may die."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from serverless_gpu import distributed
from serverless_gpu.ambient import SystemClock
from serverless_gpu.node.base.home import Home
from serverless_gpu.node.base.lock_files import is_held
from serverless_gpu.node.mlflow_server.server import (
    ServerFiles,
    Serving,
    ensure_server,
    held_port,
    look,
    place_of,
    stop_server,
    stop_servers,
)
from tests.support.golden import golden
from tests.support.local.commands import sgpu
from tests.support.local.observe import announced, wait_for
from tests.support.local.pretended_mlflow import PretendedMlflow, asked, environ_of, keeper_of, keeping, server_of
from tests.support.local.ranks import stay


@pytest.fixture
def mlflow(tmp_path: Path) -> PretendedMlflow:
    """Return an MLflow that pretends."""
    return PretendedMlflow(tmp_path / "packages")


@pytest.fixture
def there(home: Path) -> Home:
    """Return the home."""
    return Home(home)


@pytest.fixture
def place(there: Home) -> Iterator[ServerFiles]:
    """Yield the place of the home's own server, which is ended with the test."""
    yield place_of(there)
    stop_servers(there)


def ready(home: Home, mlflow: PretendedMlflow, store: str = "") -> Serving:
    """Return the server once it answers."""

    def look_again() -> Serving | None:
        serving = ensure_server(home, mlflow.python, store, environ=mlflow.environ)
        assert not serving.problem, serving.problem
        return serving if serving.ready else None

    found = wait_for(look_again, "a server that answers")
    assert found is not None
    return found


def refused(home: Home, mlflow: PretendedMlflow) -> str:
    """Return why there is no server, once that is known."""
    return wait_for(
        lambda: ensure_server(home, mlflow.python, environ=mlflow.environ).problem, "why there is no server"
    )


def stage(place: ServerFiles) -> str:
    """Return how far a server is."""
    return look(place, SystemClock()).stage


def test_a_server_is_had_without_waiting_and_said_to_be_ready_when_it_answers(
    there: Home, place: ServerFiles, mlflow: PretendedMlflow
) -> None:
    first = ensure_server(there, mlflow.python, environ=mlflow.environ)
    assert not first.ready and not first.problem
    serving = ready(there, mlflow)
    assert serving == Serving(first.uri, True)
    assert asked(serving.uri, "/health") == "OK"
    found = look(place, SystemClock())
    assert (found.stage, found.version, found.pid) == ("ready", "3.99.0", place.noted().server)
    assert found.memory_bytes > 1_000_000
    assert {path.stat().st_mode & 0o077 for path in (place.directory, place.directory / "server.json")} == {0}


def test_a_server_has_a_store_of_the_home_and_nothing_of_the_callers_own_mlflow(
    there: Home, place: ServerFiles, mlflow: PretendedMlflow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://elsewhere:5000")
    mlflow.environ["MLFLOW_TRACKING_TOKEN"] = "secret"
    variables = environ_of(ready(there, mlflow).uri)
    assert {name: value for name, value in variables.items() if name.startswith("MLFLOW_")} == {
        "MLFLOW_BACKEND_STORE_URI": f"sqlite:///{place.directory}/mlflow.db",
        "MLFLOW_ARTIFACTS_DESTINATION": f"{place.directory}/artifacts",
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_SERVER_ALLOWED_HOSTS": "localhost,localhost:*,127.0.0.1,127.0.0.1:*,[::1],[::1]:*",
    }
    assert variables["GIVEN_BY_MLFLOW"] == "yes"


def test_a_server_is_one_process_below_its_keeper(there: Home, place: ServerFiles, mlflow: PretendedMlflow) -> None:
    ready(there, mlflow)
    children = Path(f"/proc/{place.noted().keeper}/task/{place.noted().keeper}/children").read_text().split()
    assert children == [str(place.noted().server)]
    assert b"mlflow.app" in Path(f"/proc/{children[0]}/cmdline").read_bytes()


def test_of_two_keepers_of_one_server_one_ends(there: Home, place: ServerFiles, mlflow: PretendedMlflow) -> None:
    both = [keeping(place, mlflow) for _ in range(2)]
    wait_for(lambda: stage(place) == "ready", "a server that answers")
    wait_for(lambda: sum(each.poll() is not None for each in both) == 1, "one keeper's end")
    assert [each.pid for each in both if each.poll() is None] == [place.noted().keeper]
    assert stop_server(place)
    assert [each.wait(50) for each in both] == [0, 0]


def test_a_store_of_the_callers_has_a_server_of_its_own(
    there: Home, place: ServerFiles, mlflow: PretendedMlflow
) -> None:
    store = f"sqlite:///{there.root}/theirs/mlflow.db"
    own, theirs = ready(there, mlflow), ready(there, mlflow, store)
    assert own.uri != theirs.uri
    variables = environ_of(theirs.uri)
    assert variables["MLFLOW_BACKEND_STORE_URI"] == store
    assert variables["MLFLOW_DEFAULT_ARTIFACT_ROOT"] == f"{there.root}/theirs/mlruns"
    assert stop_servers(there) == 2


def test_a_server_that_is_killed_is_started_again_at_the_same_address(
    there: Home, place: ServerFiles, mlflow: PretendedMlflow
) -> None:
    uri, server, keeper = ready(there, mlflow).uri, server_of(place), keeper_of(place)
    server.send(signal.SIGKILL)
    server.wait_gone()
    wait_for(lambda: stage(place) == "starting", "that it starts again")
    again = ensure_server(there, mlflow.python, environ=mlflow.environ)
    assert again.is_restarting and golden("local.mlflow_server.started-again") in again.problem, "worth waiting for"
    wait_for(lambda: place.noted().server not in (0, server.pid) and stage(place) == "ready", "another server")
    assert ready(there, mlflow).uri == uri
    assert keeper.alive()


def test_nobody_starts_a_server_again_whose_keeper_was_killed_before_it_could(
    there: Home, place: ServerFiles, mlflow: PretendedMlflow
) -> None:
    ready(there, mlflow)
    server, keeper = server_of(place), keeper_of(place)
    server.send(signal.SIGKILL)
    wait_for(lambda: golden("local.mlflow_server.started-again") in place.noted().problem, "that it is to start again")
    keeper.send(signal.SIGKILL)
    keeper.wait_gone()
    found = look(place, SystemClock())
    assert (found.stage, found.problem, found.pid) == ("stopped", "", None)


def test_a_server_ends_with_its_keeper_and_the_next_one_has_the_same_address(
    there: Home, place: ServerFiles, mlflow: PretendedMlflow
) -> None:
    uri, server, keeper = ready(there, mlflow).uri, server_of(place), keeper_of(place)
    keeper.send(signal.SIGKILL)
    server.wait_gone()
    assert stage(place) == "stopped"
    assert ready(there, mlflow).uri == uri


def test_what_a_killed_keeper_left_of_a_server_that_starts_otherwise_the_next_one_ends(
    there: Home, place: ServerFiles, mlflow: PretendedMlflow
) -> None:
    mlflow.starts_otherwise()
    uri, keeper = ready(there, mlflow).uri, keeper_of(place)
    keeper.send(signal.SIGKILL)
    keeper.wait_gone()
    assert asked(uri, "/health") == "OK"  # the second process, which nobody told
    before = place.noted().server
    assert ready(there, mlflow).uri == uri
    wait_for(lambda: place.noted().server != before, "the next keeper has started a server of its own")


def test_stopping_ends_the_server_with_its_keeper(there: Home, place: ServerFiles, mlflow: PretendedMlflow) -> None:
    mlflow.starts_otherwise()
    uri, server, keeper = ready(there, mlflow).uri, server_of(place), keeper_of(place)
    assert stop_server(place)
    assert not keeper.alive() and not server.alive()
    with pytest.raises(OSError, match="refused"):
        asked(uri, "/health")
    assert not stop_server(place)
    assert stage(place) == "stopped"


def test_an_interpreter_without_mlflow_is_named_and_not_tried_all_the_time(there: Home, place: ServerFiles) -> None:
    python = sys.executable
    wait_for(lambda: ensure_server(there, python).problem, "why there is no server")
    for _ in range(3):
        assert ensure_server(there, python).problem == golden("local.mlflow_server.mlflow-pip-install", python=python)
    wait_for(lambda: not is_held(place.lock), "the keeper's end")
    said = (place.directory / "keeper.log").read_text()
    assert said.count("has no MLflow") == place.noted().failures == 1


def test_who_asks_for_it_now_has_it_tried_again(there: Home, place: ServerFiles, mlflow: PretendedMlflow) -> None:
    mlflow.has_trouble("ModuleNotFoundError: No module named 'flask'")
    assert golden("local.mlflow_server.mlflow-skinny-enough") in refused(there, mlflow)
    mlflow.has_trouble("")
    assert "mlflow-skinny" in ensure_server(there, mlflow.python, environ=mlflow.environ).problem
    again = ensure_server(there, mlflow.python, environ=mlflow.environ, now=True)
    assert (again.problem, again.failures) == ("", 1)  # so ranks do not wait for what may fail once more
    assert ready(there, mlflow).ready
    assert place.noted().failures == 0


def test_an_interpreter_that_is_gone_is_named(there: Home, place: ServerFiles, mlflow: PretendedMlflow) -> None:
    python = str(there.root / "venv/bin/python")
    assert wait_for(lambda: ensure_server(there, python).problem, "why") == golden(
        "local.mlflow_server.interpreter-any-more", python=python
    )


def test_a_database_of_another_version_is_said_with_the_command_that_helps(
    there: Home, place: ServerFiles, mlflow: PretendedMlflow
) -> None:
    mlflow.has_trouble("mlflow.exceptions.MlflowException: Detected out-of-date database schema (found version a, but")
    assert refused(there, mlflow).endswith(f"-m mlflow db upgrade sqlite:///{place.directory}/mlflow.db")


def test_a_port_that_is_taken_is_replaced(there: Home, place: ServerFiles, mlflow: PretendedMlflow) -> None:
    uri = ready(there, mlflow).uri
    stop_server(place)
    with socket.socket() as other:
        other.bind(("127.0.0.1", place.noted().port))
        other.listen()
        again = ready(there, mlflow)
    assert again.uri != uri
    assert asked(again.uri, "/version") == "3.99.0"
    assert golden("local.mlflow_server.taken-another-process") in (place.directory / "keeper.log").read_text()


def test_a_keeper_holds_the_port_while_no_server_listens(there: Home, place: ServerFiles) -> None:
    place.make()
    with held_port(place, place.noted()) as held, socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", held.getsockname()[1]))


def test_a_server_that_does_not_answer_any_more_is_started_again(
    there: Home, place: ServerFiles, mlflow: PretendedMlflow
) -> None:
    keeper = keeping(place, mlflow, watch_s=0.05, answer_s=0.05)
    wait_for(lambda: stage(place) == "ready", "a server that answers")
    server = server_of(place)
    mlflow.is_silent(True)
    server.wait_gone()
    mlflow.is_silent(False)
    wait_for(lambda: stage(place) == "ready", "another server")
    stop_server(place)
    assert keeper.wait(50) == 0


def test_a_server_that_nobody_uses_ends(there: Home, place: ServerFiles, mlflow: PretendedMlflow) -> None:
    keeper = keeping(place, mlflow, watch_s=0.05, idle_s=0.5)
    assert keeper.wait(50) == 0
    assert (stage(place), place.noted().problem) == ("stopped", "")


def test_a_server_whose_page_is_open_is_used(there: Home, place: ServerFiles, mlflow: PretendedMlflow) -> None:
    keeper = keeping(place, mlflow, watch_s=0.05, idle_s=1.5)
    wait_for(lambda: stage(place) == "ready", "a server that answers")
    with socket.create_connection(("127.0.0.1", place.noted().port)):
        os.utime(place.used, (1, 1))
        with pytest.raises(subprocess.TimeoutExpired):
            keeper.wait(3)
    assert keeper.wait(50) == 0


def test_a_server_with_an_owner_ends_with_it(there: Home, place: ServerFiles, mlflow: PretendedMlflow) -> None:
    ours, its = os.pipe()
    keeper = keeping(place, mlflow, owner=ours)
    os.close(ours)
    wait_for(lambda: stage(place) == "ready", "a server that answers")
    server = server_of(place)
    os.close(its)
    assert keeper.wait(50) == 0
    assert not server.alive()


def test_a_server_on_another_machine_of_a_shared_home_is_named(
    there: Home, place: ServerFiles, mlflow: PretendedMlflow
) -> None:
    ready(there, mlflow)
    noted = place.noted()
    place.note(msgspec.structs.replace(noted, machine="another", host="gpu-2"))
    serving = ensure_server(there, mlflow.python)
    assert not serving.ready
    assert golden("local.mlflow_server.runs-another-machine") in serving.problem
    place.note(noted)


def test_a_home_that_cannot_be_written_is_a_problem_in_words(there: Home, mlflow: PretendedMlflow) -> None:
    (there.root / "mlflow").write_text("a file")
    assert golden("local.mlflow_server.mlflow-default-cannot") in ensure_server(there, mlflow.python).problem


def test_the_commands_show_start_and_end_it(
    there: Home, place: ServerFiles, mlflow: PretendedMlflow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([mlflow.environ["PYTHONPATH"], os.environ.get("PYTHONPATH", "")]))
    assert "mlflow:" not in sgpu("status")
    uri = sgpu("mlflow").strip()
    assert asked(uri, "/health") == "OK"
    found = msgspec.json.decode(sgpu("mlflow", "--json"))
    assert (found["uri"], found["ready"], found["version"]) == (uri, True, "3.99.0")
    assert golden("local.mlflow_server.mlflow-ready-mlflow", uri=uri, found=found["pid"]) in sgpu("status")
    assert sgpu("mlflow", "--stop") == "stopped\n"
    assert golden("local.mlflow_server.mlflow-running", uri=uri) in sgpu("status")
    assert sgpu("mlflow", "--stop") == golden("local.mlflow_server.mlflow-server-running")
    mlflow.has_trouble("sqlite3.OperationalError: database is locked")
    assert golden("local.mlflow_server.locked-another-process") in sgpu("mlflow", code=1)


def test_the_command_without_mlflow_says_what_to_install(there: Home) -> None:
    assert "pip install 'serverless-gpu[mlflow]'" in sgpu("mlflow", code=1)


def test_stop_leaves_the_server_to_runs_that_go_on(
    there: Home, place: ServerFiles, mlflow: PretendedMlflow, tmp_path: Path
) -> None:
    ready(there, mlflow)
    run = distributed(gpus=1, gpu_type="CPU", quiet=True)(stay).submit(str(tmp_path))
    announced(tmp_path, "rank0")
    assert "MLflow's server keeps running" in sgpu("stop")
    assert stage(place) == "ready"
    run.cancel()
    assert golden("local.mlflow_server.mlflow-server-stopped") in sgpu("stop")
    assert stage(place) == "stopped"
