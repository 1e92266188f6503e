"""Ranks that end themselves with os._exit, with sys.exit and atexit handlers."""

import atexit
import os
import sys

from serverless_gpu import distributed
from serverless_gpu.errors import RunError


@distributed(gpus=2, gpu_type="CPU", quiet=True)
def leave(how, rank=0):
    atexit.register(print, f"rank {rank} has left")
    print("last words", flush=True)
    if rank == 1:
        how()
    return rank


def exit_3():
    os._exit(3)


def exit_0():
    os._exit(0)


def sys_exit():
    sys.exit(4)


if __name__ == "__main__":
    for how in (exit_3, exit_0, sys_exit):
        try:
            print(how.__name__, leave.distributed(how))
        except RunError as error:
            print(how.__name__, type(error).__name__, error.rank, str(error).splitlines()[0])
    print("done")
