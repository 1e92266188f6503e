"""The server that commands speak with."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from serverless_gpu.cli.choosing import this_home
from serverless_gpu.client.remote.profile import find_profile
from serverless_gpu.wire.connection import Connection


@contextlib.contextmanager
def server() -> Iterator[Connection]:
    """Yield a connection to the server of this user; a command does not wait for one that is away.

    Raises:
        ServerNotConfigured: there is none.
        InvalidValue: what is configured cannot be used.
    """
    profile = find_profile(this_home().root, os.environ)
    connection = Connection(profile.url, profile.token, ca=profile.ca)
    try:
        yield connection
    finally:
        connection.close()
