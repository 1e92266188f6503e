"""Attempts of a server on this node, as their directories record them.

    runs/<run>/<fence>/remote.json    open ─▶ settled    the server has everything: results, receipt
                                           └▶ stale      the attempt was over for the server: nothing is sent any more

The uplink writes the file before it starts anything. It holds the attempt's own token and none of the caller's
variables, in a directory of this user alone. It is not flushed: a reboot ends the attempt anyway, and the server sees
the new boot identifier. A disk that failed without a reboot may leave it empty. Then the attempt is `recovered` from
its directory's name: it is never launched, its end is written as soon as none of its processes is left, and the node's
next heartbeat brings a token for it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

from serverless_gpu.ambient import created_wall_ns
from serverless_gpu.json_codec import from_json
from serverless_gpu.model.billing.pricing import UNPRICED, Tariff
from serverless_gpu.model.calendars import DAY_NS
from serverless_gpu.node.attempt.history import REMOTE_FILE, touched_ns
from serverless_gpu.node.attempt.usage_account import write_text

UNSENT_DAYS_MAX = 30
_BYTES_MAX = 1 << 20
_NO_TOKEN = "lost"
"""Refused by every server, which has the node ask for another one."""
_GRACE_S = 900.0

Standing = Literal["open", "settled", "stale"]


class ServerAttempt(msgspec.Struct, frozen=True, kw_only=True):
    """An attempt that a server gave to this node."""

    run_id: str
    fence: int
    profile: str  # path of the file with the server's address and token
    token: str  # the attempt's own
    gpu_type: str
    world_size: int  # devices on this node
    partition_grace_s: float  # how long it may go on without an answer of the server
    standing: Standing = "open"
    owner: str = ""  # the principal
    tariff: Tariff = UNPRICED  # None until known; once launched, its own directory says what it pays
    recovered: bool = False  # the file was damaged: the attempt may or may not have begun

    @property
    def gang(self) -> str:
        """Return the gang's identifier, ``run:fence``."""
        return f"{self.run_id}:{self.fence}"


def read_remote(directory: Path) -> ServerAttempt | None:
    """Return what an attempt's directory says about its server; None for an attempt of this node's own."""
    try:
        with (directory / REMOTE_FILE).open("rb") as file:
            return from_json(file.read(_BYTES_MAX), ServerAttempt)
    except (OSError, msgspec.MsgspecError):
        return None


def has_remote(directory: Path) -> bool:
    """Return whether a server gave the attempt in a directory to this node; raises OSError if unknown now."""
    try:
        (directory / REMOTE_FILE).stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def write_remote(directory: Path, remote: ServerAttempt) -> None:
    """Write `remote.json`; raises OSError."""
    write_text(directory / REMOTE_FILE, msgspec.json.encode(remote).decode())


def open_attempts(runs: Path, profile: str) -> Iterator[tuple[Path, ServerAttempt]]:
    """Yield the attempts that one server has not heard all about, with their directories."""
    for path in sorted(runs.glob(f"*/*/{REMOTE_FILE}")):
        remote = read_remote(path.parent) or _recovered(path, profile)
        if remote is not None and remote.profile == profile and remote.standing == "open":
            yield path.parent, remote


def _recovered(path: Path, profile: str) -> ServerAttempt | None:
    """Return an attempt from its directory's name, its file being damaged; None if unreadable now.

    The server is unknown: one that does not know the attempt says so, and the attempt is left alone then.
    """
    fence, run_id = path.parent.name, path.parent.parent.name
    try:
        path.read_bytes()
    except OSError:
        return None
    if created_wall_ns(run_id) is None or not fence.isdigit():
        return None
    return ServerAttempt(
        run_id=run_id,
        fence=int(fence),
        profile=profile,
        token=_NO_TOKEN,
        gpu_type="",
        world_size=0,
        partition_grace_s=_GRACE_S,
        recovered=True,
    )


def is_unsent(run: Path, now_ns: int) -> bool:
    """Return whether a server still lacks something of a run; False after a month."""
    with contextlib.suppress(OSError):
        for path in run.glob(f"*/{REMOTE_FILE}"):
            remote = read_remote(path.parent)
            if remote is not None and remote.standing == "open":
                return now_ns - touched_ns(path.parent) < UNSENT_DAYS_MAX * DAY_NS
    return False
