"""What Ray's actor does on a node, without a Ray: the agent is started out of the node's file, as nobody's child."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from serverless_gpu.engines.ray import driver_process, uplink_launcher
from serverless_gpu.engines.ray.driver_process import NodeActor
from serverless_gpu.engines.ray.start_arguments import NODE_FILE
from serverless_gpu.engines.ray.uplink_launcher import NodeFile, write_node_file
from serverless_gpu.node.base.home import Home
from serverless_gpu.node.inside import linux
from serverless_gpu.node.processes.spawn import clean_variables, search_path
from serverless_gpu.node.uplink import start_stop
from serverless_gpu.node.uplink.server import UplinkProfile, write_profile
from serverless_gpu.version import __version__
from tests.support.golden import golden


@pytest.fixture
def file(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield the file of a node that Ray's variables name; its agent is ended with the test."""
    write_profile(home / "node.json", UplinkProfile(url="http://127.0.0.1:9", token="none", name="n1"))
    path = home / "ray.json"
    variables = clean_variables(os.environ)
    node = NodeFile(
        python=sys.executable,
        paths=tuple(search_path()),
        home=str(home),
        profile=str(home / "node.json"),
        environ=variables,
    )
    write_node_file(path, node)
    monkeypatch.setenv(NODE_FILE, str(path))
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", "/somewhere")
    yield path
    start_stop.stop_all(Home(home))


def actor() -> NodeActor:
    """Return what Ray would run."""
    return NodeActor(NODE_FILE, uplink_launcher.LAUNCHER, uplink_launcher.MODULE)


def changed(path: Path, **fields: object) -> None:
    """Have a node's file say something else."""
    path.write_text(json.dumps({**json.loads(path.read_text("utf-8")), **fields}), encoding="utf-8")


def test_the_agent_is_nobodys_child_and_knows_nothing_of_ray(file: Path, home: Path) -> None:
    one = actor()
    said = one.ensure()
    pid = said["pid"]
    assert said == {"pid": pid, "started": True}
    assert start_stop.running(Home(home), home / "node.json") == (pid, __version__)
    assert pid not in linux.descendants(os.getpid())
    assert os.getsid(pid) != os.getsid(0)
    names = [line.partition("=")[0] for line in Path(f"/proc/{pid}/environ").read_text("utf-8").split("\0")]
    assert not [name for name in names if name.startswith(("RAY_", NODE_FILE))]
    assert one.ensure() == {"pid": pid, "started": False}
    assert actor().ensure() == {"pid": pid, "started": False}


def test_an_agent_that_has_ended_is_started_again(file: Path, home: Path) -> None:
    one = actor()
    first = one.ensure()
    start_stop.stop_all(Home(home))
    second = one.ensure()
    assert second["started"] is True
    assert second["pid"] != first["pid"]


def test_a_machine_that_was_not_joined_says_so(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(NODE_FILE)
    assert actor().ensure() == {"problem": golden("remote.ray_node.ray-started-sgpu", NODE_FILE=NODE_FILE)}


def test_an_interpreter_that_is_gone_is_a_problem(file: Path) -> None:
    changed(file, python="/nowhere/python")
    assert "/nowhere/python" in actor().ensure()["problem"]


def test_a_home_that_cannot_be_used_is_a_problem(file: Path) -> None:
    changed(file, profile="/nowhere/node.json", paths=["/nowhere"])
    assert actor().ensure()["problem"].startswith("the launcher did not start the node's agent: ")


def test_a_file_that_is_none_is_a_problem(file: Path) -> None:
    file.write_text("{", encoding="utf-8")
    assert actor().ensure()["problem"].startswith("JSONDecodeError: ")
    file.unlink()
    assert actor().ensure()["problem"].startswith("FileNotFoundError: ")


def test_a_driver_that_is_not_connected_starts_no_ray_of_its_own_and_ends_with_its_input() -> None:
    requests = [{"id": 1, "op": "look"}, {"id": 2, "op": "reserve", "name": "x", "bundles": [], "patience_s": 0}]
    with subprocess.Popen(
        [sys.executable, "-I", driver_process.__file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as driver:
        assert driver.stdin is not None and driver.stdout is not None
        driver.stdin.write("".join(json.dumps(request) + "\n" for request in requests).encode())
        driver.stdin.flush()
        answers = sorted((json.loads(driver.stdout.readline()) for _ in requests), key=lambda answer: int(answer["id"]))
        assert answers == [{"id": number, "problem": "ConnectionError: not connected yet"} for number in (1, 2)]
        driver.stdin.close()
        assert driver.wait(30) == 0
