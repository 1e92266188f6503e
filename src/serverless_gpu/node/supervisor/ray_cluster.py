"""Manages a node's part of a run's private Ray cluster: its resources and its directory.

    supervisor ─ AttemptCluster ─▶ /tmp/sgpu-ray-<8 hex>, 0700, and its flock ─▶ stem (`inside/raycluster/share.py`)
               ├─ share ─▶ "go" ─▶ the rank that starts the node's part of the cluster (`inside/raycluster/`)
               └─ close, after all processes ended: keeps logs in <attempt>/ray/<node>, removes the directory
    agent ─ ClusterSweeper ─▶ a clean process that removes directories without a lock

While a process holds the flock on a cluster directory, the run continues. Only the supervisor and the stem hold the
flock. The flock also keeps systemd-tmpfiles from deleting the directory of a run that takes many days.

Failure cases: Without free space in /tmp, the run ends before its start with the reason in its final state. If the
supervisor and the stem are both killed, an agent of the same user removes the cluster directory later. If the sweeper
removes a directory that a supervisor has just created, the supervisor tries another name. The sweeper gives up on a
directory after `_SWEEPS_MAX` failed sweeps.

Ray writes one log file per process below its sessions' directories (/tmp/sgpu-ray-*/<start>/session_*/logs). The
supervisor keeps the last `FILE_BYTES_MAX` of each file, newest files first, up to `BYTES_MAX` in total. After all Ray
processes have ended, only Ray's log files can explain a failure. The supervisor skips pipes, links and files that it
cannot copy, because the run's outcome does not depend on them. On a slow disk, the supervisor stops copying after
`LIMIT_NS`, because the devices stay reserved during the copy. The receipt reports the missing logs.

Ray counts CPUs, GPUs and memory but isolates no resource. A node's share therefore states only how many resources Ray
may schedule for tasks of this run.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import secrets
import shutil
import socket
import stat
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

from serverless_gpu.ambient import Clock, SystemClock
from serverless_gpu.model.hardware import CPU, Device
from serverless_gpu.model.placement import share_of_cores
from serverless_gpu.model.redaction import Redactor
from serverless_gpu.model.spec import OBJECT_STORE_BYTES_MAX, OBJECT_STORE_BYTES_MIN, RayCluster
from serverless_gpu.node.attempt.usage_account import write_text
from serverless_gpu.node.base.lock_files import is_taken
from serverless_gpu.node.base.protocol import Launch
from serverless_gpu.node.inside import linux
from serverless_gpu.node.inside.raycluster import share
from serverless_gpu.node.inside.raycluster.share import ClusterShare, files_of, logs_of
from serverless_gpu.node.processes.process_tree import memory_limit_bytes
from serverless_gpu.node.supervisor.rank_environment import Network
from serverless_gpu.units import format_bytes

FILE_BYTES_MAX = 16 << 20
BYTES_MAX = 256 << 20
LIMIT_NS = 5_000_000_000
_FILES_MAX = 5_000
_PIECE_BYTES = 1 << 20
_ALONE = Network(("127.0.0.1", 0))
_NAMES_TRIED = 20
_LOOK_NS = 60_000_000_000
# Maximum number of sweeps of one directory per agent. A Ray task may have created another user's files.
_SWEEPS_MAX = 3
_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_SHARED_MEMORY = Path("/dev/shm")
MEMORY_FIGURES = Path("/proc/meminfo")


class NoDirectory(OSError):
    """Raised if no directory can be created for a run's Ray cluster.

    The exception's text contains the directory's path and the cause.
    """


class AttemptCluster:
    """The resources of an attempt's Ray cluster on this node that outlive the cluster's processes.

    `ranks_path` is the path of the directory for the ranks, if their sandbox shows another path. `redactor` masks
    secrets in Ray's logs. Raises NoDirectory if the directory cannot be created, and OSError if the attempt's directory
    has no free space.
    """

    def __init__(
        self,
        launch: Launch,
        devices: Sequence[Device],
        network: Network = _ALONE,
        clock: Clock | None = None,
        *,
        ranks_path: str = "",
        redactor: Redactor | None = None,
    ) -> None:
        self._redactor = redactor
        self._clock = clock or SystemClock()
        self._network = network
        self._launch = launch
        self._devices = tuple(devices)
        files = Path(files_of(launch.directory))
        files.mkdir(mode=0o700, exist_ok=True)
        self.note = ""  # Note for the caller about the node's share, set by `share`, or "".
        self.path, self.fd = _make()
        # A principal gets a directory inside, because the outer directory must stay this process's own.
        self.own = os.path.join(self.path, "ranks") if ranks_path else self.path
        self._ranks_path = ranks_path or self.path
        if ranks_path:
            os.mkdir(self.own, 0o700)
        else:
            _make_spill(self.path, files)
        with contextlib.suppress(OSError):  # Users can read the path of Ray's directory from this file.
            write_text(files / "directory", f"{self.path}\n")

    def share(self) -> dict[str, object]:
        """Return the resources that this node offers to the cluster."""
        spec, count = self._launch.spec, len(self._devices)
        asked = spec.ray or RayCluster()
        of_type = max(count, self._launch.of_type)
        total, available = memory_bytes()
        memory = spec.resources.memory_bytes or total * count // of_type
        cores = spec.resources.cpus or share_of_cores(len(os.sched_getaffinity(0)), count, of_type)
        kind = self._devices[0].type if self._devices else CPU
        shared = part_of_shared(*shared_memory_bytes(), count, of_type)
        store = object_store_bytes(min(memory, available), shared, asked.object_store_bytes)
        self.note = store_note(store, shared, asked.object_store_bytes)
        nonce = self._launch.nonce  # All nodes derive the cluster's secret from the run's nonce.
        return ClusterShare(
            directory=self._ranks_path,
            devices=0 if kind == CPU else count,
            accelerator="" if kind == CPU else kind,
            cpus=cluster_cpus(cores, count),
            object_store_bytes=store,
            dashboard=asked.dashboard,
            node_rank=self._launch.crew,
            num_nodes=len(self._launch.all_crews),
            host=socket.gethostname(),
            address=self._network.address,
            head=self._network.master,
            secret=hashlib.sha256(f"{nonce}:ray".encode()).hexdigest() if nonce else secrets.token_hex(32),
        )._asdict()

    def close(self) -> str:
        """Keep Ray's logs and remove the cluster directory after all processes have ended.

        Return a note for the receipt, or "".
        """
        if self.own == self.path:
            kept = logs_of(self._launch.directory, self._launch.crew)
            note = save_logs(self.path, kept, self._clock, self._redactor)
            share.remove_directory(self.path)
        else:  # Links in the principal's directory could lead to files of the node, so this process copies no log.
            note = ""
            shutil.rmtree(self.path, ignore_errors=True)
        os.close(self.fd)
        return note


class Process(Protocol):
    """A running sweeper process."""

    def poll(self) -> int | None: ...


class ClusterSweeper:
    """Removes abandoned cluster directories, periodically and after an attempt has `ended`."""

    def __init__(self, clock: Clock, start: Callable[[], Process]) -> None:
        self._clock = clock
        self._start = start
        self._process: Process | None = None
        self._due_ns = 0
        self._tries: Counter[str] = Counter()  # Number of failed sweeps by directory.

    def tend(self, *, ended: bool) -> None:
        """Start a sweep if the sweep interval has passed or an attempt has `ended`."""
        if self._process is not None and self._process.poll() is not None:
            self._process = None
        now_ns = self._clock.boottime_ns()
        if self._process is not None or (now_ns < self._due_ns and not ended):
            return
        self._due_ns = now_ns + _LOOK_NS
        left = [path for path in _directories() if self._tries[path] < _SWEEPS_MAX and is_left(path)]
        if left:
            self._tries.update(left)
            # If the system cannot start the sweeper process, a later `tend` tries again.
            with contextlib.suppress(OSError):
                self._process = self._start()


def main() -> None:
    """Remove the abandoned directories of this user's clusters."""
    os.nice(10)
    linux.be_ordinary()
    sweep()


def sweep() -> None:
    """Remove this user's cluster directories that no process locks."""
    for path in _directories():
        fd = _open(path)
        if fd is None:
            continue
        with contextlib.suppress(OSError):  # A process still holds the directory's lock.
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            share.remove_directory(path)
        os.close(fd)


def is_left(path: str) -> bool:
    """Return True if no process locks a cluster's directory."""
    fd = _open(path)
    if fd is None:
        return False
    try:
        return not is_taken(fd)
    except OSError:
        return False
    finally:
        os.close(fd)


def memory_bytes() -> tuple[int, int]:
    """Return total and available host memory for this package's processes; 0 if unknown."""
    found = {"MemTotal": 0, "MemAvailable": 0}
    with contextlib.suppress(OSError, ValueError):
        for line in MEMORY_FIGURES.read_text(encoding="ascii").splitlines():
            name, _, rest = line.partition(":")
            if name in found:
                found[name] = int(rest.split()[0]) * 1024
    total = min(found["MemTotal"], memory_limit_bytes() or found["MemTotal"])
    return total, min(total, found["MemAvailable"])


def _make() -> tuple[str, int]:
    """Create a cluster directory under an unused name and lock the directory. Raises NoDirectory."""
    for _ in range(_NAMES_TRIED):
        path = f"{share.DIRECTORY_PARENT}/{share.DIRECTORY_PREFIX}{secrets.token_hex(4)}"
        try:
            os.mkdir(path, 0o700)
        except FileExistsError:
            continue
        except OSError as error:
            problem = (
                f"could not make a directory in {share.DIRECTORY_PARENT} for the run's Ray cluster: {error.strerror}"
            )
            raise NoDirectory(problem) from error
        fd = _taken(path)
        if fd is not None:
            return path, fd
        with contextlib.suppress(OSError):
            os.rmdir(path)
    raise NoDirectory(f"could not make a directory for the run's Ray cluster: {_NAMES_TRIED} names were taken")


def _make_spill(path: str, files: Path) -> None:
    """Create the directory for Ray's spilled objects in `path`, or on the home's disk if that is larger."""
    spill = os.path.join(path, share.SPILL)
    elsewhere = files / os.path.basename(path)
    with contextlib.suppress(OSError):
        if os.stat(files).st_dev != os.stat(path).st_dev and free_bytes(files) > free_bytes(path):
            elsewhere.mkdir(mode=0o700)
            os.symlink(elsewhere, spill)
            return
    with contextlib.suppress(OSError):  # If mkdir fails, Ray tries to create the spill directory itself.
        os.mkdir(spill, 0o700)


def _taken(path: str) -> int | None:
    """Return a descriptor that locks a directory, or None if the sweeper has removed the directory."""
    fd = _open(path)
    if fd is None:
        return None
    with contextlib.suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(fd), os.stat(path)):
            return fd
    os.close(fd)
    return None


def _open(path: str) -> int | None:
    """Return a descriptor of a directory that this user owns, or None."""
    try:
        fd = os.open(path, _OPEN)
    except OSError:
        return None
    if os.fstat(fd).st_uid == os.getuid():
        return fd
    os.close(fd)
    return None


def _directories() -> list[str]:
    with contextlib.suppress(OSError):
        return [
            f"{share.DIRECTORY_PARENT}/{name}"
            for name in os.listdir(share.DIRECTORY_PARENT)
            if share.is_directory_name(name)
        ]
    return []


def shared_memory_bytes() -> tuple[int, int]:
    """Return the size of /dev/shm and its free bytes."""
    with contextlib.suppress(OSError):
        system = os.statvfs(_SHARED_MEMORY)
        return system.f_blocks * system.f_frsize, system.f_bavail * system.f_frsize
    return 0, 0


def free_bytes(path: str | Path) -> int:
    """Return the number of bytes that the user may still write to a path's file system."""
    system = os.statvfs(path)
    return system.f_bavail * system.f_frsize


def save_logs(directory: str, kept: str, clock: Clock, redactor: Redactor | None = None) -> str:
    """Copy Ray's logs to `kept`, with masked secrets.

    Return a message if the copy exceeded the time limit, else "".
    """
    left, until_ns = BYTES_MAX, clock.boottime_ns() + LIMIT_NS
    with contextlib.suppress(OSError):
        os.makedirs(kept, 0o700, exist_ok=True)
        files = _newest_first(directory, clock, until_ns)
        for number, (path, name) in enumerate(files):
            if left <= 0:
                break
            if clock.boottime_ns() > until_ns:
                return f"{len(files) - number} of {len(files)} Ray logs were not kept because copying took too long"
            with contextlib.suppress(OSError):
                left -= _copy(path, os.path.join(kept, name), min(left, FILE_BYTES_MAX), redactor)
    return ""


def _newest_first(directory: str, clock: Clock, until_ns: int) -> list[tuple[str, str]]:
    found: list[tuple[float, str, str]] = []
    for path, name in _logs(directory):
        with contextlib.suppress(OSError):
            status = os.lstat(path)
            if stat.S_ISREG(status.st_mode) and status.st_size:
                found.append((-status.st_mtime, path, name))
        if clock.boottime_ns() > until_ns:
            break
    return [(path, name) for _, path, name in sorted(found)[:_FILES_MAX]]


def _logs(directory: str) -> Iterator[tuple[str, str]]:
    """Yield Ray's log files, each with its name in the directory of kept logs."""
    for number in _entries(directory):
        start = os.path.join(directory, number)
        # Nearly every cluster starts at the first try. Logs of later tries must not overwrite logs of the first try.
        prefix = "" if number == "1" else f"start-{number}/"
        for session in _entries(start):
            path = os.path.join(start, session)
            if os.path.isfile(path) and session.endswith(".log"):
                yield path, f"{prefix}{session}"
            elif not os.path.islink(path):
                logs = os.path.join(path, "logs")
                for place, _, files in () if os.path.islink(logs) else os.walk(logs):
                    within = os.path.relpath(place, logs)
                    yield from ((os.path.join(place, name), os.path.join(prefix, within, name)) for name in files)


def _entries(directory: str) -> list[str]:
    try:
        return sorted(os.listdir(directory))
    except OSError:
        return []


def _copy(path: str, target: str, bytes_max: int, redactor: Redactor | None) -> int:
    """Copy the end of a file, with masked secrets. Return the number of copied bytes."""
    target = os.path.normpath(target)
    os.makedirs(os.path.dirname(target), 0o700, exist_ok=True)
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    copied = 0
    redacted = None if redactor is None else redactor.stream()
    with open(os.open(path, flags), "rb") as source, open(target, "wb") as file:
        source.seek(max(0, os.fstat(source.fileno()).st_size - bytes_max))
        while copied < bytes_max and (piece := source.read(min(_PIECE_BYTES, bytes_max - copied))):
            copied += len(piece)
            file.write(piece if redacted is None else redacted.feed(piece))
        if redacted is not None:
            file.write(redacted.end())
    return copied


_OF_MEMORY = 0.3  # Ray's default for the object store's share of host memory.
_OF_SHARED = 0.9  # The object store's share of the run's part of /dev/shm. Ray moves a larger object store to the disk.


def object_store_bytes(memory_bytes: int, shared_bytes: int, asked: int | None = None) -> int:
    """Return the size of a node's object store in bytes.

    `object_store_bytes` reduces a requested size only if the run's part of /dev/shm is smaller.
    """
    wanted = asked if asked is not None else round(memory_bytes * _OF_MEMORY)
    bounded = min(wanted, round(shared_bytes * _OF_SHARED), OBJECT_STORE_BYTES_MAX)
    return max(OBJECT_STORE_BYTES_MIN, bounded)


def part_of_shared(size: int, free: int, devices: int, of_type: int) -> int:
    """Return the run's part of /dev/shm in bytes, in proportion to its devices, up to the free bytes.

    Ray allocates pages of /dev/shm on demand. If every run could use all of /dev/shm, concurrent runs would crash each
    other.
    """
    least = round(OBJECT_STORE_BYTES_MIN / _OF_SHARED) + 1  # Ray cannot start with a smaller object store.
    return min(free, max(least, size * devices // of_type))


def store_note(size: int, shared_bytes: int, asked: int | None) -> str:
    """Return a note if the object store differs from the requested size or is the minimum; else ""."""
    if size == OBJECT_STORE_BYTES_MAX and asked is not None and asked > size:
        return f"the object store is {format_bytes(size)}, the maximum, instead of {format_bytes(asked)}"
    small = size == OBJECT_STORE_BYTES_MIN and size > round(shared_bytes * _OF_SHARED)
    if not small and (asked is None or asked <= size):
        return ""
    instead = "" if asked is None or asked <= size else f", not {format_bytes(asked)}"
    where = ", in /tmp" if size > shared_bytes else ""
    store = f"so Ray's object store is {format_bytes(size)}{instead}{where}"
    return (
        f"/dev/shm has {format_bytes(shared_bytes)} for this run, {store}. In a container, enlarge it with --shm-size"
    )


def cluster_cpus(cores: int, devices: int) -> int:
    """Return the number of CPUs that a node offers to Ray's scheduler.

    A node offers at least one CPU per device and one additional CPU. With fewer CPUs, Ray would never schedule a
    trainer and its workers, which each need one CPU.
    """
    return max(cores, devices + 1)
