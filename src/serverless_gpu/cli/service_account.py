"""Account, home directory and program files of the systemd units of servers and nodes."""

from __future__ import annotations

import getpass
import os
import pwd
import stat
import sys
from collections.abc import Collection, Iterable
from pathlib import Path

import click

from serverless_gpu.cli.output import say
from serverless_gpu.cli.runs.run_location import durable_home
from serverless_gpu.node.processes.spawn import PACKAGE
from serverless_gpu.server.operations.systemd_units import ACCOUNT, STATE, check_account

_INSTALL_HINT = "install serverless-gpu below a directory of root that all users may read, such as /opt"


def _checked(_context: click.Context, _option: click.Parameter, value: str) -> str:
    check_account(value)
    return value


account_option = click.option(
    "--account",
    default=ACCOUNT,
    show_default=True,
    metavar="NAME",
    callback=_checked,
    help="Operating-system account that the unit runs as.",
)


def service_home(account: str, name: str) -> Path:
    """Return the home of a unit: the requested home, the user's own home, or a home of the account."""
    requested = os.environ.get("SERVERLESS_GPU_HOME")
    if requested:
        return Path(requested).absolute()
    if account == getpass.getuser():
        return durable_home("the unit stores its files in the home directory").root
    return STATE / name


def print_warnings(account: str, *, root_runs_it: bool = False) -> None:
    """Warn about a missing account, and about program files that the account or root must not use."""
    try:
        entry = pwd.getpwnam(account)
    except KeyError:
        create = f"useradd --system --home-dir {STATE} --no-create-home --shell /usr/sbin/nologin {account}"
        say(f"sgpu: warning: the account {account} does not exist. Create the account: sudo {create}", err=True)
        entry = None
    program = [
        *_with_parents(sys.executable),
        *_with_parents(os.path.realpath(sys.executable)),
        *_with_parents(PACKAGE),
    ]
    if entry is not None:
        groups = os.getgrouplist(account, entry.pw_gid)
        closed = unreachable(program, uid=entry.pw_uid, groups=groups)
        if closed is not None:
            problem = f"the account {account} cannot read {closed}, which contains the program of the unit"
            say(f"sgpu: warning: {problem}. To fix the problem, {_INSTALL_HINT}", err=True)
    changeable = changeable_by_others(program) if root_runs_it else None
    if changeable is not None:
        problem = f"root would run a program below {changeable}, which other users can change"
        say(f"sgpu: warning: {problem}. To fix the problem, {_INSTALL_HINT}", err=True)


def unreachable(paths: Iterable[Path], *, uid: int, groups: Collection[int]) -> Path | None:
    """Return the first path that an account may not read or enter, or None. Raises OSError."""
    for path in paths:
        status = path.stat()
        mode = status.st_mode >> (6 if status.st_uid == uid else 3 if status.st_gid in groups else 0)
        needed = stat.S_IXOTH if stat.S_ISDIR(status.st_mode) else stat.S_IROTH | stat.S_IXOTH
        if uid != 0 and mode & needed != needed:
            return path
    return None


def changeable_by_others(paths: Iterable[Path]) -> Path | None:
    """Return the first path that a user other than root can change, or None. Raises OSError."""
    for path in paths:
        status = path.lstat()
        sticky = stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX
        open_mode = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not stat.S_ISLNK(status.st_mode)
        if status.st_uid != 0 or (open_mode and not sticky):
            return path
    return None


def _with_parents(path: str | Path) -> list[Path]:
    return [*reversed(Path(path).parents), Path(path)]
