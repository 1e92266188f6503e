"""What ended a run, as commands print it."""

from __future__ import annotations

from serverless_gpu.cli.output import say_lines
from serverless_gpu.client.runs.rank_failures import text_of
from serverless_gpu.errors import ServerlessGpuError


def say_failure(error: BaseException) -> None:
    """Print what ended a run on stderr: the traceback of the rank that raised, the error, and its notes.

    Args:
        error: of `Run.follow`.
    """
    cause = str(error.__cause__ or "").strip("\n")
    text = str(error) if isinstance(error, ServerlessGpuError) else f"{type(error).__name__}: {text_of(error)}"
    for part in (cause, f"sgpu: {text}", *getattr(error, "__notes__", [])):
        if part:
            say_lines(part, err=True)
