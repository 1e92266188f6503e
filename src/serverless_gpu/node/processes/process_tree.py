"""Ends an attempt's process tree, verifies its end, and removes its remaining shared memory.

All processes of an attempt are descendants of its stem. If cgroup v2 is writable, each stem has a separate cgroup. A
single write to `cgroup.kill` ends all processes of a cgroup, including detached processes. The file `cgroup.events`
shows when the cgroup is empty. Without a writable cgroup v2, the stem is the subreaper and ends its descendants itself.
This package never selects processes by name for termination.

    /sys/fs/cgroup[/unified]/<own cgroup>/serverless_gpu-<home>/<number>/    one per stem

If a pids controller is available, the controller limits an attempt's processes and threads. A fork bomb therefore harms
only its own attempt. If a memory controller is available, the supervisor sets a memory limit. The supervisor prefers
cgroup v2, and uses cgroup v1 on hybrid hosts. The same applies to the limit of cores. The memory controller's counters
show whether the kernel killed a rank for lack of memory. Without a memory controller, the kernel's global counter shows
OOM kills. Exit codes do not count as evidence of an OOM kill.

Libraries create named segments in /dev/shm and remove them when their process exits. A killed process leaves its
segments behind. Orphaned segments would eventually fill /dev/shm. `AttemptSegments` therefore finds and removes
orphaned segments:

    during the run    candidates ─▶ segments that the attempt's processes have open or mapped belong to it
    after its end     its segments that no process uses ─▶ removed

Candidate segments match a library's name pattern, because other files may belong to the user. A candidate segment
belongs to this user and was created during the attempt. `AttemptSegments` keeps a segment while any process uses the
segment or its creator runs. `AttemptSegments` also keeps a segment if it has seen no process of the attempt use the
segment.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import select
import signal
import stat
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path

import msgspec

from serverless_gpu.node.inside.linux import descendants

_MOUNT_LINE = re.compile(r"^\d+ \d+ \S+ (?P<root>\S+) (?P<point>\S+) .* - (?P<kind>\S+) \S+ (?P<options>\S+)$")
TASKS_MAX = 32_768
ZYGOTE = "-zygote"  # Suffix of the cgroup name of a zygote.
AGENT = "sgpu-agent"  # Process name of an agent.
_CLOSING_LOOKS = 100
_CLOSING_PAUSE_S = 0.01
_LEFT_MAX = 16
_CONTROLLERS = ("memory", "pids", "cpu")
_CPU_PERIOD_US = 100_000
_NO_LIMIT_BYTES = 1 << 60  # Without a memory limit, cgroup v1 reports the largest number of pages.

_SEGMENTS = Path("/dev/shm")
_PROC = Path("/proc")
_SEGMENT_NAME = re.compile(
    r"torch_(?P<torch>\d+)_\d+_\d+"
    r"|__KMP_REGISTERED_LIB_(?P<openmp>\d+)(_\d+)?"
    r"|sem\.loky-(?P<loky>\d+)-\w+"
    r"|psm_[0-9a-f]{8}"  # Multiprocessing.shared_memory.
    r"|sem\.mp-[a-z0-9_]{8}"  # Multiprocessing's locks.
    r"|nccl-[A-Za-z0-9]{6}"
)
_PROCESSES = "serverless_gpu-node"
"""Cgroup of a node's processes below the cgroup of its systemd unit."""
_DELEGATED = "user.delegate"  # systemd marks cgroups of units with Delegate=yes with this attribute.
_MOVING_LOOKS = 10  # Processes can fork while others move.
_LOOK_NS = 1_000_000_000
# Maximum number of checks per segment name. A segment that the attempt's processes do not use during these checks does
# not belong to the attempt.
_LOOKS_MAX = 3
_COARSE_NS = 50_000_000  # File timestamps may lag behind the clock by up to one tick.


class CgroupRoot:
    """The directories in which one agent creates a cgroup for each stem."""

    def __init__(
        self, path: Path | None, pids: Path | None = None, tasks_max: int = TASKS_MAX, problem: str = ""
    ) -> None:
        self.path = path  # The cgroup v2 directory, or None if cgroup v2 is not usable.
        self.problem = problem  # Reason for which no cgroup v2 directory is usable, or "".
        self._pids = pids  # Directory of the cgroup v1 pids controller on hybrid hosts, or None.
        self.tasks_max = tasks_max  # Maximum number of processes and threads per attempt.
        self._count = 0

    def make(self, mark: str = "") -> tuple[Path, ...]:
        """Create and return the cgroups for a stem, v2 first.

        With the `mark` `ZYGOTE`, create the cgroups for a zygote. If no cgroup can be created, return ().
        """
        self._count += 1
        made: list[Path] = []
        for parent in (self.path, self._pids):
            if parent is None:
                continue
            path = parent / f"{os.getpid()}-{self._count}{mark}"
            with contextlib.suppress(OSError):
                path.mkdir()
                made.append(path)
                limit = path / "pids.max"
                if limit.exists():
                    limit.write_text(str(self.tasks_max))
        return tuple(made)

    def sweep(self) -> None:
        """Remove empty cgroups left by earlier agents' stems.

        Call `sweep` only when the agent starts, before stems arrive. If a zygote's agent has ended, processes in the
        zygote's cgroup belong to no run. `sweep` kills the processes in such a zygote's cgroup.
        """
        for parent in (self.path, self._pids):
            with contextlib.suppress(OSError):
                for entry in parent.iterdir() if parent is not None else ():
                    if not entry.is_dir():
                        continue
                    if entry.name.endswith(ZYGOTE):
                        number = entry.name.partition("-")[0]
                        made_by = look_at(int(number) if number.isdigit() else 0)
                        # Another running agent may have created the cgroup.
                        if made_by is None or made_by.pid == os.getpid() or made_by.name != AGENT:
                            end_cgroup(entry)
                    remove_cgroup(entry)

    def close(self) -> None:
        """Wait up to a second until the last stems have ended, and remove all cgroups. Later agents retry."""
        for _ in range(_CLOSING_LOOKS):
            self.sweep()
            if all([remove_cgroup(path) for path in (self.path, self._pids) if path is not None]):
                return
            select.select([], [], [], _CLOSING_PAUSE_S)


def find_cgroup_root(name: str, environ: Mapping[str, str]) -> CgroupRoot:
    """Return the directories in which this process may create cgroups.

    `name` is unique to one installation. `SERVERLESS_GPU_CGROUPS=0` disables cgroups. `SERVERLESS_GPU_TASKS_MAX` limits
    the number of an attempt's processes.
    """
    if environ.get("SERVERLESS_GPU_CGROUPS") == "0":
        return CgroupRoot(None, problem="switched off by SERVERLESS_GPU_CGROUPS=0")
    wanted = environ.get("SERVERLESS_GPU_TASKS_MAX", "")
    tasks_max = int(wanted) if wanted.isascii() and wanted.isdigit() else TASKS_MAX
    pids = _directory("cgroup", "pids", name)
    path = _directory("cgroup2", "", name)
    if path is None:
        return CgroupRoot(None, pids, tasks_max, "no cgroup v2 directory is writable for this user")
    if not (path / "cgroup.kill").exists():
        return CgroupRoot(None, pids, tasks_max, "this kernel has no cgroup.kill (needs 5.14)")
    # If the parent cgroup does not delegate a controller, this package does not use the controller.
    for controller in _CONTROLLERS:
        with contextlib.suppress(OSError):
            (path / "cgroup.subtree_control").write_text(f"+{controller}")
    return CgroupRoot(path, pids, tasks_max)


def _directory(kind: str, controller: str, name: str) -> Path | None:
    """Create and return a subdirectory of this process's cgroup in a hierarchy, or None if impossible."""
    mount, place = mount_point(kind, controller), own_place(controller)
    if mount is None or place is None:
        return None
    own = mount / place.lstrip("/")
    path = (own if kind == "cgroup" else _distributor(own)) / name
    try:
        path.mkdir(exist_ok=True)
    except OSError:
        return None
    return path


def _distributor(own: Path) -> Path:
    """Return the cgroup v2 that can limit its child cgroups: this process's cgroup, or its parent.

    A cgroup with processes cannot distribute controllers to its child cgroups. In a systemd unit with Delegate=yes, the
    processes of the unit therefore move to a child cgroup of their own.
    """
    if own.name == _PROCESSES:
        return own.parent
    try:
        if os.getxattr(own, _DELEGATED) != b"1":
            return own
        offered = (own / "cgroup.controllers").read_text().split()
        given = (own / "cgroup.subtree_control").read_text().split()
        missing = [name for name in _CONTROLLERS if name in offered and name not in given]
        if missing:
            (own / _PROCESSES).mkdir(exist_ok=True)
    except OSError:  # No systemd made the cgroup, or the unit belongs to another user.
        return own
    for _ in range(_MOVING_LOOKS if missing else 0):
        pids = cgroup_pids(own)
        for pid in pids:
            with contextlib.suppress(OSError):  # The process has ended.
                (own / _PROCESSES / "cgroup.procs").write_text(str(pid))
        if not pids:
            break
    for name in missing:
        with contextlib.suppress(OSError):
            (own / "cgroup.subtree_control").write_text(f"+{name}")
    return own


def controllers(path: Path | None) -> tuple[str, ...]:
    """Return the limits available for stems: ``memory``, ``pids`` and ``cpu`` on cgroup v2, and v1 limits."""
    found: list[str] = []
    if path is not None:
        with contextlib.suppress(OSError):
            handed_down = (path / "cgroup.subtree_control").read_text().split()
            found += [name for name in _CONTROLLERS if name in handed_down]
    for name in _CONTROLLERS:
        mount, place = mount_point("cgroup", name), own_place(name)
        if name in found or mount is None or place is None:
            continue
        if os.access(mount / place.lstrip("/"), os.W_OK | os.X_OK):
            found.append(f"{name} (v1)")
    return tuple(found)


def kill_cgroup(path: Path) -> None:
    """Kill every process in a cgroup atomically."""
    # A write error means that the cgroup may be gone. `cgroup_empty` checks separately whether the cgroup exists.
    with contextlib.suppress(OSError):
        (path / "cgroup.kill").write_text("1")


def cgroup_pids(path: Path) -> list[int]:
    """Return the pids of the processes in a cgroup."""
    with contextlib.suppress(OSError, ValueError):
        return [int(line) for line in (path / "cgroup.procs").read_text().split()]
    return []


def end_cgroup(path: Path) -> None:
    """Kill every process in a cgroup (v1 or v2), and wait up to a second."""
    for _ in range(_CLOSING_LOOKS):
        kill_cgroup(path)
        pids = cgroup_pids(path)
        if not pids:
            return
        for pid in pids:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        select.select([], [], [], _CLOSING_PAUSE_S)


def cgroup_empty(path: Path) -> bool:
    """Return True if a cgroup contains no process."""
    try:
        return "populated 0" in (path / "cgroup.events").read_text()
    except OSError as error:
        # A missing cgroup is empty, because the kernel removes only empty cgroups.
        return error.errno in (errno.ENOENT, errno.ENODEV)


class ProcessIdentity(msgspec.Struct, frozen=True):
    """Identity of a process that survived SIGKILL.

    `started` is the process's start time in ticks since boot.
    """

    pid: int
    started: int
    name: str = ""

    def is_there(self) -> bool:
        """Return True if the process still exists and is not a zombie."""
        now = look_at(self.pid)
        return now is not None and now.started == self.started


def left_in(cgroup: Path | None, pids: Iterable[int]) -> tuple[ProcessIdentity, ...]:
    """Return up to 16 remaining processes of an attempt, from its cgroup and the known `pids`."""
    known = list(pids)
    if cgroup is not None:
        known += cgroup_pids(cgroup)
    found = (look_at(pid) for pid in dict.fromkeys(known))
    return tuple(left for left in found if left is not None)[:_LEFT_MAX]


def look_at(pid: int) -> ProcessIdentity | None:
    """Return a process's identity, or None if the process has ended or is a zombie."""
    try:
        line = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    name, _, rest = line.partition("(")[2].rpartition(")")  # A process name may contain parentheses.
    fields = rest.split()
    return None if fields[0] in "ZX" else ProcessIdentity(pid, int(fields[19]), name)


def uid_of(pid: int) -> int | None:
    """Return the real uid of a process, or None if it has ended."""
    return next(iter(_status_numbers(pid, "Uid:")), None)


def namespace_pids(pid: int) -> list[int]:
    """Return a process's pid in each pid namespace, this process's namespace first; [] if it ended."""
    return _status_numbers(pid, "NSpid:")


def _status_numbers(pid: int, field: str) -> list[int]:
    """Return the numbers of a field of a process's status, or [] if the process has ended."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith(field):
                return [int(word) for word in line.split()[1:]]
    return []


def pids_in_namespace(root: int, depth: int) -> dict[int, int]:
    """Return the pids of a process's descendants, by their pid in the namespace `depth` levels below."""
    known = ((pid, namespace_pids(pid)) for pid in (root, *descendants(root)))
    return {seen[depth]: pid for pid, seen in known if len(seen) > depth}


def remove_cgroup(path: Path) -> bool:
    """Remove an empty cgroup and all its descendant cgroups. Return True if the cgroup no longer exists."""
    with contextlib.suppress(OSError):
        for entry in path.iterdir():
            if entry.is_dir():
                remove_cgroup(entry)
    try:
        path.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def memory_limit_bytes(pid: int | None = None) -> int | None:
    """Return the lowest memory limit of a process's cgroups; None if no limit is visible.

    Without a pid, return the limit of this process.
    """
    found: list[int] = []
    for kind, controller, name in (("cgroup2", "", "memory.max"), ("cgroup", "memory", "memory.limit_in_bytes")):
        mount, place = mount_point(kind, controller), own_place(controller, pid)
        if mount is None or place is None:
            continue
        own = mount / place.lstrip("/")
        # In a container, the mount shows the container's cgroup without its parents.
        for path in (own, *own.parents):
            if path.is_relative_to(mount):
                with contextlib.suppress(OSError, ValueError):
                    found.append(int((path / name).read_text()))
    return min((limit for limit in found if limit < _NO_LIMIT_BYTES), default=None)


class MemoryWatch:
    """One attempt's memory limit (None: no limit), with the kernel's OOM kill counters."""

    def __init__(self, cgroup: Path | None, stem_pid: int, limit_bytes: int | None) -> None:
        self.limit_bytes = limit_bytes
        self.note = ""
        self._v1: Path | None = None
        self._v2 = cgroup if cgroup is not None and (cgroup / "memory.max").exists() else None
        self._kernel_kills = _kernel_oom_kills()
        if limit_bytes is None:
            return
        if self._v2 is not None:
            (self._v2 / "memory.max").write_text(str(limit_bytes))
            with contextlib.suppress(OSError):
                (self._v2 / "memory.oom.group").write_text("1")
        elif not self._limit_v1(stem_pid, limit_bytes):
            self.note = "memory= is not enforced: no memory controller can be written to on this machine"

    def out_of_memory(self) -> bool:
        """Return True if a kernel counter shows that an attempt's process was killed for lack of memory."""
        if self._v2 is not None:
            return _counter(self._v2 / "memory.events", "oom_kill") > 0
        if self._v1 is not None:
            return _counter(self._v1 / "memory.oom_control", "oom_kill") > 0
        return _kernel_oom_kills() > self._kernel_kills

    @property
    def is_exact(self) -> bool:
        """Return True if the counter counts only processes of the attempt, not of the whole machine."""
        return self._v2 is not None or self._v1 is not None

    def peak_bytes(self) -> int | None:
        """Return the attempt's peak host memory in bytes, or None if no controller reports the peak."""
        for path in (self._v2 and self._v2 / "memory.peak", self._v1 and self._v1 / "memory.max_usage_in_bytes"):
            if path is not None:
                with contextlib.suppress(OSError, ValueError):
                    return int(path.read_text())
        return None

    def close(self) -> None:
        """Remove the cgroup v1 of the memory limit."""
        if self._v1 is not None:
            remove_cgroup(self._v1)

    def _limit_v1(self, stem_pid: int, limit_bytes: int) -> bool:
        self._v1 = _own_v1("memory", stem_pid, {"memory.limit_in_bytes": str(limit_bytes)})
        return self._v1 is not None


class CpuLimit:
    """One attempt's limit of cores (None: no limit), for all its processes together."""

    def __init__(self, cgroup: Path | None, stem_pid: int, cores: int | None) -> None:
        self.note = ""
        self._v1: Path | None = None
        if cores is None:
            return
        quota_us = cores * _CPU_PERIOD_US
        if cgroup is not None and (cgroup / "cpu.max").exists():
            (cgroup / "cpu.max").write_text(f"{quota_us} {_CPU_PERIOD_US}")
            return
        files = {"cpu.cfs_period_us": str(_CPU_PERIOD_US), "cpu.cfs_quota_us": str(quota_us)}
        self._v1 = _own_v1("cpu", stem_pid, files)
        if self._v1 is None:
            self.note = "cpus= is not enforced: no cpu controller can be written to on this machine"

    def close(self) -> None:
        """Remove the cgroup v1 of the limit."""
        if self._v1 is not None:
            remove_cgroup(self._v1)


def _own_v1(controller: str, stem_pid: int, files: Mapping[str, str]) -> Path | None:
    """Create a cgroup v1 with limits for a stem and its descendants. Return None if impossible."""
    path = _directory("cgroup", controller, f"serverless_gpu-{stem_pid}")
    if path is None:
        return None
    try:
        for name, text in files.items():
            (path / name).write_text(text)
        for pid in (stem_pid, *descendants(stem_pid)):  # Standby ranks are already descendants of the stem.
            (path / "cgroup.procs").write_text(str(pid))
    except OSError:
        remove_cgroup(path)
        return None
    return path


def mount_point(kind: str, controller: str) -> Path | None:
    """Return the mount point of a file system type.

    For cgroup v1, the mount must have the given controller.
    """
    with contextlib.suppress(OSError), open("/proc/self/mountinfo", encoding="utf-8") as file:
        for line in file:
            match = _MOUNT_LINE.match(line.strip())
            if match and match["kind"] == kind and (not controller or controller in match["options"].split(",")):
                return Path(match["point"])
    return None


def own_place(controller: str, pid: int | None = None) -> str | None:
    """Return the cgroup of a process from lines such as ``0::/user.slice`` or ``4:memory:/x``.

    Without a pid, return the cgroup of this process.
    """
    with contextlib.suppress(OSError), open(f"/proc/{pid or 'self'}/cgroup", encoding="utf-8") as file:
        for line in file:
            _, controllers, path = line.rstrip("\n").split(":", 2)
            if controller in controllers.split(","):
                return path
    return None


def _counter(path: Path, name: str) -> int:
    with contextlib.suppress(OSError, ValueError):
        for line in path.read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == name:
                return int(value)
    return 0


def _kernel_oom_kills() -> int:
    return _counter(Path("/proc/vmstat"), "oom_kill")


class AttemptSegments:
    """The shared-memory segments of one attempt."""

    def __init__(self, place: Path = _SEGMENTS) -> None:
        self._place = place
        self._own: set[str] = set()
        self._looks: dict[str, int] = {}
        self._due_ns = 0

    def is_due(self, now_ns: int) -> bool:
        """Return True at most once per second.

        `now_ns` must always come from the same clock.
        """
        if now_ns < self._due_ns:
            return False
        self._due_ns = now_ns + _LOOK_NS
        return True

    def look(self, since_ns: int, pids: Callable[[], Collection[int]]) -> None:
        """Record segments that the attempt's processes use or that contain the processes' pids in their names.

        `since_ns` is the wall time at which user code began. `look` calls `pids` only if new segments exist.
        """
        there = set(self._candidates(since_ns))
        self._own &= there
        self._looks = {name: self._looks.get(name, 0) + 1 for name in there}
        names = {name for name, looks in self._looks.items() if looks <= _LOOKS_MAX} - self._own
        if not names:
            return
        known = pids()
        self._own |= {name for name in names if _maker(name) in known}
        for pid in known:
            self._own |= _used(pid, self._place, names)

    def remove(self, since_ns: int) -> tuple[str, ...]:
        """Remove the attempt's segments after its last process has ended.

        Return the names of the removed segments.
        """
        names = self._own.intersection(self._candidates(since_ns)) if self._own else set()
        names -= {name for name in names if (maker := _maker(name)) is not None and (_PROC / str(maker)).exists()}
        # The set lacks the segments of other users' processes, because these processes are not visible.
        in_use: set[str] = set()
        for pid in [int(name) for name in os.listdir(_PROC) if name.isdigit()] if names else ():
            in_use |= _used(pid, self._place, names)
        removed = []
        for name in sorted(names - in_use):
            with contextlib.suppress(OSError):
                (self._place / name).unlink()
                removed.append(name)
        return tuple(removed)

    def _candidates(self, since_ns: int) -> Iterable[str]:
        try:
            names = os.listdir(self._place)
        except OSError:
            return
        for name in names:
            if _SEGMENT_NAME.fullmatch(name):
                with contextlib.suppress(OSError):
                    found = (self._place / name).lstat()
                    is_young = min(found.st_ctime_ns, found.st_mtime_ns) >= since_ns - _COARSE_NS
                    if stat.S_ISREG(found.st_mode) and found.st_uid == os.getuid() and is_young:
                        yield name


def _used(pid: int, place: Path, names: set[str]) -> set[str]:
    """Return the segments that a process has open or mapped.

    The result is empty if the process has ended or is not accessible.
    """
    try:
        maps = (_PROC / str(pid) / "maps").read_bytes()
        files = os.listdir(_PROC / str(pid) / "fd")
    except OSError:
        return set()
    paths = {os.fsdecode(line.split(maxsplit=5)[5]) for line in maps.splitlines() if line.count(b"/")}
    for file in files:
        with contextlib.suppress(OSError):
            paths.add(os.readlink(_PROC / str(pid) / "fd" / file))
    return {name for name in names if f"{place}/{name}" in paths}


def _maker(name: str) -> int | None:
    """Return the pid contained in a segment's name, or None."""
    found = _SEGMENT_NAME.fullmatch(name)
    return next((int(pid) for pid in found.groupdict().values() if pid), None) if found else None
