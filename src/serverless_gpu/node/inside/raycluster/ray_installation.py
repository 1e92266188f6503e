"""Finds the installed Ray without importing the package, because the import takes a second.

Failure cases: If Ray is not installed, `ray_version` raises ModuleNotFoundError. If Ray is a source tree without
metadata, this module reads the version from Ray's `_version.py`. For Ray before 2.55, `ray_version` rejects clusters of
several nodes, because all nodes would write to the head's directory.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import re
import site
from collections.abc import Mapping

OLDEST = (2, 49)
"""The oldest tested Ray version. Older Ray versions have other options of `ray start`."""
TOKENS_SINCE = (2, 52)
DIRECTORIES_SINCE = (2, 55)

_PARTS = ("aiohttp", "aiohttp_cors", "grpc", "prometheus_client")
_VERSION = re.compile(r'^version = "([^"]+)"', re.M)
_VERSION_BYTES_MAX = 10_000


def release(version: str) -> tuple[int, ...]:
    """Return the first two numbers of a version string, or () if the string contains no numbers."""
    return tuple(int(digits) for digits in re.findall(r"\d+", version)[:2])


def origin() -> str:
    """Return the file that `import ray` would load, or ""."""
    try:
        spec = importlib.util.find_spec("ray")
    except Exception:  # noqa: BLE001 - the user's import finders may raise any exception
        return ""
    return (spec.origin or "") if spec is not None else ""


def version() -> str:
    """Return the installed Ray's version, or "" if unknown."""
    with contextlib.suppress(Exception):  # The user's import finders may raise any exception.
        # Import importlib.metadata late, because its import also loads `random`, `bisect` and other modules. A file
        # beside the caller's script may shadow `random` or `bisect`.
        return str(importlib.import_module("importlib.metadata").version("ray"))
    file = origin()  # A Ray source tree has no package metadata.
    path = os.path.join(os.path.dirname(file), "_version.py") if file else os.devnull
    with contextlib.suppress(OSError), open(path, "rb") as source:
        found = _VERSION.search(source.read(_VERSION_BYTES_MAX).decode(errors="replace"))
        return found[1] if found is not None else ""
    return ""


def ray_version(num_nodes: int = 1) -> str:
    """Return the installed Ray's version. A cluster of one node may use a Ray with an unknown version.

    Raises ModuleNotFoundError if Ray is not installed. Raises RuntimeError if several nodes would write to the head's
    directory.
    """
    known = version()
    if not origin():
        raise ModuleNotFoundError(
            "Ray is not installed in the run's environment. Run pip install 'ray[default]'", name="ray"
        )
    if num_nodes > 1 and release(known) < DIRECTORIES_SINCE:
        raise RuntimeError(f"Ray {known} cannot run on {num_nodes} nodes here. Use Ray 2.55 or later")
    return known or "of an unknown version"


def knows_tokens(version: str) -> bool:
    """Return whether Ray of this version can reject clients that lack the cluster's token."""
    return release(version) >= TOKENS_SINCE


def can_serve_clients() -> bool:
    """Return True if Ray can serve `ray://` connections on this node, which requires the grpc package."""
    return _is_there("grpc")


def missing_parts() -> list[str]:
    """Return the missing packages of `ray[default]`.

    Ray's agents and dashboard require all packages of `ray[default]`.
    """
    return [name for name in _PARTS if not _is_there(name)]


def python_path(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variable with which a new interpreter finds this interpreter's Ray."""
    directory = os.path.dirname(os.path.dirname(origin()))
    told = [path for path in variables.get("PYTHONPATH", "").split(os.pathsep) if path]
    own = [*site.getsitepackages(), site.getusersitepackages(), *told]
    if not directory or os.path.realpath(directory) in map(os.path.realpath, own):
        return {}
    return {"PYTHONPATH": os.pathsep.join([directory, *told])}


def _is_there(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ValueError:  # The user has inserted a module without a spec into `sys.modules`.
        return True
