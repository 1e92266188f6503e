"""Iterators as arguments, a generator that is refused by name, and generators that ranks make."""

import itertools

from serverless_gpu import distributed
from serverless_gpu.errors import NotPicklable


@distributed(gpus=2, gpu_type="CPU", quiet=True)
def total(numbers, rank=0, world_size=1):
    return sum(itertools.islice(numbers, rank, None, world_size))


def numbers():
    yield from range(6)


@distributed(gpus=2, gpu_type="CPU", quiet=True)
def total_of(make, rank=0, world_size=1):
    batches = (number for number in make() if number % world_size == rank)
    return sum(batches)


if __name__ == "__main__":
    given = iter(range(6))
    assert total.distributed(given) == [6, 9]
    assert list(given) == [0, 1, 2, 3, 4, 5], "the caller's iterator is where it was"
    assert total.distributed(map(abs, [-1, -2])) == [1, 2]
    assert total_of.distributed(numbers) == [6, 9]
    try:
        total.distributed(numbers())
    except NotPicklable as error:
        print(error)
    print("done")
