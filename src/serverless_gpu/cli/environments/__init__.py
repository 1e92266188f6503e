"""`sgpu env`: captures, restores, compares and deletes Python environments in a store.

    show.py            show · fingerprint · diff     writes only the index that speeds up the next scan
    store.py           capture · restore · gc
    locations.py       the interpreter, the store and the snapshot that the options name
    progress_meter.py  the progress of a capture or restore

The commands write results to stdout and messages to stderr. `diff` exits with 1 for a difference and with 2 for a
failure, like diff(1).
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import TypeVar

import click

from serverless_gpu.cli.completion import complete_directory
from serverless_gpu.cli.exit_codes import CANCELLED
from serverless_gpu.cli.output import JsonType, json_option, say, say_lines
from serverless_gpu.errors import ServerlessGpuError

Command = TypeVar("Command", bound=Callable[..., object])

_TROUBLE = 2


@click.group()
def env() -> None:
    """Capture, restore and compare environments.

    ADDRESS is a snapshot address, or an address prefix that is unique in the store.
    """


def _python(command: Command) -> Command:
    text = "Interpreter or virtual environment to use (default: the environment of sgpu)."
    return click.option("--python", metavar="PATH", help=text)(command)


def _store(command: Command) -> Command:
    text = "Store directory, or s3://, gs:// or az:// URL (default: the store in the home directory)."
    return click.option("--store", metavar="URL", help=text)(command)


@env.command()
@click.argument("address", required=False)
@click.option("--all", "everything", is_flag=True, help="List every unit and file, not only the largest.")
@_python
@_store
@json_option(JsonType("cli.json_types:EnvironmentDetails"))
def show(address: str | None, everything: bool, python: str | None, store: str | None, as_json: bool) -> None:
    """Show the contents of an environment.

    Without ADDRESS, the command shows the interpreter's current environment.
    """
    with _interruptible("nothing was changed"):
        module = _module("show")
        if address is None:
            module.show_now(python, as_json=as_json, everything=everything)
        else:
            module.show_stored(address, store, as_json=as_json, everything=everything)


@env.command()
@_python
@json_option(JsonType("cli.json_types:EnvironmentFingerprint"))
def fingerprint(python: str | None, as_json: bool) -> None:
    """Print the environment's current address.

    The command also prints the changes since the last capture. `sgpu env fingerprint` captures nothing.
    """
    with _interruptible("nothing was changed"):
        _module("show").fingerprint(python, as_json=as_json)


@env.command()
@click.option("--repair", is_flag=True, help="Check the units in the store first, and upload damaged units again.")
@_python
@_store
@json_option(JsonType("cli.json_types:EnvironmentCapture"))
def capture(repair: bool, python: str | None, store: str | None, as_json: bool) -> None:
    """Capture the current environment.

    The command sends missing files to the store and prints the address. After an interruption, the next capture sends
    only the files that are still missing.
    """
    with _interruptible(
        "no snapshot exists yet. The store keeps the uploaded files, and the next capture uploads the rest"
    ):
        _module("store").capture(python, store, repair=repair, as_json=as_json)


@env.command()
@click.argument("address")
@click.argument("directory", shell_complete=complete_directory)
@click.option("--copies", is_flag=True, help="Copy every file instead of linking packages to the read-only cache.")
@_python
@_store
@json_option(JsonType("cli.json_types:EnvironmentRestore"))
def restore(address: str, directory: str, copies: bool, python: str | None, store: str | None, as_json: bool) -> None:
    """Restore a snapshot into DIRECTORY.

    DIRECTORY must be new or empty. The command prints the interpreter path of the restored environment. The option
    --python selects the base interpreter. By default, the restored environment uses an interpreter of the same version
    on this machine.
    """
    with _interruptible(
        "the directory was not created. The cache keeps the downloaded files. The next restore downloads the rest"
    ):
        _module("store").restore_into(address, directory, python, store, copies=copies, as_json=as_json)


@env.command()
@click.argument("first", metavar="[A]", required=False)
@click.argument("second", metavar="[B]", required=False)
@_python
@_store
@json_option(JsonType("cli.json_types:EnvironmentDifference"))
def diff(first: str | None, second: str | None, python: str | None, store: str | None, as_json: bool) -> None:
    """Show differences between environments.

    The command compares packages, edited files, code, the interpreter and start-up environment variables. Without
    addresses, the command compares the last capture with the current state. With A alone, the command compares A with
    the current state. With A and B, the command compares A with B. The exit code is 0 for equal environments, 1 for
    differences and 2 for a failure.
    """
    with _interruptible("nothing was changed"):
        try:
            differs = _module("show").differences(first, second, python, store, as_json=as_json)
        except (ServerlessGpuError, OSError) as error:
            say_lines(f"sgpu: {error}", err=True)
            sys.exit(_TROUBLE)
        sys.exit(1 if differs else 0)


@env.command()
@click.option(
    "--keep",
    metavar="AGE",
    default="30d",
    show_default=True,
    help="Keep snapshots that were captured or used within this time.",
)
@click.option(
    "--grace",
    metavar="AGE",
    default="1d",
    show_default=True,
    help="Delete units that were condemned at least this long ago (minimum: 6h).",
)
@click.option(
    "--force",
    is_flag=True,
    help="Allow a shorter --grace. Use --force only while no capture into the store is running.",
)
@click.option(
    "--cache", metavar="SIZE", help="Also shrink this node's unit cache to at most this size, for example 20GB or 0."
)
@click.option("--dry-run", is_flag=True, help="List the units that gc would condemn or delete.")
@_store
@json_option(JsonType("cli.json_types:EnvironmentCollection"))
def gc(keep: str, grace: str, cache: str | None, store: str | None, **flags: bool) -> None:
    """Delete unused environment units from a store.

    The command keeps all units of recent snapshots and running attempts. Deleting in two steps protects the units of
    concurrent captures. The first `gc` run marks unused units as condemned. A later `gc` run deletes condemned units
    after the --grace period.
    """
    with _interruptible("gc may have deleted some units already. The next gc deletes the other unused units"):
        _module("store").collect_garbage((keep, grace, cache), store, **flags)


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"{__name__}.{name}")


@contextmanager
def _interruptible(left: str) -> Iterator[None]:
    """On Ctrl-C, print one line and exit with the code for a cancelled command."""
    try:
        yield
    except KeyboardInterrupt:
        say(f"sgpu: interrupted; {left}", err=True)
        sys.exit(CANCELLED)
