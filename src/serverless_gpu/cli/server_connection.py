"""Connections to the server, with a wait limit for an unreachable server.

    about one run (attach, cancel, show, logs, result, metrics, run preempt)   wait as `sgpu submit` does
    all other commands                                                         fail at once

If the server remains unreachable, a command exits with 75 (`exit_codes.py`). `SERVERLESS_GPU_PATIENCE` limits the wait.
A waiting command rereads the server's address and token, because both may change at a restart.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from serverless_gpu.cli.output import say
from serverless_gpu.client.launch.remedies import no_server
from serverless_gpu.client.remote.profile import ServerProfile, find_profile, is_configured, remote_home, reread
from serverless_gpu.client.remote.profile import patience_s as configured_patience_s
from serverless_gpu.errors import ServerNotConfigured
from serverless_gpu.lazy_import import load

if TYPE_CHECKING:
    from serverless_gpu.wire.connection import Connection
    from serverless_gpu.wire.http_client import BriefConnection


def connect(profile: ServerProfile, *, patience_s: float = 0.0, home: Path | None = None) -> Connection:
    """Return a connection. A waiting connection rereads the configuration in `home`.

    Importing the HTTP client takes 60 ms.
    """
    latest = _latest(profile, home)
    connection: Connection = load("serverless_gpu.wire.connection").Connection(
        lambda: latest().url,
        lambda: latest().token,
        ca=profile.ca,
        patience_s=patience_s,
        announce=lambda sentence: say(f"sgpu: {sentence}", err=True),
    )
    return connection


def connect_briefly(profile: ServerProfile) -> BriefConnection:
    """Return a connection for one or two requests. The connection never waits for an unreachable server."""
    connection: BriefConnection = load("serverless_gpu.wire.http_client").BriefConnection(
        profile.url, profile.token, ca=profile.ca
    )
    return connection


def _latest(profile: ServerProfile, home: Path | None) -> Callable[[], ServerProfile]:
    """Return a function that rereads the server's address and token."""
    known = profile

    def latest() -> ServerProfile:
        nonlocal known
        if home is not None:
            known = reread(home, known, os.environ)
        return known

    return latest


@contextlib.contextmanager
def patient_server(home: Path) -> Iterator[Connection]:
    """Yield a connection for a command about one run. The connection waits for an unreachable server."""
    connection = connect(find_profile(home, os.environ), patience_s=configured_patience_s(os.environ), home=home)
    try:
        yield connection
    finally:
        connection.close()


@contextlib.contextmanager
def server(*, patience_s: float = 0.0) -> Iterator[Connection]:
    """Yield a connection to this user's server.

    The connection waits `patience_s` seconds for an unreachable server.
    """
    home = remote_home(os.environ).root
    connection = connect(_profile(home), patience_s=patience_s, home=home)
    try:
        yield connection
    finally:
        connection.close()


def _profile(home: Path) -> ServerProfile:
    try:
        return find_profile(home, os.environ)
    except ServerNotConfigured:
        if is_configured(home, os.environ):
            raise
    context = click.get_current_context(silent=True)
    raise no_server(context.command_path if context is not None else "sgpu")
