"""Prints the failure that ended a run."""

from __future__ import annotations

from serverless_gpu.cli.output import say_lines
from serverless_gpu.errors import ServerlessGpuError
from serverless_gpu.lazy_import import load


def say_failure(error: BaseException) -> None:
    """Print a failure on stderr: the failing rank's traceback, the error and its notes."""
    cause = str(error.__cause__ or "").strip("\n")
    text = (
        str(error)
        if isinstance(error, ServerlessGpuError)
        else f"{type(error).__name__}: {load('serverless_gpu.client.runs.rank_failures').text_of(error)}"
    )
    for part in (cause, f"sgpu: {text}", *getattr(error, "__notes__", [])):
        if part:
            say_lines(part, err=True)
