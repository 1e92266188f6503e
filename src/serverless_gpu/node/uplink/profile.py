"""How a server is reached from this node: one small file, 0600, that whoever starts an uplink writes.

It is read again whenever the server does not answer: a server that was started again on another port, or with another
token, writes the same file.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from serverless_gpu.errors import InvalidValue
from serverless_gpu.json_codec import from_json


class UplinkProfile(msgspec.Struct, frozen=True, kw_only=True):
    """How this node reaches a server.

    Attributes:
        url: for example ``http://127.0.0.1:7878``.
        token: an agent's.
        ca: file with certificates to trust; "" for the system's.
        name: what the node calls itself; "" for the host name.
        pool: the pool it asks to be in; "" leaves that to the server.
        upload_s: how long outputs are tried to be sent while the server answers, in seconds.
    """

    url: str
    token: str
    ca: str = ""
    name: str = ""
    pool: str = ""
    upload_s: float = 3600.0


def read_profile(path: Path) -> UplinkProfile:
    """Return what the file says.

    Raises:
        InvalidValue: it cannot be read.
    """
    try:
        return from_json(path.read_bytes(), UplinkProfile)
    except (OSError, msgspec.MsgspecError) as error:
        raise InvalidValue(f"{path} does not say how the server is reached: {error}") from None


def write_profile(path: Path, profile: UplinkProfile) -> None:
    """Write the file, readable by this user alone.

    Raises:
        OSError: it could not be written.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(msgspec.json.encode(profile))
    temporary.replace(path)
