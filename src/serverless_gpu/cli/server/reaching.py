"""The server that commands speak with."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from serverless_gpu.cli.choosing import this_home
from serverless_gpu.client.remote.profile import Profile, find_profile
from serverless_gpu.loading import load

if TYPE_CHECKING:
    from serverless_gpu.wire.connection import Connection


def connect(profile: Profile) -> Connection:
    """Return a connection; HTTP is loaded here, 60 ms that other commands need not wait for."""
    connection: Connection = load("serverless_gpu.wire.connection").Connection(
        profile.url, profile.token, ca=profile.ca
    )
    return connection


@contextlib.contextmanager
def server() -> Iterator[Connection]:
    """Yield a connection to the server of this user; a command does not wait for one that is away.

    Raises:
        ServerNotConfigured: there is none.
        InvalidValue: what is configured cannot be used.
    """
    connection = connect(find_profile(this_home().root, os.environ))
    try:
        yield connection
    finally:
        connection.close()
