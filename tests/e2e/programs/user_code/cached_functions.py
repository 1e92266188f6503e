"""Functions and properties with a cache, named tuples, generic and abstract classes, all defined in the script."""

import abc
import functools
import typing

from serverless_gpu import distributed

T = typing.TypeVar("T")


class Batch(typing.NamedTuple):
    x: list
    y: int = 0

    def __len__(self):
        return len(self.x)


@functools.lru_cache(maxsize=2)
def load_vocabulary(name):
    print("loading", name)
    return {letter: number for number, letter in enumerate(name)}


class Encoder(abc.ABC, typing.Generic[T]):
    @functools.cached_property
    def vocabulary(self):
        return load_vocabulary("abc")

    @abc.abstractmethod
    def encode(self, value: T) -> Batch: ...


class Letters(Encoder[str]):
    def encode(self, value):
        return Batch([self.vocabulary[letter] for letter in value])


@distributed(gpus=2, gpu_type="CPU", quiet=True)
def encode(encoder, texts, rank=0, world_size=1):
    batches = [encoder.encode(text) for text in texts[rank::world_size]]
    return batches, sum(map(len, batches)), load_vocabulary.cache_info().misses


if __name__ == "__main__":
    results = encode.distributed(Letters(), ["abc", "ba", "c", "aab"])
    assert results == [([([0, 1, 2], 0), ([2], 0)], 2 * 2, 1), ([([1, 0], 0), ([0, 0, 1], 0)], 5, 1)], results
    assert all(isinstance(batch, Batch) for batches, *_ in results for batch in batches)
    assert load_vocabulary.cache_info().misses == 0
    print("done")
