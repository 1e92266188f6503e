"""A run's secrets on this node: files of mode 0400 in a directory of mode 0700, in memory if possible.

    /dev/shm/sgpu-secrets-<8 hex>/   HF_TOKEN …    .of = the attempt's directory
    runs/<run>/<fence>/secrets  ──▶  that directory, or a directory itself if /dev/shm is not in memory

The launching process (the uplink, or the client of a local run) writes the secrets before the launch. Ranks find the
secrets through `SGPU_SECRETS_DIR`. Without a sandbox, the supervisor removes the secrets once all processes of the
attempt have ended. In a sandbox, ranks get copies in memory (`isolation/grafts.py`). The supervisor removes the node's
files as soon as the copies exist. The product does not remove copies that ranks make.

Failure cases:

If the supervisor is killed, the agent removes the attempt's secrets. The uplink removes the secrets of a server's
attempt when it settles the attempt. If both the supervisor and the agent are killed, the next agent removes the
abandoned secrets.

If the writer is killed before it records the attempt in `.of`, the agent removes the empty secrets directory.

If another user already has a secrets directory of the same name, the writer tries another name.

If a rank replaces the `secrets` link, the link's target is safe. This module removes only directories whose name
matches `sgpu-secrets-<8 hex>`.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path

from serverless_gpu import faults
from serverless_gpu.ambient import Clock
from serverless_gpu.errors import StorageError
from serverless_gpu.model.secrets import VALUE_BYTES_MAX
from serverless_gpu.node.base.home import storage_error
from serverless_gpu.node.base.lock_files import is_taken
from serverless_gpu.node.base.private_files import read_owned
from serverless_gpu.node.base.requirements import symlink_error

LINK = "secrets"
LOOK_S = 60.0
UNNAMED_S = 3600.0
"""Minimum age in seconds at which the agent removes a secrets directory without an attempt."""
_OF = ".of"
_LOCK = "supervisor.lock"
_MEMORY = Path("/dev/shm")
_NAME = re.compile(r"sgpu-secrets-[0-9a-f]{8}")
_NAMES_TRIED = 20


def write(directory: Path, values: Mapping[str, bytes]) -> Path:
    """Write an attempt's secrets by name. Return the secrets directory. Raises StorageError.

    If /dev/shm is in memory, the function never writes the secrets to a disk.
    """
    remove(directory)
    if is_in_memory():
        try:
            return _write_in_memory(directory, values)
        except OSError as error:
            if error.filename2 is not None:  # The creation of the symbolic link failed, not the write to memory.
                raise symlink_error(directory, error, f"cannot link to the secrets from {directory}") from None
            raise StorageError(
                f"cannot store the run's secrets in {_MEMORY}: {error.strerror}",
                hint=f"delete unused files in {_MEMORY}, or enlarge it (docker run --shm-size=8g), because "
                "serverless-gpu does not write secrets to a disk",
            ) from None
    place = directory / LINK
    try:
        place.mkdir(mode=0o700)
        _fill(place, values)
    except OSError as error:
        raise storage_error(error, place) from None
    return place


def note(place: Path) -> str:
    """Return a note for the receipt if secrets may have reached a disk, else ""."""
    if place.parent == _MEMORY:
        return ""
    return f"the run's secrets were on this node's disk, because {_MEMORY} is not in memory"


def read(place: Path, owner: int) -> dict[str, bytes]:
    """Return the secrets in a directory by name. Raises OSError unless the uid `owner` owns them."""
    return read_owned(place, owner, VALUE_BYTES_MAX)


def remove(directory: Path) -> None:
    """Remove the secrets of an attempt, if any."""
    link = directory / LINK
    with contextlib.suppress(OSError):
        if link.is_symlink():
            _remove_in_memory(Path(os.readlink(link)))
            link.unlink()
        elif link.is_dir():
            shutil.rmtree(link, ignore_errors=True)


def keep(directories: Iterable[Path]) -> None:
    """Update the modification time of the secrets of waiting attempts."""
    for directory in directories:
        with contextlib.suppress(OSError):
            place = Path(os.readlink(directory / LINK))
            if _may_be_removed(place):
                os.utime(place)


class SecretSweeper:
    """Removes abandoned secrets in the agent, periodically and after an attempt has ended.

    The sweeper measures a secrets directory's age from its first sweep with a monotonic clock. A wall-clock change must
    not remove the secrets of an attempt during its launch.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._due_ns = 0
        self._seen: dict[str, tuple[int, int]] = {}

    def tend(self, waiting: Iterable[Path], *, ended: bool) -> None:
        """Remove abandoned secrets if the interval has passed or an attempt has ended (`ended`).

        `waiting` contains the directories of attempts without a supervisor.
        """
        now_ns = self._clock.boottime_ns()
        if now_ns >= self._due_ns or ended:
            self._due_ns = now_ns + round(LOOK_S * 1e9)
            keep(waiting)
            self._sweep(now_ns)

    def _sweep(self, now_ns: int) -> None:
        names: list[str] = []
        with contextlib.suppress(OSError):
            names = [name for name in os.listdir(_MEMORY) if _NAME.fullmatch(name)]
        self._seen = {name: seen for name, seen in self._seen.items() if name in names}
        for name in names:
            with contextlib.suppress(OSError):
                place = _MEMORY / name
                if not _is_ours(place):
                    continue
                changed_ns = place.lstat().st_mtime_ns
                if self._seen.get(name, (0, 0))[0] != changed_ns:
                    self._seen[name] = (changed_ns, now_ns)
                if _is_left(place, unchanged_s=(now_ns - self._seen[name][1]) / 1e9):
                    _remove_in_memory(place)


def _is_left(place: Path, *, unchanged_s: float) -> bool:
    """Return True if no attempt uses a secrets directory."""
    try:
        directory = Path((place / _OF).read_text(encoding="utf-8", errors="surrogateescape"))
    except FileNotFoundError:
        return unchanged_s >= UNNAMED_S
    if _is_looked_after(directory):
        return False
    return (directory / "stopped.json").exists() or unchanged_s >= UNNAMED_S


def _is_looked_after(directory: Path) -> bool:
    try:
        lock = os.open(directory / _LOCK, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return is_taken(lock)
    finally:
        os.close(lock)


def _write_in_memory(directory: Path, values: Mapping[str, bytes]) -> Path:
    place = _make()
    try:
        (place / _OF).write_text(str(directory), encoding="utf-8", errors="surrogateescape")
        (directory / LINK).symlink_to(place)
        _fill(place, values)
    except OSError:
        remove(directory)
        _remove_in_memory(place)
        raise
    return place


def _make() -> Path:
    for _ in range(_NAMES_TRIED):
        place = _MEMORY / f"sgpu-secrets-{os.urandom(4).hex()}"
        with contextlib.suppress(FileExistsError):
            place.mkdir(mode=0o700)
            return place
    raise FileExistsError(f"cannot create a secrets directory: {_NAMES_TRIED} random names in {_MEMORY} already exist")


def _fill(place: Path, values: Mapping[str, bytes]) -> None:
    for name, value in values.items():
        fd = os.open(place / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o400)
        with os.fdopen(fd, "wb") as file:
            file.write(value)
        faults.reach("before_secrets_are_complete")


def _remove_in_memory(place: Path) -> None:
    with contextlib.suppress(FileNotFoundError):  # Another process has already removed the secrets directory.
        if _may_be_removed(place):
            shutil.rmtree(place, ignore_errors=True)


def _may_be_removed(place: Path) -> bool:
    return place.parent == _MEMORY and bool(_NAME.fullmatch(place.name)) and _is_ours(place)


def _is_ours(place: Path) -> bool:
    status = place.lstat()
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()


def is_in_memory() -> bool:
    """Return True if /dev/shm is an in-memory file system."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/mounts").read_text(encoding="utf-8", errors="replace").splitlines():
            fields = line.split()
            if len(fields) > 2 and fields[1] == str(_MEMORY):
                return fields[2] in ("tmpfs", "ramfs")
    return False
