"""Which server remote calls go to, and as whom.

    SERVERLESS_GPU_SERVER + SERVERLESS_GPU_TOKEN      win, for jobs and containers
    $SERVERLESS_GPU_HOME/server.json (0600)           written by `sgpu up` on this machine, or by `sgpu login`

Failure cases: neither is there (`ServerNotConfigured`), an address without a token, a file that cannot be read or is
not ours, plain HTTP to another machine (the token would be readable on its way).
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from serverless_gpu.errors import InvalidValue, ServerlessGpuError, ServerNotConfigured
from serverless_gpu.node.home import storage_error
from serverless_gpu.serialized import from_json

SERVER = "SERVERLESS_GPU_SERVER"
TOKEN = "SERVERLESS_GPU_TOKEN"
_FILE = "server.json"


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """A server, and who one is there.

    Attributes:
        principal: whose token it is; "" where that was not said.
        embedded: whether `sgpu up` of this home wrote it.
        machine: `ambient.machine()` of the server when it was written, or "".
        ca: file with certificates to trust; "" for the system's.
    """

    url: str
    token: str
    principal: str = ""
    embedded: bool = False
    machine: str = ""
    ca: str = ""


def find_profile(home: Path, environ: Mapping[str, str]) -> Profile:
    """Return the server to use.

    Args:
        home: the home directory.
        environ: the environment variables to look at.

    Raises:
        ServerNotConfigured: there is none.
        InvalidValue: what is configured cannot be used.
    """
    url, token = environ.get(SERVER, ""), environ.get(TOKEN, "")
    if url:
        if not token:
            raise ServerNotConfigured(
                f"{SERVER} is set, and {TOKEN} is not", hint="a server needs a token: `sgpu token`"
            )
        profile = Profile(url=url, token=token)
    else:
        profile = _read(home / _FILE)
        if token:
            profile = msgspec.structs.replace(profile, token=token, principal="")
    check_address(profile.url)
    return profile


def moved(home: Path, known: Profile) -> Profile:
    """Return a server of this home's file as it is by now: one that was started again may have another port.

    It is the same server if it has the same token; another one that somebody has logged in to meanwhile is not asked.

    Args:
        home: the home directory.
        known: the server as it was.
    """
    try:
        there = find_profile(home, {})
    except ServerlessGpuError:  # gone, or somebody is at it
        return known
    return msgspec.structs.replace(known, url=there.url) if there.token == known.token else known


def renewed(home: Path, known: Profile, environ: Mapping[str, str]) -> Profile:
    """Return a server with the token that there is for it by now: somebody has logged in again, as the same principal.

    Another server, or another principal of it, is not taken for that: what waits was asked for by who one was.

    Args:
        home: the home directory.
        known: the server as it was.
        environ: the environment variables to look at.
    """
    try:
        there = find_profile(home, environ)
    except ServerlessGpuError:  # gone, or somebody is at it
        return known
    same_server = there.url.rstrip("/") == known.url.rstrip("/") or (there.embedded and known.embedded)
    same_one = there.principal == known.principal or not (there.principal and known.principal)
    return there if same_server and same_one else known


def write_profile(home: Path, profile: Profile) -> None:
    """Remember a server, readable for its user only.

    Raises:
        StorageError: it cannot be written.
    """
    path = home / _FILE
    temporary = path.with_name(f".{_FILE}-{os.getpid()}")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with open(descriptor, "wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(profile)) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise storage_error(error, path) from None


def _read(path: Path) -> Profile:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise ServerNotConfigured(
            "remote=True needs a server, and none is configured",
            hint="`sgpu up` starts one on this machine, `sgpu login` takes one that is there; "
            "without remote, it runs on this machine",
        ) from None
    except OSError as error:
        raise ServerNotConfigured(f"{path} cannot be read: {error.strerror}") from None
    try:
        return from_json(data, Profile)
    except msgspec.MsgspecError as error:
        raise InvalidValue(f"{path} cannot be understood: {error}", hint="`sgpu login` writes it anew") from None


def check_address(url: str) -> None:
    """Refuse an address that is none, or to which a token would go readably.

    Raises:
        InvalidValue: so it is.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc:
        raise InvalidValue(
            "the address of the server is not one",
            hint="it begins with https:// or http://, for example https://gpus.example.org or http://127.0.0.1:7878",
        )
    if parts.scheme == "http" and not _is_loopback(parts.hostname):
        raise InvalidValue(
            f"{url} would carry the token readably over the network",
            hint="use https://, or a tunnel: ssh -L 7878:127.0.0.1:7878 the-server",
        )


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
