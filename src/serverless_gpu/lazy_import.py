"""Imports parts of this package on first use and explains failures.

    serverless_gpu.distributed  ──▶  __getattr__  ──▶  load("serverless_gpu.client.decorator")

Failure case: A user's file may have the name of a standard library module. Python then imports the user's file, which
often raises an AttributeError. Python's `from … import …` would turn the AttributeError into a "cannot import name"
error about this package. No user file can shadow the imports of `lazy_import`, because Python loads those modules
before any program runs.

On Windows, `load` raises the same error for all modules except the exceptions, the GPU types and the CLI output.
"""

from __future__ import annotations

import importlib
import os
import sys

TYPE_CHECKING = False

if TYPE_CHECKING:
    from types import ModuleType

_ON_WINDOWS = ("serverless_gpu.cli.output", "serverless_gpu.compute", "serverless_gpu.errors")


def load(module: str) -> ModuleType:
    """Import a serverless-gpu module. Raises ImportError with the path of a file that shadows a module."""
    if sys.platform == "win32" and module not in _ON_WINDOWS:
        refusal: Exception = importlib.import_module("serverless_gpu.operating_system").windows_refusal()
        raise refusal
    try:
        return importlib.import_module(module)
    except AttributeError as error:
        raise ImportError(f"{module} cannot be imported: {_why(error)}") from error


def _why(error: AttributeError) -> str:
    lacking = error.obj
    name, file = getattr(lacking, "__name__", None), getattr(lacking, "__file__", None)
    if name not in sys.stdlib_module_names or not file or file.startswith(os.path.dirname(os.__file__)):
        return str(error)
    return f"{file} shadows Python's standard module {name}\nhint: rename {file}"
