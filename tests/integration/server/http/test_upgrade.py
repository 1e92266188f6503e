"""F53: nodes and clients of the protocol before this one, as they were recorded, are served by this server."""

from __future__ import annotations

import base64
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from serverless_gpu.wire.base import PROTOCOL
from tests.support.golden import golden
from tests.support.server.replaying import RECORDED, Replay, conversation, lacks
from tests.support.server.served import Served, served

pytestmark = pytest.mark.slow


def replay_of(protocol: int, server: Served) -> Replay:
    """Return who speaks a protocol to a server."""
    return Replay(protocol, server.url, {"client": server.token, "node": server.node_token})


def outcome(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what a client learns from a stream, however it was cut into messages."""
    output: dict[str, bytes] = {}
    for event in events:
        if event["type"] == "log":
            name = f"{event['rank']}.{event['stream']}"
            output[name] = output.get(name, b"") + base64.b64decode(event["data"])  # in whatever pieces
    ended = [event for event in events if event["type"] == "ended"]
    return {
        "output": output,
        "ended": [(one["state"], one["reason"], sorted(file["name"] for file in one["files"])) for one in ended],
        "settled": [event["receipt"]["state"] for event in events if event["type"] == "settled"],
    }


def told_then(exchanges: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Return what clients were told when it was recorded, by run."""
    told: dict[str, list[dict[str, Any]]] = {}
    run_id = ""
    for one in exchanges:
        if one.get("stream") and one["who"] == "client":
            run_id = one["body"]["id"] if "body" in one else one["path"].split("/")[2]
        elif "event" in one and one["event_of"].startswith("/runs"):
            told.setdefault(run_id, []).append(one["event"])
    return told


@pytest.mark.parametrize("protocol", sorted(int(path.stem.partition("-")[2]) for path in RECORDED.glob("*.json")))
def test_F53_nodes_and_clients_of_a_recorded_protocol_are_served(home: Path, protocol: int) -> None:
    said = conversation(protocol)
    with served(home) as server:
        replay = replay_of(protocol, server)
        replay.say(said)
        replay.hear_out()
        replay.close()
    assert replay.problems == []
    then = told_then(said)
    assert sorted(then) == sorted(replay.told) and len(then) == 4
    for run_id, events in then.items():
        assert outcome(replay.told[run_id]) == outcome(events)
        kinds = {event["type"]: event for event in replay.told[run_id]}
        assert [word for event in events if event["type"] in kinds for word in lacks(event, kinds[event["type"]])] == []


def test_F53_an_attempt_that_began_before_the_upgrade_ends_after_it(home: Path) -> None:
    said = conversation(PROTOCOL_BEFORE)
    run_id = next(one["body"]["id"] for one in said if one.get("stream") and one["who"] == "client")
    with served(home) as server:
        replay = replay_of(PROTOCOL_BEFORE, server)
        left = replay.say(said, until=reports("RUNNING"))
        replay.close()
    with served(home) as server:
        replay.come_again(server.url, [{"run_id": run_id, "fence": 1, "state": "RUNNING"}])
        replay.watch(run_id)
        replay.say(left)
        replay.hear_out()
        replay.close()
    assert replay.problems == []
    then = told_then(said)
    assert outcome(replay.told[run_id]) == outcome(then[run_id])


PROTOCOL_BEFORE = max(1, PROTOCOL - 1)


def reports(state: str) -> Callable[[dict[str, Any]], bool]:
    """Return what tells a report of a state from everything else."""
    return lambda one: one.get("who") == "attempt" and "report" in one["path"] and one["body"]["state"] == state


def test_F53_a_node_of_the_protocol_to_come_is_told_to_wait_for_the_server(server: Served) -> None:
    replay = Replay(PROTOCOL + 1, server.url, {"client": server.token, "node": server.node_token})
    hello = next(one for one in conversation(PROTOCOL_BEFORE) if one.get("path") == "/agents")
    for body in ({**hello["body"], "protocol": PROTOCOL + 1}, {**hello["body"], "what_is_new_there": 1}):
        status, problem = replay.ask_as("node", "POST", "/agents", body)
        assert (
            status == 400 and golden("server.upgrade.protocol-server-speaks", value=PROTOCOL + 1) in problem["message"]
        )
        assert problem["hint"] == golden("server.upgrade.upgrade-serverless-gpu")
    status, problem = replay_of(PROTOCOL, server).ask_as(
        "node", "POST", "/agents", {**hello["body"], "what_is_that": 1}
    )
    assert status == 400 and "protocol" not in problem["message"]
