"""The units for systemd: their text, what systemd says about them, and the commands that print them."""

from __future__ import annotations

import getpass
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from serverless_gpu.cli import service_account
from serverless_gpu.cli.program import sgpu
from serverless_gpu.errors import InvalidValue
from serverless_gpu.node.isolation.principals import PLACE
from serverless_gpu.server import process
from serverless_gpu.server.db.leader_lock import TakenOver
from serverless_gpu.server.operations import systemd_units
from serverless_gpu.server.operations.systemd_units import (
    CAPABILITIES,
    Installation,
    ServerInstallation,
    command_line,
    node_unit,
    server_unit,
    spawner_unit,
    unit_word,
)
from tests.support.golden import golden
from tests.support.node.served_spawner import with_capabilities
from tests.support.paths import REPOSITORY

PROGRAM = "/opt/serverless-gpu/bin/sgpu"
SERVER = ServerInstallation(
    command=(PROGRAM, "up"),
    account="serverless-gpu",
    home=Path("/var/lib/serverless-gpu/server"),
    node=False,
    tls=False,
    stopping_s=30.0,
)
NODE = Installation(
    command=(PROGRAM, "join", "--token-file", "/etc/serverless-gpu/join.json"),
    account="serverless-gpu",
    home=Path("/var/lib/serverless-gpu/node"),
)
SPAWNER = (PROGRAM, "node", "spawner", "--account", "serverless-gpu")
EXPOSURE_MAX = {"server": 1.6, "node": 6.5, "spawner": 8.3}
"""Highest exposure that `systemd-analyze security` may find, from 0 (best) to 10."""

needs_systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze (systemd)")


def settings(unit: str) -> Mapping[str, list[str]]:
    """Return the values of each setting of a unit."""
    found: dict[str, list[str]] = {}
    for line in unit.splitlines():
        name, is_setting, value = line.partition("=")
        if is_setting and not line.startswith("#"):
            found.setdefault(name, []).append(value)
    return found


def invoke(*words: str) -> Result:
    return CliRunner().invoke(sgpu, list(words), catch_exceptions=False)


def test_the_examples_are_what_is_printed() -> None:
    deploy = REPOSITORY / "deploy"
    assert (deploy / "serverless-gpu.service").read_text() == server_unit(SERVER)
    assert (deploy / "serverless-gpu-node.service").read_text() == node_unit(NODE)
    assert (deploy / "serverless-gpu-spawner.service").read_text() == spawner_unit(SPAWNER)


@pytest.mark.parametrize("unit", [server_unit(SERVER), node_unit(NODE)])
def test_server_and_node_have_an_account_without_capabilities(unit: str) -> None:
    found = settings(unit)
    assert found["User"] == ["serverless-gpu"]
    assert found["CapabilityBoundingSet"] == [""] and found["AmbientCapabilities"] == [""]
    assert found["NoNewPrivileges"] == ["yes"] and found["UMask"] == ["0077"]


def test_a_node_finds_its_spawner_and_starts_after_it() -> None:
    node, spawner = settings(node_unit(NODE)), settings(spawner_unit(SPAWNER))
    assert "SERVERLESS_GPU_SPAWNER=/run/serverless-gpu/spawner.sock" in node["Environment"]
    assert "serverless-gpu-spawner.service" in node["After"][0].split()
    assert "serverless-gpu-spawner.service" in node["Wants"][0].split()
    assert spawner["RuntimeDirectory"] == ["serverless-gpu"] and spawner["User"] == ["root"]
    assert spawner["ExecStart"][0].endswith("node spawner --account serverless-gpu")
    assert spawner["CapabilityBoundingSet"] == list(CAPABILITIES)


def test_a_node_as_root_needs_no_spawner_and_ranks_keep_what_they_need() -> None:
    found = settings(node_unit(msgspec.structs.replace(NODE, account="root"), as_root=True))
    assert found["User"] == ["root"]
    assert "spawner" not in str(found)
    assert not {"CapabilityBoundingSet", "NoNewPrivileges"} & set(found)


STARTS_RANKS = {
    "server with a node": server_unit(msgspec.structs.replace(SERVER, node=True)),
    "node": node_unit(NODE),
    "node as root": node_unit(NODE, as_root=True),
    "spawner": spawner_unit(SPAWNER),
}


@pytest.mark.parametrize("name", STARTS_RANKS)
def test_runs_survive_a_restart_of_the_units(name: str) -> None:
    found = settings(STARTS_RANKS[name])
    assert (found["KillMode"], found["OOMPolicy"], found["Delegate"]) == (["process"], ["continue"], ["yes"])
    # Each of these restrictions would be the ranks', too. Under a mount, sandboxes would get no /proc.
    forbidden = ("Private", "Protect", "Restrict", "MemoryDeny", "SystemCall", "ReadWrite", "Inaccessible", "Device")
    allowed = {"RestartPreventExitStatus"}
    assert [each for each in found if each.startswith(forbidden) and each not in allowed] == []


def test_a_server_with_a_certificate_can_reload_it() -> None:
    assert "ExecReload" not in settings(server_unit(SERVER))
    tls = settings(server_unit(msgspec.structs.replace(SERVER, tls=True)))
    assert tls["ExecReload"] == ["/bin/kill -HUP $MAINPID"]
    assert tls["TimeoutStopSec"] == ["60"]


@pytest.mark.parametrize(
    ("home", "writable", "settings_of_files"),
    [
        ("/var/lib/serverless-gpu/server", (), {"StateDirectory": ["serverless-gpu/server"], "ProtectHome": ["yes"]}),
        ("/srv/a b", (), {"ReadWritePaths": ['"/srv/a b"'], "ProtectHome": ["yes"]}),
        ("/home/ada/.sgpu", (), {"ReadWritePaths": ["/home/ada/.sgpu"], "ProtectHome": ["read-only"]}),
        ("/srv/x", (Path("/data/store"),), {"ReadWritePaths": ["/srv/x", "/data/store"], "ProtectHome": ["yes"]}),
    ],
)
def test_a_restricted_server_can_write_its_files_only(
    home: str, writable: Sequence[Path], settings_of_files: Mapping[str, list[str]]
) -> None:
    found = settings(server_unit(msgspec.structs.replace(SERVER, home=Path(home), writable=writable)))
    names = ("StateDirectory", "ReadWritePaths", "ProtectHome")
    assert {name: found[name] for name in names if name in found} == settings_of_files
    assert found["ProtectSystem"] == ["strict"]


ODD_HOME = Path("/srv/100% \"mine\" a\\b $HOME 'x'")


@needs_systemd
@pytest.mark.parametrize("odd", [False, True])
def test_systemd_understands_each_unit(tmp_path: Path, odd: bool) -> None:
    home = ODD_HOME if odd else SERVER.home
    command = (sys.executable, "-m", "serverless_gpu.cli", "up", *(["%n $HOME 'a\"b' \\"] if odd else []))
    change = {"command": command, "home": home, "account": "root"}
    server = msgspec.structs.replace(SERVER, **change, tls=True)
    units = {
        "serverless-gpu": server_unit(server),
        "own-node": server_unit(msgspec.structs.replace(server, node=True)),
        "serverless-gpu-node": node_unit(msgspec.structs.replace(NODE, **change)),
        "as-root": node_unit(msgspec.structs.replace(NODE, **change), as_root=True),
        "serverless-gpu-spawner": spawner_unit(command),
    }
    paths = []
    for name, text in units.items():
        path = tmp_path / f"{name}.service"
        path.write_text(text)
        paths.append(str(path))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *paths], capture_output=True, text=True, timeout=60, check=False
    )
    assert [line for line in done.stderr.splitlines() if any(name in line for name in units)] == []


@needs_systemd
@pytest.mark.parametrize(
    ("name", "unit"), [("server", server_unit(SERVER)), ("node", node_unit(NODE)), ("spawner", spawner_unit(SPAWNER))]
)
def test_the_exposure_of_each_unit_has_a_bound(tmp_path: Path, name: str, unit: str) -> None:
    path = tmp_path / "serverless-gpu-tested.service"
    path.write_text(unit.replace("ExecStart=/opt/serverless-gpu/bin/sgpu", "ExecStart=/bin/true"))
    bound = round(EXPOSURE_MAX[name] * 10)
    done = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--no-pager", f"--threshold={bound}", str(path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("setpriv") is None, reason="needs root and setpriv (util-linux)")
@pytest.mark.parametrize("missing", ["", "CAP_SYS_ADMIN", "CAP_SETUID", "CAP_CHOWN"])
def test_the_capabilities_of_a_spawner_suffice_for_a_sandbox(missing: str) -> None:
    program = "import os\nfrom serverless_gpu.node.isolation.levels import measure\nprint(measure(os.environ).level)"
    words = [*with_capabilities(missing), sys.executable, "-c", program]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == ("none" if missing else "sandbox")


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("setpriv") is None, reason="needs root and setpriv (util-linux)")
@pytest.mark.parametrize("missing", ["", "CAP_NET_ADMIN"])
def test_27_the_capabilities_of_a_spawner_suffice_for_network_rules(missing: str, tmp_path: Path) -> None:
    program = "import os\nfrom serverless_gpu.node.isolation.machine_egress import measure\nprint(measure(os.environ))"
    words = [*with_capabilities(missing), sys.executable, "-c", program]
    environ = {**os.environ, PLACE: str(tmp_path)}
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True, env=environ)
    assert bool(done.stdout.strip()) == bool(missing), done.stdout


@given(st.text(st.characters(min_codepoint=0x20, exclude_characters="\x7f", exclude_categories=["Cs"])))
def test_a_word_of_a_unit_means_the_same_to_systemd(text: str) -> None:
    assert unescaped(unit_word(text)) == text
    assert unescaped(command_line([text]).replace("$$", "$")) == text


def unescaped(word: str) -> str:
    """Return the word that systemd reads: quotes, backslashes and specifiers."""
    if word.startswith('"'):
        assert word.endswith('"') and len(word) > 1
        word = word[1:-1]
    else:
        assert not set(word) & set(" \"'\\;") and word
    read, rest = "", iter(word)
    for letter in rest:
        if letter in "\\%":
            following = next(rest)
            assert following in ('"', "\\") if letter == "\\" else following == "%"
            letter = following
        else:
            assert letter != '"'
        read += letter
    return read


@pytest.mark.parametrize("text", ["a\nExecStartPre=/bin/sh", "a\0b", "a\x7f"])
def test_a_path_that_would_start_another_setting_is_refused(text: str) -> None:
    with pytest.raises(InvalidValue):
        unit_word(text)
    with pytest.raises(InvalidValue):
        server_unit(msgspec.structs.replace(SERVER, home=Path(f"/srv/{text}")))


def test_a_server_that_was_replaced_is_not_started_again(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def replaced(*_words: object, **_options: object) -> None:
        raise TakenOver("another server has taken the database over")

    monkeypatch.setattr(process, "serve", replaced)
    said = CliRunner().invoke(sgpu, ["up", "--no-node", "--port", "0"])
    assert said.exit_code == 3 and golden("server.claim.taken-database-over") in said.output
    assert settings(server_unit(SERVER))["RestartPreventExitStatus"] == ["3"]


def test_sgpu_server_unit_prints_this_machines_paths_and_settings(home: Path) -> None:
    (home / "server.toml").write_text('node = false\nstop_within = "90s"\nstore = "/data/store"\n')
    found = settings(invoke("server", "unit").stdout)
    assert found["ExecStart"] == [command_line((sys.executable, "-m", "serverless_gpu.cli", "up"))]
    assert found["Environment"] == [f"SERVERLESS_GPU_HOME={home}"]
    assert found["TimeoutStopSec"] == ["120"]
    assert found["ReadWritePaths"] == [str(home), "/data/store"]
    assert settings(invoke("server", "unit", "--account", "sgpu").stdout)["User"] == ["sgpu"]


def test_a_server_that_keeps_ray_has_no_restrictions(home: Path) -> None:
    (home / "server.toml").write_text('engine = "ray"\nnode = false\n')
    assert "PrivateTmp" not in settings(invoke("server", "unit").stdout)
    (home / "server.toml").write_text("node = false\n")
    assert "PrivateTmp" in settings(invoke("server", "unit").stdout)


def test_sgpu_node_unit_names_files_from_anywhere_and_checks_the_arguments(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    printed = invoke("node", "unit", "10.0.0.5", "--token-file", "join.json", "--name", "gpu 2").stdout
    start = settings(printed)["ExecStart"][0]
    assert start.endswith(f'join 10.0.0.5 --token-file {tmp_path}/join.json --name "gpu 2"')
    assert invoke("node", "unit", "--tokenfile", "join.json").exit_code == 2
    assert invoke("node", "unit", "--spawner", "--as-root").exit_code == 2
    former = invoke("join", "--token-file", "join.json", "--unit")
    assert settings(former.stdout)["User"] == [getpass.getuser()] and "`sgpu node unit`" in former.stderr
    assert settings(former.stdout)["ExecStart"][0].endswith(f"join --token-file {tmp_path}/join.json")
    as_root = settings(invoke("node", "unit", "--as-root", "--token-file", "join.json").stdout)
    assert as_root["User"] == ["root"]
    assert settings(invoke("node", "unit", "--spawner", "--account", "sgpu").stdout)["ExecStart"][0].endswith(" sgpu")


@pytest.mark.parametrize("name", ["", "Ada", "a b", "-x", "a\nb", "x" * 40, "root;"])
def test_the_name_of_an_account_is_checked(home: Path, name: str) -> None:
    said = CliRunner().invoke(sgpu, ["server", "unit", "--account", name])
    assert isinstance(said.exception, InvalidValue)


def test_a_missing_account_is_named_with_the_command_that_creates_it(home: Path) -> None:
    said = invoke("server", "unit", "--account", "sgpu-missing")
    assert "sudo useradd --system" in said.stderr
    assert "useradd" not in said.stdout


def test_another_accounts_home_is_below_var_lib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("SERVERLESS_GPU_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("LOGNAME", "ada")
    assert service_account.service_home("serverless-gpu", "node") == systemd_units.STATE / "node"
    assert service_account.service_home("ada", "node") == tmp_path / ".serverless_gpu"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root for files of other users")
def test_program_files_that_an_account_cannot_read_or_others_can_change_are_found(tmp_path: Path) -> None:
    program = tmp_path / "bin" / "python"
    program.parent.mkdir(mode=0o755)
    program.write_bytes(b"")
    program.chmod(0o755)
    paths = [program.parent, program]
    assert service_account.unreachable(paths, uid=4242, groups=[4242]) is None
    assert service_account.changeable_by_others(paths) is None
    program.parent.chmod(0o700)
    assert service_account.unreachable(paths, uid=4242, groups=[4242]) == program.parent
    assert service_account.unreachable(paths, uid=0, groups=[0]) is None
    os.chown(program.parent, 4242, 4242)
    assert service_account.unreachable(paths, uid=4242, groups=[4242]) is None
    assert service_account.changeable_by_others(paths) == program.parent
    os.chown(program.parent, 0, 0)
    program.chmod(0o775)
    assert service_account.changeable_by_others(paths) == program
