"""The uids of a node's principals.

    owner of a run ─▶ durable map of this machine ─▶ uid, and a home directory of that uid

All agents of a machine share one map, because a uid owns the same files for all agents. A uid never gets a second
owner. The remaining files of one principal therefore never become readable for another principal.

Failure cases: If the agent cannot read or write the map, it refuses the run. A wrong uid would give a principal the
files of another principal. If the range is full, the agent refuses only new principals.
"""

from __future__ import annotations

import fcntl
import os
import pwd
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import msgspec

from serverless_gpu.errors import IsolationUnavailable
from serverless_gpu.json_codec import from_json
from serverless_gpu.node.base.private_files import write_private

RANGE = "SERVERLESS_GPU_UIDS"
"""Variable with the first and the last uid for principals, for example ``1900000000-1900065535``."""
PLACE = "SERVERLESS_GPU_PRINCIPALS"
"""Variable with the directory of the map and of the principals' homes."""
UIDS = range(1_900_000_000, 1_900_065_536)
"""Default range: unused by Linux distributions, systemd and subordinate uids."""
_PLACE = Path("/var/lib/serverless-gpu/principals")
_MAP = "uids.json"


class Principal(msgspec.Struct, frozen=True, kw_only=True):
    """A principal on this node."""

    owner: str
    uid: int
    home: str  # Persistent directory that only this uid can read and write.


class Principals:
    """Assigns a uid and a home directory to each owner."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._place = place_of(environ)
        self._uids = uid_range(environ.get(RANGE, ""))

    def of(self, owner: str) -> Principal:
        """Return an owner's principal. Raises IsolationUnavailable.

        The first call for an owner assigns a uid and creates the home directory.
        """
        try:
            with self._locked() as place:
                known = _read(place)
                uid = known.get(owner)
                if uid is None:
                    uid = free_uid(self._uids, known)
                    write_private(place, msgspec.json.encode({**known, owner: uid}))
            home = self._place / str(uid)
            _make_home(home, uid)
        except (OSError, msgspec.MsgspecError) as error:
            raise IsolationUnavailable(
                f"the node cannot give {owner!r} its own uid: {error}",
                hint=f"make {self._place} readable and writable for the node's agent",
            ) from None
        return Principal(owner=owner, uid=uid, home=str(home))

    @contextmanager
    def _locked(self) -> Iterator[Path]:
        self._place.mkdir(mode=0o711, parents=True, exist_ok=True)
        fd = os.open(self._place / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield self._place / _MAP
        finally:
            os.close(fd)


def place_of(environ: Mapping[str, str]) -> Path:
    """Return the directory of the map, of the principals' homes, and of the machine's network policies."""
    return Path(environ.get(PLACE) or _PLACE)


def ranges_of(environ: Mapping[str, str]) -> tuple[tuple[int, int], ...]:
    """Return the first and last uid of each range of principals, the configured range last.

    Principals keep a uid outside of the range after the range was changed. Raises IsolationUnavailable, OSError or
    MsgspecError.
    """
    uids = uid_range(environ.get(RANGE, ""))
    others = sorted(uid for uid in _read(place_of(environ) / _MAP).values() if uid not in uids)
    return (*((uid, uid) for uid in others), (uids.start, uids.stop - 1))


def uid_range(text: str) -> range:
    """Return the range of uids that a setting names, or the default range. Raises IsolationUnavailable."""
    if not text:
        return UIDS
    first, _, last = text.partition("-")
    if not (first.isascii() and first.isdigit() and last.isascii() and last.isdigit() and 0 < int(first) <= int(last)):
        raise IsolationUnavailable(
            f"{RANGE}={text!r} is not a range of uids", hint=f"for example {RANGE}=200000-265535"
        )
    return range(int(first), int(last) + 1)


def free_uid(uids: range, known: Mapping[str, int]) -> int:
    """Return the first uid that has no owner and no account on this machine. Raises IsolationUnavailable."""
    taken = set(known.values())
    for uid in uids:
        if uid not in taken and not _has_account(uid):
            return uid
    raise IsolationUnavailable(
        f"all {len(uids)} uids of this node's range {uids.start}-{uids.stop - 1} have an owner",
        hint=f"set a larger range in {RANGE}, and start the agent again",
    )


def _has_account(uid: int) -> bool:
    try:
        pwd.getpwuid(uid)
    except KeyError:
        return False
    return True


def _read(path: Path) -> dict[str, int]:
    try:
        return from_json(path.read_bytes(), dict[str, int])
    except FileNotFoundError:
        return {}


def _make_home(home: Path, uid: int) -> None:
    try:
        home.mkdir(mode=0o700)
    except FileExistsError:
        status = home.lstat()
        if status.st_uid == uid:
            return
    os.chown(home, uid, uid)
