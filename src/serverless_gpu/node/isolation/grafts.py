"""Mounts files of an attempt into the sandbox of its stem.

    supervisor ── fork ──▶ copies the trees ── setns(mount namespace of the stem) ── attaches them ──▶ exit

A stem on standby is sealed and has no rights before its attempt is known. The supervisor therefore mounts the attempt's
files and devices. The supervisor forks a child for the mounts, because a process that enters a mount namespace loses
its own root directory.

Failure cases: The functions raise OSError with the failed step before any rank has started.
"""

from __future__ import annotations

import os
import shutil
import socket
import stat
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from serverless_gpu.model.secrets import VALUE_BYTES_MAX
from serverless_gpu.node.base.private_files import read_owned
from serverless_gpu.node.inside import mounts, namespaces

_PROBLEM_BYTES_MAX = 4_096


class Graft(NamedTuple):
    """A file or directory of the node, with its path in the sandbox.

    With an `owner`, the sandbox gets a copy of the directory's files in memory, which only the uid `owner` can read.
    """

    source: str
    at: str
    writable: bool = False
    device: bool = False
    owner: int | None = None


def graft(stem_pidfd: int, grafts: Sequence[Graft], account: int) -> int:
    """Mount files of the node into the mount namespace of a stem. Raises OSError.

    Return a descriptor of the mount namespace. The caller closes the descriptor. `account` is the uid of the node's
    secrets.
    """

    def attach(answer: socket.socket) -> None:
        trees = [(_tree(each, account), each.at) for each in grafts]
        own = os.open("/proc/self", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)  # A sandbox shows its own /proc.
        mounts.set_namespace(stem_pidfd, mounts.CLONE_NEWNS)
        for fd, at in trees:
            _make_point(fd, at)
            mounts.attach(fd, at)
        namespace = os.open("ns/mnt", os.O_RDONLY | os.O_CLOEXEC, dir_fd=own)
        socket.send_fds(answer, [b"\0"], [namespace])

    (namespace,) = _in_child(attach, "the attempt's files cannot be mounted")
    return namespace


def remove_grafts(namespace: int, directory: str) -> None:
    """Unmount the files that `graft` has mounted below a directory of a mount namespace. Raises OSError.

    `namespace` is a descriptor of the mount namespace.
    """

    def remove(_: socket.socket) -> None:
        mounts.set_namespace(namespace, mounts.CLONE_NEWNS)
        for name in os.listdir(directory):
            mounts.unmount(f"{directory}/{name}")
        shutil.rmtree(directory)

    _in_child(remove, "the attempt's files cannot be unmounted")


def _make_point(tree: int, at: str) -> None:
    """Make the file or directory on which a detached tree is mounted, unless the path exists."""
    if os.path.lexists(at):
        return
    if stat.S_ISDIR(os.fstat(tree).st_mode):
        os.makedirs(at, mode=0o755)
    else:
        os.makedirs(os.path.dirname(at), mode=0o755, exist_ok=True)
        os.close(os.open(at, os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))


def detached_environment(overlays: Sequence[Mapping[str, object]]) -> int:
    """Mount an environment in a child process. Raises OSError.

    Return a descriptor of the environment's detached tree. `overlays` contains mounts as in `namespaces.enter_mounts`,
    outermost first. The caller closes the descriptor.
    """

    def copy(answer: socket.socket) -> None:
        namespaces.enter_mounts(overlays)
        tree = mounts.clone_tree(str(overlays[0]["at"]), mounts.READ_ONLY)
        socket.send_fds(answer, [b"\0"], [tree])

    (tree,) = _in_child(copy, "the environment cannot be mounted")
    return tree


def _in_child(work: Callable[[socket.socket], None], what: str) -> list[int]:
    """Run `work` in a child process, which may change its namespaces. Raises OSError.

    Return the descriptors that the child sends.
    """
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        ours.close()
        try:
            work(theirs)
        except OSError as error:
            theirs.sendall(str(error).encode()[:_PROBLEM_BYTES_MAX])
        finally:
            os._exit(0)
    theirs.close()
    with ours:
        text, fds, _, _ = socket.recv_fds(ours, _PROBLEM_BYTES_MAX, 1, socket.MSG_CMSG_CLOEXEC)
    os.waitpid(pid, 0)
    problem = text.strip(b"\0").decode("utf-8", "replace")
    if problem:
        raise OSError(f"{what}: {problem}")
    return fds


def _tree(each: Graft, account: int) -> int:
    if each.owner is not None:
        return mounts.files_in_memory(read_owned(Path(each.source), account, VALUE_BYTES_MAX), each.owner)
    return mounts.clone_tree(each.source, _attributes(each), recursive=False)


def _attributes(each: Graft) -> int:
    flags = mounts.NO_SETUID
    if not each.device:
        flags |= mounts.NO_DEVICES
    return flags if each.writable or each.device else flags | mounts.READ_ONLY
