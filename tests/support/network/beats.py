"""What ranks do in these tests: leave a sign of life every few milliseconds, so that it can be seen when user code ran.

Standard library only. A line of `<fence>.beats` is a moment by this machine's boottime, which all namespaces share.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from pathlib import Path

_STAY_S, _PATIENCE_S = 100.0, 2.0
_GO_ON, _ENOUGH = b".", b"!"


def beat(where: str) -> int:
    """Beat until the file `go<fence>` is there; return the fence."""
    fence = int(os.environ["SGPU_FENCE"])
    print(f"attempt {fence} begins", flush=True)
    limit = time.monotonic() + _STAY_S
    with Path(where, f"{fence}.beats").open("a") as file:
        while not Path(where, f"go{fence}").exists():
            file.write(f"{time.clock_gettime_ns(time.CLOCK_BOOTTIME)}\n")
            file.flush()
            if time.monotonic() > limit:
                raise TimeoutError("nobody said that it is enough")
            time.sleep(0.02)
    print(f"attempt {fence} returns", flush=True)
    return fence


def beats(where: str | Path, fence: int, rank: int | None = None) -> list[int]:
    """Return the moments at which an attempt ran user code; those of one of the ranks that `talk`."""
    path = Path(where, f"{fence}.beats" if rank is None else f"{fence}.{rank}.beats")
    return [int(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []


def talk(where: str, *impatient: str) -> int:
    """Beat in each of two ranks, which say a word to each other again and again; return the fence as `beat` does.

    A rank waits for a word of the other for ever, as NCCL would.

    Args:
        where: what is left behind: `<fence>.<rank>.beats` from the beginning, `<fence>.<rank>.met` once they have
            found each other; and `go<fence>` ends it.
        impatient: ranks of the first attempt that wait for two seconds only, and raise then.
    """
    fence, rank = _begin(where)
    limit = time.monotonic() + _STAY_S
    with _other_rank(rank) as other:
        Path(where, f"{fence}.{rank}.met").touch()
        other.settimeout(_PATIENCE_S if fence == 1 and str(rank) in impatient else None)
        word = _GO_ON
        while word == _GO_ON:
            if time.monotonic() > limit:
                raise TimeoutError("nobody said that it is enough")
            if rank == 0:
                word = _ENOUGH if Path(where, f"go{fence}").exists() else _GO_ON
                other.sendall(word)
            heard = other.recv(1)
            if not heard:
                raise ConnectionResetError("the other rank has hung up")
            if rank != 0:
                word = heard
                other.sendall(word)
            time.sleep(0.02)
    print(f"attempt {fence} returns", flush=True)
    return fence


def leave_one(where: str) -> int:
    """Return in rank 0, and in rank 1 once the file `go<fence>` is there."""
    fence, rank = _begin(where)
    if rank != 0:
        _wait_for(Path(where, f"go{fence}"))
    return fence


def endure(where: str) -> int:
    """Leave a file `<fence>.<rank>.asked` when asked to end, and do not before the file `go<fence>` is there."""
    fence, rank = int(os.environ["SGPU_FENCE"]), int(os.environ["RANK"])
    signal.signal(signal.SIGTERM, lambda *_: Path(where, f"{fence}.{rank}.asked").touch())
    _begin(where)
    _wait_for(Path(where, f"go{fence}"))
    return fence


def _begin(where: str) -> tuple[int, int]:
    """Say that this rank is there, by a file `<fence>.<rank>` with its pid and its parent's, and beat from now on."""
    fence, rank = int(os.environ["SGPU_FENCE"]), int(os.environ["RANK"])
    print(f"attempt {fence} begins", flush=True)
    threading.Thread(target=_beat_on, args=(Path(where, f"{fence}.{rank}.beats"),), daemon=True).start()
    temporary = Path(where, f".{fence}.{rank}.{os.getpid()}")
    temporary.write_text(f"{os.getpid()} {os.getppid()}")
    temporary.rename(Path(where, f"{fence}.{rank}"))
    return fence, rank


def _wait_for(path: Path) -> None:
    limit = time.monotonic() + _STAY_S
    while not path.exists():
        if time.monotonic() > limit:
            raise TimeoutError("nobody said that it is enough")
        time.sleep(0.02)


def _beat_on(path: Path) -> None:
    with path.open("a") as file:
        while True:
            file.write(f"{time.clock_gettime_ns(time.CLOCK_BOOTTIME)}\n")
            file.flush()
            time.sleep(0.02)


def _other_rank(rank: int) -> socket.socket:
    """Return a connection to the other of two ranks, made where torch's store would be."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if rank == 0:
        with socket.create_server(("", port)) as server:
            return server.accept()[0]
    return _connected(host, port)


def _connected(host: str, port: int) -> socket.socket:
    limit = time.monotonic() + _STAY_S
    while True:
        try:
            return socket.create_connection((host, port), timeout=5)
        except OSError:
            if time.monotonic() > limit:
                raise
            time.sleep(0.05)
