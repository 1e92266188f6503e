"""Subordinate ids: uids and gids that an administrator assigns to an account without root.

    /etc/subuid, /etc/subgid ─▶ SubordinateIds ─▶ newuidmap and newgidmap write the id maps of a user namespace

    in the user namespace     on the machine
    0                         the account of the node
    uid of a principal        the same uid
    gid of a principal        a gid of the account's range in /etc/subgid

A principal has the same uid in the namespace and on the machine. The id map is therefore the only translation, and no
part of the node translates uids. Principals get the upper half of a range, because rootless containers of the same
account use the lower uids of the range.

Failure cases: `chosen` raises IsolationUnavailable with the first missing prerequisite and its remedy. A kernel can
still refuse the namespace. The trial of the levels (`levels.py`) therefore runs inside the namespace.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import stat
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NamedTuple

from serverless_gpu.errors import IsolationUnavailable
from serverless_gpu.node.inside import namespaces
from serverless_gpu.node.isolation import accounts
from serverless_gpu.node.isolation.principals import RANGE, uid_range

SUBUID, SUBGID = Path("/etc/subuid"), Path("/etc/subgid")
PROGRAMS = ("newuidmap", "newgidmap")
"""Programs with the right to write the id maps of a user namespace, for uids and for gids."""
UIDS_MIN = 32
"""Smallest number of uids for principals. One uid of them is for the trial of the levels."""
_CAPABILITY = "security.capability"
_APPARMOR = Path("/proc/sys/kernel/apparmor_restrict_unprivileged_userns")
_DEBIAN = Path("/proc/sys/kernel/unprivileged_userns_clone")
_NAMESPACES_MAX = Path("/proc/sys/user/max_user_namespaces")


class SubordinateIds(NamedTuple):
    """The ids of an account for a user namespace: its own, and the uids of principals.

    `gid_first` is the gid of the first principal on the machine.
    """

    user: str
    uid: int
    gid: int
    uids: range
    gid_first: int

    @property
    def uid_map(self) -> tuple[int, ...]:
        """Return the extents for newuidmap: first id in the namespace, first id on the machine, number of ids."""
        return (0, self.uid, 1, self.uids.start, self.uids.start, len(self.uids))

    @property
    def gid_map(self) -> tuple[int, ...]:
        """Return the extents for newgidmap."""
        return (0, self.gid, 1, self.uids.start, self.gid_first, len(self.uids))

    def __str__(self) -> str:
        return f"subordinate uids {self.uids.start}-{self.uids.stop - 1} of {self.user}"


class SubordinateFacts(NamedTuple):
    """Prerequisites of subordinate ids, as the machine shows them to an account."""

    user: str
    uid: int
    gid: int
    uid_ranges: tuple[range, ...]
    gid_ranges: tuple[range, ...]
    missing_programs: tuple[str, ...] = ()
    powerless_programs: tuple[str, ...] = ()  # Paths of programs without the setuid bit and without capabilities.
    wanted: str = ""  # Value of `RANGE`.
    is_same_name: bool = False
    no_new_privileges: bool = False
    namespaces_max: int | None = None  # Value of user.max_user_namespaces.
    apparmor_restricts: bool = False
    debian_forbids: bool = False
    namespace_problem: str = ""  # Reason why the kernel refuses user namespaces, or "".


def find_ids(environ: Mapping[str, str]) -> SubordinateIds:
    """Return the subordinate ids of this process's account. Raises IsolationUnavailable."""
    return chosen(look_up(environ))


def chosen(facts: SubordinateFacts) -> SubordinateIds:
    """Return the ids for principals. Raises IsolationUnavailable for the first missing prerequisite."""
    cause, remedy = _problem(facts)
    if not cause:
        uids, cause, remedy = _uids(facts)
        gids = max(facts.gid_ranges, key=len)
        if not cause and len(gids) < len(uids):
            cause = f"the range of {facts.user} in {SUBGID} has {len(gids)} ids, and {len(uids)} are necessary"
            remedy = f"usermod --add-subgids FIRST-LAST {facts.user}, with as many ids as in {SUBUID}"
        if not cause:
            return SubordinateIds(facts.user, facts.uid, facts.gid, uids, gids.stop - len(uids))
    raise IsolationUnavailable(f"subordinate uids are not available: {cause}", hint=remedy)


def _problem(facts: SubordinateFacts) -> tuple[str, str]:
    """Return the first missing prerequisite and its remedy, or two empty texts."""
    if facts.missing_programs:
        return f"{' and '.join(facts.missing_programs)} missing", "install the package uidmap"
    if facts.powerless_programs:
        paths = " ".join(facts.powerless_programs)
        return f"{paths} without the setuid bit", f"chown root {paths} && chmod u+s {paths}"
    missing = [str(path) for path, found in ((SUBUID, facts.uid_ranges), (SUBGID, facts.gid_ranges)) if not found]
    if missing:
        options = " ".join(f"--add-{Path(path).name}s 200000-265535" for path in missing)
        return f"{' and '.join(missing)} without a range for {facts.user}", f"usermod {options} {facts.user}"
    if facts.is_same_name:
        setting = f"{accounts.SETTING}={accounts.SAME_NAME}"
        return f"{setting} needs the rights of root", f"run the node as root, or unset {accounts.SETTING}"
    if facts.no_new_privileges:
        cause = f"the flag no_new_privs makes {PROGRAMS[0]} ineffective"
        return cause, "start the node without NoNewPrivileges=yes or allowPrivilegeEscalation: false"
    if facts.namespaces_max == 0:
        return "user.max_user_namespaces is 0", "sysctl user.max_user_namespaces=10000"
    if facts.debian_forbids:
        return "kernel.unprivileged_userns_clone is 0", "sysctl kernel.unprivileged_userns_clone=1"
    if facts.apparmor_restricts:
        remedy = "sysctl kernel.apparmor_restrict_unprivileged_userns=0"
        return "AppArmor restricts user namespaces (kernel.apparmor_restrict_unprivileged_userns is 1)", remedy
    if facts.namespace_problem:
        return facts.namespace_problem, "allow user namespaces for this account, also in the profile of its container"
    return "", ""


def _uids(facts: SubordinateFacts) -> tuple[range, str, str]:
    """Return the uids for principals, or a problem and its remedy."""
    found = max(facts.uid_ranges, key=len)
    if facts.wanted:
        uids = uid_range(facts.wanted)
        if not any(uids.start >= each.start and uids.stop <= each.stop for each in facts.uid_ranges):
            return uids, f"{RANGE}={facts.wanted} is not in a range of {facts.user} in {SUBUID}", f"unset {RANGE}"
    else:
        uids = range(found.start + len(found) // 2, found.stop)
    if len(uids) < UIDS_MIN:
        cause = f"{len(uids)} uids are left for principals, and {UIDS_MIN} are necessary"
        needed = f"principals get the upper half of a range in {SUBUID}, or {RANGE}"
        return uids, cause, f"usermod --add-subuids FIRST-LAST {facts.user} ({needed})"
    return uids, "", ""


def look_up(environ: Mapping[str, str]) -> SubordinateFacts:
    """Return the facts of this machine about this process's account. Raises IsolationUnavailable."""
    uid = os.geteuid()
    try:
        user = pwd.getpwuid(uid).pw_name
    except KeyError:
        user = str(uid)
    names = {user, str(uid)}
    found = {name: shutil.which(name, path=environ.get("PATH")) for name in PROGRAMS}
    return SubordinateFacts(
        user,
        uid,
        os.getegid(),
        ranges_in(SUBUID, names),
        ranges_in(SUBGID, names),
        missing_programs=tuple(name for name, path in found.items() if path is None),
        powerless_programs=tuple(path for path in found.values() if path is not None and not _has_rights(path)),
        wanted=environ.get(RANGE, ""),
        is_same_name=accounts.is_same_name(environ),
        no_new_privileges="NoNewPrivs:\t1" in Path("/proc/self/status").read_text(encoding="utf-8", errors="replace"),
        namespaces_max=_number(_NAMESPACES_MAX),
        apparmor_restricts=_number(_APPARMOR) == 1 and not _is_confined(),
        debian_forbids=_number(_DEBIAN) == 0,
        namespace_problem=namespaces.probe_user_namespace(),
    )


def ranges_in(path: Path, names: Collection[str]) -> tuple[range, ...]:
    """Return the ranges of a user in a file of subordinate ids. `names` are the user's name and its uid."""
    try:
        rows = [line.strip().split(":") for line in path.read_text(encoding="utf-8", errors="replace").splitlines()]
    except OSError:
        return ()
    found = [row for row in rows if len(row) == 3 and row[0] in names and all(_is_number(each) for each in row[1:])]
    return tuple(range(int(first), int(first) + int(count)) for _, first, count in found if int(count) > 0)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()


def _has_rights(path: str) -> bool:
    """Return True if a program has the setuid bit of root, or capabilities of its file."""
    with contextlib.suppress(OSError):
        status = os.stat(path)
        if status.st_mode & stat.S_ISUID and status.st_uid == 0:
            return True
        return bool(os.getxattr(path, _CAPABILITY))
    return False


def _number(path: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        return int(path.read_text(encoding="ascii"))
    return None


def _is_confined() -> bool:
    """Return True if AppArmor has a profile for this process, which can permit user namespaces."""
    with contextlib.suppress(OSError):
        profile = Path("/proc/self/attr/current").read_text(encoding="utf-8", errors="replace")
        return profile.strip("\0\n ") not in ("", "unconfined")
    return False
