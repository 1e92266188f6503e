"""Opens an environment store by its URL: a path, `file://`, `memory://`, `s3://`, `gs://` or `az://`.

A server's store has the internal URL `sgpu+http://host:port`, which users never enter.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import cast
from urllib.parse import unquote, urlsplit

from serverless_gpu.environment.stores.base import Store
from serverless_gpu.environment.stores.directory_store import DirectoryStore, MemoryStore
from serverless_gpu.environment.stores.object_store import BOUND_S, CLOUDS, ObjectStore
from serverless_gpu.errors import InvalidValue
from serverless_gpu.lazy_import import load

_PREFIX = re.compile(r"(?:[\w.-]+(?:/[\w.-]+)*)?", re.ASCII)

_SERVED = ("sgpu+http", "sgpu+https")

_memory: dict[str, MemoryStore] = {}
_memory_lock = threading.Lock()


def is_remote(url: str) -> bool:
    """Return True if a store URL refers to a store on the network."""
    return "://" in url and not url.startswith(("file://", "memory://"))


def is_served(url: str) -> bool:
    """Return True if a store URL refers to a server's store."""
    return url.partition("://")[0] in _SERVED


def open_store(
    url: str | Path, environ: Mapping[str, str], *, token: str = "", ca: str = "", bound_s: float = BOUND_S
) -> Store:
    """Return the store for a URL without accessing or creating the store.

    Args:
        url: a path, ``file:///a/path``, ``memory://name`` (one store per name in this process), ``s3://bucket/prefix``,
            ``gs://bucket/prefix``, ``az://container/prefix``, or ``sgpu+http://host:port`` for a server.
        environ: source of credentials for object stores, and of the certificates for a server without `ca`.
        token: the token for a server.
        ca: file with the certificates for a server, from its profile, or "" for the system's certificates.
        bound_s: time limit of one call to an object store or a server, in seconds.

    Raises:
        InvalidValue: the url names no store, or contains credentials.
        StoreUnavailable: the url names an object store, and obstore is not installed.
    """
    text = str(url)
    if "://" not in text:
        if not text:
            raise _invalid(text)
        return DirectoryStore(Path(os.path.expanduser(text)))
    parts = urlsplit(text)
    if "@" in parts.netloc or parts.query or parts.fragment:
        # The error message shows only the URL scheme, because the rest of the URL may contain secrets.
        raise InvalidValue(
            f"the store URL ({parts.scheme}://…) must not contain a user, a password or a query",
            hint="set credentials in environment variables, for example AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
        )
    if parts.scheme == "file" and parts.netloc in ("", "localhost") and parts.path:
        return DirectoryStore(Path(unquote(parts.path)))
    if parts.scheme == "memory":
        with _memory_lock:
            return _memory.setdefault(text, MemoryStore(parts.netloc + parts.path))
    if parts.scheme in _SERVED and parts.netloc and parts.path in ("", "/"):
        # Import the HTTP client late, because the import takes 50 ms and most stores are directories.
        served = load(f"{__package__}.server_store")
        return cast(
            "Store", served.ServedStore(text, token, ca=ca or environ.get("SSL_CERT_FILE", ""), bound_s=bound_s)
        )
    if parts.scheme in CLOUDS and (bucket := parts.netloc):
        prefix = parts.path.strip("/")
        if _PREFIX.fullmatch(prefix) and not {".", ".."} & set(prefix.split("/")):
            return ObjectStore(parts.scheme, bucket, prefix, environ, bound_s=bound_s)
    raise _invalid(text)


def _invalid(text: str) -> InvalidValue:
    return InvalidValue(
        f"{text!r} is not a valid store URL",
        hint="use a directory path, s3://bucket/prefix, gs://bucket/prefix or az://container/prefix",
    )
