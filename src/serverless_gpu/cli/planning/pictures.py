"""Writes pictures of commands; reports obstacles before the work."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from serverless_gpu.cli.output import say
from serverless_gpu.errors import (
    InvalidValue,
    ServerlessGpuError,
    StorageError,
)
from serverless_gpu.lazy_import import load
from serverless_gpu.node.base.private_files import refuse_irregular

_KINDS = (".png", ".svg", ".pdf")


def load_drawing(path: Path, module: str) -> ModuleType:
    """Return the drawing module after checking for Matplotlib, the directory and the file type."""
    if path.suffix.lower() not in _KINDS:
        raise InvalidValue(f"{path} cannot be written: a picture ends in {', '.join(_KINDS)}")
    refuse_irregular(path)
    if not path.parent.is_dir():
        message = f"the picture cannot be written to {path}: there is no directory {path.parent}"
        raise StorageError(message, hint="give the path of a file in a directory you can write to")
    try:
        return load(module)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        message = "--png draws with Matplotlib, which this Python does not have"
        raise ServerlessGpuError(message, hint="pip install 'serverless-gpu[simulate]'") from None


def write_picture(draw: Callable[[], None], path: Path) -> None:
    """Draw a picture and print its path; raise StorageError when it cannot be written."""
    try:
        draw()
    except OSError as error:
        message = f"the picture cannot be written to {path}: {error.strerror or error}"
        raise StorageError(message, hint="give the path of a file in a directory you can write to") from None
    say(f"{path} shows it", err=True)
