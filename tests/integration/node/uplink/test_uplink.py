"""A node and its server: orders become runs, and the server hears everything of them."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path

import msgspec
import pytest
from blake3 import blake3

from serverless_gpu import distributed
from serverless_gpu.ambient import machine
from serverless_gpu.client.caller_context import caller_context
from serverless_gpu.client.launch.preflight import pack
from serverless_gpu.model.lifecycle.attempt import Reason, State, StopReason
from serverless_gpu.model.spec import BlobReference, Command, Function, RunSpec
from serverless_gpu.node.attempt.history import read_ending
from serverless_gpu.node.monitor import messages
from serverless_gpu.node.uplink import start_stop
from serverless_gpu.node.uplink.start_stop import ensure, running, stop_all
from serverless_gpu.testing import FakeGpus
from serverless_gpu.wire.agents import Stop
from tests.support.golden import golden
from tests.support.local.observe import announced, wait_for
from tests.support.local.ranks import stay
from tests.support.node.agent_server import TOKEN
from tests.support.node.fake_monitor import FakeMonitor
from tests.support.node.node import Node


def hello(text: str) -> str:
    """Say something in a rank."""
    print(text, flush=True)
    return text


def fail(text: str) -> None:
    """Fail in a rank."""
    raise ValueError(text)


def flood(lines: int) -> None:
    """Write faster than any screen shows."""
    for _ in range(lines):
        os.write(1, b"x" * 999 + b"\n")


def large(size: int) -> bytes:
    """Return many bytes."""
    return b"x" * size


def test_22C9_orders_that_come_together_are_acknowledged_together(node: Node) -> None:
    numbers = range(1, 51)
    for seq in numbers:
        node.server.send(Stop(seq=seq, run_id="of-nobody", fence=1, reason=StopReason.CANCEL))
    wait_for(lambda: node.server.acknowledged.issuperset(numbers), "all are acknowledged")
    assert node.server.acknowledgements < len(numbers)


def test_an_order_becomes_a_run_whose_output_results_facts_and_receipt_reach_the_server(node: Node) -> None:
    attempt = node.run(hello, "from the node", ranks=2).settled()
    assert attempt.reason is Reason.COMPLETED and attempt.ending is not None and attempt.ending.began
    assert attempt.ending.state is State.SUCCEEDED
    assert attempt.logs["0.stdout"] == attempt.logs["1.stdout"] == b"from the node\n"
    assert set(attempt.files) == {"results/0.pkl", "results/1.pkl"}
    assert attempt.facts[0] == "reserved" and "freed" in attempt.facts.values()
    assert attempt.receipt is not None and attempt.receipt["gate"].startswith("2 GPUs verified free")
    wait_for(lambda: node.standing(attempt) == "settled", "the node knows that the server has everything")
    wait_for(lambda: attempt.start.seq in node.server.acknowledged, "the order is acknowledged, beside the reports")
    last = attempt.reports[-1]
    assert last.exec_ns is not None and last.gpus == ("FAKE-H100-0", "FAKE-H100-1")


def test_a_flood_that_the_server_has_is_not_noted_as_one_that_was_not_shown(node: Node) -> None:
    attempt = node.run(flood, 8_000).settled()
    assert len(attempt.logs["0.stdout"]) == 8_000_000
    assert attempt.receipt is not None and not [note for note in attempt.receipt["notes"] if "not shown" in note]


def test_a_failure_reaches_the_server_with_the_ending(node: Node) -> None:
    attempt = node.run(fail, "no luck").settled()
    assert attempt.reason is Reason.RANK_RAISED
    assert {"failures/0.json", "failures/0.pkl"} <= set(attempt.files)
    assert b"no luck" in attempt.logs.get("0.stderr", b"") or b"no luck" in (
        attempt.files["failures/0.json"].inline or b""
    )


def test_what_the_node_says_of_itself_is_what_a_local_client_would_find(node: Node) -> None:
    wait_for(lambda: node.server.heartbeats, "it is heard of")
    said = node.server.hellos[0]
    assert said.machine == machine() and said.python == f"{sys.version_info.major}.{sys.version_info.minor}"
    assert [device.uuid for device in said.devices if device.type == "H100"] == [f"FAKE-H100-{n}" for n in range(8)]
    assert said.unavailable == () and said.problem == ""
    assert said.python in said.pythons and said.pythons == node.server.heartbeats[-1].pythons
    assert said.instance == node.server.heartbeats[-1].instance == (node.server.home / "instance").read_text()


def test_devices_that_others_have_or_that_are_in_quarantine_are_named(node: Node, where: str) -> None:
    local = distributed(gpus=2, quiet=True)(stay).submit(where)
    announced(Path(where), "rank1")
    FakeGpus(node.server.home).set("FAKE-H100-7", memory_used_bytes=1 << 30, processes={4711: 1 << 30})
    taken = {"FAKE-H100-0", "FAKE-H100-1", "FAKE-H100-7"}
    beats = node.server.heartbeats
    wait_for(lambda: beats and set(beats[-1].unavailable) == taken, "they are named")
    own = node.run(stay, where, ranks=1)
    own.running()
    count = len(node.server.heartbeats)
    wait_for(lambda: len(node.server.heartbeats) > count + 1, "it is heard of again")
    assert set(node.server.heartbeats[-1].unavailable) == taken, "what the server gave is the server's knowledge"
    assert [seen.run_id for seen in node.server.heartbeats[-1].attempts] == [own.start.run_id]
    Path(where, "go").touch()
    assert local.results(timeout=60) == [0, 1]
    own.settled()


def test_an_order_that_comes_twice_is_one_run(node: Node, where: str) -> None:
    attempt = node.run(stay, where).running()
    node.server.again(attempt)
    Path(where, "go").touch()
    attempt.settled()
    node.server.again(attempt)
    node.run(hello, "later").settled()
    assert attempt.endings == 1 and sorted(os.listdir(where)) == ["go", "rank0"]


def test_what_this_node_does_not_have_is_refused_before_anything_runs(node: Node) -> None:
    attempt = node.run(hello, "a", gpu_type="A100").settled()
    assert attempt.reason is Reason.REFUSED and attempt.ending is not None and not attempt.ending.began
    stopped = msgspec.json.decode(bytes(attempt.ending.stopped or b""))
    assert "A100" in stopped["cause"]["detail"]
    assert attempt.receipt is not None and attempt.receipt["gate"] == "no device was reserved"


@pytest.mark.parametrize("way", ["order", "answer"])
def test_a_stop_reaches_the_ranks_with_its_reason(node: Node, where: str, way: str) -> None:
    attempt = node.run(stay, where).running()
    if way == "order":
        node.server.order_stop(attempt, StopReason.PREEMPT)
    else:
        attempt.stop = StopReason.PREEMPT
    attempt.settled()
    assert attempt.reason is Reason.PREEMPTED and State.STOPPING in attempt.states


def test_a_call_that_is_a_blob_is_fetched_and_a_large_result_becomes_one(node: Node, tmp_path: Path) -> None:
    size = 3 << 20
    pack(str(tmp_path / "call.pkl"), large, (size,), {})
    call = (tmp_path / "call.pkl").read_bytes()
    half = len(call) // 2
    parts = [call[:half], call[half:]]
    digests = tuple(blake3(part).hexdigest() for part in parts)
    node.server.parts.update(zip(digests, parts, strict=True))
    spec = RunSpec(payload=Function(call=BlobReference(size=len(call), parts=digests)))
    attempt = node.server.order(spec, None, msgspec.json.encode(caller_context())).settled()
    assert attempt.reason is Reason.COMPLETED
    blob = attempt.files["results/0.pkl"].blob
    assert blob is not None and blob.size > size
    assert b"x" * size in b"".join(node.server.parts[digest] for digest in blob.parts)


def test_a_command_needs_no_call(node: Node) -> None:
    spec = RunSpec(payload=Command(argv=("echo", "said by a program")))
    attempt = node.server.order(spec, None, msgspec.json.encode(caller_context())).settled()
    assert attempt.reason is Reason.COMPLETED and attempt.logs["0.stdout"] == b"said by a program\n"


def test_many_bytes_of_all_ranks_arrive_whole(node: Node) -> None:
    def write(lines: int, rank: int = 0) -> None:
        for number in range(lines):
            print(f"{rank}:{number}:{'x' * 80}")

    attempt = node.run(write, 30_000, ranks=2).settled()
    for rank in range(2):
        expected = "".join(f"{rank}:{number}:{'x' * 80}\n" for number in range(30_000)).encode()
        assert attempt.logs[f"{rank}.stdout"] == expected


def test_values_of_variables_are_in_no_file_and_the_token_in_no_command_line(
    node: Node, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    monkeypatch.setenv("A_SECRET", "s3cr3t-of-the-caller")
    attempt = node.run(stay, where).running()
    for path in node.home.root.rglob("*"):
        if path.is_file() and not path.is_symlink():
            with contextlib.suppress(FileNotFoundError):  # the run goes on, and replaces files of its own
                assert b"s3cr3t-of-the-caller" not in path.read_bytes(), path
    command = Path(f"/proc/{node.uplink().pid}/cmdline").read_bytes()
    assert TOKEN.encode() not in command
    Path(where, "go").touch()
    attempt.settled()


def test_one_uplink_runs_however_often_it_is_asked_for(node: Node) -> None:
    first = node.uplink()
    assert not ensure(node.home, node.server.profile, os.environ)
    assert node.uplink().pid == first.pid
    assert stop_all(node.home) == 1 and not first.alive()
    assert running(node.home, node.server.profile) is None and stop_all(node.home) == 0


def test_F16_a_stopped_uplink_leaves_its_runs_alone(node: Node, where: str) -> None:
    attempt = node.run(stay, where).running()
    rank, _ = announced(Path(where), "rank0")
    stop_all(node.home)
    assert rank.alive() and read_ending(node.directory(attempt)) is None
    Path(where, "go").touch()
    wait_for(lambda: read_ending(node.directory(attempt)), "it ends without anybody watching")
    assert attempt.ending is None
    node.restart()
    assert attempt.settled().reason is Reason.COMPLETED


def test_an_uplink_that_does_not_hear_is_killed_and_that_is_no_failure(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start_stop, "END_S", 0.3)
    uplink = node.uplink()
    uplink.send(signal.SIGSTOP)
    assert stop_all(node.home) == 1
    uplink.wait_gone()
    node.restart()
    assert node.run(hello, "again").settled().reason is Reason.COMPLETED


def test_a_server_names_no_directory_but_those_of_its_own_runs(node: Node) -> None:
    local = distributed(gpus=1, quiet=True)(hello).submit("local")
    assert local.results(timeout=60) == ["local"] and local.receipt(60).gate
    own = node.run(hello, "a", run_id=local.id)
    wait_for(lambda: own.ending is not None, "it is refused")
    assert own.reason is Reason.REFUSED and golden("node.uplink.one-node-own") in own.reports[0].sentence
    node.run(hello, "a", run_id="../../../tmp/elsewhere")
    wait_for(lambda: golden("node.uplink.attempt-name") in node.log(), "it is refused, too")
    assert not Path("/tmp/elsewhere").exists()
    assert local.results() == ["local"] and (local.directory / "receipt.json").exists()


def test_a_home_that_cannot_be_written_to_is_a_refusal_that_is_told(node: Node) -> None:
    node.home.runs.write_text("no directory")
    attempt = node.run(hello, "a")
    wait_for(lambda: attempt.ending is not None, "it is refused")
    node.home.runs.unlink()
    assert attempt.reason is Reason.REFUSED and "cannot write" in attempt.reports[0].sentence
    assert node.run(hello, "b").settled().reason is Reason.COMPLETED


def test_where_a_run_is_tracked_and_what_its_node_did_reach_the_server(node: Node, where: str) -> None:
    def answers(word: messages.AnyMonitorMessage) -> tuple[messages.MonitorMessage, ...]:
        if isinstance(word, messages.Observe):
            Path(word.directory, "logs", "0.telemetry").write_bytes(b"[1]\n[2]\n")
            return (messages.TrackedNote(run_id="m1", url="http://127.0.0.1:5000/#/experiments/1/runs/m1", environ={}),)
        return ()

    monitor = FakeMonitor(node.home.sockets(), answers).serve()
    try:
        attempt = node.run(stay, where).running()
        wait_for(lambda: attempt.reports[-1].tracked, "the link is known while the run goes on")
        Path(where, "go").touch()
        attempt.settled()
    finally:
        monitor.close()
    assert attempt.reports[-1].tracked == "http://127.0.0.1:5000/#/experiments/1/runs/m1"
    assert attempt.logs["0.telemetry"] == b"[1]\n[2]\n"
    assert attempt.receipt is not None and attempt.receipt["tracked"] == attempt.reports[-1].tracked
