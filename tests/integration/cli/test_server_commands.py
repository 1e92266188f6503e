"""`sgpu down`, `logout`, `help`, `schema` and `completion`, as processes and against a served server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from serverless_gpu.client.remote.profile import ServerProfile, write_profile
from serverless_gpu.server.http.listener import lock_holder
from tests.support.cli.cli import FIRST, make, sgpu
from tests.support.local.observe import wait_for


def run(home: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the command as a process of its own in a home."""
    environ = {**os.environ, "SERVERLESS_GPU_HOME": str(home), **variables}
    command = [sys.executable, "-m", "serverless_gpu.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environ, timeout=120, check=False)


def test_down_stops_the_server_of_this_home_and_waits_for_its_end(home: Path) -> None:
    environ = {**os.environ, "SERVERLESS_GPU_HOME": str(home)}
    command = [sys.executable, "-m", "serverless_gpu.cli", "up", "--port", "0", "--no-node"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environ) as server:
        try:
            wait_for(lambda: (home / "server.json").exists(), "the server is ready")
            assert lock_holder(home / "server") == server.pid
            done = run(home, "down")
            assert (done.returncode, server.wait(10)) == (0, 0), done.stderr
        finally:
            if server.poll() is None:
                server.send_signal(signal.SIGKILL)
    again = run(home, "down")
    assert (again.returncode, lock_holder(home / "server")) == (0, None)


def test_config_prints_each_setting_and_its_origin(home: Path) -> None:
    (home / "server.toml").write_text("node = false\n")
    printed = run(home, "server", "config", SGPU_HOSTS="gpu.internal").stdout
    rows = {line.split()[0]: line.split()[1:] for line in printed.splitlines()}
    assert rows["node"] == ["false", str(home / "server.toml")]
    assert rows["hosts"] == ["gpu.internal", "SGPU_HOSTS"]
    assert rows["database"] == ["-", "default"]


def test_down_without_a_server_says_so(home: Path) -> None:
    done = run(home, "down")
    assert (done.returncode, done.stderr) == (0, "")


def test_logout_deletes_the_address_and_the_token(home: Path) -> None:
    write_profile(home, ServerProfile(url="http://127.0.0.1:9", token="t"))
    assert "http://127.0.0.1:9" in sgpu("logout").stdout
    assert not (home / "server.json").exists()
    assert sgpu("logout").exit_code == 0


def test_bare_sgpu_and_a_bare_group_print_their_help_and_exit_with_0(home: Path) -> None:
    for arguments in ((), ("run",), ("node",), ("help",), ("help", "run", "logs"), ("version",)):
        done = run(home, *arguments)
        assert (done.returncode, done.stderr) == (0, ""), arguments
        assert done.stdout


@pytest.mark.parametrize("arguments", [("nonsense",), ("runs", "--nonsense"), ("help", "nonsense"), ("logs", "a", "b")])
def test_a_wrong_command_line_is_a_message_with_our_prefix_and_exits_with_2(
    home: Path, arguments: tuple[str, ...]
) -> None:
    done = run(home, *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    message, hint = done.stderr.splitlines()
    assert message.startswith("sgpu: ")
    assert hint.startswith("hint: sgpu") and hint.endswith(" --help")


def test_a_renamed_command_works_with_a_notice(home: Path) -> None:
    write_profile(home, ServerProfile(url="http://127.0.0.1:9", token="t"))
    new, old = run(home, "node", "list"), run(home, "nodes")
    notice, *rest = old.stderr.splitlines()
    assert notice.startswith("sgpu: `sgpu nodes` is now called `sgpu node list`")
    assert (old.returncode, rest) == (new.returncode, new.stderr.splitlines())
    assert "`sgpu user add` is now called `sgpu user create`" in run(home, "user", "add", "--help").stderr


def test_a_schema_describes_the_json(home: Path) -> None:
    schema = json.loads(run(home, "schema", "runs").stdout)
    assert schema["type"] == "array"
    assert run(home, "schema", "logs").returncode == 2


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_knows_commands_and_runs(home: Path, shell: str) -> None:
    assert "_SGPU_COMPLETE" in run(home, "completion", shell).stdout
    make(home / "runs", FIRST)
    words = {"COMP_WORDS": "sgpu logs 01", "COMP_CWORD": "01" if shell == "fish" else "2"}
    found = run(home, _SGPU_COMPLETE=f"{shell}_complete", **words).stdout
    assert FIRST in found


def test_completion_without_a_server_completes_nothing_and_fails_nothing(home: Path) -> None:
    done = run(home, _SGPU_COMPLETE="bash_complete", COMP_WORDS="sgpu node drain ", COMP_CWORD="3")
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "", "")
