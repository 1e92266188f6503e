"""Explains the last output of an MLflow server in one sentence with a remedy."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from typing import NamedTuple


class Attempted(NamedTuple):
    """A server that was to start: its interpreter, its store (as may be shown), the place of its log."""

    python: str
    store: str
    log: str


NO_DATABASE = "is not a database"
OTHER_VERSION = "was written by another version of MLflow"
_LACKS = re.compile(r"^ModuleNotFoundError: No module named '([^']+)'", re.MULTILINE)
_ERROR = re.compile(r"^(?:[\w.]*(?:Error|Exception|Exit)\b.*)$", re.MULTILINE)
_LINE_MAX = 300
_PAUSE_S, _PAUSE_S_MAX = 5.0, 600.0


_KNOWN: tuple[tuple[str, Callable[[Attempted], str]], ...] = (
    (
        "Detected out-of-date database schema",  # which it also says of a newer one
        lambda tried: (
            f"{tried.store} {OTHER_VERSION}; serve it with that one, or upgrade it, after a "
            f"backup: {shlex.quote(tried.python)} -m mlflow db upgrade {shlex.quote(tried.store)}"
        ),
    ),
    (
        "Can't locate revision",
        lambda tried: f"{tried.store} was written by a newer MLflow than that of {tried.python}; upgrade it there",
    ),
    ("ddress already in use", lambda tried: "its port was taken by another process while it started"),
    (
        "unable to open database file",
        lambda tried: f"{tried.store} cannot be opened: it is not there, or not yours to write",
    ),
    ("attempt to write a readonly database", lambda tried: f"{tried.store} cannot be written to"),
    ("database is locked", lambda tried: f"{tried.store} is locked by another process"),
    (
        "file is not a database",
        lambda tried: f"{tried.store} {NO_DATABASE}; once that file is moved away a new one is made",
    ),
    ("No space left on device", lambda tried: f"no space left for {tried.store}"),
    ("database or disk is full", lambda tried: f"no space left for {tried.store}"),
)


def sentence(written: str, ending: str, tried: Attempted) -> str:
    """Return why a server did not come up, or ended.

    `written` is the end of its output; `ending` the fallback, such as "exit code 1".
    """
    for words, say in _KNOWN:
        if words in written:
            return say(tried)
    lacking = _LACKS.findall(written)
    if lacking and lacking[-1].partition(".")[0] == "mlflow":
        return f"{tried.python} has no MLflow; pip install mlflow"
    if lacking:
        what = f"no {lacking[-1]}; mlflow-skinny is not enough"
        return f"{tried.python} has not all of MLflow ({what}); pip install mlflow"
    errors = _ERROR.findall(written)
    last = errors[-1].strip()[:_LINE_MAX] if errors else ""
    return f"MLflow's server ended ({ending}){': ' + last if last else ''}; all it wrote: {tried.log}"


def pause_s(failures: int) -> float:
    """Return how long to wait after so many failures in a row."""
    return float(min(_PAUSE_S * 2 ** min(max(failures, 1) - 1, 20), _PAUSE_S_MAX))


def without_password(store: str) -> str:
    """Return the address of a store as it may be shown."""
    return re.sub(r"(?<=://)[^/@]*@", "…@", store)
