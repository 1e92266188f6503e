"""Importing a part of this package when it is first asked for, and what is said when that fails.

    serverless_gpu.distributed  ──▶  __getattr__  ──▶  load("serverless_gpu.client.decorator")

Failure case: a file of the user's has the name of one of Python's modules, and our import gets it. What is raised then
is often an AttributeError, which Python's `from … import …` would turn into "cannot import name", of this package. This
module itself needs nothing that can be hidden: what it imports is loaded before any program runs.

On Windows everything is refused with one sentence but the exceptions, the types of GPUs, and what prints the sentence.
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
    """Return a module of this package; ImportError names the file that hides a module it needs."""
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
    return f"{file} hides Python's own module {name}\nhint: give {file} another name"
