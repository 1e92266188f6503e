"""How a rank learns of the job's MLflow run, and what it may write there; MLflow itself is not needed."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import math
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from serverless_gpu.node.inside.mlflow import hook
from serverless_gpu.node.inside.mlflow import job as mlflow_job
from serverless_gpu.node.inside.mlflow.job import MlflowJob
from serverless_gpu.node.inside.mlflow.writes import HELD_MAX, Batch, HeldWrites, Writes
from tests.support.golden import golden
from tests.support.node.mlflow_job import VARIABLES

READY = {mlflow_job.URI: "http://m", mlflow_job.RUN: "r1", mlflow_job.EXPERIMENT: "7"}


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start from, and come back to, an environment without MLflow's variables."""
    for name in (*VARIABLES, "_MLFLOW_SERVER_ARTIFACT_ROOT"):
        monkeypatch.setenv(name, "")  # so that it is restored, also where the test sets it by itself
        monkeypatch.delenv(name)


@pytest.fixture
def attempt(tmp_path: Path) -> Path:
    """Return an attempt's directory."""
    directory = tmp_path / "runs" / "a" / "1"
    directory.mkdir(parents=True)
    return directory


def say(attempt: Path, state: str, environ: dict[str, str] | None = None, sentence: str = "") -> None:
    """Write the file as the monitor does."""
    said = {"state": state, "environ": environ or {}, "sentence": sentence}
    (attempt / "new").write_text(json.dumps(said))
    (attempt / "new").rename(attempt / mlflow_job.FILE)


def test_a_ready_run_is_taken_on(attempt: Path) -> None:
    say(attempt, "ready", READY)
    job = MlflowJob(str(attempt), 0)
    assert job.resolve()
    assert (job.run_id, job.experiment_id, job.uri) == ("r1", "7", "http://m")
    assert {name: os.environ[name] for name in READY} == READY


def test_what_user_code_has_changed_stays(attempt: Path) -> None:
    say(attempt, "ready", READY)
    job = MlflowJob(str(attempt), 0)
    os.environ[mlflow_job.URI] = "http://own"
    assert job.resolve() and job.changed(mlflow_job.URI)
    assert os.environ[mlflow_job.URI] == "http://own"
    assert mlflow_job.RUN not in os.environ, "it is not known there"


def test_the_callers_own_uri_is_kept_with_its_credentials(attempt: Path) -> None:
    os.environ[mlflow_job.URI] = "http://user:secret@m"
    say(attempt, "ready", {mlflow_job.RUN: "r1", mlflow_job.EXPERIMENT: "7"})
    job = MlflowJob(str(attempt), 0)
    assert job.resolve()
    assert job.uri == os.environ[mlflow_job.URI] == "http://user:secret@m"


def test_variables_that_came_with_the_rank_need_no_file(attempt: Path) -> None:
    os.environ.update(READY)
    job = MlflowJob(str(attempt), 0)
    assert job.resolve(60.0)
    assert job.run_id == "r1"


def test_a_pending_run_is_waited_for(attempt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    say(attempt, "pending")
    looks: list[float] = []

    def sleep(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 3:
            say(attempt, "ready", READY)

    monkeypatch.setattr("time.sleep", sleep)
    assert MlflowJob(str(attempt), 0).resolve(60.0)
    assert len(looks) == 3


@pytest.mark.parametrize("state", ["failed", "away"])
def test_where_nobody_has_named_a_server_a_rank_without_its_run_writes_beside_the_attempt_and_not_where_it_works(
    attempt: Path, state: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """MLflow's own default is a database in the working directory: all ranks would make the same one at once."""
    say(attempt, state, sentence="no such run")
    for rank in range(2):
        job = MlflowJob(str(attempt), rank)
        assert not job.resolve(60.0)
        uri = os.environ.pop(mlflow_job.URI)
        assert f"{attempt}/mlflow/{rank}/" in uri and Path(attempt, "mlflow", str(rank)).is_dir()
    said, _ = capsys.readouterr().err.splitlines()
    assert golden("node.mlflow_job.such-run-rank") in said and f"{attempt}/mlflow/0/" in said


@pytest.mark.parametrize("state", ["failed", "away"])
@pytest.mark.parametrize("name", [mlflow_job.RUN, mlflow_job.EXPERIMENT])
def test_23A2_a_run_that_the_caller_names_and_nobody_finds_is_left_to_the_users_mlflow(
    attempt: Path, name: str, state: str, capsys: pytest.CaptureFixture[str]
) -> None:
    os.environ[name] = "theirs"
    say(attempt, state, sentence="no such run")
    job = MlflowJob(str(attempt), 0)
    assert not job.resolve(60.0)
    assert os.environ[name] == "theirs" and mlflow_job.URI not in os.environ
    assert golden("node.mlflow_job.such-run-mlflow") in capsys.readouterr().err


def test_a_rank_that_writes_beside_the_attempt_stays_there(attempt: Path) -> None:
    say(attempt, "away", sentence="it starts too slowly")
    job = MlflowJob(str(attempt), 0)
    assert not job.resolve(60.0)
    apart = os.environ[mlflow_job.URI]
    say(attempt, "ready", READY)
    job.resolve()
    assert os.environ[mlflow_job.URI] == apart and mlflow_job.RUN not in os.environ


def test_the_node_is_asked_for_the_run_once_its_server_answers(attempt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.environ[mlflow_job.URI] = "http://m"
    say(attempt, "away", sentence="it does not answer")
    job = MlflowJob(str(attempt), 0)
    assert not job.resolve(60.0) and job.is_away

    def sleep(_seconds: float) -> None:
        assert (attempt / mlflow_job.ASKED).exists()
        say(attempt, "ready", {mlflow_job.RUN: "r1", mlflow_job.EXPERIMENT: "7"})

    monkeypatch.setattr("time.sleep", sleep)
    assert job.ask() and job.run_id == "r1" and not job.is_away


def test_a_node_that_does_not_find_the_run_is_not_asked_every_time(
    attempt: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.environ[mlflow_job.URI] = "http://m"
    say(attempt, "away")
    job = MlflowJob(str(attempt), 0)
    assert not job.resolve()
    monkeypatch.setattr(mlflow_job, "BACK_S", 0.05)
    assert not job.ask()
    monkeypatch.setattr("time.sleep", lambda _: pytest.fail("it waits again"))
    assert not job.ask()


def test_a_tracker_that_is_known_to_be_away_is_not_waited_for_and_said_with_what_follows(
    attempt: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    os.environ[mlflow_job.URI] = "http://m"
    say(attempt, "away", sentence="MLflow at http://m does not answer (Connection refused)")
    monkeypatch.setattr("time.sleep", lambda _: pytest.fail("it waits"))
    jobs = [MlflowJob(str(attempt), rank) for rank in range(3)]
    assert not any(job.resolve(60.0) for job in jobs)
    line, _ = capsys.readouterr().err.splitlines()
    assert golden("node.mlflow_job.does-answer-connection") in line
    say(attempt, "ready", READY)
    assert all(job.resolve() for job in jobs)


def test_a_wait_that_is_felt_is_said_once(
    attempt: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    say(attempt, "pending", sentence="the home's MLflow server is starting")
    now = [1_000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])

    def sleep(seconds: float) -> None:
        now[0] += seconds
        if now[0] > 1_000.9:
            os.utime(attempt / mlflow_job.FILE)
        if now[0] > 1_003:
            say(attempt, "ready", READY)
        if now[0] <= 1_000.9:
            assert capsys.readouterr().err == "", "nobody feels that"

    monkeypatch.setattr("time.sleep", sleep)
    assert MlflowJob(str(attempt), 0).resolve(20.0)
    assert capsys.readouterr().err.splitlines() == [golden("node.mlflow_job.serverless-gpu-home")]


@pytest.mark.parametrize("state", ["failed", "pending", "nonsense"])
def test_one_that_nobody_is_at_work_on_is_said_once_and_looked_for_again(
    attempt: Path, capsys: pytest.CaptureFixture[str], state: str
) -> None:
    say(attempt, state, sentence="it refused")
    os.utime(attempt / mlflow_job.FILE, (1, 1))
    jobs = [MlflowJob(str(attempt), rank) for rank in range(3)]
    assert not any(job.resolve(60.0) for job in jobs)
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2 and "it refused" in said[0], "the first rank, and one of the others"
    say(attempt, "ready", READY)
    assert all(job.resolve() for job in jobs)


def test_a_file_that_never_appears(attempt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlflow_job, "APPEARS_S", 0.0)
    assert not MlflowJob(str(attempt), 0).resolve(60.0)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"state": "ready"}', '{"state": "ready", "environ": []}'])
def test_a_file_that_is_not_what_it_should_be(attempt: Path, content: str) -> None:
    (attempt / mlflow_job.FILE).write_text(content)
    assert not MlflowJob(str(attempt), 0).resolve()


def test_an_import_of_something_else_called_mlflow_is_left_alone(
    attempt: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user's own package of that name: imported as it is, with one finder on the path and nothing patched."""
    (tmp_path / "mlflow").mkdir()
    (tmp_path / "mlflow" / "__init__.py").write_text("value = 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("sys.meta_path", [*sys.meta_path])
    hook.install(str(attempt), 0)
    module = importlib.import_module("mlflow")
    del sys.modules["mlflow"]  # for good: other tests have none
    assert module.value == 3
    hook.settle(0.1)


class Refused(Exception):
    """As MLflow's: one that the server has given has a code."""

    def __init__(self, code: str) -> None:
        super().__init__(code)
        self.error_code = code


class Param:
    """As MLflow's."""

    def __init__(self, key: str, value: str) -> None:
        self.key, self.value = key, value


class Store:
    """As MLflow's: refuses a batch with a parameter that is there with another value."""

    def __init__(self) -> None:
        self.params: dict[str, str] = {}
        self.points: list[Any] = []
        self.calls = 0
        self.away = False

    def get_run(self, _run_id: str) -> Any:
        return SimpleNamespace(data=SimpleNamespace(params=dict(self.params)))

    def log_batch(self, run_id: str, metrics: Any, params: Any, tags: Any) -> None:
        del run_id, tags
        self.calls += 1
        if self.away:
            raise Refused("INTERNAL_ERROR")
        if "bad" in metrics or len({param.key for param in params}) < len(params):
            raise Refused("INVALID_PARAMETER_VALUE")
        if any(self.params.get(param.key, param.value) != param.value for param in params):
            raise Refused("INVALID_PARAMETER_VALUE")
        self.params.update((param.key, param.value) for param in params)
        self.points.extend(metrics)

    def log_metric(self, run_id: str, metric: Any) -> None:
        del run_id
        self.points.append(metric)

    def log_param(self, run_id: str, param: Any) -> None:
        self.log_batch(run_id, [], [param], [])


def patched(attempt: Path, rank: int, store: type[Store]) -> Writes:
    """Return the writes of a rank whose job's run is known, in front of a store."""
    say(attempt, "ready", READY)
    job = MlflowJob(str(attempt), rank)
    assert job.resolve()
    writes = Writes(job, Refused)
    writes.patch(store)
    return writes


@pytest.fixture
def store() -> type[Store]:
    """Return a store that may be patched."""
    return type("PatchedStore", (Store,), {})


def test_what_is_not_the_jobs_run_passes_untouched(attempt: Path, store: type[Store]) -> None:
    patched(attempt, 0, store)
    there = store()
    there.params = {"lr": "1"}
    with pytest.raises(Refused):
        there.log_batch("another", [], [Param("lr", "2")], [])
    with pytest.raises(Refused):
        there.log_param("another", Param("lr", "2"))


def test_a_parameter_that_differs_is_renamed_and_the_rest_of_its_batch_is_not(
    attempt: Path, store: type[Store], capsys: pytest.CaptureFixture[str]
) -> None:
    patched(attempt, 5, store)
    there = store()
    there.params = {"seed": "0", "x" * 250: "0"}
    batch = [Param("seed", "5"), Param("lr", "1"), Param("x" * 250, "5")]
    there.log_batch("r1", ["point"], batch, [])
    there.log_param("r1", Param("seed", "5"))
    assert there.points == ["point"]
    del there.params["x" * 250]
    assert there.params == {"seed": "0", "seed.rank5": "5", "lr": "1", "x" * 244 + ".rank5": "5"}
    assert capsys.readouterr().err.count("log different values") == 1


def test_other_refusals_are_the_users_to_see(attempt: Path, store: type[Store]) -> None:
    patched(attempt, 0, store)
    there = store()
    there.away = True
    with pytest.raises(Refused):
        there.log_batch("r1", ["point"], [Param("lr", "1")], [])


def in_background(work: Callable[[], object]) -> None:
    """Do what a thread of MLflow's asynchronous logging does."""
    thread = threading.Thread(target=work, name="MLflowBatchLoggingWorkerPool_0")
    thread.start()
    thread.join()


def log(store: Store, *batches: list[Any]) -> Callable[[], None]:
    """Return what logs batches of points."""

    def work() -> None:
        for batch in batches:
            store.log_batch("r1", batch, [], [])

    return work


def test_F44_what_ranks_log_while_the_server_does_not_answer_arrives_when_it_does(
    attempt: Path, store: type[Store], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(HeldWrites.__init__, "__defaults__", (HELD_MAX, 0.01))
    writes = patched(attempt, 0, store)
    there = store()
    there.away = True
    in_background(log(there, *([n] for n in range(100))))
    in_background(lambda: there.log_batch("r1", [], [Param("lr", "1")], []))
    assert not writes.wait(0.0) and there.points == []
    there.away = False
    assert writes.wait(30.0)
    assert there.points == [*range(100)] and there.params == {"lr": "1"} and writes.lost() == 0
    in_background(lambda: there.log_batch("r1", [100], [], []))
    assert there.points[-1] == 100, "at once, as before"
    said = capsys.readouterr().err
    assert said.count("MLflow does not answer. Each rank holds its newest") == 1
    assert said.count("MLflow answers again") == 1


def test_F44_a_server_that_stays_away_costs_the_background_one_time_out_and_the_rest_is_counted(
    attempt: Path, store: type[Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a queue of points would be worked off at one time-out each."""
    # A slow machine must not come to the next try.
    monkeypatch.setattr(HeldWrites.__init__, "__defaults__", (HELD_MAX, 600.0))
    writes = patched(attempt, 0, store)
    there = store()
    there.away = True
    in_background(log(there, *(["point"] * 10 for _ in range(100))))
    assert there.calls == 1 and writes.lost() == 0
    writes.give_up()
    assert writes.lost() == 1000
    in_background(lambda: there.log_batch("r1", ["point"] * 10, [], []))
    assert writes.lost() == 1010


def test_a_bad_value_takes_nothing_else_of_its_second_with_it(attempt: Path, store: type[Store]) -> None:
    """Asynchronous logging, our default, puts the calls of a second into one batch."""
    patched(attempt, 0, store)
    there = store()
    points = [*range(50), "bad", *range(50, 99)]
    refused: list[str] = []

    def work() -> None:
        try:
            there.log_batch("r1", points, [Param("lr", "1"), Param("lr", "1"), Param("lr", "2")], [])
        except Refused as error:
            refused.append(error.error_code)

    in_background(work)
    assert there.points == [*range(99)] and there.params == {"lr": "1"}
    assert refused == ["INVALID_PARAMETER_VALUE"], "MLflow's log says so"
    assert there.calls < 40


def test_a_parameter_that_is_logged_twice_in_a_second_is_logged(attempt: Path, store: type[Store]) -> None:
    patched(attempt, 0, store)
    there = store()
    in_background(lambda: there.log_batch("r1", [1], [Param("lr", "1"), Param("lr", "1")], []))
    assert there.points == [1] and there.params == {"lr": "1"} and there.calls == 1


def test_a_batch_of_nothing_but_bad_values_is_given_up(attempt: Path, store: type[Store]) -> None:
    patched(attempt, 0, store)
    there = store()
    refused = threading.Event()

    def work() -> None:
        try:
            there.log_batch("r1", ["bad"] * 1000, [], [])
        except Refused:
            refused.set()

    in_background(work)
    assert refused.is_set() and there.calls < 200


def test_F44_the_jobs_run_is_started_by_ranks_although_its_server_is_just_being_started_again(
    attempt: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    monkeypatch.setattr("time.sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    attached: Any = SimpleNamespace(refused=Refused, job=MlflowJob(str(attempt), 0), _patience_until=math.inf)
    tried: list[float] = []

    def start(answers_at: float) -> str:
        tried.append(now[0])
        if now[0] < answers_at:
            raise Refused("INTERNAL_ERROR")
        return "run"

    assert hook.MlflowHook.patiently(attached, lambda: start(40.0)) == "run"
    with pytest.raises(Refused):
        hook.MlflowHook.patiently(attached, lambda: start(1e9))
    assert 100.0 <= now[0] < 101.0, "one that stays away is given up"
    tried.clear()
    with pytest.raises(Refused):
        hook.MlflowHook.patiently(attached, lambda: start(1e9))
    assert len(tried) == 1, "and not waited for by each of many calls"
    assert hook.MlflowHook.patiently(attached, lambda: start(0.0)) == "run"
    later = now[0] + 5
    assert hook.MlflowHook.patiently(attached, lambda: start(later)) == "run", "another outage is another"
    assert capsys.readouterr().err.count("so start_run waits up to") == 1


def test_F44_what_is_held_is_bounded_the_newest_of_it_is_kept() -> None:
    sent: list[int] = []
    answers = threading.Event()
    back = threading.Event()
    held = HeldWrites(back.set, limit=30, again_s=0.001)

    def send(number: int) -> bool:
        if answers.is_set():
            sent.append(number)
        return answers.is_set()

    for number in range(100):
        held.keep(Batch(10, functools.partial(send, number)))
    answers.set()
    assert held.wait(30.0) and back.wait(30.0) and not held.is_away
    assert sent == [97, 98, 99] and held.lost == 970


def test_F44_a_batch_that_is_refused_later_does_not_hold_up_the_others(
    attempt: Path, store: type[Store], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(HeldWrites.__init__, "__defaults__", (HELD_MAX, 0.01))
    writes = patched(attempt, 0, store)
    there = store()
    there.away = True
    for number in range(2):
        in_background(functools.partial(there.log_batch, "r1", [], [Param("lr", str(number))], []))
    in_background(lambda: there.log_batch("r1", ["point"], [], []))
    there.away = False
    assert writes.wait(30.0)
    assert there.params == {"lr": "0"} and there.points == ["point"]
    assert golden("node.mlflow_job.does-take-rank") in capsys.readouterr().err
