"""`sgpu up --mlflow`, with an MLflow that only pretends: it is there, said, looked after, and gone with the server."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from serverless_gpu.ambient import SystemClock
from serverless_gpu.errors import InvalidOption, InvalidValue, ServerProblem
from serverless_gpu.node.base.home import Home
from serverless_gpu.node.mlflow_server.server import ServerFiles, Serving, ensure_server, look, place_of, stop_servers
from serverless_gpu.server.core.settings import Settings, read_settings
from serverless_gpu.server.operations.sidecars import mlflow_checks, mlflow_sidecar
from tests.support.golden import golden
from tests.support.local.observe import wait_for
from tests.support.local.pretended_mlflow import PretendedMlflow, asked, environ_of, keeper_of, server_of

UP = (sys.executable, "-m", "serverless_gpu.cli", "up", "--port", "0", "--no-node")


@pytest.fixture
def mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PretendedMlflow:
    """Return an MLflow that pretends, and is installed."""
    made = PretendedMlflow(tmp_path / "packages")
    path = made.environ["PYTHONPATH"]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([path, os.environ.get("PYTHONPATH", "")]))
    monkeypatch.syspath_prepend(path)
    return made


@pytest.fixture
def place(home: Path) -> Iterator[ServerFiles]:
    """Yield the place of the home's MLflow server, which is ended with the test."""
    yield place_of(Home(home))
    stop_servers(Home(home))


@pytest.fixture
def up(home: Path, place: ServerFiles, mlflow: PretendedMlflow) -> Iterator[subprocess.Popen[str]]:
    """Yield `sgpu up --mlflow` in a process of its own, once it answers."""
    with subprocess.Popen([*UP, "--mlflow"], stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def told(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Return the addresses of the server and of MLflow, as `sgpu up` says them."""
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(2)]
    assert lines[1].startswith("MLflow at http://"), lines
    return lines[0].split()[-1], lines[1].split()[2].rstrip(",")


def is_ready(place: ServerFiles) -> bool:
    """Return whether MLflow's server answers."""
    return look(place, SystemClock()).stage == "ready"


def test_it_is_the_server_of_the_home_and_told_to_clients(
    home: Path, place: ServerFiles, up: subprocess.Popen[str], mlflow: PretendedMlflow
) -> None:
    server, uri = told(up)
    assert json.loads(asked(server, "/api/v1/version"))["mlflow"] == uri
    wait_for(lambda: is_ready(place), "MLflow's server answers")
    assert asked(uri, "/health") == "OK"
    assert environ_of(uri)["MLFLOW_BACKEND_STORE_URI"] == f"sqlite:///{home}/mlflow/default/mlflow.db"
    assert ensure_server(Home(home), "another/python") == Serving(uri, True)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_it_ends_with_the_server_however_that_ends(
    place: ServerFiles, up: subprocess.Popen[str], number: signal.Signals
) -> None:
    told(up)
    wait_for(lambda: is_ready(place), "MLflow's server answers")
    server, keeper = server_of(place), keeper_of(place)
    up.send_signal(number)
    up.wait(60)
    keeper.wait_gone()
    assert not server.alive()


def test_a_keeper_that_is_killed_is_replaced(place: ServerFiles, up: subprocess.Popen[str]) -> None:
    _, uri = told(up)
    wait_for(lambda: is_ready(place), "MLflow's server answers")
    keeper = keeper_of(place)
    keeper.send(signal.SIGKILL)
    keeper.wait_gone()
    wait_for(lambda: place.noted().keeper != keeper.pid and is_ready(place), "another keeper")
    assert asked(uri, "/health") == "OK"


def test_the_server_is_unwell_while_mlflow_is(home: Path, place: ServerFiles, mlflow: PretendedMlflow) -> None:
    mlflow.has_trouble("ModuleNotFoundError: No module named 'flask'")
    settings = read_settings(home, {"mlflow": True})
    (check,) = mlflow_checks(settings)
    with mlflow_sidecar(settings):
        assert golden("local.mlflow_server.mlflow-skinny-enough") in wait_for(check, "what is wrong")
        mlflow.has_trouble("")
        wait_for(lambda: check() == "", "MLflow is tried again")
    assert mlflow_checks(read_settings(home)) == ()


def test_a_server_of_before_is_replaced_by_one_of_this_interpreter(
    home: Path, place: ServerFiles, mlflow: PretendedMlflow
) -> None:
    wait_for(lambda: ensure_server(Home(home), mlflow.python, environ=mlflow.environ).ready, "MLflow's server answers")
    before = keeper_of(place)
    with mlflow_sidecar(read_settings(home, {"mlflow": True})) as settings:
        assert not before.alive()
        assert settings.mlflow_url == f"http://127.0.0.1:{place.noted().port}"


def test_other_machines_are_told_of_a_proxy_and_mlflow_takes_its_name(
    home: Path, place: ServerFiles, mlflow: PretendedMlflow
) -> None:
    options = {"mlflow": True, "host": "0.0.0.0", "behind_proxy": ("10.0.0.1",), "hosts": ("gpu.internal",)}
    with (
        pytest.raises(InvalidValue, match=re.escape(golden("server.mlflow_beside.could-reach-mlflow"))) as raised,
        mlflow_sidecar(read_settings(home, options)),
    ):
        pytest.fail("it was started")
    assert "--mlflow-url" in raised.value.hint
    options["mlflow_url"] = "https://mlflow.internal/"
    with mlflow_sidecar(read_settings(home, options)) as settings:
        assert settings.mlflow_url == "https://mlflow.internal"
        wait_for(lambda: is_ready(place), "MLflow's server answers")
        hosts = environ_of(look(place, SystemClock()).uri)["MLFLOW_SERVER_ALLOWED_HOSTS"]
        assert hosts.endswith(",gpu.internal,gpu.internal:*,mlflow.internal,mlflow.internal:*")


def test_without_mlflow_it_is_refused_with_what_to_install(home: Path) -> None:
    with pytest.raises(ServerProblem, match="mlflow") as raised, mlflow_sidecar(read_settings(home, {"mlflow": True})):
        pytest.fail("it was started")
    assert raised.value.hint == "pip install 'serverless-gpu[server,mlflow]'"


def test_a_server_can_tell_of_an_mlflow_that_is_there_already(home: Path) -> None:
    settings = read_settings(home, {"mlflow_url": "https://mlflow.example.com"})
    with mlflow_sidecar(settings) as complete:
        assert complete == settings
    assert not (home / "mlflow").exists()


@pytest.mark.parametrize(
    "url", ["mlflow.example.com", "ftp://mlflow.example.com", "https://ada:word@mlflow.example.com"]
)
def test_an_address_that_is_none_is_refused(home: Path, url: str) -> None:
    with pytest.raises(InvalidValue, match="mlflow_url"):
        read_settings(home, {"mlflow_url": url})


def test_a_store_is_a_path_from_here_or_a_url(home: Path) -> None:
    def store(text: str) -> str:
        return read_settings(home, {"mlflow_store": text}).mlflow_store

    assert store("runs") == str(Path("runs").absolute())
    assert store("postgresql://a:b@c/d") == "postgresql://a:b@c/d"
    with pytest.raises(InvalidOption, match="mlflow"):
        read_settings(home, {"mlflow": "yes"})
    assert replace(read_settings(home), mlflow=True, effective=()) == Settings(
        home=home, database=f"sqlite:///{home}/server/server.db", mlflow=True
    )
