"""The uids of a node's principals.

    owner of a run ─▶ durable map of this machine ─▶ uid, and a home directory of that uid
                   └▶ account of the same name (`accounts.py`), if the site says so

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
from serverless_gpu.node.base.protocol import UNKNOWN_OWNER, Account
from serverless_gpu.node.isolation import accounts

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
    home: str  # Persistent directory of this uid.
    place: str  # The node's directory with the map, the principals' logs and their homes.
    account: Account | None = None  # Account of the operating system; None for a uid of the range.

    @property
    def log(self) -> Path:
        """Return the log of the principal's zygotes, which only the node can read."""
        return Path(self.place) / f"{self.uid}.log"


class Principals:
    """Assigns a uid and a home directory to each owner. `home` is the home directory of the node."""

    def __init__(self, environ: Mapping[str, str], home: Path | None = None) -> None:
        self._place = Path(environ.get(PLACE) or _PLACE)
        self._uids = uid_range(environ.get(RANGE, ""))
        self._is_same_name = accounts.is_same_name(environ)
        self._home = home

    def of(self, owner: str) -> Principal:
        """Return an owner's principal. Raises IsolationUnavailable.

        The first call for an owner assigns a uid and creates the home directory. An account of the operating system
        keeps its uid and its home directory.
        """
        if owner == UNKNOWN_OWNER:
            raise IsolationUnavailable("the server did not name the run's owner, and owners share no uid")
        if self._is_same_name:
            return self._with_account(owner)
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
        return Principal(owner=owner, uid=uid, home=str(home), place=str(self._place))

    def _with_account(self, owner: str) -> Principal:
        """Return an owner's principal with the account of the owner's name. Raises IsolationUnavailable."""
        name = owner.partition(" of ")[0]
        try:
            self._place.mkdir(mode=0o711, parents=True, exist_ok=True)
            ours = {os.geteuid()} if self._home is None else {os.geteuid(), self._home.stat().st_uid}
            rules = accounts.AccountRules(*accounts.first_ids(), ours, self._uids)
            uid, account = accounts.chosen(name, accounts.look_up(name), rules)
        except OSError as error:
            raise IsolationUnavailable(
                f"the node cannot look up the account of principal {name!r}: {error}",
                hint=f"make {self._place} and the accounts readable for the node's agent",
            ) from None
        return Principal(owner=owner, uid=uid, home=account.home, place=str(self._place), account=account)

    @contextmanager
    def _locked(self) -> Iterator[Path]:
        self._place.mkdir(mode=0o711, parents=True, exist_ok=True)
        fd = os.open(self._place / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield self._place / _MAP
        finally:
            os.close(fd)


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
