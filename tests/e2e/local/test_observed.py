"""Attempts as a monitor sees them, through a real supervisor: what it is told, and what ranks, watchers and the receipt
get of what it says. The monitor is a fake; the real one has its own tests."""

from __future__ import annotations

import functools
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from serverless_gpu import distributed, runtime
from serverless_gpu.ambient import SystemClock
from serverless_gpu.client.launch import launch
from serverless_gpu.client.launch.preflight import pack
from serverless_gpu.errors import RunTimedOut
from serverless_gpu.model.lifecycle.attempt import Reason, State
from serverless_gpu.model.receipt import DeviceUse, Receipt
from serverless_gpu.model.spec import Command, RunSpec, Tracking
from serverless_gpu.node.agent.connection import connect
from serverless_gpu.node.attempt.submission import write_submission
from serverless_gpu.node.base import protocol
from serverless_gpu.node.base.home import Home
from serverless_gpu.node.inside import payload
from serverless_gpu.node.inside.channel import Channel
from serverless_gpu.node.monitor import messages
from tests.support.golden import golden
from tests.support.local.observe import wait_for
from tests.support.node.fake_monitor import FakeMonitor

TRACKED = messages.TrackedNote(
    run_id="m1",
    url="http://127.0.0.1:5000/#/experiments/1/runs/m1",
    environ={"MLFLOW_RUN_ID": "m1", "MLFLOW_TRACKING_URI": "http://127.0.0.1:5000"},
)
THERE = Tracking(uri="http://127.0.0.1:5000")


def mlflow_variables() -> dict[str, str]:
    """Return what a rank's MLflow reads."""
    return {name: value for name, value in os.environ.items() if name.startswith("MLFLOW_")}


def answers(word: messages.AnyMonitorMessage) -> tuple[messages.MonitorMessage, ...]:
    """Say where the run is tracked, and see its devices work."""
    if isinstance(word, messages.Observe):
        return (TRACKED,)
    if isinstance(word, messages.Ranks):
        uses = tuple(DeviceUse(uuid=device.uuid, samples=40, busy_percent=87.0) for device in word.devices)
        return (
            messages.AttemptSample(uses=uses, busy=True),
            messages.UserSentence(sentence="12 points dropped", note=True),
        )
    return ()


@pytest.fixture
def monitor(own: Path) -> Iterator[FakeMonitor]:
    made = FakeMonitor(Home(own).sockets(), answers).serve()
    yield made
    made.close()


def launched(home: Path, spec: RunSpec) -> tuple[protocol.Launch, list[protocol.AnyMessage]]:
    """Run something on two fakes; return the launch and everything its supervisor said."""
    channel, greeting = connect(Home(home))
    order = launch.LaunchOrder(msgspec.structs.replace(spec, quiet=True), SystemClock().boottime_ns())
    message = msgspec.structs.replace(
        launch.make_message(order, Home(home), greeting), candidates=greeting.devices[:2], world_size=2
    )
    Home(home).make_attempt(message.run_id, message.fence)
    write_submission(message, greeting.version)
    pack(str(Path(message.directory) / "call.pkl"), mlflow_variables, (), {})
    protocol.send(channel, message)
    return message, said(channel)


def said(channel: Channel) -> list[protocol.AnyMessage]:
    """Return everything up to the end."""
    channel.sock.settimeout(60)
    heard = []
    with channel.sock:
        while (received := protocol.receive(channel)) is not None:
            heard.append(received[0])
    return heard


def receipt_of(heard: list[protocol.AnyMessage]) -> Receipt:
    """Return the receipt."""
    return next(message.receipt for message in heard if isinstance(message, protocol.Finished))


def test_a_run_is_observed_from_its_launch_to_its_receipt(
    own: Path, monitor: FakeMonitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "9")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://elsewhere")
    message, heard = launched(own, RunSpec(name="seen", tracker=THERE))
    variables = payload.load(f"{message.directory}/results/1.pkl")
    assert isinstance(variables, dict)
    assert {name: value for name, value in variables.items() if name not in TRACKED.environ} == {
        "MLFLOW_HTTP_REQUEST_TIMEOUT": "9",
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
        "MLFLOW_DISABLE_TELEMETRY": "true",
    }
    assert [m for m in heard if isinstance(m, protocol.Tracked)] == [protocol.Tracked(run_id="m1", url=TRACKED.url)]
    assert protocol.WaitingNote(sentence="12 points dropped") in heard
    receipt = receipt_of(heard)
    assert (receipt.tracked, receipt.notes) == (TRACKED.url, ("12 points dropped",))
    assert [(use.samples, use.uuid) for use in receipt.uses] == [(40, uuid) for uuid in receipt.gpus]
    wait_for(lambda: monitor.all(messages.Settled), "the supervisor has said all")
    assert [type(word) for word in monitor.heard] == [
        messages.Observe,
        messages.Ranks,
        messages.EndingNote,
        messages.Settled,
    ]
    (observe,), (ranks,), (ending,) = (
        monitor.all(kind) for kind in (messages.Observe, messages.Ranks, messages.EndingNote)
    )
    assert (
        isinstance(observe, messages.Observe)
        and isinstance(ranks, messages.Ranks)
        and isinstance(ending, messages.EndingNote)
    )
    assert (observe.run_id, observe.directory, observe.world_size) == (message.run_id, message.directory, 2)
    assert observe.environ["MLFLOW_TRACKING_URI"] == "http://elsewhere"
    assert "HOME" not in observe.environ
    assert (sorted(ranks.pids), [device.uuid for device in ranks.devices]) == ([0, 1], list(receipt.gpus))
    assert (ending.state, ending.reason) == (State.SUCCEEDED, Reason.COMPLETED)


def test_F44_without_a_monitor_a_run_is_as_it_was(own: Path) -> None:
    nobody = FakeMonitor(Home(own).sockets())
    nobody.die()
    try:
        message, heard = launched(own, RunSpec(name="unseen"))
        assert payload.load(f"{message.directory}/results/0.pkl") == {}
        receipt = receipt_of(heard)
        assert (receipt.state, receipt.tracked, receipt.uses, receipt.notes) == ("SUCCEEDED", "", (), ())
    finally:
        nobody.close()


def test_a_program_waits_until_it_is_known_where_it_is_tracked(own: Path, monitor: FakeMonitor) -> None:
    argv = ("python", "-c", "import os; print(os.environ['MLFLOW_RUN_ID'])")
    message, heard = launched(own, RunSpec(name="program", tracker=THERE, payload=Command(argv=argv)))
    assert receipt_of(heard).state == "SUCCEEDED", heard
    assert (Path(message.directory) / "logs" / "1.stdout").read_text() == "m1\n"


def test_a_monitor_that_is_killed_while_ranks_run_is_followed_by_another(own: Path, monitor: FakeMonitor) -> None:
    channel, greeting = connect(Home(own))
    order = launch.LaunchOrder(RunSpec(name="goes on", quiet=True, tracker=THERE), SystemClock().boottime_ns())
    wait = ("python", "-c", "import os,time\nwhile not os.path.exists('go'): time.sleep(.01)")
    message = msgspec.structs.replace(
        launch.make_message(order, Home(own), greeting), candidates=greeting.devices[:1], world_size=1
    )
    message = msgspec.structs.replace(
        message,
        spec=msgspec.structs.replace(message.spec, payload=Command(argv=wait)),
        context=msgspec.structs.replace(message.context, cwd=str(own)),
    )
    Home(own).make_attempt(message.run_id, message.fence)
    write_submission(message, greeting.version)
    protocol.send(channel, message)
    wait_for(lambda: monitor.all(messages.Ranks), "the ranks run")
    monitor.die()
    second = FakeMonitor(Home(own).sockets(), answers).serve()
    try:
        wait_for(lambda: second.all(messages.Ranks), "the next monitor knows of them")
        (own / "go").touch()
        assert receipt_of(said(channel)).tracked == TRACKED.url
        wait_for(lambda: second.all(messages.Settled), "the supervisor has said all")
        assert [type(word) for word in second.heard] == [
            messages.Observe,
            messages.Ranks,
            messages.EndingNote,
            messages.Settled,
        ]
    finally:
        second.close()


def do_nothing(begun: Path) -> None:
    """Wait, and save when asked to."""
    begun.touch()
    while not runtime.should_stop():
        time.sleep(0.01)
    print("asked to stop:", runtime.stop_reason())


def idle_answers(begun: Path, word: messages.AnyMonitorMessage) -> Iterator[messages.MonitorMessage]:
    """See devices that do nothing once user code has begun, again and again."""
    while isinstance(word, messages.Ranks):
        time.sleep(0.05)  # as a sampler does
        yield messages.AttemptSample(uses=(), busy=not begun.exists())


def test_a_run_that_leaves_its_devices_idle_is_warned_of_and_stopped_and_may_save_first(
    own: Path, tmp_path: Path
) -> None:
    begun = tmp_path / "begun"
    monitor = FakeMonitor(Home(own).sockets(), functools.partial(idle_answers, begun)).serve()
    try:
        run = distributed(gpus=1, gpu_type="H100", idle_timeout=1.5, quiet=True)(do_nothing).submit(begun)
        with pytest.raises(RunTimedOut, match=re.escape(golden("local.observed.did-nothing-long"))) as stopped:
            run.results()
        assert stopped.value.reason == "idle" and "idle_timeout=" in str(stopped.value)
        receipt = run.receipt()
        assert (receipt.state, receipt.reason) == ("TIMED_OUT", "idle")
        assert any(note.startswith("the run stopped because no device was busy for ") for note in receipt.notes)
        assert [line.strip() for line in run.logs().splitlines()] == [golden("local.observed.asked-stop-idle")]
    finally:
        monitor.close()
