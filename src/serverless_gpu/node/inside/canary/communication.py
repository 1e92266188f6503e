"""Attempts on interprocess communication of the node and of other principals."""

from __future__ import annotations

import ctypes
import os
import socket
from collections.abc import Mapping

from .base import Attempt, Targets, check, libc, read_byte, system_call

_SHM_RDONLY = 0o10000
_IPC_NOWAIT = 0o4000
_SEM_GETVAL = 12
_KEY_USER_SESSION, _KEYCTL_SEARCH = -3, 10
_MAPPED_MAX = 16


def _connect(path: str) -> None:
    # Sequenced-packet and stream sockets differ only after the kernel's check of the caller's rights.
    for kind in (socket.SOCK_STREAM, socket.SOCK_SEQPACKET):
        with socket.socket(socket.AF_UNIX, kind) as peer:
            try:
                peer.connect(path)
            except OSError as error:
                if "wrong type" in str(error):
                    continue
                raise
            return


def _shared_memory(targets: Targets) -> None:
    segment = check(libc.shmget(targets.number("key"), 0, 0))
    check(libc.shmat(segment, None, _SHM_RDONLY))


def _semaphore(targets: Targets) -> None:
    found = check(libc.semget(targets.number("key"), 0, 0))
    check(libc.semctl(found, 0, _SEM_GETVAL))


def _message(targets: Targets) -> None:
    found = check(libc.msgget(targets.number("key"), 0))
    check(libc.msgsnd(found, ctypes.create_string_buffer(b"\1\0\0\0\0\0\0\0x", 9), 1, _IPC_NOWAIT))


def _message_queue(targets: Targets) -> None:
    name = targets.text("queue").encode()
    os.close(check(system_call("mq_open", name, os.O_RDWR | os.O_NONBLOCK, 0, None)))


def _session_key(targets: Targets) -> None:
    """Find a key of the node's session keyring."""
    check(system_call("keyctl", _KEYCTL_SEARCH, _KEY_USER_SESSION, b"user", targets.text("keyring_key").encode(), 0))


ATTEMPTS: Mapping[str, Attempt] = {
    "shared-memory-file": lambda targets: read_byte(targets.text("segment")),
    "shared-memory": _shared_memory,
    "semaphore": _semaphore,
    "message-queue": _message,
    "posix-message-queue": _message_queue,
    "abstract-socket": lambda targets: _connect(f"\0{targets.text('abstract')}"),
    "public-socket": lambda targets: _connect(targets.text("public_socket")),
    "service-socket": lambda targets: _connect(targets.text("service_socket")),
    "agent-socket": lambda targets: _connect(targets.text("agent_socket")),
    "supervisor-socket": lambda targets: _connect(targets.text("supervisor_socket")),
    "ray-socket": lambda targets: _connect(targets.text("ray_socket")),
    "session-key": _session_key,
}
