"""Writes the charts that commands draw.

`load_drawing` reports missing packages and directories before the computation starts.
"""

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
    """Return the drawing module after checking the file type, the directory and Matplotlib."""
    if path.suffix.lower() not in _KINDS:
        raise InvalidValue(f"the chart {path} cannot be written: the file name must end in {', '.join(_KINDS)}")
    refuse_irregular(path)
    if not path.parent.is_dir():
        message = f"the chart {path} cannot be written: the directory {path.parent} does not exist"
        raise StorageError(message, hint="choose a file in a directory that you can write to")
    try:
        return load(module)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        message = "--png needs Matplotlib, which is not installed"
        raise ServerlessGpuError(message, hint="run pip install 'serverless-gpu[simulate]'") from None


def write_picture(draw: Callable[[], None], path: Path) -> None:
    """Draw a chart and print its path. Raise StorageError if the file is not writable."""
    try:
        draw()
    except OSError as error:
        message = f"the chart {path} cannot be written: {error.strerror or error}"
        raise StorageError(message, hint="choose a file in a directory that you can write to") from None
    say(f"sgpu: wrote {path}", err=True)
