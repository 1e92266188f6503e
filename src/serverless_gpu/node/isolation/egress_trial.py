"""Tries the network rules in a network namespace of its own.

    unshare ─▶ loopback up ─▶ nft -f - ─▶ a child with a principal's uid connects to a listener of root, then to its own

The process ends with 0 if the kernel refuses the first connection and allows the second. Otherwise, the last line of
its output is the reason.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import subprocess
import sys

from serverless_gpu.node.inside import mounts

_CLONE_NEWNET = 0x40000000
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 0x1
_CONNECT_S = 5.0
_OPEN, _CLOSED, _FAILED = 2, 3, 4


def main(uid: int, nft: str, rules: str) -> None:
    """Try the rules, and end the process."""
    try:
        problem = _problem(uid, nft, rules)
    except OSError as error:
        problem = str(error)
    if problem:
        print(problem, flush=True)
    sys.exit(1 if problem else 0)


def _problem(uid: int, nft: str, rules: str) -> str:
    mounts.unshare(_CLONE_NEWNET)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        fcntl.ioctl(sock, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", _IFF_UP))
    loaded = subprocess.run([nft, "-f", "-"], input=rules, capture_output=True, text=True, check=False)
    if loaded.returncode:
        return (loaded.stderr.strip().splitlines() or [f"nft ended with exit code {loaded.returncode}"])[0]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        pid = os.fork()
        if pid == 0:
            os._exit(_connect(uid, listener.getsockname()))
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    problems = {_OPEN: "a principal reaches a service of root", _CLOSED: "a principal does not reach its own service"}
    return problems.get(code, f"the principal's process ended with {code}") if code else ""


def _connect(uid: int, place: tuple[str, int]) -> int:
    """Connect as a principal. Return 0, or the code of a wrong outcome."""
    try:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
        if _reaches(place):
            return _OPEN
        with socket.create_server(("127.0.0.1", 0)) as own:
            return 0 if _reaches(own.getsockname()) else _CLOSED
    except OSError:
        return _FAILED


def _reaches(place: tuple[str, int]) -> bool:
    with socket.socket() as sock:
        sock.settimeout(_CONNECT_S)
        try:
            sock.connect(place)
        except ConnectionRefusedError:
            return False
    return True
