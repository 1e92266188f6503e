"""A call through a scripted server: what its caller gets, whatever happens to the line."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import serverless_gpu
from serverless_gpu import distributed
from serverless_gpu.client.remote.profile import ServerProfile, write_profile
from serverless_gpu.errors import (
    IdempotencyConflict,
    InvalidValue,
    NodeLost,
    NotAllowed,
    RemoteError,
    RunCancelled,
    ServerNotConfigured,
    ServerUnavailable,
    UntrustedResult,
    UsageError,
)
from serverless_gpu.model.lifecycle.attempt import MEANINGS, Failure, Reason, State
from serverless_gpu.node.base.protocol import Stopped
from serverless_gpu.wire.runs import EndedMessage
from tests.support.golden import golden
from tests.support.local.observe import wait_for
from tests.support.remote.fake_server import TOKEN, FakeServer, until_it_is_said
from tests.support.remote.stream import pickled, play, train


def later(work: Callable[[], None]) -> threading.Thread:
    """Do something beside the test."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def test_a_call_is_one_request_and_feels_like_a_local_one(
    fake: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    play(fake.script(), tmp_path, 0.1)
    assert train.distributed(lr=0.1) == [0.1]
    out, err = capsys.readouterr()
    assert out == "[rank 0] step 1\n"
    assert "serverless-gpu: " in err and "1 × H100 (fake) · " in err and "verified free" in err
    fake.seen.clear()
    play(fake.script(), tmp_path, 0.2)
    assert train.distributed(lr=0.2) == [0.2]
    assert fake.seen == {"POST runs": 1}, "the second call knows the server already"


def test_a_handle_that_nobody_asks_opens_no_stream(fake: FakeServer, tmp_path: Path) -> None:
    script = fake.script()
    run = train.submit(0.5)
    assert fake.seen == {"POST runs": 1, "GET version": 1} and run.status() == "QUEUED"
    script.say(State.QUEUED, "needs 1 H100; bob/bert has it; you are 1st")
    assert run.waiting_for() == golden("remote.stream.needs-h100-bob")
    assert "GET runs/events" not in fake.seen
    play(script, tmp_path, 0.5)
    assert run.result() == 0.5 and run.status() == "SUCCEEDED" and run.receipt().gate
    assert run.logs() == "step 1\n" and run.logs(stream="stderr") == ""
    with pytest.raises(InvalidValue, match=re.escape(golden("remote.stream.only-rank"))):
        run.result(1)


def test_options_of_the_server_travel(fake: FakeServer, tmp_path: Path) -> None:
    script = fake.script()
    options = {"pool": "p", "team": "t", "priority": "CRITICAL", "tags": {"a": "b"}, "retries": 2, "resume": True}
    play_later = later(lambda: play(script, tmp_path))
    distributed(gpus=1, gpu_type="H100", remote=True, quiet=True, **options)(len).distributed("x")  # type: ignore[arg-type]  # written as a dictionary
    play_later.join()
    assert script.request is not None
    spec = script.request.spec
    assert (spec.pool, spec.team, spec.priority, spec.tags) == ("p", "t", "CRITICAL", {"a": "b"})
    assert (spec.retries, spec.resume, spec.environment) == (2, True, "live")


def test_what_was_asked_for_is_on_disk_before_it_is_sent(home: Path, fake: FakeServer) -> None:
    fake.refuse = NotAllowed("viewers run nothing")
    with pytest.raises(NotAllowed, match="viewers run nothing"):
        train.submit(0.1)
    assert [path for path in (home / "remote").iterdir() if path.name[0] != "."] == [], "nothing is left of it"
    fake.refuse = None
    fake.script()
    run = train.submit(0.1)
    assert (home / "remote" / run.id / "1" / "spec.json").exists()


def test_the_token_is_in_no_body_and_in_no_file(
    home: Path, fake: FakeServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SERVERLESS_GPU_TOKEN", "sgpu_test_secret")
    play(fake.script(), tmp_path)
    train.submit(0.1).results()
    assert all(b"sgpu_test_secret" not in body for body in fake.bodies)
    written = [path for path in (home / "remote").rglob("*") if path.is_file()]
    assert written and all(b"sgpu_test_secret" not in path.read_bytes() for path in written)


@pytest.mark.parametrize("watched", [True, False])
def test_F60_an_answer_that_got_lost_makes_no_second_run(fake: FakeServer, tmp_path: Path, watched: bool) -> None:
    play(fake.script(), tmp_path, 7)
    fake.lose = 2
    assert (train.distributed(0.1) if watched else train.submit(0.1).results()) == [7]
    assert fake.seen["POST runs"] == 3 and len(fake.runs) == 1


def test_F60_an_identifier_that_means_another_run_is_said(fake: FakeServer) -> None:
    fake.refuse = IdempotencyConflict("run 1 is another one")
    with pytest.raises(IdempotencyConflict):
        train.distributed(0.1)


def test_F65_a_proxy_that_resets_every_100_kB_costs_no_byte_and_repeats_none(
    fake: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = fake.script()
    lines = "".join(f"line {number} ä\n" for number in range(60_000))
    script.say(State.RUNNING)
    script.write(0, lines.encode())
    script.write(0, b"error\n", stream="stderr")
    script.end({"results/0.pkl": pickled(tmp_path, 1)})
    fake.cut_after = 100_000
    assert train.distributed(0.1) == [1]
    out, err = capsys.readouterr()
    assert out == "".join(f"[rank 0] {line}\n" for line in lines.splitlines())
    assert err.count("[rank 0] error\n") == 1 and "does not answer" not in err
    assert len(fake.queries) > 5


def test_a_restart_of_the_server_inside_a_call_is_one_line(
    fake: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = fake.script()
    script.say(State.RUNNING)
    script.write(0, b"before\n")

    def restart() -> None:
        while "POST runs" not in fake.seen:
            time.sleep(0.01)
        fake.stop()
        script.write(0, b"after\n")
        script.end({"results/0.pkl": pickled(tmp_path, 2)})
        printed.append(until_it_is_said(capsys))
        fake.start()

    printed: list[tuple[str, str]] = []
    thread = later(restart)
    assert train.distributed(0.1) == [2]
    thread.join()
    out, err = ("".join(parts) for parts in zip(*printed, capsys.readouterr(), strict=True))
    assert out == golden("remote.stream.rank-before-rank")
    away, back = (line for line in err.splitlines() if "answer" in line)
    assert away == golden("remote.stream.serverless-gpu-server", url=fake.url)
    assert back.startswith("serverless-gpu: " + golden("remote.server_away.server-back-after"))


@pytest.mark.parametrize("streams", [True, False], ids=["in a call", "by a handle"])
def test_a_server_that_comes_back_on_another_port_is_found_there(
    home: Path, fake: FakeServer, tmp_path: Path, streams: bool
) -> None:
    script = fake.script()
    script.say(State.RUNNING)

    def restart() -> None:
        while "POST runs" not in fake.seen:
            time.sleep(0.01)
        fake.stop()
        script.end({"results/0.pkl": pickled(tmp_path, 2)})
        fake.port = 0
        fake.start()
        write_profile(home, ServerProfile(url=fake.url, token=TOKEN, principal="alice", embedded=True))

    before = fake.url
    if streams:
        thread = later(restart)
        assert train.distributed(0.1) == [2]
        thread.join()
    else:
        run = train.submit(0.1)
        restart()
        assert run.status() in ("RUNNING", "SUCCEEDED"), "it answers"
        assert run.results() == [2]
    assert fake.url != before


def test_a_call_that_waits_does_not_go_to_another_server_that_somebody_logged_in_to(
    home: Path, fake: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERVERLESS_GPU_PATIENCE", "0.5")
    fake.script()
    run = train.submit(0.1)
    fake.stop()
    with FakeServer() as other:
        write_profile(home, ServerProfile(url=other.url, token="sgpu_another", principal="alice"))
        with pytest.raises(ServerUnavailable, match="does not answer"):
            run.status()
        assert not other.seen


def test_a_server_that_the_variables_name_is_where_they_say(
    home: Path, fake: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERVERLESS_GPU_PATIENCE", "0.5")
    monkeypatch.setenv("SERVERLESS_GPU_SERVER", fake.url)
    monkeypatch.setenv("SERVERLESS_GPU_TOKEN", TOKEN)
    fake.script()
    run = distributed(gpus=1, gpu_type="H100", remote=True, env="live")(pickled).submit(home, 1)
    fake.stop()
    with FakeServer() as other:
        write_profile(home, ServerProfile(url=other.url, token=TOKEN, principal="alice"))
        with pytest.raises(ServerUnavailable, match="does not answer"):
            run.status()
        assert not other.seen


def test_F66_results_are_waited_for_while_the_server_is_down(
    fake: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = fake.script()
    run = train.submit(0.1)
    play(script, tmp_path, 3)
    fake.stop()

    def start_again() -> None:
        printed.append(until_it_is_said(capsys))
        fake.start()

    printed: list[tuple[str, str]] = []
    thread = later(start_again)
    assert run.results() == [3]
    thread.join()
    err = printed[0][1] + capsys.readouterr().err
    assert err.count("serverless-gpu: ") == 2 and golden("remote.stream.does-answer-waiting") in err
    assert err.splitlines()[-1].startswith("serverless-gpu: the server answers again")


def test_patience_has_an_end_and_the_run_goes_on(fake: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVERLESS_GPU_PATIENCE", "0.5")
    script = fake.script()
    run = train.submit(0.1)
    fake.stop()
    with pytest.raises(ServerUnavailable, match=golden("remote.stream.answered-does-answer")):
        run.results()
    assert script.stops == []


def test_large_payloads_and_results_go_through_the_store_of_the_server(fake: FakeServer, tmp_path: Path) -> None:
    script = fake.script(world_size=2)
    data = bytes(range(256)) * 70_000  # 18 MB: two parts

    @distributed(gpus=2, gpu_type="H100", remote=True, quiet=True)
    def send(given: bytes) -> bytes:
        return given

    run = send.submit(data)
    assert script.request is not None and script.request.call is None
    payload_of = script.request.spec.payload
    assert len(fake.blobs) == 2 and sum(map(len, fake.blobs.values())) == payload_of.call.size  # type: ignore[union-attr]  # it is a Function
    fake.script(world_size=2)
    send.submit(data)
    assert fake.seen["PUT blobs"] == 2, "what is there is not sent again"
    script.say(State.RUNNING)
    script.end({f"results/{rank}.pkl": pickled(tmp_path, data[rank:]) for rank in range(2)}, inline_max=0)
    assert run.result(1) == data[1:]
    assert not (run.directory / "results" / "0.pkl").exists(), "the other is not fetched before it is asked for"
    assert run.result(0) == data


def test_another_attempt_is_said_and_its_results_count(
    fake: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = fake.script()
    script.say(State.RUNNING)
    script.write(0, b"first\n")
    script.say(State.QUEUED, "node n1 went away; it is tried again")
    script.fence = 2
    script.say(State.RUNNING, node="n2")
    script.write(0, b"second\n")
    script.end({"results/0.pkl": pickled(tmp_path, "second")})
    run = train.submit(0.1)
    assert run.follow() is None and run.results() == ["second"]
    assert run.directory.name == "2"
    out, err = capsys.readouterr()
    assert out == golden("remote.stream.rank-first-rank")
    assert golden("remote.stream.node-n1-went") in err and golden("remote.stream.attempt-run", id=run.id) in err


def test_a_flood_is_said_to_be_elsewhere(fake: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = fake.script()
    script.say(State.RUNNING)
    script.gaps[1, 0, "stdout"] = (6, 5_006)
    script.write(0, b"start\n" + b"x" * 5_000 + b"\nend\n")
    script.end({"results/0.pkl": pickled(tmp_path, 1)})
    run = train.submit(0.1)
    assert run.follow() is None
    out, err = capsys.readouterr()
    assert "[rank 0] start\n" in out and "[rank 0] end\n" in out and "xxx" not in out
    assert golden("remote.stream.kb-shown-too", id=run.id) in err


def test_a_failure_names_its_node_and_where_the_output_is(fake: FakeServer) -> None:
    script = fake.script()
    script.say(State.RUNNING, node="gpu-7")
    failure = Failure(rank=0, reason=Reason.RANK_RAISED, at_ns=1, detail="ZeroDivisionError: division by zero")
    script.end(
        {"failures/0.json": b'{"kind":"exception","type":"ZeroDivisionError","message":"division by zero"}'},
        stopped=Stopped(state=State.FAILED, reason=Reason.RANK_RAISED, cause=failure, consequences=()),
    )
    with pytest.raises(RemoteError, match="division by zero") as caught:
        train.distributed(0.1)
    run_id = next(iter(fake.runs))
    assert caught.value.__notes__[0] == golden("remote.stream.rank-host-gpu", run_id=run_id)


def test_a_node_that_never_came_back_is_the_servers_word(fake: FakeServer) -> None:
    script = fake.script()
    script.say(State.UNREACHABLE, "node n1 has not been heard of for 61 s")
    with script.changed:
        script.events.append(
            EndedMessage(
                seq=2,
                fence=1,
                state=State.LOST,
                reason=Reason.NODE_GONE,
                sentence="n1 was last heard of at 12:00:00",
            )
        )
        script.changed.notify_all()
    script.settle(Stopped(state=State.LOST, reason=Reason.NODE_GONE, cause=None, consequences=()), receipt=False)
    with pytest.raises(NodeLost) as caught:
        train.distributed(0.1)
    assert caught.value.message == golden("remote.stream.n1-last-heard", sentence=MEANINGS[Reason.NODE_GONE].sentence)


# --- whose code it is -------------------------------------------------------------------------------------------------


class Detonating:
    """Loading it leaves a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("failed", [False, True])
def test_what_somebody_else_returned_is_not_loaded_unless_they_are_trusted(
    fake: FakeServer, tmp_path: Path, failed: bool
) -> None:
    trace = tmp_path / "trace"
    script = fake.known("theirs", owner="bob")
    script.say(State.RUNNING)
    data = pickled(tmp_path, Detonating(trace))
    if failed:
        cause = Failure(rank=0, reason=Reason.RANK_RAISED, at_ns=1, detail="Boom")
        ended = Stopped(state=State.FAILED, reason=Reason.RANK_RAISED, cause=cause, consequences=())
        record = b'{"kind":"exception","type":"Boom","message":"","pickled":true}'
        script.end({"failures/0.json": record, "failures/0.pkl": data}, stopped=ended)
    else:
        script.end({"results/0.pkl": data})
    trace.unlink(missing_ok=True)
    with pytest.raises((UntrustedResult, RemoteError), match="belongs to bob") as caught:
        serverless_gpu.attach("theirs").results()
    assert not trace.exists()
    if not failed:
        assert isinstance(caught.value, UntrustedResult) and "allow_pickle_from='bob'" in caught.value.hint
        serverless_gpu.attach("theirs", allow_pickle_from="bob").results()
        assert trace.exists()


def test_files_that_no_run_has_are_not_written(home: Path, fake: FakeServer, tmp_path: Path) -> None:
    script = fake.script()
    evil = {"../../../evil.txt": b"x", "/tmp/evil": b"x", "results/../0.pkl": b"x", "call.pkl": b"x"}
    script.end({**evil, "results/0.pkl": pickled(tmp_path, 1)})
    run = train.submit(0.1)
    assert run.results() == [1]
    names = {str(path.relative_to(home / "remote" / run.id)) for path in (home / "remote" / run.id).rglob("*.*")}
    assert names == {"1/spec.json", "1/stopped.json", "1/results/0.pkl"}


# --- handles ----------------------------------------------------------------------------------------------------------


def test_a_run_is_found_again_by_its_id(home: Path, fake: FakeServer, tmp_path: Path) -> None:
    script = fake.script()
    run = train.submit(0.1)
    found = serverless_gpu.attach(run.id)
    assert found.status() == "QUEUED" and not found.wait(0)
    play(script, tmp_path, 5)
    assert found.results() == [5] == run.results()
    with pytest.raises(InvalidValue, match=re.escape(golden("remote.stream.run-unknown"))):
        serverless_gpu.attach("unknown")


def test_runs_come_in_the_order_in_which_they_end(fake: FakeServer, tmp_path: Path) -> None:
    scripts = [fake.script() for _ in range(3)]
    runs = train.map([0.1, 0.2, 0.3])
    order = []
    for script, value in zip(reversed(scripts), "cba", strict=True):
        play(script, tmp_path, value)
        for run in serverless_gpu.as_completed([run for run in runs if run not in order]):
            order.append(run)
            break
    assert [run.result() for run in order] == ["c", "b", "a"] and order == runs[::-1]


def test_cancel_is_asked_for_and_fine_when_it_is_too_late(fake: FakeServer, tmp_path: Path) -> None:
    script = fake.script()
    run = train.submit(0.1)
    script.say(State.RUNNING)
    run.cancel()
    with pytest.raises(RunCancelled):
        run.results()
    run.cancel()
    assert script.stops == ["cancel"]


def test_a_handle_that_is_given_up_leaves_the_run_alone(fake: FakeServer) -> None:
    script = fake.script()
    run = train.submit(0.1)
    assert run.wait(0.1) is False
    names = [thread.name for thread in threading.enumerate()]
    assert f"serverless-gpu-run-{run.id}" in names
    gone = f"serverless-gpu-run-{run.id}"
    del run
    script.say(State.RUNNING)  # the next sign of life
    wait_for(lambda: gone not in [thread.name for thread in threading.enumerate()], "nobody listens any more")
    assert script.stops == []


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_sessions_are_of_this_machine(fake: FakeServer) -> None:
    with pytest.raises(UsageError, match=re.escape(golden("remote.stream.session-holds-devices"))):
        serverless_gpu.session(gpus=1, gpu_type="H100", remote=True)  # type: ignore[call-arg]  # an option of `distributed`


def test_a_function_of_the_server_is_not_called_in_a_session(own_session: serverless_gpu.Session) -> None:
    with pytest.raises(UsageError, match=re.escape(golden("remote.stream.train-remote-true"))):
        own_session.distributed(train, 0.1)


@pytest.fixture
def own_session(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[serverless_gpu.Session]:
    """Yield a session of this machine."""
    monkeypatch.setenv("SERVERLESS_GPU_FAKE", "H100:1")
    with serverless_gpu.session(gpus=1, gpu_type="H100", quiet=True) as session:
        yield session


def test_without_a_server_it_says_how_to_get_one(home: Path) -> None:
    with pytest.raises(ServerNotConfigured, match="none is configured") as caught:
        train.distributed(0.1)
    assert "sgpu up" in caught.value.hint


def test_a_token_is_not_sent_readably_over_a_network(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVERLESS_GPU_SERVER", "http://gpus.example.org")
    monkeypatch.setenv("SERVERLESS_GPU_TOKEN", "sgpu_x")
    with pytest.raises(InvalidValue, match=re.escape(golden("remote.stream.would-carry-token"))):
        train.distributed(0.1)
    monkeypatch.delenv("SERVERLESS_GPU_TOKEN")
    with pytest.raises(ServerNotConfigured, match="SERVERLESS_GPU_TOKEN is not"):
        train.distributed(0.1)
