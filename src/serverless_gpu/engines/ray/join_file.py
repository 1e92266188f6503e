"""The join file, 0600: what a machine needs to ask the server whether it may join.

`sgpu up --engine ray` makes one for one machine, `sgpu node invite` for several.

    {"server": "https://gpu.internal:7878", "token": "sgpu_…", "ca": "-----BEGIN CERTIFICATE-----…"}

The token is good for joining and nothing else. Ray's token is not in it: the server gives that, over TLS. Whoever has
the file can make a machine a node of the pool, and a node is given users' code, arguments and secrets.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from serverless_gpu.errors import InvalidValue
from serverless_gpu.json_codec import from_json
from serverless_gpu.node.base.private_files import readers, write_private

NAME = "join.json"
_BYTES_MAX = 1 << 20


class JoinFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What it says."""

    server: str
    token: str
    ca: str = ""  # certificates to trust, PEM; "" for the system's


def write_join_file(path: Path, file: JoinFile) -> None:
    """Write it, readable by this user alone.

    Raises:
        OSError: it could not be written.
    """
    write_private(path, msgspec.json.format(msgspec.json.encode(file)) + b"\n")


def read_join_file(path: Path) -> JoinFile:
    """Return what it says.

    Raises:
        InvalidValue: it is not there, others can read it, or it is none.
    """
    try:
        others = readers(path)
        with path.open("rb") as opened:
            data = opened.read(_BYTES_MAX)
    except OSError as error:
        raise InvalidValue(
            f"{path} cannot be read: {error.strerror}",
            hint="`sgpu up --engine ray` says where it wrote it: copy that here",
        ) from None
    if others:
        raise InvalidValue(
            f"{path} lets in whoever has it, and {others}",
            hint=f"chmod 600 {path}   (did somebody read it? sgpu token revoke, and make another: sgpu node invite)",
        )
    try:
        return from_json(data, JoinFile)
    except msgspec.MsgspecError:
        raise InvalidValue(
            f"{path} is not a join file", hint="it is server/join.json in the home of `sgpu up --engine ray`, as it is"
        ) from None
