"""A file system that never answers: whoever touches it cannot be ended, not even by SIGKILL.

    python -m tests.e2e.rows.hanging_disk <directory> <command> …

Mounts it at the directory, in a mount namespace that only the command and its children share: anybody else who looked
at it would hang as well. The kernel asks this process about files (FUSE); it reads the question and is silent, and a
question that was read has to be waited for. With this process the file system ends, and whoever hangs in it.
"""

from __future__ import annotations

import ctypes
import os
import struct
import subprocess
import sys
import threading

_CLONE_NEWNS = 0x20000
_MS_REC_PRIVATE = 0x44000
_INIT = 26
_HEADER = struct.Struct("<IiQ")
_REPLY = struct.Struct("<IIIIHHIIHHI28x")


def main(directory: str, *command: str) -> int:
    """Run a command beside the file system, and end with it."""
    libc = ctypes.CDLL(None, use_errno=True)
    _call(libc.unshare, _CLONE_NEWNS)
    _call(libc.mount, b"none", b"/", None, _MS_REC_PRIVATE, None)
    device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0".encode()
    _call(libc.mount, b"sgpu-test", directory.encode(), b"fuse.sgpu-test", 0, options)
    threading.Thread(target=_listen, args=(device,), daemon=True).start()
    done = subprocess.run(command, check=False)
    sys.stdin.read()  # it ends when nobody needs it any more
    return done.returncode


def _listen(device: int) -> None:
    while True:
        question = os.read(device, 1 << 18)
        _, opcode, unique = struct.unpack_from("<IIQ", question)
        if opcode == _INIT:
            answer = _REPLY.pack(7, 31, 0, 0, 0, 0, 4096, 0, 0, 0, 0)
            os.write(device, _HEADER.pack(_HEADER.size + len(answer), 0, unique) + answer)


def _call(function: object, *arguments: object) -> None:
    if function(*arguments) != 0:  # type: ignore[operator]  # a function of the C library
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
