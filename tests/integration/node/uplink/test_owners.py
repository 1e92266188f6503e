"""Runs of several principals on one node: no interpreter is shared, and none of another's can be reached."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from serverless_gpu import distributed
from serverless_gpu.client.caller_context import caller_context
from serverless_gpu.model.lifecycle.attempt import Reason
from serverless_gpu.model.spec import RunSpec
from serverless_gpu.testing import agent_status
from tests.support.golden import golden
from tests.support.local.observe import wait_for
from tests.support.node.agent_server import AgentServer, SeenAttempt
from tests.support.node.node import Node


def warm_and_why(attempt: SeenAttempt) -> tuple[bool, str]:
    receipt: dict[str, Any] = attempt.settled().receipt or {}
    assert attempt.reason is Reason.COMPLETED, attempt.ending
    return receipt["warm"], receipt["warm_reason"]


def zygotes(home: Path) -> dict[str, int]:
    """Return the pids of zygotes by owner, once all are ready."""

    def ready() -> dict[str, int]:
        status = agent_status(home)
        found = () if status is None else status.zygotes
        return {each.owner: each.pid or 0 for each in found} if all(each.state == "ready" for each in found) else {}

    return wait_for(ready, "zygotes are ready")


def write_into_zygotes(path: str) -> None:
    """Try to write to the memory of every zygote of this machine, and leave word of it."""
    opened: dict[str, str] = {}
    for name in os.listdir("/proc"):
        try:
            with open(f"/proc/{name}/comm") as file:
                if file.read().strip() != "sgpu-zygote":
                    continue
        except OSError:
            continue
        try:
            os.close(os.open(f"/proc/{name}/mem", os.O_RDWR))
        except OSError as error:
            opened[name] = type(error).__name__
        else:
            opened[name] = "opened"
    with open(f"{path}.new", "w") as file:
        json.dump(opened, file)
    os.rename(f"{path}.new", path)


def test_22A2_a_rank_cannot_write_the_memory_of_any_zygote(node: Node, tmp_path: Path) -> None:
    node.run(len, "bob", owner="bob").settled()
    node.run(len, "alice", owner="alice").settled()
    mine = zygotes(node.home.root)
    assert len(set(mine.values())) == 2
    attempt = node.run(write_into_zygotes, str(tmp_path / "seen"), owner="alice")
    assert warm_and_why(attempt)[0], "her own zygote is there, and was not written to either"
    seen = json.loads((tmp_path / "seen").read_text())
    assert {seen[str(pid)] for pid in mine.values()} == {"PermissionError"}


def test_22A2_owners_share_no_zygote(node: Node) -> None:
    node.run(len, "a", owner="bob").settled()
    zygotes(node.home.root)
    assert warm_and_why(node.run(len, "a", owner="bob")) == (True, "")
    warm, why = warm_and_why(node.run(len, "a", owner="alice"))
    assert not warm and golden("node.owners.first-run-owner") in why
    zygotes(node.home.root)
    assert warm_and_why(node.run(len, "a", owner="alice")) == (True, "")
    assert warm_and_why(node.run(len, "a", owner="bob")) == (True, "")


def test_22A2_a_run_of_nobody_in_particular_shares_no_zygote(node: Node) -> None:
    for _ in range(2):
        warm, why = warm_and_why(node.run(len, "a"))
        assert not warm and why.startswith("the server did not name the run's owner")
    status = agent_status(node.home.root)
    assert status is not None and status.zygotes == ()


def call_here() -> None:
    """Ask this node for a run, as its user would; the rank has all devices that there are for it."""
    os.environ["MALLOC_ARENA_MAX"] = "3"  # so that it needs another interpreter
    distributed(gpus=1, quiet=True)(len).submit("a").cancel()


def test_22A2_a_call_from_inside_a_run_is_that_owners(node: Node) -> None:
    attempt = node.run(call_here, owner="alice").settled()
    assert attempt.reason is Reason.COMPLETED
    status = agent_status(node.home.root)
    assert status is not None and len(status.zygotes) == 2
    assert {each.owner.partition(" of ")[0] for each in status.zygotes} == {"alice"}


WITHOUT_NAMESPACES = """
import os, pathlib, sys
from serverless_gpu.node.base.home import Home
from serverless_gpu.node.uplink.start_stop import ensure
pathlib.Path("/proc/sys/user/max_user_namespaces").write_text("0")
ensure(Home(pathlib.Path(sys.argv[1])), pathlib.Path(sys.argv[2]), os.environ)
"""


@pytest.fixture
def poor(server: AgentServer) -> Iterator[Node]:
    """Yield a node on which no further user namespace can be made."""
    command = ["unshare", "--user", "--map-root-user", sys.executable, "-c", WITHOUT_NAMESPACES]
    done = subprocess.run(
        [*command, str(server.home), str(server.profile)], check=False, capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"no user namespace to begin with: {done.stderr}")
    yield Node(server)


def test_22A2_where_stems_get_no_user_namespace_runs_start_cold_and_say_why(poor: Node) -> None:
    poor.run(len, "a", owner="bob").settled()
    for owner in ("alice", "bob"):
        warm, why = warm_and_why(poor.run(len, "a", owner=owner))
        assert not warm and why.startswith("this node cannot give each run its own user namespace")
    status = agent_status(poor.home.root)
    assert status is not None and {each.state for each in status.zygotes} <= {"cold", "starting"}


def test_22A11_an_interpreter_is_no_other_program_and_has_no_code_among_its_options(node: Node, tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    shell = tmp_path / "python3"
    shell.write_text(f"#!/bin/sh\ntouch {marker}\n")
    shell.chmod(0o777)
    for changes, sentence in (
        ({"python": "/bin/sh", "flags": ("-c", f"touch {marker}")}, "interpreter with the option '-c'"),
        ({"python": "/bin/sh", "flags": ()}, "'/bin/sh' is not the name of a Python"),
        ({"flags": ("-c", f"open({str(marker)!r}, 'w')")}, "interpreter with the option '-c'"),
        ({"flags": ("-X", "presite=antigravity")}, "interpreter with the option '-X' 'presite=antigravity'"),
        ({"python": str(shell)}, f"{shell} is writable by others"),
        ({"python": "python3"}, "the interpreter 'python3' is not an absolute path"),
    ):
        context = msgspec.json.encode(msgspec.structs.replace(caller_context(), **changes))
        attempt = node.server.order(RunSpec(name="evil"), b"", context, owner="alice")
        wait_for(lambda attempt=attempt: attempt.ending, "it has ended")  # type: ignore[misc]  # bound now
        assert attempt.reason is not Reason.COMPLETED
        assert attempt.ending is not None and isinstance(attempt.ending.stopped, msgspec.Raw)
        assert sentence in json.loads(bytes(attempt.ending.stopped))["cause"]["detail"]
    assert not marker.exists()
