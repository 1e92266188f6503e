"""What people decide about a node, against a real server and its node: through the command line, with real runs."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from serverless_gpu.client.remote.profile import find_profile
from serverless_gpu.engines.ray.pool_join import read_join_file
from serverless_gpu.errors import InvalidValue, NotAllowed
from serverless_gpu.node.uplink.server import UplinkProfile
from serverless_gpu.server.lifecycle.liveness import PRESENT_S
from serverless_gpu.wire.connection import Connection
from serverless_gpu.wire.nodes import NodeList
from tests.support.golden import golden
from tests.support.local.observe import wait_for
from tests.support.remote.commands import sgpu, start
from tests.support.remote.machines import Machine

pytestmark = pytest.mark.slow
WORK = "echo attempt $SGPU_FENCE; echo $SGPU_GPU_UUIDS >> {seen}; [ $SGPU_FENCE = 2 ] || exec sleep 600"


@pytest.fixture
def node(served: Path) -> Iterator[str]:
    """Yield the name of the node, which is afterwards as it was."""
    wait_for(lambda: " UP " in sgpu("node", "list").stdout, "the node has joined")
    name = sgpu("node", "list").stdout.splitlines()[1].split()[0]
    yield name
    sgpu("node", "calendar", name, "--clear")
    sgpu("node", "resume", name)


def test_a_run_leaves_a_node_that_is_drained_and_goes_on_without_the_gpu_that_is_left_out(
    node: str, served: Path, tmp_path: Path
) -> None:
    seen = tmp_path / "seen"
    run = start("sh", "-c", WORK.format(seen=seen), gpus=1, resume=True)
    ends = start("sh", "-c", "exec sleep 600", gpus=1)
    wait_for(lambda: seen.exists() and seen.read_text(), "user code has begun")
    wait_for(lambda: ends.status() == "RUNNING", "the other one, too")
    sgpu("node", "drain", node, "--note", "new fan")
    assert (
        golden("remote.nodes.takes-nothing-new", split=sgpu("whoami").stdout.split()[0]) in sgpu("node", "list").stdout
    )
    (uuid,) = seen.read_text().split()
    said = sgpu("node", "quarantine", node, uuid.rpartition("-")[2], "--note", "hot").stdout
    assert said == golden("remote.nodes.left-out-runs", uuid=uuid, node=node)
    done = sgpu("node", "drain", node, "--stop", "--wait", "60s").stdout
    assert (
        done.startswith(f"{node} gets no new runs. 2 runs are running on the node\n")
        and "no runs are running on the node\n" in done
    )
    with pytest.raises(Exception, match=golden("remote.nodes.run-leave-node")):
        ends.results()
    wait_for(lambda: "drains it since" in (run.waiting_for() or ""), "the first one waits, and knows why")
    wait_for(lambda: "\nreceipt of attempt 1:\n" in sgpu("show", run.id).stdout, "the first one's receipt is there")
    shown = sgpu("show", run.id).stdout
    (told,) = [line for line in shown.splitlines() if line.startswith("attempt 1: ")]
    assert told.endswith(" (new fan)") and f" on {node}: " in told
    assert f"{node} is UP" in sgpu("node", "resume", node).stdout
    receipt = run.receipt(60)
    assert receipt.state == "SUCCEEDED"
    assert len(seen.read_text().split()) == 2 and seen.read_text().split()[1] != uuid
    assert sgpu("logs", run.id).stdout.endswith("attempt 2\n")
    assert sgpu("node", "release", node, uuid).stdout == golden("remote.nodes.given-runs-again", uuid=uuid, node=node)
    assert "is quarantined" not in sgpu("node", "list").stdout
    assert sgpu("node", "release", node, uuid).stdout == golden("remote.nodes.left-out", uuid=uuid, node=node)


def test_22A3_machines_are_invited_and_approved(node: str, served: Path, tmp_path: Path) -> None:
    path = tmp_path / "join.json"
    said = sgpu("node", "invite", "--uses", "10", "--for", "1h", "--out", str(path)).stdout
    assert said.startswith(f"{path} admits 10 machines until ") and path.stat().st_mode & 0o777 == 0o600
    file = read_join_file(path)
    assert file.token.startswith("sgpu_") and file.server == find_profile(served, os.environ).url
    with contextlib.closing(Connection(file.server, file.token)) as joining, pytest.raises(NotAllowed):
        joining.ask("GET", "/nodes", answer=NodeList)
    made = sgpu("token", "create", "--for", "node", "--scope", "agent").stdout.split()[-1]
    profile = UplinkProfile(url=file.server, token=made, name="far")
    home = Machine(profile, gpus=1)
    try:
        home.start()
        wait_for(lambda: golden("remote.nodes.sgpu-node-approve") in home.log(), "its log says what it waits for")
        (waits,) = [line for line in sgpu("node", "list").stdout.splitlines() if line.startswith("far ")]
        assert " PENDING " in waits
        assert sgpu("node", "approve", "far").stdout == golden("remote.nodes.far-approved-joins")
        wait_for(lambda: "joined" in home.log(), "it has joined")
        thief = Machine(msgspec.structs.replace(profile, name="thief"), gpus=1)
        try:
            thief.start()
            wait_for(lambda: golden("remote.nodes.token-thief-node") in thief.log(), "it is refused")
        finally:
            thief.end()
        home.uplink().kill()
        home.start()
        wait_for(lambda: home.log().count("joined") == 2, "its next process is let in at once", PRESENT_S / 2)
    finally:
        home.end()
    sgpu("node", "forget", "far", "--i-know-it-is-dead")
    assert "far" not in sgpu("node", "list").stdout


def test_a_calendar_is_set_shown_changed_in_part_and_cleared(node: str, served: Path) -> None:
    me = sgpu("whoami").stdout.split()[0]
    assert sgpu("node", "calendar", node).stdout == golden("remote.nodes.nobody-particular-everybody", node=node)
    said = sgpu("node", "calendar", node, "--shared", "00:00-24:00", "--owner", me, "--zone", "Europe/Berlin").stdout
    assert said.splitlines() == [golden("remote.nodes.others-may-use", node=node, me=me), "shared now"]
    assert "runs of" in sgpu("node", "calendar", node, "--owner-first").stdout
    assert f"all, {me} first" in sgpu("node", "list").stdout
    assert '"shared": [' in sgpu("node", "calendar", node, "--json").stdout
    with pytest.raises(InvalidValue, match=re.escape(golden("remote.nodes.window-calendar"))):
        sgpu("node", "calendar", node, "--shared", "mo-fr")
    assert sgpu("node", "calendar", node, "--clear").stdout.endswith("All users may use the node at any time\n")
