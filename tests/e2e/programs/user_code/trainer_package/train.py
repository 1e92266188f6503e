"""A module that is the program of each rank: ``sgpu submit -m trainer_package.train``."""

import os
import sys

from .model import forward

if __name__ == "__main__":
    print("value", forward(int(sys.argv[1])), "of", os.environ["WORLD_SIZE"])
