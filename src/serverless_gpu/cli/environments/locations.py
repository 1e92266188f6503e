"""Resolves the interpreter, store and snapshot that options name, and where this home keeps environments."""

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
    """Return the recogniser of environments that this home captured."""
    return Recogniser(directory / "index")


def open_blobs(url: str | None, directory: Path) -> StoreBlobs:
    """Return the objects of a store; None means this home's store."""
    return StoreBlobs(open_store(directory / "store" if url is None else url, os.environ))


def describe(python: str | None) -> Description:
    """Return an interpreter's description of itself, started in this directory; None means sgpu's own."""
    path = sys.executable if python is None else str(_interpreter(python))
    active = os.environ.get("VIRTUAL_ENV", "")
    if python is None and os.path.isdir(active) and not os.path.samefile(active, sys.prefix):
        say(f"sgpu: this is about {sys.prefix}, which sgpu belongs to; for the active one: --python {active}", err=True)
    try:
        return read_description(describe_other(path))
    except (RuntimeError, OSError, ValueError) as error:
        raise EnvironmentUnsupported(f"{path} cannot be asked for its environment: {error}") from None


def interpreter(python: str | None) -> str:
    """Return the interpreter for a restored environment; "" for any that fits."""
    return "" if python is None else str(_interpreter(python))


def choose_snapshot(wanted: str, among: StoreBlobs) -> Snapshot:
    """Return the snapshot with this address or unique beginning of one."""
    text = wanted.strip().lower()
    # A whole address needs no list of the store, which may be long and far away.
    return read_snapshot(among, text if len(text) == _ADDRESS_DIGITS else among.find_snapshot(text))


def _interpreter(text: str) -> Path:
    path = Path(os.path.expanduser(text)).absolute()
    if path.is_dir():
        path = path / "bin" / "python"
    if not os.access(path, os.X_OK) or path.is_dir():
        raise InvalidValue(
            f"--python: there is no interpreter {path}", hint="name a python, or the directory of a venv"
        )
    return path
