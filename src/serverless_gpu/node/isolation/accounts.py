"""Accounts of the operating system for principals of the same name.

    SERVERLESS_GPU_ACCOUNTS=same-name     principal "ana" ─▶ account "ana": its uid, its groups, its home directory

Sites with shared file systems or Slurm choose this setting. The files of an account then have the same owner on every
machine. The server's administrators decide who may use a principal's name, and therefore an account.

Failure cases: The agent refuses the run of a principal without a suitable account. The agent never uses another uid
instead. System accounts, root and accounts of the node itself are not suitable.
"""

from __future__ import annotations

import os
import pwd
import re
import stat
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NamedTuple

from serverless_gpu.errors import IsolationUnavailable
from serverless_gpu.node.base.protocol import Account

SETTING = "SERVERLESS_GPU_ACCOUNTS"
"""Variable with the accounts of principals: ``range`` (the default) or ``same-name``."""
RANGE_ACCOUNTS, SAME_NAME = "range", "same-name"
_LOGIN_DEFS = Path("/etc/login.defs")
_FIRST_ID = 1_000
_NOBODY = frozenset({65_534, 0xFFFF_FFFF})
_NO_LOGIN = ("nologin", "false")
_GROUPS_MAX = 128  # The kernel accepts at most one page of text as an id map.


class AccountEntry(NamedTuple):
    """An account as the operating system describes it. `home_uid` is the owner of the home directory."""

    name: str
    uid: int
    gid: int
    home: str
    shell: str
    groups: Collection[int]
    home_uid: int | None  # None without a home directory.


class AccountRules(NamedTuple):
    """Limits for suitable accounts."""

    uid_min: int  # Smallest uid of people.
    gid_min: int
    ours: Collection[int]  # Uids of the node's own processes and files.
    uids: range  # Range for principals without an account.


def is_same_name(environ: Mapping[str, str]) -> bool:
    """Return True if principals use accounts of their name. Raises IsolationUnavailable."""
    setting = environ.get(SETTING) or RANGE_ACCOUNTS
    if setting not in (RANGE_ACCOUNTS, SAME_NAME):
        raise IsolationUnavailable(
            f"{SETTING}={setting!r} is not a valid setting", hint=f"use {SETTING}={RANGE_ACCOUNTS} or {SAME_NAME}"
        )
    return setting == SAME_NAME


def chosen(name: str, entry: AccountEntry | None, rules: AccountRules) -> tuple[int, Account]:
    """Return the uid and the account of a principal. Raises IsolationUnavailable.

    The account keeps its primary group and its groups of people. System groups, such as ``docker``, ``disk`` and
    ``sudo``, would give rights on the node.
    """
    problem = _problem(name, entry, rules)
    if problem or entry is None:
        raise IsolationUnavailable(
            f"principal {name!r} cannot use an account of this node: {problem}",
            hint=f"make a suitable account {name!r} on this node, or use uids of a range: {SETTING}={RANGE_ACCOUNTS}",
        )
    groups = sorted(gid for gid in {*entry.groups} - _NOBODY - {entry.gid} if gid >= rules.gid_min)
    return entry.uid, Account(name=entry.name, gid=entry.gid, groups=tuple(groups[:_GROUPS_MAX]), home=entry.home)


def _problem(name: str, entry: AccountEntry | None, rules: AccountRules) -> str:
    if entry is None:
        return "the node has no account of this name"
    if entry.name != name:
        return f"the operating system answers with the account {entry.name!r}"
    if entry.uid == 0 or entry.gid == 0:
        return "the account has the uid or the primary group of root"
    if entry.uid < rules.uid_min or entry.uid in _NOBODY or entry.gid in _NOBODY:
        return f"uid {entry.uid} belongs to a system account (uids of people start at {rules.uid_min})"
    if entry.uid in rules.ours:
        return f"uid {entry.uid} owns processes or files of the node itself"
    if entry.uid in rules.uids:
        return f"uid {entry.uid} is in the range for principals without an account"
    if os.path.basename(entry.shell) in _NO_LOGIN:
        return f"the account may not log in (shell {entry.shell})"
    if not entry.home.startswith("/") or os.path.normpath(entry.home) != entry.home:
        return f"its home directory {entry.home!r} is not an absolute path"
    if entry.home_uid is None:
        return f"its home directory {entry.home} does not exist on this node"
    if entry.home_uid != entry.uid:
        return f"its home directory {entry.home} belongs to uid {entry.home_uid}"
    return ""


def look_up(name: str) -> AccountEntry | None:
    """Return the operating system's entry of an account, or None. Raises OSError."""
    try:
        known = pwd.getpwnam(name)
    except KeyError:
        return None
    home_uid = None
    try:
        status = os.stat(known.pw_dir)
        home_uid = status.st_uid if stat.S_ISDIR(status.st_mode) else None
    except OSError:
        pass  # The entry says that the directory is missing.
    groups = os.getgrouplist(name, known.pw_gid)
    return AccountEntry(known.pw_name, known.pw_uid, known.pw_gid, known.pw_dir, known.pw_shell, groups, home_uid)


def first_ids(path: Path = _LOGIN_DEFS) -> tuple[int, int]:
    """Return the smallest uid and gid of people on this machine, at least 1000 without a setting."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    found = dict(re.findall(r"^\s*(UID_MIN|GID_MIN)\s+(\d+)", text, re.MULTILINE))
    return int(found.get("UID_MIN", _FIRST_ID)), int(found.get("GID_MIN", _FIRST_ID))
