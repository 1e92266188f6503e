"""Which modules commands load: `--version`, `--help` and `runs` are cheap because this list is short."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import click
import pytest

import serverless_gpu
from serverless_gpu.cli import program
from serverless_gpu.client.remote.profile import ServerProfile, write_profile

SOURCE = Path(serverless_gpu.__path__[0]).parent
COSTLY = {"alembic", "asyncio", "cloudpickle", "email", "fastapi", "http", "httpx2", "importlib.metadata", "json"}
COSTLY |= {"logging", "multiprocessing", "numpy", "obstore", "sqlalchemy", "sqlite3", "ssl", "tempfile", "uvicorn"}
START = {"", ".cli", ".cli.command_group", ".cli.exit_codes", ".cli.program"}
START |= {".errors", ".lazy_import", ".version"}
"""Modules of this package that every command loads, below `serverless_gpu`."""
LIST = START | {
    ".ambient",
    ".cli.output",
    ".cli.runs",
    ".cli.runs.run_location",
    ".cli.runs.run_table",
    ".cli.server_connection",
    ".client",
    ".client.display",
    ".client.display.terminal_screen",
    ".client.launch",
    ".client.launch.remedies",
    ".client.remote",
    ".client.remote.profile",
    ".operating_system",
    ".json_codec",
    ".model",
    ".model.billing",
    ".model.billing.metering",
    ".model.billing.pricing",
    ".model.calendars",
    ".model.hardware",
    ".model.isolation",
    ".model.lifecycle",
    ".model.lifecycle.attempt",
    ".model.markup",
    ".model.receipt",
    ".model.secrets",
    ".model.spec",
    ".node",
    ".node.attempt",
    ".node.attempt.history",
    ".node.base",
    ".node.base.home",
    ".node.base.lock_files",
    ".units",
}
ASK = LIST | {
    ".model.cost",
    ".model.billing.ledger",
    ".model.scheduling",
    ".model.scheduling.values",
    ".wire",
    ".wire.base",
    ".wire.http_client",
    ".wire.queue",
    ".wire.runs",
    ".wire.server_status",
}
"""Those that `sgpu runs` loads beside, where it asks a server."""
_PROGRAM = """
import sys
from serverless_gpu.cli import main
sys.argv = ["sgpu", *{arguments!r}]
try:
    main()
except SystemExit:
    pass
print(sorted(sys.modules), file=sys.stderr)
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Return a home with one run, of which little is known."""
    attempt = tmp_path / "runs" / "01m7wtgc0mdrq1jtwz87xq3ma4" / "1"
    attempt.mkdir(parents=True)
    (attempt / "spec.json").write_text('{"world_size": 1}')
    return tmp_path


def loaded_by(home: Path, *arguments: str) -> set[str]:
    """Return the modules that a command has loaded when it ends."""
    own = {name: text for name, text in os.environ.items() if not name.startswith("SERVERLESS_GPU")}
    environ = {**own, "SERVERLESS_GPU_HOME": str(home), "PYTHONPATH": str(SOURCE)}
    program = _PROGRAM.format(arguments=list(arguments))
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, env=environ, check=True, timeout=60)
    return set(ast.literal_eval(done.stderr.splitlines()[-1]))


def ours(modules: set[str]) -> set[str]:
    """Return the modules of this package, below its name."""
    return {name.removeprefix("serverless_gpu") for name in modules if name.partition(".")[0] == "serverless_gpu"}


@pytest.mark.parametrize("arguments", [("--version",), ("--help",)])
def test_22B6_the_version_and_the_help_load_click_and_no_command(home: Path, arguments: Sequence[str]) -> None:
    modules = loaded_by(home, *arguments)
    assert ours(modules) - START == set()
    assert modules & (COSTLY | {"msgspec", "socket", "hashlib", "subprocess"}) == set()


def test_22B6_a_list_of_runs_loads_what_reads_directories_and_no_network(home: Path) -> None:
    modules = loaded_by(home, "runs")
    assert ours(modules) - LIST == set()
    assert modules & (COSTLY | {"subprocess", "ctypes"}) == set()


def test_22B6_a_list_of_runs_of_a_server_loads_the_connection_and_nothing_that_runs_anything(home: Path) -> None:
    write_profile(home, ServerProfile(url="http://127.0.0.1:9", token="t"))
    modules = loaded_by(home, "runs")
    assert ours(modules) - ASK == set()
    assert modules & {"asyncio", "cloudpickle", "httpx2", "multiprocessing", "sqlalchemy", "sqlite3"} == set()


@pytest.mark.parametrize("name", sorted(program.COMMANDS))
def test_22B6_the_table_of_commands_says_what_the_commands_say(name: str) -> None:
    context = click.Context(program.sgpu)
    command = program.sgpu.get_command(context, name)
    assert command is not None and command.name == name
    summary = click.Command(name, help=program.COMMANDS[name].summary)
    assert summary.get_short_help_str(200) == command.get_short_help_str(200)


def test_22B6_a_command_that_is_not_in_the_table_is_not_there() -> None:
    assert program.sgpu.get_command(click.Context(program.sgpu), "start") is None
