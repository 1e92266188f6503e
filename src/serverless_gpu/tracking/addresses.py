"""Addresses of tracking servers, in a module that loads nothing else."""

from __future__ import annotations

from urllib.parse import urlsplit, urlunsplit


def split_userinfo(uri: str) -> tuple[str, str]:
    """Return an address without its credentials and trailing slash, and the credentials, or ""."""
    try:
        parts = urlsplit(uri.strip())
    except ValueError:
        return "", ""
    userinfo, _, host = parts.netloc.rpartition("@")
    # A query or a fragment in the address of a server means nothing, and may be a secret.
    return urlunsplit((parts.scheme, host, parts.path.rstrip("/"), "", "")), userinfo
