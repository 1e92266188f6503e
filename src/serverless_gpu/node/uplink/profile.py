"""A server's address and token for this node: one small file, 0600, written by the uplink's starter.

The uplink reads it again whenever the server does not answer: a server that was started again on another port, or with
another token, writes the same file.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from serverless_gpu.errors import InvalidValue
from serverless_gpu.json_codec import from_json


class UplinkProfile(msgspec.Struct, frozen=True, kw_only=True):
    """Address and token of a server for this node."""

    url: str
    token: str  # an agent's
    ca: str = ""  # file with certificates to trust; "" for the system's
    name: str = ""  # what the node calls itself; "" for the host name
    pool: str = ""  # the pool it asks to be in; "" leaves that to the server
    upload_s: float = 3600.0  # how long outputs are tried while the server answers


def read_profile(path: Path) -> UplinkProfile:
    """Return what the file says; raises InvalidValue."""
    try:
        return from_json(path.read_bytes(), UplinkProfile)
    except (OSError, msgspec.MsgspecError) as error:
        raise InvalidValue(f"{path} does not say how the server is reached: {error}") from None


def write_profile(path: Path, profile: UplinkProfile) -> None:
    """Write the file, readable by this user alone; raises OSError."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(msgspec.json.encode(profile))
    temporary.replace(path)
