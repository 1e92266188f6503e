"""The sandbox of a principal, and the sandbox of each attempt inside it.

    launcher (root) ── private root: programs and the environment read-only, the principal's home, nothing else
      └─ member: user, mount, IPC, host name and pid namespaces ── becomes the principal's uid
           └─ holder, pid 1: reaps processes, ends with the last of them
                └─ zygote: CAP_SYS_ADMIN and CAP_SETPCAP in this user namespace only
                     └─ stem, pid 1 of an attempt: own mounts, IPC, /proc, /tmp, /dev/shm ── seal ─▶ ranks

The launcher is a clean interpreter. The launcher holds no rights of the principal and runs none of the principal's
code. The launcher stays the parent of the holder until the last process of the sandbox has ended. The zygote runs the
principal's code with capabilities of the principal's own user namespace. With the granted capabilities, the principal's
code can change its own view of files. The principal's code cannot reach anything outside of its private root.

When a stem that is pid 1 of its pid namespace ends, the kernel ends all processes of the stem's attempt. The holder is
pid 1 of the sandbox, because the end of a zygote with pid 1 would end all attempts.

Failure cases: Each function raises OSError with the failed step. After a failed step, the launcher ends with a
traceback in the agent's log. The run fails with the text of the traceback. If the kernel refuses nested namespaces to
the zygote, the zygote reports a `cold` problem.

A prototype of the sandbox on Linux 6.18 cost about 1.5 ms per attempt.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import socket
import stat
from collections.abc import Iterable, Sequence
from typing import NamedTuple, NoReturn

from . import linux, mounts, seal
from .namespaces import Mount, enter_mounts

ATTEMPT = "/run/sgpu"
"""Directory in the sandbox where the node mounts the files of the running attempt."""
CALL, RESULTS, FAILURES, STOP, WORK = (
    f"{ATTEMPT}/{name}" for name in ("call.pkl", "results", "failures", "stop", "work")
)
CHECKPOINTS, SECRETS, CLUSTER = (f"{ATTEMPT}/{name}" for name in ("checkpoints", "secrets", "cluster"))
HOME = "/home/user"
USER = "user"
PRINCIPAL_DEPTH, ATTEMPT_DEPTH = 2, 3
"""Number of pid namespaces between the node and the processes of a principal, and between the node and a rank."""
KEPT = (seal.CAPABILITIES["SYS_ADMIN"], seal.CAPABILITIES["SETPCAP"])

_OWN_VIEW = mounts.CLONE_NEWNS | mounts.CLONE_NEWIPC | mounts.CLONE_NEWUTS
_NO_SUID_DEV = mounts.NO_SETUID | mounts.NO_DEVICES
_NO_SUID_DEV_EXEC = _NO_SUID_DEV | mounts.NO_EXECUTION
_READ_ONLY = mounts.READ_ONLY | _NO_SUID_DEV
BASIC_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
_LINKS_MAX = 40
_PARTS = ("pyvenv.cfg", "bin", "lib", "lib64", "libexec", "include", "share", "etc", "ssl")

SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/opt", "/nix/store")
SETTINGS = (
    *("alternatives", "ca-certificates", "ca-certificates.conf", "crypto-policies", "fonts", "gai.conf", "glvnd"),
    *("host.conf", "hosts", "inputrc", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "libibverbs.d", "locale.alias"),
    *("locale.conf", "localtime", "login.defs", "magic", "mime.types", "nsswitch.conf", "nvidia", "OpenCL"),
    *("os-release", "pki", "profile", "protocols", "rdma", "resolv.conf", "services", "ssl", "timezone", "vulkan"),
)
"""Entries of /etc that programs need. No other entry of /etc exists in a sandbox."""


class View(NamedTuple):
    """The files of a principal's sandbox. All paths of a `View` are paths of the node."""

    uid: int
    at: str  # Empty directory in which the launcher builds the private root.
    home: str  # Persistent home directory of the principal, which the sandbox shows as `HOME`.
    python: str  # Interpreter of the zygote.
    shown: Sequence[str]  # Further files and directories, read-only at the same paths.
    devices: Sequence[str]  # Device nodes that an attempt may get later. The sandbox shows empty files in their place.
    gid: int = 0  # Primary group of an account; 0 for the group with the number of the uid.
    groups: Sequence[int] = ()  # Supplementary groups.
    user: str = USER
    home_at: str = HOME  # Path of the home directory in the sandbox.


def enter(view: View, environment: Sequence[Mount]) -> None:
    """Move this process (root, one thread) into a new sandbox of a principal. Return in the zygote only.

    The calling process becomes the keeper of the sandbox. The keeper ends with the sandbox. `environment` contains
    overlays, as in `namespaces.enter_mounts`. Raises OSError.
    """
    os.setgroups(list(view.groups))
    seal.leave_keyring()
    if environment:
        enter_mounts(environment)
    mounts.unshare(_OWN_VIEW | mounts.CLONE_NEWPID)
    mounts.keep_mounts_in(private=True)
    processes = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)  # The private root has another /proc.
    _make_root(view)
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid:
        theirs.close()
        _keep(ours, processes, pid, view)
    ours.close()
    os.close(processes)
    # The kernel lets a user namespace mount /proc only beside a visible /proc, which pivot_root unmounts. The new /proc
    # shows only processes of the sandbox.
    mounts.mount("proc", f"{view.at}/proc", _NO_SUID_DEV_EXEC)
    mounts.pivot_root(view.at)  # Also changes the root of the keeper.
    _become(view, theirs)
    holder = os.fork()
    if holder:
        _exit_like(holder)
    _hold()


def rehearse(view: View) -> NoReturn:
    """Create a sandbox with an attempt, then exit with 0 if each step succeeded."""
    enter(view, ())
    pid = fork_init()
    if pid == 0:
        enter_attempt(1 << 20, 1 << 20, ())
        os._exit(0)
    _exit_like(pid)


def interpreter_parts(python: str) -> list[str]:
    """Return the files of an interpreter's installation and of its virtual environment, if any.

    The function lists the parts of an installation one by one, because an installation's directory can be a home
    directory.
    """
    found = [python]
    for program in dict.fromkeys((python, os.path.realpath(python))):
        prefix = os.path.dirname(os.path.dirname(program))
        if prefix != "/":  # `SYSTEM` has the parts of /bin/python3. The whole of /etc must stay hidden.
            found += [os.path.join(prefix, part) for part in _PARTS]
    return found


def mounts_of(process: int | str) -> bytes:
    """Return the mounts of a process; b"" if the process has ended.

    Each mount has a number of its own, which differs between mount namespaces.
    """
    with contextlib.suppress(OSError), open(f"/proc/{process}/mountinfo", "rb") as file:
        return file.read()
    return b""


def fork_init() -> int:
    """Fork a child that is pid 1 of a new pid namespace. Raises OSError.

    Return the child's pid, or 0 in the child. Later children of the caller belong to the caller's pid namespace again.
    """
    own = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
    try:
        mounts.unshare(mounts.CLONE_NEWPID)
        pid = os.fork()
        if pid:
            mounts.set_namespace(own, mounts.CLONE_NEWPID)
    finally:
        os.close(own)
    return pid


def enter_attempt(shared_bytes_max: int, scratch_bytes_max: int, trees: Iterable[tuple[int, str]]) -> None:
    """Create private mounts for this process, and seal the process. Raises OSError.

    The process must be pid 1 of its pid namespace. `trees` contains descriptors of detached environments with their
    mount points. The function closes the descriptors.
    """
    mounts.unshare(_OWN_VIEW)
    mounts.keep_mounts_in(private=False)
    below = [path for path in _mounted_below("/tmp", "/dev/shm") if os.path.isdir(path)]
    hidden = [(mounts.clone_tree(path), path) for path in below]
    mounts.mount("tmpfs", "/tmp", _NO_SUID_DEV, f"size={scratch_bytes_max},mode=1777")
    mounts.mount("tmpfs", "/dev/shm", _NO_SUID_DEV_EXEC, f"size={shared_bytes_max},mode=1777")
    for _, path in hidden:
        os.makedirs(path, exist_ok=True)
    mounts.mount("devpts", "/dev/pts", mounts.NO_SETUID | mounts.NO_EXECUTION, "newinstance,ptmxmode=0666,mode=0620")
    mounts.mount("proc", "/proc", _NO_SUID_DEV_EXEC)
    for fd, at in (*hidden, *trees):
        try:
            mounts.attach(fd, at)
        finally:
            os.close(fd)
    seal.seal()


def _make_root(view: View) -> None:
    mounts.mount("tmpfs", view.at, _NO_SUID_DEV, "size=4M,nr_inodes=16k,mode=0755")
    root = PrivateRoot(view.at)
    for path in (*SYSTEM, *(f"/etc/{name}" for name in SETTINGS), *view.shown, *interpreter_parts(view.python)):
        root.show(path)
    gid = view.gid or view.uid
    own = f"{view.user}:x:{view.uid}:{gid}::{view.home_at}:/bin/sh\n"
    root.write("/etc/passwd", f"root:x:0:0:root:/root:/sbin/nologin\n{own}")
    root.write("/etc/group", f"root:x:0:\n{view.user}:x:{gid}:\n")
    for place in ("/tmp", "/dev/shm", "/dev/pts", "/proc", "/sys", "/var", "/run", view.home_at, ATTEMPT):
        root.directory(place)
    for place in (RESULTS, FAILURES, STOP, WORK, CHECKPOINTS, SECRETS, CLUSTER):
        root.directory(place)
    root.write(CALL, "")
    root.link("/var/tmp", "/tmp")
    root.show_alone("/sys")
    root.mount(view.home, view.home_at, _NO_SUID_DEV)
    for name in BASIC_DEVICES:
        root.write(f"/dev/{name}", "")
        root.mount(f"/dev/{name}", f"/dev/{name}", mounts.NO_SETUID)
    for path in view.devices:
        root.write(path, "")
    for name, target in (("fd", "/proc/self/fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2")):
        root.link(f"/dev/{name}", target)
    root.link("/dev/ptmx", "pts/ptmx")


def _mounted_below(*places: str) -> list[str]:
    """Return the outermost mount points below directories that an attempt replaces by its own directories."""
    found: list[str] = []
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        points = sorted({re.sub(r"\\([0-7]{3})", _octal, line.split()[4]) for line in file})
    for point in points:
        if point.startswith(tuple(f"{place}/" for place in places)) and not point.startswith(
            tuple(f"{place}/" for place in found)
        ):
            found.append(point)
    return found


def _octal(match: re.Match[str]) -> str:
    return chr(int(match[1], 8))  # The kernel writes blanks in paths as octal numbers.


class PrivateRoot:
    """A directory that becomes the root of a sandbox. Paths are paths in the sandbox."""

    def __init__(self, at: str) -> None:
        self._at = at
        self.shown: list[str] = []  # Paths that the directory shows, without links.

    def show(self, path: str, links: int = 0) -> None:
        """Show a path of the node read-only at the same path, including the symbolic links in the path."""
        if any(path == each or path.startswith(f"{each}/") for each in self.shown) or links > _LINKS_MAX:
            return
        place = "/"
        parts = [part for part in path.split("/") if part]
        for number, part in enumerate(parts):
            place = os.path.join(place, part)
            try:
                status = os.lstat(place)
            except OSError:
                return  # The node does not have this file.
            if stat.S_ISLNK(status.st_mode):
                target = os.path.normpath(os.path.join(os.path.dirname(place), os.readlink(place)))
                self.link(place, os.readlink(place))
                return self.show(os.path.join(target, *parts[number + 1 :]), links + 1)
        if stat.S_ISDIR(status.st_mode):
            self.directory(path)
        else:
            self.write(path, "")
        self.mount(path, path, _READ_ONLY)
        self.shown.append(path)

    def mount(self, source: str, at: str, attributes: int, *, recursive: bool = True) -> None:
        fd = mounts.clone_tree(source, attributes, recursive=recursive)
        try:
            mounts.attach(fd, self._at + at)
        finally:
            os.close(fd)

    def show_alone(self, path: str) -> None:
        """Show a file system of the node read-only, without the file systems that are mounted below it."""
        try:
            self.mount(path, path, _READ_ONLY, recursive=False)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            # In a user namespace, the kernel copies the lower mounts too, because they hide parts of the upper mount.
            self.mount(path, path, _READ_ONLY)
            for point in _mounted_below(path):
                mounts.mount("tmpfs", self._at + point, _READ_ONLY | _NO_SUID_DEV_EXEC, "size=4k,nr_inodes=1,mode=0555")

    def directory(self, path: str) -> None:
        os.makedirs(self._at + path, mode=0o755, exist_ok=True)

    def link(self, path: str, target: str) -> None:
        self.directory(os.path.dirname(path))
        with contextlib.suppress(FileExistsError):
            os.symlink(target, self._at + path)

    def write(self, path: str, text: str) -> None:
        self.directory(os.path.dirname(path))
        with open(self._at + path, "w", encoding="utf-8") as file:
            file.write(text)


def _keep(member: socket.socket, processes: int, pid: int, view: View) -> NoReturn:
    """Map the principal's ids into the member's user namespace, then wait for the end of the sandbox."""
    member.recv(1)
    gids = "".join(f"{gid} {gid} 1\n" for gid in (view.gid or view.uid, *view.groups))
    for name, text in (("setgroups", "deny"), ("uid_map", f"{view.uid} {view.uid} 1"), ("gid_map", gids)):
        fd = os.open(f"{pid}/{name}", os.O_WRONLY | os.O_CLOEXEC, dir_fd=processes)
        os.write(fd, text.encode())  # The kernel accepts an id map only as a single write.
        os.close(fd)
    member.sendall(b"m")
    linux.set_name("sgpu-keeper")
    _exit_like(pid)


def _become(view: View, keeper: socket.socket) -> None:
    """Enter the principal's namespaces and become its uid, with all capabilities in the user namespace."""
    mounts.unshare(mounts.CLONE_NEWUSER | _OWN_VIEW | mounts.CLONE_NEWPID)
    keeper.sendall(b"n")
    if keeper.recv(1) != b"m":
        raise OSError("the keeper of the sandbox ended before it mapped the ids")
    keeper.close()
    os.umask(0o077)
    linux.keep_capabilities()
    gid = view.gid or view.uid
    os.setresgid(gid, gid, gid)
    os.setresuid(view.uid, view.uid, view.uid)
    seal.set_capabilities(tuple(range(seal.CAPABILITIES_MAX)))


def _hold() -> None:
    """Start the zygote and reap orphans, as pid 1 of the sandbox. Return in the zygote only."""
    mounts.mount("proc", "/proc", _NO_SUID_DEV_EXEC)
    # The launcher's standard library may be hidden now, so this process imports no codec.
    limit = os.open("/proc/sys/user/max_user_namespaces", os.O_WRONLY | os.O_CLOEXEC)
    os.write(limit, b"0")
    os.close(limit)
    seal.drop_bounding_set(KEPT)
    seal.forbid_new_privileges()
    zygote = os.fork()
    if zygote == 0:
        seal.set_capabilities(KEPT)
        seal.keep_over_exec(KEPT)
        linux.enter_scopes(linux.SCOPE_ABSTRACT_SOCKET)
        return
    linux.set_name("sgpu-holder")
    linux.leave_descriptors()
    seal.set_capabilities(())
    code = 0
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.wait()
            if pid == zygote:
                code = os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else 128 - code)


def _exit_like(pid: int) -> NoReturn:
    """Close all descriptors, wait for a child, and exit with its code."""
    linux.leave_descriptors()
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else 128 - code)
