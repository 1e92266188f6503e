"""The unit for systemd, and what systemd is told."""

from __future__ import annotations

import os
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from serverless_gpu.cli.program import sgpu
from serverless_gpu.server import process
from serverless_gpu.server.db.leader_lock import TakenOver
from serverless_gpu.server.operations.systemd import Installation, join_unit, notify, taken_from, unit
from tests.support.golden import golden
from tests.support.paths import REPOSITORY

EXAMPLE = Installation(
    command=("/opt/serverless-gpu/bin/sgpu", "up"),
    user="sgpu",
    home=Path("/var/lib/serverless-gpu"),
    node=True,
    tls=False,
    stopping_s=30.0,
)


def test_the_example_is_what_is_printed() -> None:
    assert (REPOSITORY / "deploy" / "serverless-gpu.service").read_text() == unit(EXAMPLE)


def test_the_example_of_a_machine_that_joins_is_what_is_printed() -> None:
    command = ("/opt/serverless-gpu/bin/sgpu", "join", "10.0.0.5", "--token-file", "/etc/serverless-gpu/join.json")
    printed = join_unit(command, user="sgpu", home=Path("/var/lib/serverless-gpu"))
    assert (REPOSITORY / "deploy" / "serverless-gpu-join.service").read_text() == printed
    assert {"KillMode=process", "OOMPolicy=continue", "Restart=always", "Delegate=yes"} <= set(printed.splitlines())


def test_a_server_that_keeps_ray_is_in_no_sandbox(home: Path) -> None:
    (home / "server.toml").write_text('engine = "ray"\nnode = false\n')
    printed = CliRunner().invoke(sgpu, ["server", "unit"])
    assert printed.exit_code == 0, printed.output
    assert "PrivateTmp=yes" not in printed.output
    (home / "server.toml").write_text("node = false\n")
    assert "PrivateTmp=yes" in CliRunner().invoke(sgpu, ["server", "unit"]).output


def test_a_unit_of_a_machine_that_joins_names_files_from_anywhere(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = ["join", "10.0.0.5", "--token-file", "join.json", "--name", "gpu 2", "--unit"]
    monkeypatch.setattr(sys, "argv", ["sgpu", *arguments])
    done = CliRunner().invoke(sgpu, arguments)
    assert done.exit_code == 0, done.output
    start = next(line for line in done.output.splitlines() if line.startswith("ExecStart="))
    assert start.endswith(f"join 10.0.0.5 --token-file {tmp_path}/join.json --name 'gpu 2'")


def test_only_the_server_is_stopped_and_ranks_keep_what_they_need() -> None:
    lines = unit(EXAMPLE).splitlines()
    assert "KillMode=process" in lines
    assert "OOMPolicy=continue" in lines
    assert "TimeoutStopSec=60" in lines
    # Each of these would be the ranks', too: devices, setuid programs, namespaces, compilers.
    forbidden = ("PrivateDevices", "NoNewPrivileges", "RestrictNamespaces", "MemoryDenyWriteExecute", "ProtectClock")
    assert not [line for line in lines if line.startswith(forbidden)]
    assert not [line for line in lines if line.startswith("ExecReload")]


def test_a_server_without_a_node_is_in_a_sandbox_and_one_with_a_certificate_can_be_told_to_renew_it() -> None:
    lines = unit(msgspec.structs.replace(EXAMPLE, node=False, tls=True)).splitlines()
    assert {"NoNewPrivileges=yes", "PrivateDevices=yes", "ReadWritePaths=/var/lib/serverless-gpu"} <= set(lines)
    assert "ExecReload=/bin/kill -HUP $MAINPID" in lines


@pytest.mark.parametrize("node", [True, False])
def test_systemd_understands_the_unit(tmp_path: Path, node: bool) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("there is no systemd-analyze")
    there = msgspec.structs.replace(
        EXAMPLE, command=(sys.executable, "-m", "serverless_gpu.cli", "up"), user="root", node=node, tls=True
    )
    path = tmp_path / "serverless-gpu.service"
    path.write_text(unit(there))
    looked = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(path)], capture_output=True, text=True, timeout=60
    )
    about_ours = [line for line in looked.stderr.splitlines() if "serverless-gpu.service" in line]
    assert about_ours == []


def test_a_server_that_was_replaced_is_not_started_again(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def replaced(*_words: object, **_options: object) -> None:
        raise TakenOver("another server has taken the database over")

    monkeypatch.setattr(process, "serve", replaced)
    said = CliRunner().invoke(sgpu, ["up", "--no-node", "--port", "0"])
    assert said.exit_code == 3 and golden("server.claim.taken-database-over") in said.output
    assert "RestartPreventExitStatus=3" in unit(EXAMPLE).splitlines()


def test_sgpu_server_unit_prints_it_with_this_machines_paths(home: Path) -> None:
    (home / "server.toml").write_text('node = false\nstop_within = "90s"\n')
    said = CliRunner().invoke(sgpu, ["server", "unit"], catch_exceptions=False)
    assert said.exit_code == 0
    lines = said.output.splitlines()
    assert golden("server.systemd.execstart-serverless-gpu", quote=shlex.quote(sys.executable)) in lines
    assert f"Environment=SERVERLESS_GPU_HOME={home}" in lines
    assert "TimeoutStopSec=120" in lines and "NoNewPrivileges=yes" in lines


def test_sgpu_server_config_prints_what_holds_and_who_said_it(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "server.toml").write_text("node = false\n")
    monkeypatch.setenv("SGPU_HOSTS", "gpu.internal")
    said = CliRunner().invoke(sgpu, ["server", "config"], catch_exceptions=False)
    rows = {line.split()[0]: line.split()[1:] for line in said.output.splitlines()}
    assert rows["node"] == ["false", str(home / "server.toml")]
    assert rows["hosts"] == ["gpu.internal", "SGPU_HOSTS"]
    assert rows["database"] == ["-", "default"]


def test_systemd_is_told_where_it_listens_and_nobody_else_learns_where(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "notify"))
        notify(str(tmp_path / "notify"), "READY=1", "STATUS=x")
        assert listener.recv(100) == b"READY=1\nSTATUS=x"
    notify(str(tmp_path / "notify"), "READY=1")  # nobody listens
    notify("", "READY=1")


def test_a_place_in_the_abstract_namespace_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"sgpu-test-{id(monkeypatch)}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(f"\0{name}")
        notify(f"@{name}", "READY=1")
        assert listener.recv(100) == b"READY=1"


def test_the_variable_is_taken_so_that_children_do_not_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", "/run/x")
    assert taken_from(os.environ) == "/run/x"
    assert "NOTIFY_SOCKET" not in os.environ
