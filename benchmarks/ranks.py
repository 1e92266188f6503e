"""What ranks do in the benchmarks, whoever starts them; as a program: what torchrun starts.

    torchrun --standalone --nproc-per-node=2 benchmarks/ranks.py join DIRECTORY

Times are nanoseconds of CLOCK_BOOTTIME, which all processes of a machine share. A rank writes each into a file of the
round's directory after it has taken it, so that every contestant pays the same for telling.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

RANKS = 2
GIGABYTE = 1 << 30
NAP_S = 60.0
POLL_S = 0.002
SETTLED_S = 0.2
FLOOD_BYTES = 4 << 30
LINE_S = 0.02


def now_ns() -> int:
    """Return nanoseconds since boot."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


def stamp(directory: str, event: str, rank: int) -> None:
    """Write down that this happens now."""
    at_ns = now_ns()
    path = Path(directory) / f"{event}-{rank}"
    path.with_suffix(".part").write_text(str(at_ns), encoding="ascii")
    path.with_suffix(".part").rename(path)


def stamps(directory: str, event: str, ranks: int) -> list[int]:
    """Return when it happened on every rank.

    Raises:
        FileNotFoundError: a rank did not get there.
    """
    return [int((Path(directory) / f"{event}-{rank}").read_text(encoding="ascii")) for rank in range(ranks)]


def await_stamp(directory: str, event: str, rank: int) -> None:
    """Return when a rank has got there; for rounds that are not about waiting."""
    path = Path(directory) / f"{event}-{rank}"
    while not path.exists():
        time.sleep(POLL_S)


def first_line(directory: str) -> None:
    """Say that user code runs."""
    stamp(directory, "enter", _rank())


def join(directory: str) -> None:
    """Join the process group and say so.

    The barrier comes after the clock: a rank 0 that ends while another rank still talks to its store resets it.
    """
    stamp(directory, "enter", _rank())
    dist.init_process_group("gloo")
    stamp(directory, "ready", _rank())
    dist.barrier()


def joined(directory: str) -> None:
    """Say that the process group is there: the launcher has made it."""
    stamp(directory, "ready", dist.get_rank())


def meet_until_lost(directory: str) -> None:
    """Join the process group, say so, and meet the others until one is gone."""
    dist.init_process_group("gloo")
    stamp(directory, "ready", _rank())
    meet_for_ever()


def meet_for_ever() -> None:
    """Be in collectives, one after the other."""
    while True:
        dist.barrier()
        time.sleep(POLL_S)


def nap(directory: str) -> None:
    """Sleep until somebody ends it."""
    stamp(directory, "enter", _rank())
    time.sleep(NAP_S)


def die_beside_sleeper(directory: str) -> None:
    """Rank 1 is killed while rank 0 sleeps."""
    stamp(directory, "enter", _rank())
    if _rank() == 0:
        time.sleep(NAP_S)
    await_stamp(directory, "enter", 0)
    _die(directory)


def die_beside_collective(directory: str) -> None:
    """Rank 1 is killed while rank 0 waits for it in a collective."""
    dist.init_process_group("gloo")
    dist.barrier()
    if _rank() == 0:
        dist.barrier()
    _die(directory)


def flood(directory: str, size: int) -> None:
    """Rank 0 writes as fast as it can; rank 1 says what time it is, until that is over."""
    if _rank() == 0:
        await_stamp(directory, "enter", 1)
        stamp(directory, "flooding", 0)
        pour(1, size)
        stamp(directory, "flooded", 0)
        return
    stamp(directory, "enter", 1)
    while not (Path(directory) / "flooded-0").exists():
        os.write(1, b"%d\n" % now_ns())
        time.sleep(LINE_S)


def pour(fd: int, size: int) -> None:
    """Write so many bytes, in blocks of short lines."""
    block = (b"x" * 63 + b"\n") * (1 << 14)
    for _ in range(size // len(block)):
        written = 0
        while written < len(block):
            written += os.write(fd, block[written:] if written else block)


def make_tensor(directory: str, size: int) -> torch.Tensor:
    """Return a tensor of that many bytes, and say when it was there."""
    tensor = torch.ones(size // 4, dtype=torch.float32)
    stamp(directory, "made", 0)
    return tensor


def entered() -> int:
    """Return the time at which the function began."""
    return now_ns()


def make_and_tell(size: int) -> tuple[torch.Tensor, int]:
    """Return a tensor of that many bytes, and the time when it was there."""
    return torch.ones(size // 4, dtype=torch.float32), now_ns()


def pickle_tensor(directory: str) -> None:
    """Make a tensor of 1 GB and pickle it to a file."""
    pickle_to(os.path.join(directory, "value.pkl"), make_tensor(directory, GIGABYTE))
    stamp(directory, "pickled", 0)


def pickle_to(path: str, value: object) -> None:
    """Write a value as pickle does it best."""
    with open(path, "wb") as file:
        pickle.dump(value, file, protocol=pickle.HIGHEST_PROTOCOL)


def read(value: torch.Tensor) -> None:
    """Read every byte of a tensor once."""
    if float(value.sum()) <= 0:
        raise RuntimeError("the tensor is not what was made")


def _die(directory: str) -> None:
    time.sleep(SETTLED_S)
    stamp(directory, "killed", 1)
    os.kill(os.getpid(), signal.SIGKILL)


def _rank() -> int:
    return int(os.environ["RANK"])


ACTIONS = {
    function.__name__: function
    for function in (first_line, join, nap, die_beside_sleeper, die_beside_collective, pickle_tensor)
}

if __name__ == "__main__":
    ACTIONS[sys.argv[1]](sys.argv[2])
    sys.stdout.flush()
    if sys.argv[1] == "join":
        dist.destroy_process_group()
