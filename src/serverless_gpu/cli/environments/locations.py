"""Resolves the interpreter, store and snapshot that options of `sgpu env` name."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from serverless_gpu.cli.output import say
from serverless_gpu.cli.runs.run_location import this_home
from serverless_gpu.environment.documents import Snapshot
from serverless_gpu.environment.scan.description import Description, read_description
from serverless_gpu.environment.scan.interpreter import describe_other
from serverless_gpu.environment.scan.scan import Recogniser
from serverless_gpu.environment.stores.blobs import StoreBlobs
from serverless_gpu.environment.stores.repair import read_snapshot
from serverless_gpu.environment.stores.store_urls import open_store
from serverless_gpu.errors import EnvironmentUnsupported, InvalidValue

_ADDRESS_DIGITS = 64


def environments_directory() -> Path:
    """Return the directory of this home's environments."""
    return this_home().environments


def known_environments(directory: Path) -> Recogniser:
    """Return the recogniser of the environments that this home captured."""
    return Recogniser(directory / "index")


def open_blobs(url: str | None, directory: Path) -> StoreBlobs:
    """Return the objects of a store. The default is the store of this home."""
    return StoreBlobs(open_store(directory / "store" if url is None else url, os.environ))


def describe(python: str | None) -> Description:
    """Start an interpreter in the working directory and return its description of its environment.

    The default is the interpreter of sgpu.
    """
    path = sys.executable if python is None else str(_interpreter(python))
    active = os.environ.get("VIRTUAL_ENV", "")
    if python is None and os.path.isdir(active) and not os.path.samefile(active, sys.prefix):
        say(f"sgpu: using sgpu's own environment, {sys.prefix}; for the active one, add --python {active}", err=True)
    try:
        return read_description(describe_other(path))
    except (RuntimeError, OSError, ValueError) as error:
        raise EnvironmentUnsupported(f"{path} did not describe its environment: {error}") from None


def interpreter(python: str | None) -> str:
    """Return the base interpreter for a restored environment, or "" for any suitable one."""
    return "" if python is None else str(_interpreter(python))


def choose_snapshot(wanted: str, among: StoreBlobs) -> Snapshot:
    """Return the snapshot whose address is this text, or begins with this text as a unique prefix."""
    text = wanted.strip().lower()
    # A whole address needs no listing of the store, which may be large and remote.
    return read_snapshot(among, text if len(text) == _ADDRESS_DIGITS else among.find_snapshot(text))


def _interpreter(text: str) -> Path:
    path = Path(os.path.expanduser(text)).absolute()
    if path.is_dir():
        path = path / "bin" / "python"
    if not os.access(path, os.X_OK) or path.is_dir():
        raise InvalidValue(
            f"--python: there is no interpreter {path}",
            hint="name a Python interpreter or the directory of a virtual environment",
        )
    return path
