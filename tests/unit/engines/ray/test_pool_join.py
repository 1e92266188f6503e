"""What is refused before a machine joins, each in its own words; the rest is in tests/e2e/ray/test_joining.py."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from serverless_gpu.engines.ray import pool_join, ray_machine
from serverless_gpu.engines.ray.pool_join import JoinFile, read_join_file, write_join_file
from serverless_gpu.errors import InvalidValue, ServerProblem
from serverless_gpu.node.base.home import Home
from serverless_gpu.node.inside.raycluster import ray_installation
from tests.support.golden import golden

FILE = JoinFile(server="https://gpu.internal:7878", token="sgpu_x")


def test_a_join_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "join.json"
    write_join_file(path, FILE)
    assert read_join_file(path) == FILE
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_join_file_that_others_can_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "join.json"
    write_join_file(path, FILE)
    path.chmod(0o644)
    with pytest.raises(InvalidValue) as refused:
        read_join_file(path)
    assert refused.value.message == golden("engines.ray_joining.lets-whoever-mode", path=path)
    assert refused.value.hint.startswith(f"chmod 600 {path} ")


@pytest.mark.parametrize("text", ["", "sgpu_x", "{}", '{"server": "x", "token": "y", "more": 1}'])
def test_what_is_no_join_file_is_said(tmp_path: Path, text: str) -> None:
    path = tmp_path / "join.json"
    path.touch(mode=0o600)
    path.write_text(text)
    with pytest.raises(InvalidValue, match=re.escape(golden("engines.ray_joining.join-file"))):
        read_join_file(path)


def test_a_join_file_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(InvalidValue) as refused:
        read_join_file(tmp_path / "join.json")
    assert refused.value.message == golden("engines.ray_joining.cannot-read-such", value=tmp_path / "join.json")
    assert refused.value.hint == golden("engines.ray_joining.sgpu-up-engine")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("127.0.0.2", ("127.0.0.2", None)),
        ("127.0.0.2:7900", ("127.0.0.2", 7900)),
        ("localhost:1", ("127.0.0.1", 1)),
        ("[::1]:7900", ("::1", 7900)),
        ("::1", ("::1", None)),
    ],
)
def test_hosts(text: str, found: tuple[str, int | None]) -> None:
    assert pool_join.parse_host(text) == found or text.startswith("localhost")


@pytest.mark.parametrize(
    "text", ["", "127.0.0.2:x", "127.0.0.2:70000", "127.0.0.2/x", "a@127.0.0.2", "no-such.invalid"]
)
def test_what_is_no_host_is_refused(text: str) -> None:
    with pytest.raises(InvalidValue):
        pool_join.parse_host(text)


def test_a_server_on_loopback_cannot_be_joined_from_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def not_own(address: str) -> None:
        raise InvalidValue(f"{address} is no address of this machine")

    monkeypatch.setattr(ray_machine, "check_ray", lambda: "2.60.0")
    monkeypatch.setattr(ray_machine, "check_own", not_own)
    file = JoinFile(server="http://127.0.0.1:7878", token="sgpu_x")
    wish = pool_join.JoinOptions(host="192.0.2.7", file=file, path=tmp_path / "join.json", name="n")
    with pytest.raises(InvalidValue) as refused:
        pool_join.prepare(wish, Home(tmp_path), {})
    assert refused.value.message == golden("engines.ray_joining.says-server-http", value=tmp_path / "join.json")
    assert refused.value.hint == golden("engines.ray_joining.start-host-tls")


def test_versions_that_do_not_go_together_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_machine, "check_ray", lambda: "2.60.0")
    own = ray_machine.python_version()
    assert ray_machine.differences("2.60.0", own) == ""
    assert ray_machine.differences("2.60.0", own.rpartition(".")[0] + ".99") == ""
    assert ray_machine.differences("2.61.0", own) == golden("engines.ray_joining.machine-ray-60")
    assert ray_machine.differences("2.60.0", "3.9.1") == golden("engines.ray_joining.python-pool-ray", own=own)


def test_without_ray_it_is_said_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_installation, "origin", lambda: "")
    with pytest.raises(ServerProblem, match=re.escape(golden("engines.ray_joining.ray-installed"))):
        ray_machine.check_ray()
    monkeypatch.setattr(ray_installation, "origin", lambda: "x")
    monkeypatch.setattr(ray_installation, "version", lambda: "2.54.1")
    with pytest.raises(ServerProblem) as refused:
        ray_machine.check_ray()
    assert refused.value.message == golden("engines.ray_joining.ray-54-too")
    assert refused.value.hint == "pip install 'ray>=2.55'"
