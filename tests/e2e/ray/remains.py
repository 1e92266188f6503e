"""What belongs to one run, seen from outside while it goes on, and what of it is still there afterwards.

    footprint = Footprint("SGPU_RUN_ID=01k...")    what the run's processes have in their environment
    footprint.look()                               while the run goes on, as often as one likes
    footprint.left()                               afterwards: a sentence for each thing that is still there

Found are processes that were started with that variable, whatever is below their stem, and all of a pid namespace that
one of them is in: a process that threw its environment away and left its session is found by one of the others. Of
these: sockets that listen (by inode, so another one's port of the same number is none of theirs), files and directories
in temporary places, shared memory, cgroups. A pid alone names no process: its start time goes with it.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import signal
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from tests.support.paths import REPOSITORY

_OURS = re.compile(r"/tmp/sgpu-ray-[0-9a-f]+")
_TEMPORARY = ("/tmp/", "/var/tmp/", "/dev/shm/", "/run/")
_LISTENING = "0A"
_CHECKOUT = f"{REPOSITORY}/"
"""Libraries of its environments are open files, too, and it may lie below /tmp."""
_PROC = Path("/proc")


class Identity(NamedTuple):
    """One process, never another one of the same number."""

    pid: int
    started: int


class Listener(NamedTuple):
    """A socket that listens."""

    inode: int
    address: str
    port: int
    owner: str

    @property
    def private(self) -> bool:
        """Return whether it can be reached from this machine only."""
        return ipaddress.ip_address(self.address).is_loopback


@dataclass
class Footprint:
    """What belongs to one run, as far as it was seen.

    Attributes:
        mark: `NAME=value`, a variable that the run's processes were started with.
        allowed: directories in which files may stay: the home, the test's own.
    """

    mark: str
    allowed: tuple[str, ...] = ()
    processes: dict[Identity, str] = field(default_factory=dict)
    listeners: dict[int, Listener] = field(default_factory=dict)
    paths: set[str] = field(default_factory=set)
    namespaces: set[str] = field(default_factory=set)
    cgroups: set[str] = field(default_factory=set)
    _shared: frozenset[str] = field(default_factory=lambda: frozenset(os.listdir("/dev/shm")))

    def look(self) -> Footprint:
        """See what there is now, and remember it."""
        for pid in self._pids():
            with contextlib.suppress(OSError):
                self.remember(pid)
        return self

    def named(self, name: str) -> list[int]:
        """Return the living processes of the run whose command line or name begins or goes on with this."""
        self.look()
        return sorted(
            who.pid for who, line in self.processes.items() if name in line and _started(who.pid) == who.started
        )

    def alive(self) -> list[str]:
        """Return the processes of the run that are still there, zombies too, as command lines."""
        self.look()
        return [f"{who.pid}: {line}" for who, line in self.processes.items() if _started(who.pid) == who.started]

    def left(self) -> list[str]:
        """Return a sentence for each thing of the run that is still there."""
        told = [f"process {line}" for line in self.alive()]
        inodes = {listener.inode for listener in _listening("self")}
        told += [
            f"{listener.address}:{listener.port} is listened at ({listener.owner})"
            for listener in self.listeners.values()
            if listener.inode in inodes
        ]
        there = sorted(path for path in self.paths if os.path.lexists(path))
        told += [f"{path} is there" for path in there if not any(path.startswith(f"{other}/") for other in there)]
        mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace")
        told += [f"{path} is mounted" for path in sorted(self.paths) if f" {path} " in mounts]
        told += [f"/dev/shm/{name} is nobody's" for name in sorted(self._abandoned())]
        told += [f"cgroup {path} is there" for path in sorted(self.cgroups) if os.path.isdir(path)]
        return told

    def end(self) -> None:
        """Kill whatever is left, so that the next test does not suffer from this one."""
        self.look()
        for who in list(self.processes):
            with contextlib.suppress(OSError):
                fd = os.pidfd_open(who.pid)
                if _started(who.pid) == who.started:
                    signal.pidfd_send_signal(fd, signal.SIGKILL)
                os.close(fd)

    def _pids(self) -> Iterator[int]:
        """Yield what is the run's: by its variables, below its stem, in its namespaces."""
        parents = {pid: parent for pid in _all() if (parent := _parent(pid)) is not None}
        own = {pid for pid in parents if self.mark.encode() in _variables(pid)}
        own |= {who.pid for who in self.processes if _started(who.pid) == who.started}
        own |= {stem for pid in own for stem in _stems(pid, parents)}
        here = _namespace(os.getpid())
        self.namespaces |= {space for pid in own if (space := _namespace(pid)) and space != here}
        grown = True
        while grown:
            more = {pid for pid, parent in parents.items() if parent in own or _namespace(pid) in self.namespaces} - own
            own |= more
            grown = bool(more)
        yield from sorted(own - {os.getpid()})

    def remember(self, pid: int) -> None:
        started = _started(pid)
        if started is None:
            return
        line = _line(pid)
        self.processes[Identity(pid, started)] = line
        inodes = set()
        for target in _open_files(pid):
            if target.startswith("socket:["):
                inodes.add(int(target[8:-1]))
            elif target.startswith(_TEMPORARY) and not target.endswith(" (deleted)"):
                self._remember_path(target)
        for listener in _listening(str(pid)):
            if listener.inode in inodes:
                self.listeners.setdefault(listener.inode, listener._replace(owner=line[:80]))
        for found in _OURS.findall(f"{line} {_variables(pid)!r}"):
            self.paths.add(found)
        if (path := _cgroup(pid)) and path != _cgroup(os.getpid()):
            self.cgroups.add(path)

    def _remember_path(self, path: str) -> None:
        if not path.startswith((*self.allowed, _CHECKOUT)):
            self.paths.add(path)

    def _abandoned(self) -> Iterable[str]:
        """Return which files are new in /dev/shm and not in the hands of anybody.

        Directories (secrets, simulated disks) and PostgreSQL's are of tests that run beside this one.
        """
        new = {name for name in os.listdir("/dev/shm") if name not in self._shared}
        new = {name for name in new if not os.path.isdir(f"/dev/shm/{name}") and not name.startswith("PostgreSQL.")}
        if not new:
            return ()
        held = {target for pid in _all() for target in _open_files(pid)}
        return {name for name in new if f"/dev/shm/{name}" not in held}


def _all() -> list[int]:
    return [int(name) for name in os.listdir(_PROC) if name.isdigit()]


def _stat(pid: int) -> list[str]:
    """Return the fields of a process's stat after its name: state, parent, ...; none when it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def _parent(pid: int) -> int | None:
    fields = _stat(pid)
    return int(fields[1]) if fields else None


def _started(pid: int) -> int | None:
    fields = _stat(pid)
    return int(fields[19]) if fields else None


def _variables(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""


def _line(pid: int) -> str:
    try:
        name = Path(f"/proc/{pid}/comm").read_text(encoding="utf-8", errors="replace").strip()
        line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace").strip()
    except OSError:
        return "?"
    return f"[{name}] {line}" if _stat(pid)[:1] != ["Z"] else f"[{name}] (a zombie)"


def _namespace(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:
        return ""


def _cgroup(pid: int) -> str:
    """Return the directory of a process's cgroup (version 2); "" where there is none."""
    try:
        text = Path(f"/proc/{pid}/cgroup").read_text(encoding="utf-8")
    except OSError:
        return ""
    lines = [line[3:] for line in text.splitlines() if line.startswith("0::")]
    return f"/sys/fs/cgroup{lines[0]}" if lines and lines[0] != "/" else ""


def _stems(pid: int, parents: dict[int, int]) -> Iterator[int]:
    """Yield the stem that a process is below."""
    while pid in parents:
        if _line(pid).startswith("[sgpu-stem]"):
            yield pid
            return
        pid = parents[pid]


def _open_files(pid: int) -> Iterator[str]:
    """Yield what a process has open or mapped."""
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                yield os.readlink(f"/proc/{pid}/fd/{name}")
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace").splitlines():
            fields = line.split(maxsplit=5)
            if len(fields) == 6 and fields[5].startswith(_TEMPORARY):
                yield fields[5]


def _listening(pid: str) -> Iterator[Listener]:
    """Yield the sockets that listen in a process's network namespace."""
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/net/{table}").read_text(encoding="ascii").splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTENING:
                    address, _, port = fields[1].partition(":")
                    yield Listener(int(fields[9]), _address(address), int(port, 16), "")


def _address(text: str) -> str:
    """Return an address as people write it; the kernel prints words of four bytes in its own order."""
    raw = bytes.fromhex(text)
    words = b"".join(raw[start : start + 4][::-1] for start in range(0, len(raw), 4))
    address = ipaddress.ip_address(words)
    return str(getattr(address, "ipv4_mapped", None) or address)
