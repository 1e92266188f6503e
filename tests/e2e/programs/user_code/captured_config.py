"""Settings that the function captures: data classes, an enumeration, a namespace, a partial, a named tuple."""

import argparse
import enum
import functools
from collections import namedtuple
from dataclasses import asdict, dataclass, field, replace

from serverless_gpu import distributed


class Schedule(enum.Enum):
    COSINE = "cosine"
    FLAT = "flat"


@dataclass(frozen=True)
class Optimizer:
    lr: float = 0.1
    betas: tuple = (0.9, 0.99)


@dataclass(slots=True, kw_only=True)
class Config:
    name: str
    optimizer: Optimizer = field(default_factory=Optimizer)
    schedule: Schedule = Schedule.COSINE

    @property
    def title(self):
        return f"{self.name}-{self.schedule.value}"


Shape = namedtuple("Shape", "rows columns")


def scaled(factor, shape):
    return Shape(factor * shape.rows, factor * shape.columns)


config = Config(name="small", optimizer=replace(Optimizer(), lr=0.5))
args = argparse.Namespace(seed=7)
double = functools.partial(scaled, 2)


@distributed(gpus=2, gpu_type="CPU", quiet=True)
def train(shape, rank=0):
    config.name += f"-{rank}"
    assert config.schedule is Schedule.COSINE and isinstance(config.optimizer, Optimizer)
    return config, double(shape), args.seed


if __name__ == "__main__":
    for rank, (seen, shape, seed) in enumerate(train.distributed(Shape(1, 2))):
        assert isinstance(seen, Config) and seen.title == f"small-{rank}-cosine", seen
        assert asdict(seen)["optimizer"] == {"lr": 0.5, "betas": (0.9, 0.99)}
        assert (shape, shape.columns, seed) == ((2, 4), 4, 7)
    assert config.name == "small"
    print("done")
