"""The doctor's checks of tracking: where it would go, whether that answers, how the home's own servers are."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from serverless_gpu.doctor.facts import CheckOutcome, MachineFacts, TrackingFacts, TrackingServer
from serverless_gpu.doctor.probes.servers import without_userinfo
from serverless_gpu.node.mlflow_server.server import StartAttempt, failure_sentence
from tests.support.doctor.diagnosed import OK, PYTHON, WARNING, found, one

THERE = TrackingFacts(installed=True, uri="https://mlflow.example.com", away="")
SERVER = TrackingServer(uri="http://127.0.0.1:26570", stage="ready", version="3.17.2", pid=7)


@pytest.mark.parametrize(
    ("tracking", "outcome", "said"),
    [
        (TrackingFacts(), OK, f"MLflow does not track runs, because MLflow is not installed for {PYTHON}"),
        (
            TrackingFacts(installed=True),
            OK,
            "MLflow tracks runs in the store of this home directory (to print the store's address, run `sgpu mlflow`)",
        ),
        (replace(THERE, off="SERVERLESS_GPU_TRACKING=0"), OK, "off: SERVERLESS_GPU_TRACKING=0"),
        (THERE, OK, "https://mlflow.example.com, by MLFLOW_TRACKING_URI; it answers"),
        (
            replace(THERE, away="timed out"),
            WARNING,
            "https://mlflow.example.com (MLFLOW_TRACKING_URI) does not answer: timed out",
        ),
        (replace(THERE, uri="/data/mlruns", away=None), OK, "/data/mlruns, by MLFLOW_TRACKING_URI"),
    ],
)
def test_where_runs_are_tracked(tracking: TrackingFacts, outcome: CheckOutcome, said: str) -> None:
    assert one("tracking", MachineFacts(tracking=tracking))[:2] == (outcome, said)


@pytest.mark.parametrize(
    ("server", "outcome", "said"),
    [
        (SERVER, OK, "http://127.0.0.1:26570 is ready, MLflow 3.17.2"),
        (replace(SERVER, stage="stopped"), OK, "http://127.0.0.1:26570 is stopped, MLflow 3.17.2"),
        (
            replace(SERVER, away="timed out"),
            WARNING,
            "the MLflow server http://127.0.0.1:26570 (pid 7) does not answer: timed out",
        ),
        (replace(SERVER, stage="failed", problem="no"), WARNING, "http://127.0.0.1:26570: no"),
    ],
)
def test_how_the_homes_server_is(server: TrackingServer, outcome: CheckOutcome, said: str) -> None:
    assert one("mlflow-server", MachineFacts(tracking=TrackingFacts(servers=(server,))))[:2] == (outcome, said)


@pytest.mark.parametrize(
    ("written", "mend"),
    [
        (
            "sqlite3.DatabaseError: file is not a database",
            "mv '/a home/mlflow.db' '/a home/mlflow.db.away' && sgpu mlflow   (this creates a new database)",
        ),
        (
            "Detected out-of-date database schema",
            "/env/bin/python -m mlflow db upgrade 'sqlite:////a home/mlflow.db' && sgpu mlflow   (after a backup)",
        ),
        ("database is locked", "sgpu mlflow"),
    ],
)
def test_what_mends_a_store_that_cannot_be_served(written: str, mend: str) -> None:
    file = "/a home/mlflow.db"
    problem = failure_sentence(
        written, "exit code 1", StartAttempt("/env/bin/python", f"sqlite:///{file}", "server.log")
    )
    server = replace(
        SERVER, stage="failed", problem=problem, database=f"sqlite:///{file}", file=file, python="/env/bin/python"
    )
    assert one("mlflow-server", MachineFacts(tracking=TrackingFacts(servers=(server,))))[2] == mend


def test_without_a_server_nothing_is_said_of_it() -> None:
    assert found("mlflow-server", MachineFacts(tracking=TrackingFacts())) == []


def test_nobody_is_asked_with_a_password() -> None:
    assert without_userinfo("https://ada:word@mlflow.example.com") == "https://mlflow.example.com"
