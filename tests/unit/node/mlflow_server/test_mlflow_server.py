"""MLflow's servers: whose is whose, which ports they have, what their last words mean."""

from __future__ import annotations

from pathlib import Path

import pytest

from serverless_gpu.node.base.home import Home
from serverless_gpu.node.mlflow_server.keeper import ServerStart, server_variables
from serverless_gpu.node.mlflow_server.server import (
    ServerFiles,
    ServerRecord,
    ServerStore,
    StartAttempt,
    failure_sentence,
    local_path,
    open_place,
    pause_s,
    place_of,
    places,
    without_password,
)

TRIED = StartAttempt("/env/bin/python", "sqlite:////h/mlflow.db", "/h/server.log")
TRACEBACK = 'Traceback (most recent call last):\n  File "x.py", line 1, in <module>\n'


@pytest.mark.parametrize(
    ("store", "path"),
    [
        ("sqlite:////data/mlflow.db", "/data/mlflow.db"),
        ("sqlite:////data/a%20b.db?timeout=5", "/data/a b.db"),
        ("file:///data/mlruns", "/data/mlruns"),
        ("/data/mlruns", "/data/mlruns"),
        ("postgresql://sgpu:word@db/mlflow", None),
        ("https://mlflow.example.com", None),
    ],
)
def test_a_store_is_a_path_or_somewhere_else(store: str, path: str | None) -> None:
    assert local_path(store) == (None if path is None else Path(path))


def test_each_store_has_one_place_whatever_it_is_called(tmp_path: Path) -> None:
    home = Home(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path / "mlruns")
    names = [str(tmp_path / "mlruns"), f"file://{tmp_path}/mlruns", str(tmp_path / "link")]
    assert len({place_of(home, name).directory for name in names}) == 1
    others = ["", f"sqlite:///{tmp_path}/mlruns/mlflow.db", "postgresql://a@b/c"]
    assert len({place_of(home, name).directory for name in [*names, *others]}) == 4


def test_a_place_remembers_its_store_in_a_file_that_only_its_owner_reads(tmp_path: Path) -> None:
    home = Home(tmp_path)
    place = place_of(home, "postgresql://sgpu:word@db/mlflow")
    place.make()
    assert open_place(place.directory).store == "postgresql://sgpu:word@db/mlflow"
    assert (place.directory / "store").stat().st_mode & 0o777 == 0o600
    assert [each.store for each in places(home)] == [place.store]


def test_an_address_is_known_before_the_server_and_stays(tmp_path: Path) -> None:
    place = place_of(Home(tmp_path))
    first = place.uri(ServerRecord())
    port = int(first.rpartition(":")[2])
    assert place_of(Home(tmp_path)).uri(ServerRecord()) == first
    assert 20_000 <= port < 30_000
    assert place.uri(ServerRecord(port=4321)) == "http://127.0.0.1:4321"
    ports = list(place.ports(ServerRecord(port=4321)))
    assert (ports[0], ports[1], ports[-1]) == (4321, port, 0)
    assert len(set(ports)) == len(ports)


def test_what_is_written_down_of_a_server_and_cannot_be_read_is_nothing(tmp_path: Path) -> None:
    place = ServerFiles(tmp_path)
    assert place.noted() == ServerRecord()
    (tmp_path / "server.json").write_text("{")
    assert place.noted() == ServerRecord()


def test_the_store_of_a_caller_keeps_its_artifacts_where_mlflow_without_a_server_has_them(tmp_path: Path) -> None:
    own, files = ServerFiles(tmp_path).backing(), ServerFiles(tmp_path, "file:///data/mlruns").backing()
    assert own == ServerStore(f"sqlite:///{tmp_path}/mlflow.db", f"{tmp_path}/artifacts", False, True)
    assert files == ServerStore("/data/mlruns", "/data/mlruns", True, False)
    variables = server_variables(files, ServerStart("python", {}, ("mlflow.example.com",)))
    assert variables["MLFLOW_DEFAULT_ARTIFACT_ROOT"] == "/data/mlruns"
    assert variables["MLFLOW_ALLOW_FILE_STORE"] == "true"
    assert variables["MLFLOW_SERVER_ALLOWED_HOSTS"].endswith(",mlflow.example.com,mlflow.example.com:*")
    theirs = ServerFiles(tmp_path, "postgresql://a@b/c").backing()
    assert theirs == ServerStore("postgresql://a@b/c", f"{tmp_path}/artifacts", False, True)
    assert "MLFLOW_DEFAULT_ARTIFACT_ROOT" not in server_variables(theirs, ServerStart("python", {}))


@pytest.mark.parametrize(
    ("written", "said"),
    [
        (
            f"{TRACEBACK}ModuleNotFoundError: No module named 'mlflow'",
            "/env/bin/python has no MLflow. Run pip install mlflow",
        ),
        (
            f"{TRACEBACK}ModuleNotFoundError: No module named 'flask'",
            "/env/bin/python has only a part of MLflow (no flask; mlflow-skinny is not enough); pip install mlflow",
        ),
        (
            "mlflow.exceptions.MlflowException: Detected out-of-date database schema (found version a, but expected b)",
            "sqlite:////h/mlflow.db was written by another version of MLflow; serve the store with that version, or "
            "back it up and upgrade it: /env/bin/python -m mlflow db upgrade sqlite:////h/mlflow.db",
        ),
        (
            "alembic.util.exc.CommandError: Can't locate revision identified by 'abc'",
            "sqlite:////h/mlflow.db was written by a newer MLflow than that of /env/bin/python. "
            "Upgrade MLflow in that interpreter",
        ),
        ("[Errno 98] Address already in use", "another process took the port of the MLflow server during its start"),
        ("(sqlite3.OperationalError) database is locked", "sqlite:////h/mlflow.db is locked by another process"),
        (
            f"{TRACEBACK}ImportError: libfoo.so: cannot open shared object file",
            "MLflow's server ended (exit code 1): ImportError: libfoo.so: cannot open shared object file. See the "
            "log /h/server.log",
        ),
        ("", "MLflow's server ended (exit code 1). See the log /h/server.log"),
    ],
)
def test_last_words_become_a_sentence(written: str, said: str) -> None:
    assert failure_sentence(written, "exit code 1", TRIED) == said


def test_pauses_grow_to_a_limit() -> None:
    assert [pause_s(failures) for failures in (0, 1, 2, 3, 8, 1000)] == [5.0, 5.0, 10.0, 20.0, 600.0, 600.0]


def test_a_password_is_not_shown() -> None:
    assert without_password("postgresql://sgpu:word@db/mlflow") == "postgresql://…@db/mlflow"
    assert without_password("sqlite:////h/mlflow.db") == "sqlite:////h/mlflow.db"
