"""What is sent to an MLflow server, to whom its credentials go, and what its answers mean."""

from __future__ import annotations

import base64
import re
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest

from serverless_gpu.model.spec import Tracking
from serverless_gpu.testing.mlflow import FakeMlflow, FakeRun
from serverless_gpu.tracking.base import Metric, TrackerAway, TrackerRefused, TrackerRun, split_userinfo
from serverless_gpu.tracking.mlflow import MlflowTracker, RestClient, proxy_for
from tests.support.golden import golden

NAMED = {"MLFLOW_TRACKING_URI": "http://HOST"}
EXPERIMENT = Tracking(experiment="/Users/ada/digits", run_name="r")


@contextmanager
def talking(address: str, environ: Mapping[str, str] | None = None) -> Iterator[MlflowTracker]:
    with closing(MlflowTracker(address, environ or {})) as tracker:
        yield tracker


def made(tracker: MlflowTracker, tracking: Tracking = EXPERIMENT) -> TrackerRun:
    return tracker.begin(tracking, "01", tags={"sgpu.run_id": "01"}, at_ms=5)


def test_a_run_is_made_found_and_ended() -> None:
    with FakeMlflow() as mlflow, talking(mlflow.uri + "/") as tracker:
        assert tracker.find(EXPERIMENT, "01") is None
        tracked = made(tracker)
        assert tracker.find(EXPERIMENT, "01") == tracked
        tracker.end(tracked, "KILLED", 9)
        run = mlflow.run_of("01")
        assert (run.status, run.start_time, run.end_time) == ("KILLED", 5, 9)
        tracker.resume(tracked)
        assert run.status == "RUNNING"
        assert tracked.uri == mlflow.uri
        assert tracked.url == f"{mlflow.uri}/#/experiments/1/runs/{run.run_id}"


def test_points_parameters_and_tags_go_in_requests_of_the_size_mlflow_takes() -> None:
    metrics = [Metric(f"m{number}", number, 7, 1) for number in range(2001)]
    pairs = {f"k{number}": "v" for number in range(201)}
    with FakeMlflow() as mlflow, talking(mlflow.uri) as tracker:
        tracked = made(tracker)
        before = len(mlflow.requests)
        tracker.log(tracked, metrics=metrics, params=pairs, tags=pairs)
        assert len(mlflow.requests) - before == 3 + 3 + 3
        run = mlflow.run_of("01")
    assert [point.key for point in run.points] == [f"m{number}" for number in range(2001)]
    assert run.params == pairs
    assert run.tags.items() >= pairs.items()


def test_an_experiment_is_taken_by_its_identifier_or_is_mlflows_own_default() -> None:
    with FakeMlflow() as mlflow, talking(mlflow.uri) as tracker:
        mlflow.store.experiments["7"] = "seven"
        assert made(tracker, Tracking(experiment_id="7", experiment="ignored")).experiment_id == "7"
        assert made(tracker, Tracking()).experiment_id == "0"
        with pytest.raises(TrackerRefused, match=re.escape(golden("tracking.mlflow_rest.experiment-id-exists"))):
            made(tracker, Tracking(experiment_id="9"))


def test_a_run_that_nobody_knows_is_refused_with_the_variable_it_came_from() -> None:
    with FakeMlflow() as mlflow, talking(mlflow.uri) as tracker:
        for act in (made, lambda tracker, tracking: tracker.find(tracking, "01")):
            with pytest.raises(TrackerRefused, match=re.escape(golden("tracking.mlflow_rest.run-id-cafe"))):
                act(tracker, Tracking(run_id="cafe"))


def test_an_experiment_that_was_deleted_is_refused_with_what_to_do() -> None:
    with FakeMlflow() as mlflow, talking(mlflow.uri) as tracker:
        mlflow.store.experiments["1"] = EXPERIMENT.experiment
        mlflow.store.deleted.add("1")
        with pytest.raises(TrackerRefused) as caught:
            made(tracker)
    assert str(caught.value) == golden("tracking.mlflow_rest.experiment-users-ada", uri=mlflow.uri)


def test_an_experiment_that_somebody_makes_at_the_same_moment_is_theirs_and_ours() -> None:
    with FakeMlflow() as mlflow, talking(mlflow.uri) as tracker:
        mlflow.behave("loses", only="experiments/create")
        with pytest.raises(TrackerAway):
            made(tracker)
        mlflow.behave("answers")
        assert made(tracker).experiment_id == "1"


@pytest.mark.parametrize(
    ("userinfo", "environ", "header"),
    [
        ("", {}, ""),
        ("", {**NAMED, "MLFLOW_TRACKING_USERNAME": "ada", "MLFLOW_TRACKING_PASSWORD": "pä:s"}, "Basic ada:pä:s"),
        ("", {**NAMED, "MLFLOW_TRACKING_TOKEN": "t0ken"}, "Bearer t0ken"),
        # Nobody has named a server: this one is somebody else's choice.
        ("", {"MLFLOW_TRACKING_USERNAME": "ada", "MLFLOW_TRACKING_PASSWORD": "x"}, ""),
        ("", {"MLFLOW_TRACKING_TOKEN": "t0ken"}, ""),
        ("bob:s%20cret@", {"MLFLOW_TRACKING_TOKEN": "t0ken"}, "Basic bob:s cret"),
        ("", {"MLFLOW_TRACKING_URI": "http://bob:s3cret@HOST/"}, "Basic bob:s3cret"),
        ("", {"MLFLOW_TRACKING_URI": "http://elsewhere:5000", "MLFLOW_TRACKING_TOKEN": "t0ken"}, ""),
        ("", {"MLFLOW_TRACKING_URI": "http://bob:s3cret@elsewhere:5000"}, ""),
        ("", {"MLFLOW_TRACKING_URI": "sqlite:///mlflow.db", "MLFLOW_TRACKING_TOKEN": "t0ken"}, ""),
    ],
)
def test_credentials_are_the_callers_and_go_to_the_server_they_are_for(
    userinfo: str, environ: dict[str, str], header: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    if header.startswith("Basic "):
        header = "Basic " + base64.b64encode(header.removeprefix("Basic ").encode()).decode()
    with FakeMlflow() as mlflow:
        host = mlflow.uri.removeprefix("http://")
        environ = {name: value.replace("HOST", host) for name, value in environ.items()}
        with talking(f"http://{userinfo}{host}", environ) as tracker:
            tracked = made(tracker)
        assert set(mlflow.authorizations) == {header}
    assert "s3cret" not in repr(tracked)
    assert "s cret" not in repr(tracked)


def test_the_file_in_which_mlflow_keeps_credentials_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".mlflow").mkdir()
    (tmp_path / ".mlflow" / "credentials").write_text(
        "[mlflow]\nmlflow_tracking_username = ada\nmlflow_tracking_password = 100%\n"
    )
    with FakeMlflow() as mlflow:
        for environ in ({}, {"MLFLOW_TRACKING_URI": mlflow.uri}):
            with talking(mlflow.uri, environ) as tracker:
                made(tracker)
        # Not to a server that the caller did not name: it is the home's own, or one of ours.
        assert mlflow.authorizations[0] == ""
        assert mlflow.authorizations[-1] == "Basic " + base64.b64encode(b"ada:100%").decode()


@pytest.mark.parametrize("name", ["MLFLOW_TRACKING_AUTH", "MLFLOW_TRACKING_AWS_SIGV4"])
def test_plugins_of_mlflow_are_refused_in_a_sentence(name: str) -> None:
    sentence = f"{name} needs an MLflow plugin, which serverless-gpu cannot load"
    named = {"MLFLOW_TRACKING_URI": "http://127.0.0.1:9"}
    with (
        talking("http://127.0.0.1:9", {**named, name: "true"}) as tracker,
        pytest.raises(TrackerRefused, match=sentence),
    ):
        made(tracker)


@pytest.mark.parametrize(
    "address", ["", "databricks", "sqlite:////tmp/mlflow.db", "file:///x", "http://[::1", "http://"]
)
def test_what_is_no_address_of_a_server_is_refused(address: str) -> None:
    with talking(address) as tracker, pytest.raises(TrackerRefused):
        made(tracker)


def test_a_password_that_is_wrong_is_refused_with_what_to_set() -> None:
    with FakeMlflow() as mlflow, talking(mlflow.uri) as tracker:
        mlflow.behave("forbids")
        with pytest.raises(TrackerRefused) as caught:
            made(tracker)
    assert str(caught.value) == golden("tracking.mlflow_rest.mlflow-cannot-used", uri=mlflow.uri)


@pytest.mark.parametrize(
    ("answer", "kind", "text"),
    [
        (
            b"HTTP/1.1 302 Found\r\nLocation: http://u:p@login/?next\r\n\r\n",
            TrackerRefused,
            "the server answers 302 (to http://login)",
        ),
        (b"HTTP/1.1 404 Not Found\r\n\r\nnginx", TrackerRefused, "the server answers 404: nginx"),
        (b"HTTP/1.1 429 Slow down\r\n\r\n", TrackerAway, "answers 429"),
        (b"HTTP/1.1 503 No\r\n\r\n<html>\n busy", TrackerAway, "answers 503: <html> busy"),
        (b"HTTP/1.1 501 No\r\n\r\nnever", TrackerRefused, "the server answers 501: never"),
        (b"HTTP/1.1 200 OK\r\n\r\n[]", TrackerRefused, "the answer does not have MLflow's format ("),
        (b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * (1 << 21), TrackerRefused, "the answer is longer than 1048576 bytes"),
        (b"", TrackerAway, "does not answer ("),
        (b"SSH-2.0-OpenSSH_9.6\r\n", TrackerAway, "does not answer ("),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{", TrackerAway, "does not answer ("),
    ],
)
def test_answers_that_are_not_mlflows(answer: bytes, kind: type[Exception], text: str) -> None:
    with one_answer(answer) as address, talking(address) as tracker, pytest.raises(kind) as caught:
        made(tracker)
    assert text in str(caught.value)
    assert str(caught.value).startswith(f"MLflow at {address} ")
    assert "u:p" not in str(caught.value)


def test_an_answer_that_comes_byte_by_byte_is_given_up() -> None:
    with (
        dripping() as address,
        closing(RestClient(address, {})) as rest,
        pytest.raises(TrackerAway, match=r"too slowly|within"),
    ):
        rest.call("GET", "mlflow/runs/get", answer=dict, timeout_s=0.2)


def test_files_go_through_the_servers_own_store_and_nowhere_else() -> None:
    with FakeMlflow() as mlflow, talking(mlflow.uri) as tracker:
        tracked = made(tracker)
        tracker.upload(tracked, "sgpu/a b/ü?%.txt", b"x")
        assert mlflow.run_of("01").files == {"sgpu/a b/ü?%.txt": b"x"}
        for elsewhere in (
            "s3://bucket/1",
            "file:///mlruns",
            "mlflow-artifacts://other:1/1/x/artifacts",
            "",
            "http://o/x",
        ):
            other = TrackerRun(run_id="x", experiment_id="1", uri=tracked.uri, url="", artifacts=elsewhere)
            with pytest.raises(TrackerRefused, match="accepts no files"):
                tracker.upload(other, "a", b"x")
        root = tracked.artifacts.replace("mlflow-artifacts:", f"{mlflow.uri}/api/2.0/mlflow-artifacts/artifacts")
        tracker.upload(TrackerRun(run_id="x", experiment_id="1", uri=tracked.uri, url="", artifacts=root), "b", b"y")
        assert mlflow.run_of("01").files["b"] == b"y"


def test_an_identifier_cannot_break_out_of_a_filter() -> None:
    with FakeMlflow() as mlflow, talking(mlflow.uri) as tracker:
        made(tracker)
        with pytest.raises(TrackerRefused, match=re.escape(golden("tracking.mlflow_rest.identifier-run"))):
            tracker.find(EXPERIMENT, "x' OR '1' = '1")


def test_addresses_lose_what_is_secret() -> None:
    assert split_userinfo("https://u:p@h:1/mlflow/?token=x#y") == ("https://h:1/mlflow", "u:p")
    assert split_userinfo(" http://h ") == ("http://h", "")


@pytest.mark.parametrize(
    ("address", "environ", "proxy"),
    [
        ("http://mlflow.corp:5000", {"HTTP_PROXY": "http://proxy:3128"}, "http://proxy:3128"),
        ("https://mlflow.corp", {"https_proxy": "proxy:3128", "HTTP_PROXY": "other"}, "http://proxy:3128"),
        ("https://mlflow.corp", {"HTTP_PROXY": "other"}, None),
        ("http://mlflow.corp:5000", {"http_proxy": "p", "NO_PROXY": "x,.corp"}, None),
        ("http://mlflow.corp:5000", {"http_proxy": "p", "no_proxy": "mlflow.corp:5000"}, None),
        ("http://mlflow.corp:5000", {"http_proxy": "p", "no_proxy": "*"}, None),
        ("http://mlflow.corp:5000", {"http_proxy": "p", "no_proxy": "low.corp"}, "http://p"),
        ("http://127.0.0.1:5000", {"http_proxy": "p"}, None),
        ("http://mlflow.corp", {"ALL_PROXY": "http://p"}, "http://p"),
    ],
)
def test_the_callers_proxy_is_used(address: str, environ: dict[str, str], proxy: str | None) -> None:
    assert proxy_for(address, environ) == proxy


@contextmanager
def one_answer(answer: bytes) -> Iterator[str]:
    """Yield the address of a server that answers every connection with these bytes and closes it."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection, suppress(OSError):  # whoever has read enough hangs up
                    connection.recv(1 << 16)
                    connection.sendall(answer)
                    connection.shutdown(socket.SHUT_WR)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)
        thread.join(10)


@contextmanager
def dripping() -> Iterator[str]:
    """Yield the address of a server whose answer never ends."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        over = threading.Event()

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
                while not over.wait(0.02):
                    try:
                        connection.sendall(b" ")
                    except OSError:
                        return

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        over.set()
        thread.join(10)


@pytest.mark.parametrize(
    "environ",
    [
        {"MLFLOW_TRACKING_TOKEN": "top-secret\n"},
        {"MLFLOW_TRACKING_TOKEN": "top-secret-é"},
        {"ALL_PROXY": "socks5://me:top-secret@proxy:1080"},
        {"ALL_PROXY": "gopher://me:top-secret@proxy:70"},
        {"ALL_PROXY": "http://me:top-secret@proxy\x01/"},
    ],
)
def test_what_makes_no_request_is_refused_and_not_shown(environ: dict[str, str]) -> None:
    with FakeMlflow() as mlflow:  # a proxy is not asked about this machine's own addresses
        uri = "http://mlflow.test:5000" if "ALL_PROXY" in environ else mlflow.uri
        with talking(uri, {"MLFLOW_TRACKING_URI": uri, **environ}) as tracker, pytest.raises(TrackerRefused) as refused:
            made(tracker)
    assert str(refused.value).startswith(f"cannot send a request to MLflow at {uri}: ")
    assert "secret" not in str(refused.value)


def test_an_address_that_makes_no_request_is_refused() -> None:
    with talking("http://mlflow\x01/") as tracker, pytest.raises(TrackerRefused, match="cannot send a request"):
        made(tracker)


def test_what_a_server_says_does_nothing_to_a_terminal() -> None:
    evil = "\x1b]0;owned\x07\x1b[31m\n\r\u202e"
    with FakeMlflow() as mlflow, talking(mlflow.uri) as tracker, pytest.raises(TrackerRefused) as caught:
        made(tracker, Tracking(experiment_id=evil))
    said = f"MLflow at {mlflow.uri} answers 404: No Experiment with id= ]0;owned [31m exists"
    assert str(caught.value) == golden("tracking.mlflow_rest.mlflow-experiment-id", said=said)


@pytest.mark.parametrize("identifier", ["", "a\0b", "a\nb", "ä", "x" * 300])
def test_an_identifier_that_cannot_be_a_variable_is_refused(identifier: str) -> None:
    with FakeMlflow() as mlflow, talking(mlflow.uri) as tracker:
        mlflow.store.runs["m"] = FakeRun(identifier, "0", {})
        with pytest.raises(TrackerRefused, match=re.escape(golden("tracking.mlflow_rest.identifiers-mlflow"))):
            tracker.find(Tracking(run_id="m"), "01")
