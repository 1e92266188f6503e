"""Starts ranks from a package: ``python -m trainer_package``."""

import sys

from serverless_gpu import distributed

from .model import forward


@distributed(gpus=2, gpu_type="CPU", quiet=True)
def train(x, rank=0):
    return forward(x + rank)


def main(argv):
    print(train.distributed(int(argv[0])))


if __name__ == "__main__":
    main(sys.argv[1:])
