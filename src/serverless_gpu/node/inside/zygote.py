"""The zygote: a warm interpreter of one principal and one environment that forks stems.

    agent ◀── channel ──▶ zygote (torch imported, no CUDA, one thread)
                             └─ fork ─▶ stem ─ fork ─▶ ranks

Forking saves the time for importing torch. `import torch` takes a second, while forking a process with torch takes 3
ms. The following rules make the zygote's forks safe:

* **The zygote never runs a parallel region.** The OpenMP runtime's thread pool does not survive a fork. If the parent
  has run a parallel region, a forked child hangs in its first parallel region.
* **The zygote never touches CUDA.** A process cannot use a CUDA context that it inherited through a fork.
* **The zygote has exactly one thread when it forks a stem.** Another thread of the zygote could hold a lock, such as
  the lock of malloc or of the importer. A forked child would wait forever for a lock that another thread of the zygote
  held. The OpenBLAS library of numpy starts threads on import and ends them in its own fork handler. The zygote
  therefore makes one trial fork and then counts its threads.
* **Imports leave no child process behind.** If start-up code (`.pth` files, `sitecustomize`) starts a process in the
  zygote, the process belongs to no run.
* **Every rank reseeds its random generators** (`rank.py`). A copied generator would give all ranks the same random
  numbers.

If a server has several principals, each stem has its own user namespace. With separate user namespaces, a rank cannot
modify the memory of the zygote, from which later ranks are forked.

When its first stem has ended, an idle zygote moves its memory into huge pages, one page at a time. For a huge page, a
fork copies one page-table entry instead of 512 entries. Cold starts do not wait until the zygote uses huge pages. The
zygote keeps small pages on Linux before 6.1, with fragmented memory, or without transparent huge pages.

The zygote ends when the agent closes its end of the channel. Forked stems continue to run and depend only on their
supervisors. The agent ends all other descendants of the zygote (`node/agent/zygotes.py`).

Failure cases:

* If a module import fails, or the trial fork leaves threads or processes, the zygote reports the problem. The zygote
  also reports a failure to create a stem's user namespace. After a reported problem, the agent starts runs cold.
* If the agent has another protocol version, the zygote exits with code 4.
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

from . import blas, linux, namespaces, protocol, sandbox, stem
from .channel import Channel, pair

_HUGE_PAGE_BYTES = 2 << 20
_MADV_COLLAPSE = 25


def main(channel_fd: int, version: int, preload: list[str]) -> None:
    """Preload modules, then fork a stem for each request until the agent exits.

    `version` is the agent's protocol version. The zygote skips modules in `preload` that are not installed.
    """
    if version != protocol.VERSION:
        raise SystemExit(4)
    channel = Channel.adopt(channel_fd)
    channel.sock.set_inheritable(False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    linux.set_name("sgpu-zygote")
    linux.be_ordinary()
    # Importing torch creates a million objects but no garbage. Garbage collection would take 15 % of the import time.
    gc.disable()
    problem = _preload(preload)
    if problem:
        channel.send(protocol.encode({"event": "cold", "reason": problem}))
        return
    blas.find()
    # The trial fork runs every library's fork handler before the zygote counts its threads.
    if (pid := os.fork()) == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    for finalizer in list(getattr(weakref.finalize, "_registry", {})):
        # The zygote owns the objects with finalizers. Running torch's finalizers would cost each rank 25 ms at exit.
        finalizer.atexit = False
    # Each rank also clears the importer cache. The zygote clears the cache first, because a rank that clears a full
    # cache would copy a thousand pages.
    sys.path_importer_cache.clear()
    gc.enable()
    # Forked processes keep sharing the pages of frozen objects, because the garbage collector does not write to frozen
    # objects.
    gc.freeze()
    threads = os.listdir("/proc/self/task")
    # Without preloaded modules, the process serves a cold start, which has no fallback.
    if len(threads) != 1 and preload:
        found = ", ".join(_name_of(f"/proc/self/task/{thread}") for thread in threads)
        channel.send(protocol.encode({"event": "cold", "reason": f"preloading leaves threads behind ({found})"}))
        return
    if preload:
        _reap()
    # Orphaned processes of start-up code have become children of this process.
    left = linux.children(os.getpid()) if preload else []
    if left:
        found = ", ".join(_name_of(f"/proc/{pid}") for pid in left)
        channel.send(protocol.encode({"event": "cold", "reason": f"start-up code leaves processes behind ({found})"}))
        return
    # The module names include modules without a file.
    names = sorted({name.partition(".")[0] for name in list(sys.modules)})
    files = {name: getattr(module, "__file__", None) for name, module in list(sys.modules.items())}
    found_files = {name: file for name, file in files.items() if isinstance(file, str)}
    ready = {
        "modules": sorted(set(found_files.values())),  # The agent watches the loaded modules' files for changes.
        # The caller may import other copies of the packages that the zygote has loaded.
        "packages": {name: file for name, file in found_files.items() if "." not in name},
        "names": names,
        "libraries": mapped_libraries(),
    }
    channel.send(protocol.encode({"event": "ready", **ready}))
    _serve(channel)


def _preload(names: list[str]) -> str:
    """Import those modules in `names` that are installed. Return a failure reason, or ""."""
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
                if ranges is None:  # When the first stem has ended, no cold start waits for the huge pages.
                    ranges = huge_page_ranges()
            elif not _answer(channel, (wake_read, wake_write)):
                return


def _answer(channel: Channel, own_fds: tuple[int, ...]) -> bool:
    received = channel.receive()
    if received is None:
        return False
    request = protocol.decode(received[0])
    if request.get("op") == "hold":
        # The agent keeps an environment on the disk while a process holds the environment's descriptor. Stems inherit
        # the environment's descriptor.
        return True
    if request.get("op") == "stem":
        _fork_stem(channel, request, own_fds, received[1])
    for fd in received[1]:
        os.close(fd)  # The stem holds its own copies of the descriptors.
    return True


def _fork_stem(
    channel: Channel, request: protocol.Message, own_fds: tuple[int, ...], received: tuple[int, ...]
) -> None:
    ours, theirs = pair()
    admission = socket.socketpair() if request.get("apart") is True else None
    try:
        isolation = request.get("isolation")
        is_sandbox = isinstance(isolation, dict) and isolation.get("level") == protocol.SANDBOX
        pid = sandbox.fork_init() if is_sandbox else os.fork()
    except OSError as error:
        ours.close()
        theirs.close()
        channel.send(protocol.encode({"event": "cold", "reason": f"{protocol.UNSHARED} ({error})"}))
        return
    if pid == 0:
        signal.set_wakeup_fd(-1)
        for fd in own_fds:
            os.close(fd)
        channel.close()
        ours.close()
        if admission is not None:
            admission[0].close()
        stem.main(theirs, request, None if admission is None else admission[1], received)
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
    """Return the files mapped into this process, including those of native libraries; None if unknown."""
    try:
        with open(maps, encoding="utf-8", errors="surrogateescape") as file:
            return sorted({line.split(None, 5)[5].rstrip("\n") for line in file if line.count("/")} - {""})
    except OSError:
        return None


def huge_page_ranges(maps: str = "/proc/self/maps") -> list[int]:
    """Return the addresses of writable anonymous memory ranges that fit into one huge page each.

    Copying page tables takes most of the time when a process with torch forks. Each call requires three forks of a
    process with torch. A process that writes to a shared huge page still copies only 4 KiB.
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
    """Move one memory range into a huge page. Return True if the kernel moved the memory range."""
    libc = ctypes.CDLL(None)
    return bool(libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(_HUGE_PAGE_BYTES), _MADV_COLLAPSE) == 0)
