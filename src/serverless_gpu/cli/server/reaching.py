"""The server that commands speak with."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from serverless_gpu.cli.choosing import this_home
from serverless_gpu.cli.output import say
from serverless_gpu.client.remote.profile import SERVER, Profile, find_profile
from serverless_gpu.errors import ServerNotConfigured
from serverless_gpu.loading import load

if TYPE_CHECKING:
    from serverless_gpu.wire.connection import Connection


def connect(profile: Profile, *, patience_s: float = 0.0) -> Connection:
    """Return a connection; HTTP is loaded here, 60 ms that other commands need not wait for.

    Args:
        profile: which server, and as whom.
        patience_s: how long a server that is away is waited for, in seconds; that is said on stderr.
    """
    connection: Connection = load("serverless_gpu.wire.connection").Connection(
        profile.url, profile.token, ca=profile.ca, patience_s=patience_s, announce=_say
    )
    return connection


@contextlib.contextmanager
def server(*, patience_s: float = 0.0) -> Iterator[Connection]:
    """Yield a connection to the server of this user; a command does not wait for one that is away, unless told.

    Args:
        patience_s: how long it does, in seconds.

    Raises:
        ServerNotConfigured: there is none.
        InvalidValue: what is configured cannot be used.
    """
    connection = connect(_profile(this_home().root), patience_s=patience_s)
    try:
        yield connection
    finally:
        connection.close()


def _profile(home: Path) -> Profile:
    try:
        return find_profile(home, os.environ)
    except ServerNotConfigured:
        if (home / "server.json").exists() or os.environ.get(SERVER):
            raise
    raise ServerNotConfigured(
        "this asks a server, and none is configured",
        hint="`sgpu up` starts one on this machine, `sgpu login` takes one that is there",
    )


def _say(sentence: str) -> None:
    say(f"sgpu: {sentence}", err=True)
