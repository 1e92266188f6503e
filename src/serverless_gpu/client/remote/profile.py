"""Finds the server for remote calls and the caller's credentials for the server.

    SERVERLESS_GPU_SERVER + SERVERLESS_GPU_TOKEN      take precedence, for jobs and containers
    $SERVERLESS_GPU_HOME/server.json (0600)           written by `sgpu up` on this machine, or by `sgpu login`

The client refuses a server address without a token, an unreadable profile file, and a profile file of another user. The
client also refuses plain HTTP to another machine.
"""

from __future__ import annotations

import contextlib
import os
import socket
import warnings
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from serverless_gpu.errors import InvalidValue, ServerlessGpuError, ServerNotConfigured
from serverless_gpu.json_codec import from_json
from serverless_gpu.node.base.home import Home, find_durable_home, find_home, storage_error

SERVER = "SERVERLESS_GPU_SERVER"
TOKEN = "SERVERLESS_GPU_TOKEN"
FILE = "server.json"
PATIENCE = "SERVERLESS_GPU_PATIENCE"
PATIENCE_S = 600.0
_notes_said: set[str] = set()


class ServerProfile(msgspec.Struct, frozen=True, kw_only=True):
    """A server's address and the caller's credentials for the server."""

    url: str
    token: str
    principal: str = ""  # Principal that owns the token, or "" if unknown.
    embedded: bool = False  # True if `sgpu up` wrote the profile for the server of this home directory.
    machine: str = ""  # `ambient.machine()` of the server when the profile was written, or "".
    ca: str = ""  # Path of a file with trusted certificates, or "" for the system's certificates.


def remote_home(environ: Mapping[str, str]) -> Home:
    """Return the home directory for remote calls, which contains the server profile and result copies.

    If environment variables name the server, a temporary directory suffices, because the server stores all results.
    """
    if not environ.get(SERVER):
        return find_durable_home(environ, f"its {FILE} names the server")
    home = find_home(environ)
    if home.note and home.note not in _notes_said:
        _notes_said.add(home.note)
        warnings.warn(home.note, stacklevel=4)
    return home


def find_profile(home: Path, environ: Mapping[str, str]) -> ServerProfile:
    """Return the profile of the configured server. Raise ServerNotConfigured if no server is configured."""
    url, token = environ.get(SERVER, ""), environ.get(TOKEN, "")
    if url:
        if not token:
            raise ServerNotConfigured(
                f"{SERVER} is set, and {TOKEN} is not", hint=f"set {TOKEN} to a token of the server: `sgpu token`"
            )
        profile = ServerProfile(url=url, token=token)
    else:
        profile = _read(home / FILE)
        if token:
            profile = msgspec.structs.replace(profile, token=token, principal="")
    check_address(profile.url)
    return profile


def is_configured(home: Path, environ: Mapping[str, str]) -> bool:
    """Return True if an environment variable or the profile file names a server, valid or not."""
    return bool(environ.get(SERVER)) or (home / FILE).exists()


def reread(home: Path, known: ServerProfile, environ: Mapping[str, str]) -> ServerProfile:
    """Return the profile of a known server with its current address and token.

    If the profile has not changed, the function returns `known`. A restarted server may use another port and new
    tokens. The client reads the address and the token from the same source, so that no other server receives the token.
    The client ignores a profile of another server or principal, because the caller waits for the known server.
    """
    try:
        there = find_profile(home, environ)
    # Another process may be writing the profile file at this moment.
    except ServerlessGpuError:
        return known
    # An environment variable's token does not identify the server.
    same_token = there.token == known.token and not environ.get(TOKEN)
    same_principal = there.principal == known.principal or not (there.principal and known.principal)
    return there if same_token or (same_principal and _is_same_server(there, known)) else known


def _is_same_server(there: ServerProfile, known: ServerProfile) -> bool:
    """Return True if two profiles belong to the same server."""
    if there.url.rstrip("/") == known.url.rstrip("/"):
        return True
    if there.embedded and known.embedded:
        return there.machine == known.machine or not (there.machine and known.machine)
    if there.embedded or known.embedded or not there.principal:
        return False
    return _host(there) == _host(known) and there.principal == known.principal


def _host(profile: ServerProfile) -> tuple[str, str | None]:
    parts = urlsplit(profile.url)
    return parts.scheme, parts.hostname


def patience_s(environ: Mapping[str, str]) -> float:
    """Return the number of seconds to wait for an unreachable server."""
    text = environ.get(PATIENCE)
    if not text:
        return PATIENCE_S
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 86_400:  # The range check also refuses NaN, because any comparison with NaN is False.
        raise InvalidValue(f"{PATIENCE}={text!r} is not a number of seconds up to a day", hint="the default is 600")
    return value


def write_profile(home: Path, profile: ServerProfile) -> None:
    """Store a server profile in a file that only its user can read."""
    path = home / FILE
    temporary = path.with_name(f".{FILE}-{os.getpid()}")
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


def _read(path: Path) -> ServerProfile:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        missing = ServerNotConfigured(
            "remote=True needs a server, and none is configured",
            hint="start a server on this machine with `sgpu up`, or connect to an existing server with `sgpu login`; "
            "without remote, the call runs on this machine",
        )
        missing.is_missing = True
        raise missing from None
    except OSError as error:
        raise ServerNotConfigured(f"{path} cannot be read: {error.strerror}") from None
    try:
        return from_json(data, ServerProfile)
    except msgspec.MsgspecError as error:
        raise InvalidValue(f"{path} is invalid: {error}", hint="write the profile again with `sgpu login`") from None


def check_address(url: str) -> None:
    """Raise InvalidValue for a malformed address, or for plain HTTP to another machine."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc:
        raise InvalidValue(
            "the address of the server is invalid",
            hint="use an address with https:// or http://, for example https://gpus.example.org or "
            "http://127.0.0.1:7878",
        )
    if parts.scheme == "http" and not _is_loopback(parts.hostname):
        raise InvalidValue(
            f"{url} would send the token unencrypted over the network",
            hint="use https://, or a tunnel: ssh -L 7878:127.0.0.1:7878 the-server",
        )


def _is_loopback(host: str) -> bool:
    for family, packed in ((socket.AF_INET, b"\x7f"), (socket.AF_INET6, bytes(15) + b"\x01")):
        with contextlib.suppress(OSError, ValueError):
            return socket.inet_pton(family, host).startswith(packed)
    return host == "localhost"


def remove_profile(home: Path) -> ServerProfile | None:
    """Delete the stored server profile. Return the deleted profile, or None if no profile was stored."""
    path = home / FILE
    if not path.exists():
        return None
    profile = _read(path)
    try:
        path.unlink()
    except OSError as error:
        raise storage_error(error, path) from None
    return profile
