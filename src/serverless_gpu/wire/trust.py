"""Which certificates of servers are trusted."""

from __future__ import annotations

import ssl

from serverless_gpu.errors import InvalidValue


def trust(ca: str) -> ssl.SSLContext:
    """Return the context that checks a server's certificate (20 ms to make); "" is the system's."""
    try:
        return ssl.create_default_context(cafile=ca or None)
    except OSError as error:
        raise InvalidValue(
            f"{ca or 'the system'} has no certificate that can be read: {error.strerror or error}",
            hint="`sgpu login URL --ca FILE`: the certificate of the server's authority, PEM",
        ) from error
