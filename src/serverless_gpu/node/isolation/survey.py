"""Looks for processes, files and objects of principals outside of sandboxes, homes and attempts.

Sandboxes hide the shared places of the node. Remains therefore come from runs without namespaces, from operators, or
from an earlier use of the same uids.

Failure cases: `RemainSurvey.unknown` names a place with too many files and an unreadable place. A process or a file
that disappears meanwhile is not in the survey.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import stat
from collections.abc import Container, Iterator, Sequence
from pathlib import Path

import msgspec

from serverless_gpu.ambient import SystemClock
from serverless_gpu.node.inside import mounts
from serverless_gpu.node.isolation.remains import Remain, RemainKind

SHARED_PLACES = ("/tmp", "/var/tmp", "/dev/shm")
"""Directories of the node in which every user can create files, and delete only own files."""
_SYSTEM_V = (
    (RemainKind.SHARED_MEMORY, "shm", "shmid"),
    (RemainKind.SEMAPHORES, "sem", "semid"),
    (RemainKind.MESSAGES, "msg", "msqid"),
)
_SCHEDULES = (
    *("/var/spool/cron/crontabs", "/var/spool/cron/tabs", "/var/spool/cron"),
    *("/var/spool/cron/atjobs", "/var/spool/atjobs", "/var/spool/at"),
)
_USER_UNITS = ("/var/lib/systemd/linger", "/run/systemd/users", "/run/user")
_ENTRIES_MAX = 20_000  # Entries of a place that all users can write.
_TREE_MAX = 10_000  # Entries of a directory that the sweeper may remove.
_DEPTH_MAX = 8
_ANSWER_BYTES_MAX = 1 << 20


class RemainSurvey(msgspec.Struct):
    """Everything that belongs to uids, and sentences about places that could not be looked at."""

    found: list[Remain] = []
    unknown: list[str] = []


def survey(uids: Container[int], shared: Sequence[str] = SHARED_PLACES) -> RemainSurvey:
    """Return what belongs to `uids` outside of the places that the node gave to its principals."""
    result = RemainSurvey()
    now_s = SystemClock().wall_ns() / 1e9
    result.found += _processes(uids)
    for place in shared:
        _files(place, uids, now_s, result)
    for kind, name, column in _SYSTEM_V:
        result.found += _system_v(kind, Path("/proc/sysvipc") / name, column, uids, now_s)
    try:
        result.found += [
            Remain(RemainKind.POSIX_QUEUE, uid, name, now_s - changed_s)
            for name, uid, changed_s in posix_queues()
            if uid in uids
        ]
    except OSError as error:
        result.unknown.append(f"POSIX message queues cannot be listed: {error}")
    for kind, places in ((RemainKind.SCHEDULE, _SCHEDULES), (RemainKind.USER_UNIT, _USER_UNITS)):
        for place in places:
            result.found += _named_after(kind, place, uids)
    return result


def _processes(uids: Container[int]) -> Iterator[Remain]:
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        with contextlib.suppress(OSError):  # The process has ended.
            text = Path(f"/proc/{entry}/status").read_text(encoding="utf-8", errors="replace")
            fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
            found = [int(word) for word in fields.get("Uid", "").split() if int(word) in uids]
            if not found or fields.get("State", "").split()[:1] == ["Z"]:
                continue
            inner = len(fields.get("NSpid", "").split()) > 1
            cgroup = Path(f"/proc/{entry}/cgroup").read_text(encoding="utf-8", errors="replace")
            name = f"{entry} ({fields.get('Name', '').strip()})"
            yield Remain(RemainKind.PROCESS, found[0], name, is_expected=inner or "/serverless_gpu-" in cgroup)


def _files(place: str, uids: Container[int], now_s: float, result: RemainSurvey) -> None:
    """Add the files of `uids` in a directory that all users can write, and in such directories below it."""
    left, queue = _ENTRIES_MAX, [(place, 0)]
    while queue:
        directory, depth = queue.pop()
        try:
            with os.scandir(directory) as entries:
                for entry in entries:
                    left -= 1
                    if left < 0:
                        result.unknown.append(f"{place} contains more than {_ENTRIES_MAX} files, so some are unknown")
                        return
                    with contextlib.suppress(FileNotFoundError):
                        status = entry.stat(follow_symlinks=False)
                        if status.st_uid in uids:
                            # Another user could replace a directory in between, except in the shared place itself.
                            is_own = not stat.S_ISDIR(status.st_mode) or _is_whole(entry.path, status.st_uid)
                            result.found.append(
                                Remain(
                                    RemainKind.FILE,
                                    status.st_uid,
                                    entry.path,
                                    now_s - status.st_ctime,
                                    is_removable=is_own and depth == 0,
                                )
                            )
                        elif stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_IWOTH and depth < _DEPTH_MAX:
                            queue.append((entry.path, depth + 1))
        except FileNotFoundError:
            continue
        except OSError as error:
            result.unknown.append(f"{directory} cannot be listed: {error.strerror}")


def _is_whole(directory: str, uid: int) -> bool:
    """Return True if all files below a directory belong to a uid."""
    left = _TREE_MAX
    for path, directories, files in os.walk(directory):
        for name in (*directories, *files):
            left -= 1
            try:
                if left < 0 or os.lstat(os.path.join(path, name)).st_uid != uid:
                    return False
            except OSError:
                return False
    return True


def _system_v(kind: RemainKind, table: Path, column: str, uids: Container[int], now_s: float) -> Iterator[Remain]:
    try:
        header, *lines = table.read_text(encoding="ascii").splitlines()
    except (OSError, ValueError):
        return  # The kernel lacks SysV interprocess communication.
    names = header.split()
    for line in lines:
        row = {name: int(value, 8 if name == "perms" else 10) for name, value in zip(names, line.split(), strict=False)}
        uid = next((row[name] for name in ("uid", "cuid") if row[name] in uids), None)
        if uid is not None:
            # A segment that a process of any uid has attached is in use.
            changed_s = now_s if row.get("nattch") else max(row.get(name, 0) for name in names if name.endswith("time"))
            yield Remain(kind, uid, str(row[column]), now_s - changed_s)


def posix_queues(removed: str = "") -> list[tuple[str, int, float]]:
    """Return name, uid and time of the last change of each POSIX message queue, after removing one.

    A child process mounts the queues, because many machines do not. Raises OSError.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    pid = os.fork()
    if pid == 0:
        answer: object = "the process that lists them ended"
        try:
            ours.close()
            mounts.unshare(mounts.CLONE_NEWNS)
            mounts.keep_mounts_in(private=True)
            mounts.mount("mqueue", "/tmp", mounts.NO_SETUID | mounts.NO_DEVICES | mounts.NO_EXECUTION)
            if removed:
                os.unlink(os.path.join("/tmp", removed))
            with os.scandir("/tmp") as entries:
                answer = [(each.name, each.stat().st_uid, each.stat().st_ctime) for each in entries]
        except OSError as error:
            answer = str(error)
        finally:
            theirs.sendall(json.dumps(answer).encode())
            os._exit(0)
    theirs.close()
    with ours, ours.makefile("rb") as reader:
        text = reader.read(_ANSWER_BYTES_MAX)
    os.waitpid(pid, 0)
    found = json.loads(text or b'""')
    if isinstance(found, str):
        raise OSError(found or "no answer")
    return [(str(name), int(uid), float(changed_s)) for name, uid, changed_s in found]


def _named_after(kind: RemainKind, place: str, uids: Container[int]) -> Iterator[Remain]:
    """Yield the entries of a directory that belong to a uid or have its number as name."""
    with contextlib.suppress(OSError), os.scandir(place) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                number = int(entry.name) if entry.name.isascii() and entry.name.isdigit() else -1
                uid = number if number in uids else entry.stat(follow_symlinks=False).st_uid
                if uid in uids:
                    yield Remain(kind, uid, entry.path)
