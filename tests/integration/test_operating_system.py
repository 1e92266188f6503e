"""The first hour on macOS and Windows, by recorded descriptions (`tests/support/systems.py`): imports, refusals."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from serverless_gpu.cli.program import COMMANDS
from tests.support.golden import golden
from tests.support.paths import REPOSITORY

WINDOWS_REFUSAL = (
    "serverless-gpu does not run on Windows, neither the client nor the ranks\n"
    "hint: install serverless-gpu in WSL 2: run `wsl --install`, then `pip install serverless-gpu` in WSL"
)
MACOS_HINT = (
    "hint: use a Linux machine, for example over ssh. "
    "On macOS, only commands that use a server work: sgpu login, sgpu runs"
)
ON_LINUX = ("doctor", "down", "gpus", "join", "mlflow", "server", "top", "up")
CALL = """
from serverless_gpu import distributed
from serverless_gpu.errors import HardwareError

try:
    distributed(gpus=1, gpu_type="CPU", remote={remote})(len).distributed("a")
except HardwareError as error:
    print(error)
"""


def on(system: str, program: str, home: Path) -> subprocess.CompletedProcess[str]:
    """Run a program as on another system."""
    first = f"from tests.support.systems import pretend\npretend({system!r})\n"
    return subprocess.run(
        [sys.executable, "-c", first + program],
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        env={**os.environ, "SERVERLESS_GPU_HOME": str(home)},
        timeout=60,
        check=False,
    )


def sgpu(system: str, home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command as on another system."""
    program = f"import sys\nfrom serverless_gpu.cli import main\nsys.argv = ['sgpu', *{list(arguments)!r}]\nmain()\n"
    return on(system, program, home)


@pytest.mark.parametrize("system", ["macOS", "Windows"])
@pytest.mark.parametrize("arguments", [["--help"], ["--version"]])
def test_23B13_help_and_version_work(system: str, arguments: list[str], tmp_path: Path) -> None:
    done = sgpu(system, tmp_path, *arguments)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("Usage: sgpu" if arguments == ["--help"] else "serverless-gpu, version")


@pytest.mark.parametrize("system", ["macOS", "Windows"])
def test_23B13_the_import_works(system: str, tmp_path: Path) -> None:
    done = on(
        system, "import serverless_gpu\nfrom serverless_gpu import GPUType, errors\nprint(GPUType.H100.name)", tmp_path
    )
    assert (done.stdout, done.stderr) == ("H100\n", "")


def test_23B13_windows_is_refused_with_one_sentence(tmp_path: Path) -> None:
    for arguments in (["runs"], ["submit", "train.py"], ["up"], ["doctor"], ["login", "http://127.0.0.1:1"]):
        done = sgpu("Windows", tmp_path, *arguments)
        assert (done.returncode, done.stdout, done.stderr) == (1, "", f"sgpu: {WINDOWS_REFUSAL}\n"), arguments
    program = "from serverless_gpu.errors import HardwareError\ntry:\n    from serverless_gpu import distributed\n"
    done = on("Windows", f"{program}except HardwareError as error:\n    print(error)", tmp_path)
    assert (done.stdout, done.stderr) == (f"{WINDOWS_REFUSAL}\n", "")
    assert list(tmp_path.iterdir()) == []


def test_23B13_calls_on_macos_are_refused_before_anything_starts(tmp_path: Path) -> None:
    done = on("macOS", CALL.format(remote=False), tmp_path)
    assert done.stdout == golden("common.systems.ranks-need-linux", MACOS_HINT=MACOS_HINT), done.stderr
    done = on("macOS", CALL.format(remote=True), tmp_path)
    assert done.stdout == golden("common.systems.calls-through-server", MACOS_HINT=MACOS_HINT), done.stderr


@pytest.mark.parametrize("command", ON_LINUX)
def test_23B13_commands_of_nodes_and_servers_are_refused_on_macos(command: str, tmp_path: Path) -> None:
    done = sgpu("macOS", tmp_path, command)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == golden("common.systems.sgpu-nodes-servers", command=command, MACOS_HINT=MACOS_HINT)


@pytest.mark.slow
def test_23B13_every_other_command_can_be_loaded_on_macos(tmp_path: Path) -> None:
    names = sorted(set(COMMANDS) - set(ON_LINUX))
    program = (
        "from serverless_gpu.cli import program\n"
        "import click\n"
        f"for name in {names!r}:\n"
        "    command = program.sgpu.get_command(click.Context(program.sgpu), name)\n"
        "    print(name, command.get_short_help_str() != '')\n"
    )
    done = on("macOS", program, tmp_path)
    assert done.stdout.splitlines() == [f"{name} True" for name in names], done.stderr
