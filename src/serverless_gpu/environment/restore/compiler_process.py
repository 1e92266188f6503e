"""Compiles Python files to bytecode, in a process of the environment's interpreter.

    <interpreter> -I -S -B compiler_process.py <bytes of memory>
        stdin   one JSON array per line: [source, bytecode, size]
        stdout  the number of each finished line, and 1 if it has bytecode now

The process imports only the standard library. With the options -I -S, Python executes no `.pth` file, no
`sitecustomize` and no module of the environment. The process compiles the source code of an environment's modules, but
never runs it.

A bytecode file records the modification time and size of its source file. The bytecode of units is valid in every tree,
because all files of units have the same modification time. The process skips source files with syntax errors, because
many distributions contain Python 2 code and templates.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import marshal
import os
import resource
import struct
import sys
import warnings

_SOURCE_BYTES_MAX = 16 * 1024 * 1024
_NO_FOLLOW = os.O_NOFOLLOW | os.O_CLOEXEC


def bytecode(source: bytes, name: str, mtime_s: int) -> bytes:
    """Return the content of a bytecode file for a code object."""
    code = compile(source, name, "exec", dont_inherit=True, optimize=0)
    stamp = struct.pack("<III", 0, mtime_s & 0xFFFFFFFF, len(source) & 0xFFFFFFFF)
    return importlib.util.MAGIC_NUMBER + stamp + marshal.dumps(code)


def compile_file(source: str, target: str, size: int) -> bool:
    """Compile one source file, and return True if a bytecode file for it exists afterwards.

    Never write a bytecode file through a symbolic link.
    """
    fd = os.open(source, os.O_RDONLY | _NO_FOLLOW)
    with open(fd, "rb") as file:
        status = os.fstat(fd)
        if status.st_size != size or size > _SOURCE_BYTES_MAX:
            return False
        content = file.read()
    try:
        data = bytecode(content, source, int(status.st_mtime))
    except (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError):
        return False
    folder = os.path.dirname(target)
    try:
        os.mkdir(folder, 0o755)
        os.chmod(folder, 0o755)
    except FileExistsError:
        if os.path.islink(folder):
            return False
    temporary = f"{target}.{os.getpid()}"
    with contextlib.suppress(FileNotFoundError):
        # A killed compiler process with the same process ID may have left this temporary file behind.
        os.unlink(temporary)
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_FOLLOW, 0o600)
    try:
        with open(fd, "wb") as file:
            file.write(data)
            file.flush()
            os.fchmod(fd, 0o444)
        os.rename(temporary, target)
    except OSError:
        os.unlink(temporary)
        raise
    return True


def main() -> None:
    """Compile the source files that stdin lists, one path per line."""
    warnings.simplefilter("ignore")  # Users cannot act on compiler warnings about installed packages.
    memory = int(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for number, line in enumerate(sys.stdin):
        source, target, size = json.loads(line)
        try:
            made = compile_file(source, target, size)
        except OSError as error:
            if error.errno in (28, 122):  # If the disk is full (ENOSPC, EDQUOT), compiling other files would also fail.
                sys.exit(28)
            made = False
        print(number, int(made), flush=True)


if __name__ == "__main__":
    main()
