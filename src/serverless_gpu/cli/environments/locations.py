"""Which interpreter, which store and which snapshot a person means; and where this home keeps environments."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from serverless_gpu.cli.output import say
from serverless_gpu.cli.runs.run_choice import this_home
from serverless_gpu.environment.documents import Snapshot
from serverless_gpu.environment.scan.description import Description, read_description
from serverless_gpu.environment.scan.interpreter import describe_other
from serverless_gpu.environment.scan.scan import Recogniser
from serverless_gpu.environment.stores.blobs import StoreBlobs
from serverless_gpu.environment.stores.repair import read_snapshot
from serverless_gpu.environment.stores.store_urls import open_store
from serverless_gpu.errors import EnvironmentUnsupported, InvalidValue

_ADDRESS_DIGITS = 64


def environments() -> Path:
    """Return the directory of this home's environments."""
    return this_home().environments


def recogniser(directory: Path) -> Recogniser:
    """Return what recognises the environments that were captured from this home."""
    return Recogniser(directory / "index")


def blobs(url: str | None, directory: Path) -> StoreBlobs:
    """Return what lies in the store that is meant.

    Args:
        url: what was typed; None for the store of this home.
        directory: of this home's environments.

    Raises:
        InvalidValue: it is no store.
    """
    return StoreBlobs(open_store(directory / "store" if url is None else url, os.environ))


def describe(python: str | None) -> Description:
    """Return what an interpreter says about itself, as one that is started in this directory.

    Args:
        python: what was typed, an interpreter or its venv; None for the one sgpu belongs to.

    Raises:
        InvalidValue: there is no such interpreter.
        EnvironmentUnsupported: it does not say what it is.
    """
    path = sys.executable if python is None else str(_interpreter(python))
    if python is None:
        _mention_other(os.environ.get("VIRTUAL_ENV", ""))
    try:
        return read_description(describe_other(path))
    except (RuntimeError, OSError, ValueError) as error:
        raise EnvironmentUnsupported(f"{path} cannot be asked for its environment: {error}") from None


def interpreter(python: str | None) -> str:
    """Return the interpreter to put an environment on; "" for any that fits.

    Raises:
        InvalidValue: there is no such interpreter.
    """
    return "" if python is None else str(_interpreter(python))


def choose_snapshot(wanted: str, among: StoreBlobs) -> Snapshot:
    """Return the snapshot that is meant.

    Args:
        wanted: an address, or its beginning.
        among: the store.

    Raises:
        EnvironmentProblem: there is none, or several.
    """
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


def _mention_other(active: str) -> None:
    """Say whose environment this is about when another one is active in the shell."""
    if os.path.isdir(active) and not os.path.samefile(active, sys.prefix):
        say(f"sgpu: this is about {sys.prefix}, which sgpu belongs to; for the active one: --python {active}", err=True)
