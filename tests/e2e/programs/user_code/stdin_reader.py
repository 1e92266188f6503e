"""Ranks that read from standard input find its end at once; the caller's input stays the caller's."""

import sys

from serverless_gpu import distributed


@distributed(gpus=2, gpu_type="CPU", quiet=True)
def ask():
    try:
        return input("continue? ")
    except EOFError:
        return sys.stdin.read()


if __name__ == "__main__":
    first = input()
    assert ask.distributed() == ["", ""]
    assert (first, sys.stdin.read()) == ("for the caller", "and more\n")
    print("done")
