"""Records of servers' attempts on this node, stored in the attempt directories.

    runs/<run>/<fence>/remote.json    open ─▶ settled    the server has everything: results, receipt
                                           └▶ stale      the server gave the attempt up; the uplink sends no more data

The uplink writes `remote.json` before it launches the attempt. `remote.json` contains the attempt's token but none of
the caller's variables. Only the user of this node can read `remote.json`. The uplink does not flush `remote.json` to
the disk, because a reboot ends the attempt anyway. After a reboot, the server sees the new boot identifier. If the disk
fails without a reboot, `remote.json` may be empty. If `remote.json` is empty, the uplink recovers the attempt from the
directory's name (`recovered`). The uplink never launches a recovered attempt. The uplink writes `stopped.json` once all
processes of a recovered attempt have ended. The server's next answer contains a new token for the recovered attempt.
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
"""Placeholder token. The uplink requests a valid token, because every server refuses the placeholder token."""
_GRACE_S = 900.0

Standing = Literal["open", "settled", "stale"]


class ServerAttempt(msgspec.Struct, frozen=True, kw_only=True):
    """An attempt of a server on this node."""

    run_id: str
    fence: int
    profile: str  # Path of the file with the server's address and token.
    token: str  # Token that authenticates the attempt to the server.
    gpu_type: str
    world_size: int  # Number of the attempt's devices on this node.
    partition_grace_s: float  # Seconds for which the attempt may run without an answer from the server.
    standing: Standing = "open"
    owner: str = ""  # Principal that owns the run.
    tariff: Tariff = UNPRICED  # Price terms of the attempt; `UNPRICED` until the launch.
    recovered: bool = False  # True if `remote.json` was damaged. A recovered attempt may have begun.

    @property
    def gang(self) -> str:
        """Return the gang's identifier, ``run:fence``."""
        return f"{self.run_id}:{self.fence}"


def read_remote(directory: Path) -> ServerAttempt | None:
    """Return the server's record in an attempt's directory; None for an attempt of this node's own user."""
    try:
        with (directory / REMOTE_FILE).open("rb") as file:
            return from_json(file.read(_BYTES_MAX), ServerAttempt)
    except (OSError, msgspec.MsgspecError):
        return None


def has_remote(directory: Path) -> bool:
    """Return True if an attempt directory contains a server's record. Raises OSError if the check fails."""
    try:
        (directory / REMOTE_FILE).stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def write_remote(directory: Path, remote: ServerAttempt) -> None:
    """Write `remote.json`. Raises OSError."""
    write_text(directory / REMOTE_FILE, msgspec.json.encode(remote).decode())


def open_attempts(runs: Path, profile: str) -> Iterator[tuple[Path, ServerAttempt]]:
    """Yield the unsettled attempts of one server, each with its directory."""
    for path in sorted(runs.glob(f"*/*/{REMOTE_FILE}")):
        remote = read_remote(path.parent) or _recovered(path, profile)
        if remote is not None and remote.profile == profile and remote.standing == "open":
            yield path.parent, remote


def _recovered(path: Path, profile: str) -> ServerAttempt | None:
    """Return an attempt with a damaged record, or None if the record cannot be read now.

    A damaged record does not identify the attempt's server. If a server does not know the attempt, the uplink ignores
    the attempt.
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
    """Return True for at most a month while a run's server has not received all data."""
    with contextlib.suppress(OSError):
        for path in run.glob(f"*/{REMOTE_FILE}"):
            remote = read_remote(path.parent)
            if remote is not None and remote.standing == "open":
                return now_ns - touched_ns(path.parent) < UNSENT_DAYS_MAX * DAY_NS
    return False
