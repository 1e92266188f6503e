"""Attempts that a server gave to this node: the supervisor stops them by its own clock, and takes each of them once."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from serverless_gpu import distributed
from serverless_gpu.ambient import SystemClock
from serverless_gpu.client.launch import launch
from serverless_gpu.client.launch.preflight import pack
from serverless_gpu.model.lifecycle.attempt import Reason, State
from serverless_gpu.model.spec import RunSpec
from serverless_gpu.node.agent.connection import connect
from serverless_gpu.node.attempt.claim import try_lock
from serverless_gpu.node.attempt.history import read_ending
from serverless_gpu.node.attempt.submission import write_submission
from serverless_gpu.node.base import protocol
from serverless_gpu.node.base.home import Home
from serverless_gpu.node.inside.channel import Channel
from tests.support.golden import golden
from tests.support.local.observe import announced, nothing_of_a_run, wait_for
from tests.support.local.ranks import stay

S = 1_000_000_000


def launched(home: Path, where: str, lease_s: float | None) -> tuple[protocol.Launch, Channel]:
    """Launch `stay` with a lease of so many seconds."""
    channel, greeting = connect(Home(home))
    order = launch.LaunchOrder(RunSpec(name="stay", quiet=True, grace_s=5.0), 0)
    lease_ns = None if lease_s is None else SystemClock().boottime_ns() + round(lease_s * S)
    message = msgspec.structs.replace(
        launch.make_message(order, Home(home), greeting),
        candidates=greeting.devices[:1],
        world_size=1,
        lease_ns=lease_ns,
    )
    Home(home).make_attempt(message.run_id, message.fence)
    write_submission(message, greeting.version)
    pack(str(Path(message.directory) / "call.pkl"), stay, (where,), {})
    protocol.send(channel, message)
    return message, channel


def stopped(channel: Channel) -> protocol.Stopped | protocol.Refused:
    """Return how it ended, and close the connection."""
    channel.sock.settimeout(60)
    with channel.sock:
        while (received := protocol.receive(channel)) is not None:
            if isinstance(received[0], protocol.Stopped | protocol.Refused):
                return received[0]
    raise AssertionError("the connection ended without a word")


def test_F18_without_an_answer_of_the_server_the_supervisor_stops_its_ranks(own: Path, where: str) -> None:
    message, channel = launched(own, where, 60.0)
    rank, _ = announced(Path(where), "rank0")
    protocol.send(channel, protocol.Lease(deadline_ns=SystemClock().boottime_ns() + S // 10))
    ending = stopped(channel)
    assert isinstance(ending, protocol.Stopped)
    assert (ending.state, ending.reason) == (State.LOST, Reason.NODE_PARTITIONED)
    assert not rank.alive()
    wait_for(lambda: nothing_of_a_run(own), "it has given everything back")
    receipt = (Path(message.directory) / "receipt.json").read_text()
    assert golden("local.leases.server-did-answer") in receipt, (own / "agent.log").read_text()


def test_F17_an_answer_in_time_lets_it_go_on(own: Path, where: str) -> None:
    _, channel = launched(own, where, 60.0)
    rank, _ = announced(Path(where), "rank0")
    deadline_ns = SystemClock().boottime_ns() + 3 * S
    protocol.send(channel, protocol.Lease(deadline_ns=deadline_ns))
    protocol.send(channel, protocol.Lease(deadline_ns=SystemClock().boottime_ns() + 60 * S))
    wait_for(lambda: SystemClock().boottime_ns() > deadline_ns, "the first lease is over")
    assert rank.alive()
    Path(where, "go").touch()
    ending = stopped(channel)
    assert isinstance(ending, protocol.Stopped) and ending.state is State.SUCCEEDED


def test_a_launch_that_comes_twice_starts_once(own: Path, where: str) -> None:
    distributed(gpus=1, quiet=True)(len).distributed("a")
    message, channel = launched(own, where, None)
    rank, _ = announced(Path(where), "rank0")
    again, _ = connect(Home(own))
    protocol.send(again, message)
    refused = stopped(again)
    assert isinstance(refused, protocol.Refused) and golden("local.leases.another-process-looks") in refused.message
    assert rank.alive() and read_ending(Path(message.directory)) is None
    Path(where, "go").touch()
    assert isinstance(stopped(channel), protocol.Stopped)
    wait_for(lambda: nothing_of_a_run(own), "it has given everything back")
    again, _ = connect(Home(own))
    protocol.send(again, message)
    refused = stopped(again)
    assert isinstance(refused, protocol.Refused) and "has ended" in refused.message


def test_an_attempt_whose_lock_is_free_and_that_has_begun_does_not_begin_again(own: Path, where: str) -> None:
    message, channel = launched(own, where, None)
    announced(Path(where), "rank0")
    Path(where, "go").touch()
    assert isinstance(stopped(channel), protocol.Stopped)
    wait_for(lambda: nothing_of_a_run(own), "it has given everything back")
    directory = Path(message.directory)
    (directory / "stopped.json").unlink()
    again, _ = connect(Home(own))
    protocol.send(again, message)
    refused = stopped(again)
    assert isinstance(refused, protocol.Refused) and "has already begun" in refused.message
    lock = try_lock(directory)
    assert lock >= 0
    os.close(lock)
