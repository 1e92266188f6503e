"""The uids of a node's principals.

    owner of a run ─▶ durable map of this machine ─▶ uid, and a home directory of that uid
                   └▶ account of the same name (`accounts.py`), if the site says so

All agents of a machine share one map, because a uid owns the same files for all agents. A uid gets a second owner only
after an operator has freed it (`sweeper.py`). While files, processes or scheduled jobs of a uid remain, the uid gets no
other owner. The remaining files of one principal therefore never become readable for another principal.

Failure cases: If the agent cannot read or write the map, it refuses the run. A wrong uid would give a principal the
files of another principal. If the range is full, the agent refuses only new principals.
"""

from __future__ import annotations

import fcntl
import os
import pwd
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import msgspec

from serverless_gpu.errors import IsolationUnavailable
from serverless_gpu.json_codec import from_json
from serverless_gpu.node.base.private_files import write_private
from serverless_gpu.node.base.protocol import UNKNOWN_OWNER, Account
from serverless_gpu.node.isolation import SPAWNER, accounts
from serverless_gpu.node.isolation.survey import survey

RANGE = "SERVERLESS_GPU_UIDS"
"""Variable with the first and the last uid for principals, for example ``1900000000-1900065535``."""
PLACE = "SERVERLESS_GPU_PRINCIPALS"
"""Variable with the directory of the map and of the principals' homes."""
UIDS = range(1_900_000_000, 1_900_065_536)
"""Default range: unused by Linux distributions, systemd and subordinate uids."""
_PLACE = Path("/var/lib/serverless-gpu/principals")
_ACCOUNT_PLACE = ".local/share/serverless-gpu/principals"  # $XDG_DATA_HOME can differ between sessions of an account.
MAP = "uids.json"
_HOMES = "homes.json"
T = TypeVar("T")


class Principal(msgspec.Struct, frozen=True, kw_only=True):
    """A principal on this node."""

    owner: str
    uid: int
    home: str  # Persistent directory of this uid.
    place: str  # The node's directory with the map and the principals' homes.
    account: Account | None = None  # Account of the operating system; None for a uid of the range.


class PrincipalMap:
    """The durable map of all agents of this machine, in the directory `place`."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.place = place_of(environ)
        self._range = environ.get(RANGE, "")

    @property
    def uids(self) -> range:
        """Return the range of uids for principals. Raises IsolationUnavailable for an invalid setting."""
        return uid_range(self._range)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock of the map. Raises OSError."""
        self.place.mkdir(mode=0o711, parents=True, exist_ok=True)
        fd = os.open(self.place / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    def read(self) -> dict[str, int]:
        """Return the uids by owner. Raises OSError or MsgspecError if the map is not readable."""
        return _read(self.place / MAP, dict[str, int], {})

    def write(self, uids: Mapping[str, int]) -> None:
        """Replace the map durably. The caller holds the lock. Raises OSError."""
        write_private(self.place / MAP, msgspec.json.encode(uids))

    def homes(self) -> list[Path]:
        """Return the home directories of all agents that used the map. Raises OSError or MsgspecError."""
        return [Path(home) for home in _read(self.place / _HOMES, list[str], [])]

    def note_home(self, home: Path) -> None:
        """Remember the home directory of an agent. The caller holds the lock. Raises OSError or MsgspecError."""
        known = self.homes()
        if home not in known:
            there = [str(each) for each in (*known, home) if each.exists()]  # A deleted home contains no attempts.
            write_private(self.place / _HOMES, msgspec.json.encode(there))


class Principals:
    """Assigns a uid and a home directory to each owner."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._map = PrincipalMap(environ)
        self._environ = environ

    def of(self, owner: str, home: Path | None = None) -> Principal:
        """Return an owner's principal. Raises IsolationUnavailable.

        The first call for an owner assigns a uid and creates the home directory. An account of the operating system
        keeps its uid and its home directory. `home` is the home directory of the node.
        """
        if owner == UNKNOWN_OWNER:
            raise IsolationUnavailable("the server did not name the run's owner, and owners share no uid")
        place = self._map.place
        try:
            if accounts.is_same_name(self._environ):
                return self._with_account(owner, home)
            with self._map.locked():
                known = self._map.read()
                uid = known.get(owner)
                if uid is None:
                    uid = free_uid(self._map.uids, known, _used(self._map))
                    self._map.write({**known, owner: uid})
                if home is not None:
                    self._map.note_home(home)
            own = place / str(uid)
            _make_home(own, uid)
        except (OSError, msgspec.MsgspecError) as error:
            raise IsolationUnavailable(
                f"the node cannot give {owner!r} its own uid: {error}",
                hint=f"make {place} readable and writable for the node's agent",
            ) from None
        return Principal(owner=owner, uid=uid, home=str(own), place=str(place))

    def _with_account(self, owner: str, node_home: Path | None) -> Principal:
        """Return a principal with the account of its name. Raises IsolationUnavailable or OSError."""
        name = owner.partition(" of ")[0]
        place = self._map.place
        place.mkdir(mode=0o711, parents=True, exist_ok=True)
        ours = {os.geteuid()} if node_home is None else {os.geteuid(), node_home.stat().st_uid}
        rules = accounts.AccountRules(*accounts.first_ids(), ours, self._map.uids)
        uid, account = accounts.chosen(name, accounts.look_up(name), rules)
        return Principal(owner=owner, uid=uid, home=account.home, place=str(place), account=account)


def place_of(environ: Mapping[str, str]) -> Path:
    """Return the directory of the map and of the principals' homes.

    All homes of an account without root and without a spawner share a directory, because they share subordinate uids.
    """
    if environ.get(PLACE):
        return Path(environ[PLACE])
    if os.geteuid() == 0 or environ.get(SPAWNER):
        return _PLACE
    try:
        home = pwd.getpwuid(os.geteuid()).pw_dir
    except KeyError:
        home = "/nonexistent"  # As in /etc/passwd for accounts without a home directory.
    return Path(home, _ACCOUNT_PLACE)


def _used(known: PrincipalMap) -> frozenset[int]:
    """Return the uids of the range to which something on this node belongs."""
    homes = {int(path.name) for path in known.place.iterdir() if path.name.isascii() and path.name.isdigit()}
    return frozenset({*homes, *(each.uid for each in survey(known.uids).found)})


def ranges_of(environ: Mapping[str, str]) -> tuple[tuple[int, int], ...]:
    """Return the first and last uid of each range of principals, the configured range last.

    Principals keep a uid outside of the range after the range was changed. Raises IsolationUnavailable, OSError or
    MsgspecError.
    """
    uids = uid_range(environ.get(RANGE, ""))
    others = sorted(uid for uid in PrincipalMap(environ).read().values() if uid not in uids)
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


def free_uid(uids: range, known: Mapping[str, int], used: Collection[int] = ()) -> int:
    """Return the first uid without an owner, an account, files or processes. Raises IsolationUnavailable.

    `used` contains the uids of remaining files and processes.
    """
    taken = {*known.values(), *used}
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


def _read(path: Path, kind: type[T], missing: T) -> T:
    try:
        return from_json(path.read_bytes(), kind)
    except FileNotFoundError:
        return missing


def _make_home(home: Path, uid: int) -> None:
    try:
        home.mkdir(mode=0o700)
    except FileExistsError:
        status = home.lstat()
        if status.st_uid == uid:
            return
    os.chown(home, uid, uid)
