"""Calls of a module's functions, submitted by a script of a small environment: what they need travels to the nodes."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from pathlib import Path

from tests.support.local.small_environment import SmallEnvironment, with_requirements

_SUBMIT = """
import importlib, json, sys
from serverless_gpu import distributed

module, name, options, *args = sys.argv[1:]
function = getattr(importlib.import_module(module), name)
print(distributed(remote=True, env="snapshot", **{"quiet": True, **json.loads(options)})(function).submit(*args).id)
"""


class Submitting:
    """A caller with an environment of its own; it is made when it is first needed.

    Args:
        directory: where that is made.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._small: SmallEnvironment | None = None

    def submit(self, function: Callable[..., object], *args: str, environ: dict[str, str], **options: object) -> str:
        """Submit a call of a function of a module that needs the standard library only; return the run's identifier.

        Args:
            function: what ranks call.
            args: its arguments.
            environ: variables of the script.
            options: of `distributed`.
        """
        if self._small is None:
            self._small = SmallEnvironment(self._directory, *with_requirements("httpx2"))
            self._small.write("submit.py", _SUBMIT)
        path = Path(inspect.getfile(function))
        self._small.write(path.name, path.read_text())
        words = (path.stem, function.__name__, json.dumps(options), *args)
        out, _ = self._small.run("submit.py", *words, **environ)
        return out.strip()
