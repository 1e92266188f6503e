"""Where a call is tracked: variables, an MLflow the caller has imported, and what never goes into a spec."""

from __future__ import annotations

import sys
import types
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest

from serverless_gpu.client import mlflow_context
from serverless_gpu.client.mlflow_context import (
    RemoteTracking,
    TrackingResolution,
    TrackingStore,
    place_of,
    resolve,
    with_tracking,
)
from serverless_gpu.model.spec import Command, RunSpec, Tracking
from tests.support.golden import golden

SPEC = RunSpec(name="train")
SERVER = "http://10.1.2.3:5000"
ELSEWHERE = RemoteTracking(is_elsewhere=True, is_beside=False, mlflow=lambda: SERVER)
RUN, OTHER_RUN = "a" * 32, "b" * 32


class Driver:
    """An MLflow that the caller has imported, as far as we look at it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.run: tuple[object, object] | None = None
        self.uri, self.is_set = "sqlite:////home/a/mlflow.db", False
        self.fluent = types.ModuleType("mlflow.tracking.fluent")
        self.service = types.ModuleType("mlflow.tracking._tracking_service.utils")
        self.fluent.active_run = self._active_run  # type: ignore[attr-defined]  # a module is made
        self.service.get_tracking_uri = lambda: self.uri  # type: ignore[attr-defined]  # a module is made
        self.service.is_tracking_uri_set = lambda: self.is_set  # type: ignore[attr-defined]  # a module is made
        self.set_experiment(None)
        for module in (types.ModuleType("mlflow"), self.fluent, self.service):
            monkeypatch.setitem(sys.modules, module.__name__, module)

    def set_experiment(self, experiment_id: object) -> None:
        self.fluent._active_experiment_id = experiment_id  # type: ignore[attr-defined]  # a module is made

    def _active_run(self) -> object:
        if self.run is None:
            return None
        run_id, experiment_id = self.run
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id=run_id, experiment_id=experiment_id))


@pytest.fixture(autouse=True)
def without_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have no MLflow loaded, nor any said once."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "mlflow"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(mlflow_context, "_shown_notices", set())
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Have an environment with MLflow, which must not be imported."""
    package = tmp_path / "site" / "mlflow"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise AssertionError('imported')")
    monkeypatch.syspath_prepend(str(package.parent))
    return package


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    return Driver(monkeypatch)


def found(environ: Mapping[str, str], spec: RunSpec = SPEC, arguments: Mapping[str, object] | None = None) -> Tracking:
    resolved = resolve(spec, arguments or {}, environ)
    assert resolved.tracking is not None
    assert resolved.sentence == ""
    return resolved.tracking


# --- whether ----------------------------------------------------------------------------------------------------------


def test_without_mlflow_nothing_is_tracked_and_nothing_is_said() -> None:
    assert resolve(SPEC, {}, {"MLFLOW_TRACKING_URI": SERVER}) == TrackingResolution(None)


def test_a_directory_that_is_called_mlflow_is_no_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mlflow").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert resolve(SPEC, {}, {}) == TrackingResolution(None)


@pytest.mark.usefixtures("installed")
def test_an_environment_with_mlflow_is_tracked_at_home_and_mlflow_is_not_imported() -> None:
    told = found({})
    assert (told.uri, told.store, told.run_id, told.parent_id, told.experiment_id) == ("", "", "", "", "")
    assert "mlflow" not in sys.modules


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("spec", "environ"),
    [
        (RunSpec(tracking=False), {}),
        (SPEC, {"SERVERLESS_GPU_TRACKING": "0"}),
        (SPEC, {"SGPU_RUN_ID": "r1"}),
    ],
    ids=["option", "variable", "in a rank"],
)
def test_it_can_be_switched_off(spec: RunSpec, environ: dict[str, str]) -> None:
    environ |= {"MLFLOW_TRACKING_URI": SERVER}
    assert resolve(spec, {}, environ, ELSEWHERE) == TrackingResolution(None)


def test_a_finder_that_fails_is_no_mlflow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)  # as some switch it off
    assert resolve(SPEC, {}, {}) == TrackingResolution(None)


# --- where ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("uri", "place"),
    [
        (SERVER, TrackingStore(uri=SERVER)),
        (f" {SERVER}/ ", TrackingStore(uri=SERVER)),
        ("https://me:word@mlflow.example.org/base/?token=x#y", TrackingStore(uri="https://mlflow.example.org/base")),
        ("http://[::1]:5000", TrackingStore(uri="http://[::1]:5000")),
        ("sqlite:////data/mlflow.db", TrackingStore(store="sqlite:////data/mlflow.db")),
        ("sqlite:///mlflow.db", TrackingStore(store="sqlite:////here%20now/mlflow.db")),
        ("sqlite:///./a/../mlflow.db?timeout=3", TrackingStore(store="sqlite:////here%20now/mlflow.db?timeout=3")),
        ("file:///data/mlruns", TrackingStore(store="/data/mlruns")),
        ("file://localhost/data/mlruns", TrackingStore(store="/data/mlruns")),
        ("file:mlruns", TrackingStore(store="/here now/mlruns")),
        ("./mlruns", TrackingStore(store="/here now/mlruns")),
        ("/data/ml%20runs", TrackingStore(store="/data/ml%20runs")),
        ("file:///data/ml%20runs", TrackingStore(store="/data/ml runs")),
    ],
)
def test_a_uri_means_a_server_or_a_store(uri: str, place: TrackingStore) -> None:
    assert place_of(uri, "/here now") == place


@pytest.mark.parametrize(
    "uri",
    [
        "databricks",
        "databricks://profile",
        "databricks-uc",
        "postgresql://me:word@db/mlflow",
        "uc:https://x",
        "gs://b/x",
    ],
)
@pytest.mark.usefixtures("installed")
def test_what_only_mlflow_can_speak_to_is_left_to_it_and_said_without_a_password(uri: str) -> None:
    resolved = resolve(SPEC, {}, {"MLFLOW_TRACKING_URI": uri})
    assert resolved.tracking is None
    assert "MLflow's own client" in resolved.sentence
    assert "word" not in resolved.sentence


@pytest.mark.parametrize(
    "uri",
    [
        "http://",
        "http://host:port",
        "https:///x",
        "http://h\u00f6st",
        "sqlite://",
        "sqlite:///:memory:",
        "file://host/x",
        "http://a\nb",
        "http://" + "a" * 3000,
    ],
)
def test_what_is_no_address_is_said(uri: str) -> None:
    place = place_of(uri, "/here")
    assert (place.uri, place.store) == ("", "")
    assert "run tracking is disabled" in place.problem


def test_what_the_caller_should_know_is_said_once(
    installed: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "databricks")
    assert with_tracking(RunSpec(quiet=True)).tracker is None
    assert capsys.readouterr().err == ""
    assert with_tracking(SPEC).tracker is with_tracking(SPEC).tracker is None
    assert capsys.readouterr().err.count("databricks") == 1
    monkeypatch.setenv("MLFLOW_TRACKING_URI", SERVER)
    told = with_tracking(SPEC).tracker
    assert told is not None and told.uri == SERVER


def test_variables_name_experiment_and_run(installed: Path) -> None:
    told = found({"MLFLOW_TRACKING_URI": SERVER, "MLFLOW_EXPERIMENT_NAME": "/Team/digits"})
    assert (told.uri, told.experiment, told.experiment_id) == (SERVER, "/Team/digits", "")
    told = found({"MLFLOW_TRACKING_URI": SERVER, "MLFLOW_EXPERIMENT_ID": "17", "MLFLOW_RUN_ID": RUN})
    assert (told.experiment, told.experiment_id, told.run_id) == ("", "17", RUN)
    told = found({"MLFLOW_EXPERIMENT_ID": "../1", "MLFLOW_RUN_ID": "a/../b"})
    assert (told.experiment_id, told.run_id) == ("", "")
    assert told.experiment.startswith("/Users/")


@pytest.mark.usefixtures("installed")
def test_the_default_experiment_is_named_after_user_and_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlflow_context, "user_name", lambda: "DOMAIN\\eve")
    monkeypatch.setitem(sys.modules, "__main__", types.SimpleNamespace(__file__="/home/eve/fit.py"))
    told = found({})
    assert told.experiment == "/Users/DOMAIN_eve/fit"
    assert told.tags["mlflow.user"] == "DOMAIN\\eve"
    assert told.tags["mlflow.source.name"] == "/home/eve/fit.py"
    command = RunSpec(payload=Command(argv=(sys.executable, "sweep.py")))
    assert found({}, command).experiment == "/Users/DOMAIN_eve/sweep"


@pytest.mark.usefixtures("installed")
def test_the_commit_of_the_program_is_among_the_tags(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "__main__", types.SimpleNamespace(__file__=str(Path(__file__).resolve())))
    told = found({})
    assert len(told.tags["mlflow.source.git.commit"]) == 40


# --- the caller's own MLflow ------------------------------------------------------------------------------------------


def test_an_mlflow_that_was_only_imported_changes_nothing(driver: Driver) -> None:
    told = found({})
    assert (told.uri, told.store, told.experiment_id) == ("", "", "")


def test_an_active_run_is_the_parent_in_its_own_store(driver: Driver) -> None:
    driver.run = (RUN, "3")
    told = found({})
    assert (told.store, told.parent_id, told.experiment_id, told.run_id) == (driver.uri, RUN, "3", "")


def test_a_run_the_caller_names_is_continued_and_not_nested(driver: Driver) -> None:
    driver.run = (RUN, "3")
    for named in (RUN, OTHER_RUN):
        told = found({"MLFLOW_RUN_ID": named})
        assert (told.run_id, told.parent_id) == (named, "")


def test_set_tracking_uri_and_set_experiment_of_the_caller_count(driver: Driver) -> None:
    driver.uri, driver.is_set = f"{SERVER}/", True
    driver.set_experiment("8")
    told = found({"MLFLOW_EXPERIMENT_NAME": "another"})
    assert (told.uri, told.experiment_id, told.experiment) == (SERVER, "8", "")


def test_an_experiment_set_in_the_default_store_is_looked_for_there(driver: Driver) -> None:
    driver.set_experiment("8")
    told = found({})
    assert (told.store, told.experiment_id) == (driver.uri, "8")


@pytest.mark.parametrize("name", ["MLFLOW_RUN_ID", "MLFLOW_EXPERIMENT_ID"])
def test_23A2_a_run_or_experiment_that_a_variable_names_is_looked_for_in_the_store_of_the_callers_mlflow(
    driver: Driver, name: str
) -> None:
    assert not driver.is_set
    told = found({name: RUN})
    assert told.store == driver.uri and RUN in (told.run_id, told.experiment_id)
    assert found({name: RUN, "MLFLOW_TRACKING_URI": SERVER}).uri == SERVER


def test_a_variable_wins_over_what_was_set_before_it_but_not_over_an_active_run(driver: Driver) -> None:
    driver.uri, driver.is_set = "http://other:5000", True
    assert found({"MLFLOW_TRACKING_URI": SERVER}).uri == SERVER
    driver.run = (RUN, "3")
    assert found({"MLFLOW_TRACKING_URI": SERVER}).uri == "http://other:5000"


@pytest.mark.parametrize("broken", ["active_run", "get_tracking_uri", "is_tracking_uri_set"])
def test_an_mlflow_of_another_version_tells_less(driver: Driver, broken: str) -> None:
    driver.run = (RUN, "3")
    module = driver.fluent if broken == "active_run" else driver.service
    delattr(module, broken)
    told = found({})
    assert (told.uri, told.store, told.parent_id) == ("", "", "")


def test_what_an_mlflow_says_is_not_believed_blindly(driver: Driver) -> None:
    driver.run = ("../x", object())
    driver.set_experiment(object())
    told = found({})
    assert (told.parent_id, told.experiment_id) == ("", "")


# --- through a server -------------------------------------------------------------------------------------------------


def no_question() -> str:
    raise AssertionError("the server was asked for its MLflow")


def test_a_servers_own_mlflow_is_for_those_who_configured_nothing(installed: Path) -> None:
    resolved = resolve(SPEC, {}, {}, ELSEWHERE)
    assert resolved.tracking is not None and resolved.tracking.uri == SERVER
    environ = {"MLFLOW_TRACKING_URI": "http://mine:5000"}
    resolved = resolve(SPEC, {}, environ, RemoteTracking(True, False, no_question))
    assert resolved.tracking is not None and resolved.tracking.uri == "http://mine:5000"


@pytest.mark.parametrize("said", ["sqlite:////etc/x.db", "/etc", "file:///etc", "ftp://x", "http://", "\x1b[31m"])
def test_what_a_server_calls_its_mlflow_and_is_no_address_of_one_is_left_out(said: str) -> None:
    assert resolve(SPEC, {}, {}, RemoteTracking(True, False, lambda: said)).tracking is None


def test_credentials_in_what_a_server_calls_its_mlflow_are_left_out() -> None:
    found = resolve(SPEC, {}, {}, RemoteTracking(True, False, lambda: "http://me:you@there:5000/x?y=z")).tracking
    assert found is not None and found.uri == "http://there:5000/x"


def test_a_servers_own_mlflow_needs_none_in_the_environment() -> None:
    resolved = resolve(SPEC, {}, {}, ELSEWHERE)
    assert resolved.tracking is not None and resolved.tracking.uri == SERVER
    assert resolve(SPEC, {}, {}, RemoteTracking(True, False, lambda: "")) == TrackingResolution(None)


@pytest.mark.usefixtures("installed")
def test_a_run_far_away_that_nobody_has_a_place_for_is_not_tracked_and_that_is_said() -> None:
    resolved = resolve(SPEC, {}, {}, RemoteTracking(True, False, lambda: ""))
    assert resolved.tracking is None
    assert "sgpu up --mlflow" in resolved.sentence
    beside = resolve(SPEC, {}, {}, RemoteTracking(True, True, lambda: ""))
    assert beside.tracking is not None and (beside.tracking.uri, beside.sentence) == ("", "")


def test_a_store_of_this_machine_is_not_for_runs_elsewhere(driver: Driver) -> None:
    driver.run = (RUN, "3")
    environ = {"MLFLOW_EXPERIMENT_ID": "3", "MLFLOW_EXPERIMENT_NAME": "/Team/digits"}
    resolved = resolve(SPEC, {}, environ, ELSEWHERE)
    assert resolved.tracking is not None
    told = resolved.tracking
    assert (told.uri, told.store, told.parent_id, told.experiment_id) == (SERVER, "", "", "")
    assert told.experiment == "/Team/digits"
    assert golden("client.tracked_calls.machine") in resolved.sentence
    here = resolve(SPEC, {}, environ, RemoteTracking(False, True, no_question))
    assert here.tracking is not None and here.tracking.store == driver.uri


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]"])
def test_an_address_that_means_something_else_on_each_machine_is_said(host: str) -> None:
    environ = {"MLFLOW_TRACKING_URI": f"http://{host}:5000"}
    assert "cannot reach" in resolve(SPEC, {}, environ, ELSEWHERE).sentence
    assert resolve(SPEC, {}, environ).sentence == ""


# --- what is written down ---------------------------------------------------------------------------------------------


def test_nothing_secret_and_nothing_that_cannot_be_sent_gets_into_a_spec(
    installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "__main__", types.SimpleNamespace(__file__="/home/a\udc80b/fit.py"))
    environ = {
        "MLFLOW_TRACKING_URI": "https://me:word@mlflow.example.org",
        "MLFLOW_TRACKING_PASSWORD": "word",
        "MLFLOW_TRACKING_TOKEN": "word",
        "MLFLOW_EXPERIMENT_NAME": "a\udc80b",
    }
    told = found(environ, arguments={"lr": 0.1, "api_key": "word", "config": {"hf_token": "word"}})
    assert told.params == {"call.lr": "0.1"}
    assert b"word" not in msgspec.json.encode(msgspec.structs.replace(SPEC, tracker=told))


def test_arguments_that_raise_cost_the_arguments(installed: Path) -> None:
    class Rude(list[object]):
        def __len__(self) -> int:
            raise RuntimeError("nobody asks me")

    assert found({}, arguments={"x": Rude([object()])}).params == {}
