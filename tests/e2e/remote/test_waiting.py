"""What a caller who waits is told, and what not."""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path
from queue import Queue

import msgspec
import pytest

import serverless_gpu
from serverless_gpu import distributed
from serverless_gpu.ambient import SystemClock
from serverless_gpu.client.remote.profile import ServerProfile, write_profile
from serverless_gpu.errors import NotAuthenticated
from serverless_gpu.model.lifecycle.attempt import State
from serverless_gpu.model.scheduling.values import DeviceHolder, Wait, WaitReason
from serverless_gpu.wire.agents import NOT_SENT
from serverless_gpu.wire.queue import WaitView, wait_view
from serverless_gpu.wire.runs import StateMessage
from tests.support.golden import golden
from tests.support.local.observe import wait_for
from tests.support.remote.fake_server import FakeServer, Script
from tests.support.remote.stream import pickled


@distributed(gpus=1, gpu_type="H100", remote=True)
def train(lr: float) -> object:
    """Return what it is given."""
    return lr


def test_F43_results_that_do_not_get_on_are_said_to_who_waits_and_progress_is_not(
    fake: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = fake.script()
    script.say(State.RUNNING)
    script.say(State.STOPPING, "sending results to the server: 16.8 MB of 200 MB")
    script.say(State.STOPPING, f"{NOT_SENT}the server has no space to store this")
    script.end({"results/0.pkl": pickled(tmp_path, 1)})
    run = train.submit(0.1)
    assert run.follow() is None and run.results() == [1]
    err = capsys.readouterr().err
    assert golden("remote.waiting.serverless-gpu-server", NOT_SENT=NOT_SENT) in err and "16.8 MB of" not in err


def waits(script: Script, waiting: WaitView, sentence: str) -> None:
    """Be told by the server that the run waits."""
    with script.changed:
        number = len(script.events) + 1
        message = StateMessage(seq=number, fence=0, state=State.QUEUED, sentence=sentence, waiting=waiting)
        script.events.append(message)
        script.changed.notify_all()


def test_a_wait_is_told_with_the_times_of_whoever_reads_it(
    fake: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TZ", "Asia/Kolkata")
    time.tzset()
    at_ns = (SystemClock().wall_ns() // 86_400_000_000_000 + 3_653) * 86_400_000_000_000  # midnight at Greenwich
    holder = DeviceHolder(title="alice/bert-ft", count=3, until_ns=at_ns, is_bound=True)
    wait = Wait(
        run_id="", reason=WaitReason.CAPACITY, count=8, gpu_type="H100", node="n3", free=5, holders=(holder,), place=2
    )
    script = fake.script()
    waits(script, wait_view(wait), "alice/bert-ft holds 3 until 00:00 at the latest")
    script.say(State.RUNNING)
    script.end({"results/0.pkl": pickled(tmp_path, 1)})
    try:
        assert train.submit(0.1).follow() is None
        line = capsys.readouterr().err.splitlines()[0]
    finally:
        monkeypatch.delenv("TZ")
        time.tzset()
    assert line.startswith("serverless-gpu: needs 8 H100 on one node; 5 free on n3; alice/bert-ft holds 3 until ")
    assert line.endswith(" 05:30 at the latest; you are 2nd")


def test_what_a_newer_server_says_of_a_wait_is_said_in_its_words(
    fake: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = fake.script()
    waits(script, WaitView(reason="moonlight", place=3), "waits for the moon")
    script.say(State.RUNNING)
    script.end({"results/0.pkl": pickled(tmp_path, 1)})
    assert train.submit(0.1).follow() is None
    assert capsys.readouterr().err.splitlines()[0] == golden("remote.waiting.serverless-gpu-waits")


def test_a_token_that_is_revoked_meanwhile_leaves_a_run_that_is_named(
    fake: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERVERLESS_GPU_PATIENCE", "1")
    script = fake.script()
    script.say(State.RUNNING)
    run = train.submit(0.1)
    assert run.status() == "RUNNING"
    fake.refuse_tokens = True
    fake.break_streams()
    with pytest.raises(NotAuthenticated) as caught:
        run.results()
    assert (
        golden("local.edges.run-goes", id=run.id) in caught.value.hint and f"sgpu cancel {run.id}" in caught.value.hint
    )


def test_F67_a_token_that_ends_meanwhile_is_said_and_the_same_wait_goes_on_with_another_one(
    fake: FakeServer, home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = fake.script()
    script.say(State.RUNNING)
    script.write(0, b"first\n")
    answers: Queue[object] = Queue()

    def call() -> None:
        try:
            answers.put(train.distributed(0.1))
        except BaseException as error:  # noqa: BLE001 - the test says which one
            answers.put(error)

    waits = threading.Thread(target=call, daemon=True)
    waits.start()
    said: list[str] = []
    shown: list[str] = []

    def tells(text: str) -> bool:
        out, err = capsys.readouterr()
        shown.append(out)
        said.append(err)
        return text in "".join(shown) + "".join(said)

    wait_for(lambda: tells("first"), "the run goes on")
    fake.token = "another"
    fake.break_streams()
    wait_for(lambda: tells(f"store a new token with `sgpu login {fake.url}` in a terminal"), "it is said what to do")
    script.write(0, b"second\n")
    somebody_else = ServerProfile(url=fake.url, token="another", principal="bob", embedded=True)
    write_profile(home, somebody_else)
    asked = fake.seen["GET runs/events"]
    threading.Event().wait(1.0)
    assert waits.is_alive() and fake.seen["GET runs/events"] == asked  # who one is then is not who asked for the run
    write_profile(home, msgspec.structs.replace(somebody_else, principal="alice"))
    script.end({"results/0.pkl": pickled(tmp_path, 1)}, inline_max=0)
    waits.join(60)
    assert answers.get_nowait() == [1]
    assert fake.seen["POST runs"] == 1
    shown.append(capsys.readouterr().out)
    assert "".join(shown) == golden("remote.stream.rank-first-rank")


def test_F67_a_token_that_ends_before_the_results_are_here_is_waited_for(
    fake: FakeServer, home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = fake.script()
    script.say(State.RUNNING)
    run = train.submit(0.1)
    assert run.status() == "RUNNING"
    script.end({"results/0.pkl": pickled(tmp_path, 1)}, inline_max=0)
    assert run.status() == "SUCCEEDED"
    fake.token = "another"
    login = threading.Timer(
        1.0, lambda: write_profile(home, ServerProfile(url=fake.url, token="another", principal="alice", embedded=True))
    )
    login.start()
    assert run.results() == [1]
    assert "sgpu login" in capsys.readouterr().err


def test_F67_a_token_that_ended_before_a_call_refuses_it_at_once(fake: FakeServer) -> None:
    fake.script().say(State.RUNNING)
    assert train.submit(0.1).status() == "RUNNING"
    fake.token = "another"
    fake.script()
    with pytest.raises(NotAuthenticated):
        train.submit(0.1)
    assert len(fake.runs) == 1


def test_F67_ctrl_c_ends_the_wait_for_another_token(fake: FakeServer, tmp_path: Path) -> None:
    script = fake.script()
    script.say(State.RUNNING)
    run = train.submit(0.1)
    assert run.status() == "RUNNING"
    fake.token = "another"
    fake.break_streams()
    main = threading.main_thread().ident
    assert main is not None
    interrupt = threading.Timer(1.0, lambda: signal.pthread_kill(main, signal.SIGINT))
    interrupt.start()
    with pytest.raises(KeyboardInterrupt):
        run.results()


def test_a_run_that_has_ended_is_never_said_to_wait(fake: FakeServer, tmp_path: Path) -> None:
    script = fake.script()
    run_id = train.submit(0.1).id
    script.say(State.RUNNING)
    script.end({"results/0.pkl": pickled(tmp_path, 1)})
    fake.pause_s = 0.05
    assert serverless_gpu.attach(run_id).status() == "SUCCEEDED"
