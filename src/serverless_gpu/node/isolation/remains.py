"""Judges what principals have left on a node outside of their sandboxes, homes and attempts.

    process in no sandbox         reported, because an operator may have started it
    file, shared memory, queue    removed an hour after its last change, if no process of the uid runs; else left alone
    the same, unclear             reported: no principal has the uid, or files of other users are inside
    crontab, job, user unit       reported, because it starts processes outside of sandboxes

This module decides from values only. `survey.py` looks, `sweeper.py` removes and reports. The sweeper never judges uids
of accounts, because their files and processes belong to the site.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import NamedTuple

LEFT_S = 3_600.0
"""Seconds after the last change until a file without a process counts as left behind."""


class RemainKind(StrEnum):
    """Kinds of things that can outlive an attempt."""

    PROCESS = "process"
    FILE = "file"
    SHARED_MEMORY = "shared memory segment"
    SEMAPHORES = "semaphore set"
    MESSAGES = "message queue"
    POSIX_QUEUE = "POSIX message queue"
    SCHEDULE = "scheduled job"
    USER_UNIT = "user service manager"


class RemainAction(StrEnum):
    """The sweeper's reaction to a remain."""

    KEEP = "keep"
    REMOVE = "remove"
    REPORT = "report"


class Remain(NamedTuple):
    """Something that belongs to the uid of a principal."""

    kind: RemainKind
    uid: int
    name: str  # Path, pid with the process's name, or number of a SysV object.
    age_s: float = 0.0  # Seconds since the last change.
    is_expected: bool = False  # True for a process in a sandbox or in a cgroup of a run.
    # False for a directory with files of other users or too many files, and for a path that other users can change.
    is_removable: bool = True


class RemainVerdict(NamedTuple):
    """Reaction of the sweeper to a remain, with the sentence for operators."""

    remain: Remain
    action: RemainAction
    sentence: str


def judge(remains: Iterable[Remain], owners: Mapping[int, str]) -> list[RemainVerdict]:
    """Return a verdict for each remain. `owners` maps the uids of this node's principals to their names."""
    found = list(remains)
    busy = {each.uid for each in found if each.kind is RemainKind.PROCESS}
    return [_judge(each, owners.get(each.uid), is_busy=each.uid in busy) for each in found]


def _judge(remain: Remain, owner: str | None, *, is_busy: bool) -> RemainVerdict:
    whose = f"uid {remain.uid}, which no principal has," if owner is None else f"{owner} (uid {remain.uid})"
    what = f"{remain.kind} {remain.name} of {whose}"
    match remain.kind:
        case RemainKind.PROCESS:
            action = RemainAction.KEEP if remain.is_expected else RemainAction.REPORT
            return RemainVerdict(
                remain, action, f"{what} runs outside of a sandbox. End it: kill {remain.name.split()[0]}"
            )
        case RemainKind.SCHEDULE | RemainKind.USER_UNIT:
            return RemainVerdict(
                remain, RemainAction.REPORT, f"{what} can start processes outside of a sandbox. Remove it"
            )
    if is_busy or remain.age_s < LEFT_S:
        return RemainVerdict(remain, RemainAction.KEEP, f"{what} may be in use")
    if owner is None:
        return RemainVerdict(remain, RemainAction.REPORT, f"{what} remains. Remove it, or choose another range of uids")
    if not remain.is_removable:
        return RemainVerdict(remain, RemainAction.REPORT, f"{what} cannot be removed safely. Remove it")
    return RemainVerdict(remain, RemainAction.REMOVE, f"{what} was left behind")
