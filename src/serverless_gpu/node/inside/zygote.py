"""The zygote: a warm interpreter of one principal and one environment, from which stems are forked.

    agent ◀── channel ──▶ zygote (torch imported, no CUDA, one thread)
                             └─ fork ─▶ stem ─ fork ─▶ ranks

Why fork at all: `import torch` costs a second, a fork of a process that has done it 3 ms. What makes it safe, and is
kept here:

- **No parallel region ever runs in this process.** The OpenMP runtime's thread pool does not survive a fork: a child
  that enters a parallel region after its parent did waits for threads that do not exist, for ever.
- **CUDA is never touched.** A CUDA context cannot be used after a fork.
- **Exactly one thread when a stem is forked.** Another thread could hold a lock (malloc's, the importer's) at that
  moment, and the child would wait for it for ever. numpy's OpenBLAS starts threads on import but ends them in its own
  fork handler: hence one trial fork, then the count.
- **No other process is left by what it imported**: start-up code of the user's (`.pth` files, `sitecustomize`) runs
  here, and what that starts would be no run's.
- **Random generators are reseeded in every rank** (`rank.py`): a copied generator would give all ranks the same
  numbers.

Where a server has several principals, each stem has a user namespace of its own: a rank cannot write the memory of the
process that the next run's ranks are forked from.

Once its first run has ended, and whenever nothing else is to be done, it puts its memory into huge pages, one after the
other: a fork copies one entry where it would copy 512, and a cold start does not wait for it. Where the kernel cannot
do it (before Linux 6.1, no memory in one piece, transparent huge pages forbidden) nothing changes.

Ends when the agent's end of the channel closes. Stems it forked live on: their life hangs on their supervisor, not on
us. Everything else that is left of it is ended by the agent (`node/agent/zygotes.py`). Failure cases: a module
cannot be imported, threads or processes are left after the trial fork, or a stem gets no user namespace (each said to
the agent, which then starts runs cold); the agent is of another protocol version (exit code 4).
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import importlib.util
import os
import select
import signal
import socket
import sys
import weakref

from . import blas, linux, namespaces, protocol, stem
from .channel import Channel, pair

_HUGE_PAGE_BYTES = 2 << 20
_MADV_COLLAPSE = 25


def main(channel_fd: int, version: int, preload: list[str]) -> None:
    """Preload, then fork a stem whenever the agent asks, until the agent is gone.

    `version` is the agent's protocol version. Modules that are not installed are left out of `preload`.
    """
    if version != protocol.VERSION:
        raise SystemExit(4)
    channel = Channel.adopt(channel_fd)
    channel.sock.set_inheritable(False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    linux.set_name("sgpu-zygote")
    linux.be_ordinary()
    gc.disable()  # importing torch makes a million objects and no garbage; looking for it is 15 %
    problem = _preload(preload)
    if problem:
        channel.send(protocol.encode({"event": "cold", "reason": problem}))
        return
    blas.find()
    if (pid := os.fork()) == 0:  # every library's fork handler runs before threads are counted
        os._exit(0)
    os.waitpid(pid, 0)
    for finalizer in list(getattr(weakref.finalize, "_registry", {})):
        finalizer.atexit = False  # the objects are this process's; torch's cost each rank 25 ms at its end
    sys.path_importer_cache.clear()  # each rank does: here it copies no page, and there a thousand
    gc.enable()
    gc.freeze()  # copied pages stay shared: the collector will not write to these objects in a child
    threads = os.listdir("/proc/self/task")
    if len(threads) != 1 and preload:  # without preload this is the cold start itself: the last resort
        found = ", ".join(_name_of(f"/proc/self/task/{thread}") for thread in threads)
        channel.send(protocol.encode({"event": "cold", "reason": f"preloading leaves threads behind ({found})"}))
        return
    if preload:
        _reap()
    left = linux.children(os.getpid()) if preload else []  # orphans have become children of this process
    if left:
        found = ", ".join(_name_of(f"/proc/{pid}") for pid in left)
        channel.send(protocol.encode({"event": "cold", "reason": f"start-up code leaves processes behind ({found})"}))
        return
    names = sorted({name.partition(".")[0] for name in list(sys.modules)})  # also of modules without a file
    files = {name: getattr(module, "__file__", None) for name, module in list(sys.modules.items())}
    found_files = {name: file for name, file in files.items() if isinstance(file, str)}
    ready = {
        "modules": sorted(set(found_files.values())),  # the agent notices when one of them changes
        "packages": {name: file for name, file in found_files.items() if "." not in name},  # a caller may have others
        "names": names,
        "libraries": mapped_libraries(),
    }
    channel.send(protocol.encode({"event": "ready", **ready}))
    _serve(channel)


def _preload(names: list[str]) -> str:
    """Import what is installed, and return what went wrong, or ""."""
    for name in names:
        if importlib.util.find_spec(name.partition(".")[0]) is None:
            continue
        try:
            importlib.import_module(name)
        except Exception as error:  # noqa: BLE001 - a broken package must not stop functions that do not use it
            sys.excepthook(*sys.exc_info())
            return f"{name} cannot be imported ({type(error).__name__}: {error})"
    return ""


def _serve(channel: Channel) -> None:
    wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    poll = select.poll()
    poll.register(channel, select.POLLIN)
    poll.register(wake_read, select.POLLIN)
    ranges: list[int] | None = None
    while True:
        events = poll.poll(0 if ranges else None)
        if ranges and not events:
            collapse_huge_page(ranges.pop())
        for fd, _ in events:
            if fd == wake_read:
                with contextlib.suppress(BlockingIOError):
                    os.read(wake_read, 4096)
                _reap()
                if ranges is None:  # the first stem has ended: a cold start does not wait for this
                    ranges = huge_page_ranges()
            elif not _answer(channel, (wake_read, wake_write)):
                return


def _answer(channel: Channel, own_fds: tuple[int, ...]) -> bool:
    received = channel.receive()
    if received is None:
        return False
    request = protocol.decode(received[0])
    if request.get("op") == "hold":
        return True  # an environment is in use while any process has this descriptor, and stems inherit it
    if request.get("op") == "stem":
        _fork_stem(channel, request, own_fds)
    for fd in received[1]:
        os.close(fd)  # the stem has its own, of the environment that it is in
    return True


def _fork_stem(channel: Channel, request: protocol.Message, own_fds: tuple[int, ...]) -> None:
    ours, theirs = pair()
    admission = socket.socketpair() if request.get("apart") is True else None
    pid = os.fork()
    if pid == 0:
        signal.set_wakeup_fd(-1)
        for fd in own_fds:
            os.close(fd)
        channel.close()
        ours.close()
        if admission is not None:
            admission[0].close()
        stem.main(theirs, request, None if admission is None else admission[1])
    theirs.close()
    if admission is not None:
        admission[1].close()
        with admission[0]:
            problem = namespaces.admit(admission[0], pid)
        if problem:
            ours.close()
            channel.send(protocol.encode({"event": "cold", "reason": f"{protocol.UNSHARED} ({problem})"}))
            return
    channel.send(protocol.encode({"event": "stem", "pid": pid}), (ours.fileno(),))
    ours.close()


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _name_of(process: str) -> str:
    with contextlib.suppress(OSError), open(f"{process}/comm", encoding="utf-8", errors="replace") as file:
        return file.read().strip()
    return "?"


def mapped_libraries(maps: str = "/proc/self/maps") -> list[str] | None:
    """Return the files mapped into this process, by libraries outside of Python, too; None if unknown."""
    try:
        with open(maps, encoding="utf-8", errors="surrogateescape") as file:
            return sorted({line.split(None, 5)[5].rstrip("\n") for line in file if line.count("/")} - {""})
    except OSError:
        return None


def huge_page_ranges(maps: str = "/proc/self/maps") -> list[int]:
    """Return the addresses of the writable anonymous memory that could be one huge page each.

    Copying page tables dominates a fork of a process with torch in it, and each call has three such forks. A process
    that writes to a huge page gets its own copy of 4 KiB of it, as without.
    """
    found: list[int] = []
    with contextlib.suppress(OSError), open(maps, encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            place, mode, _offset, _device, _inode, *name = line.split(None, 5)
            if mode == "rw-p" and (not name or name[0].strip() == "[heap]"):
                start, end = (int(number, 16) for number in place.split("-"))
                found += range(
                    -(-start // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES, end - _HUGE_PAGE_BYTES + 1, _HUGE_PAGE_BYTES
                )
    return found


def collapse_huge_page(address: int) -> bool:
    """Put one range into a huge page; return whether the kernel did."""
    libc = ctypes.CDLL(None)
    return bool(libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(_HUGE_PAGE_BYTES), _MADV_COLLAPSE) == 0)
