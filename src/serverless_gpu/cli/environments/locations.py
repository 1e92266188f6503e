"""Resolves the interpreter, store and snapshot in the options of `sgpu env`."""

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
    """Return the environments directory in the home directory."""
    return this_home().environments


def known_environments(directory: Path) -> Recogniser:
    """Return a recogniser for environments that were captured from this home directory."""
    return Recogniser(directory / "index")


def open_blobs(url: str | None, directory: Path) -> StoreBlobs:
    """Return the blobs of a store. Without a URL, open the store in the home directory."""
    return StoreBlobs(open_store(directory / "store" if url is None else url, os.environ))


def describe(python: str | None) -> Description:
    """Run an interpreter in the working directory and return the description of its environment.

    Without `python`, run the interpreter that runs sgpu.
    """
    path = sys.executable if python is None else str(_interpreter(python))
    active = os.environ.get("VIRTUAL_ENV", "")
    if python is None and os.path.isdir(active) and not os.path.samefile(active, sys.prefix):
        say(
            f"sgpu: using sgpu's own environment {sys.prefix}. For the active environment, add --python {active}",
            err=True,
        )
    try:
        return read_description(describe_other(path))
    except (RuntimeError, OSError, ValueError) as error:
        raise EnvironmentUnsupported(f"{path} did not describe its environment: {error}") from None


def interpreter(python: str | None) -> str:
    """Return the base interpreter for a restored environment, or "" for any suitable interpreter."""
    return "" if python is None else str(_interpreter(python))


def choose_snapshot(wanted: str, among: StoreBlobs) -> Snapshot:
    """Return the snapshot that has this address or this unique address prefix."""
    text = wanted.strip().lower()
    # A complete address avoids listing the store, which may be large and remote.
    return read_snapshot(among, text if len(text) == _ADDRESS_DIGITS else among.find_snapshot(text))


def _interpreter(text: str) -> Path:
    path = Path(os.path.expanduser(text)).absolute()
    if path.is_dir():
        path = path / "bin" / "python"
    if not os.access(path, os.X_OK) or path.is_dir():
        raise InvalidValue(
            f"--python: no interpreter exists at {path}",
            hint="name a Python interpreter or the directory of a virtual environment",
        )
    return path
