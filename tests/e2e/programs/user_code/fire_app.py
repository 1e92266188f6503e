"""A class that fire turns into a command line; its methods start the ranks."""

import fire

from serverless_gpu import distributed


class Trainer:
    def __init__(self, lr=0.1):
        self.lr = lr

    def fit(self, steps=2):
        train = distributed(gpus=2, gpu_type="CPU", quiet=True)(self._fit)
        return train.distributed(steps)

    def _fit(self, steps, world_size=1):
        return round(self.lr * steps * world_size, 3)


if __name__ == "__main__":
    fire.Fire(Trainer)
