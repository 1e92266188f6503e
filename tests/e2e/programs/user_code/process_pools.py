"""Pools of processes and threads in ranks, by fork and spawn, with functions of the script."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor

from serverless_gpu import distributed


def square(x):
    return x * x


@distributed(gpus=2, gpu_type="CPU", quiet=True)
def work(rank=0):
    items = range(10 * rank, 10 * rank + 4)
    with multiprocessing.Pool(2) as pool:
        by_fork = pool.map(square, items)
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        by_spawn = list(pool.map(square, items))
    with ThreadPoolExecutor(2) as pool:
        by_threads = list(pool.map(square, items))
    assert by_fork == by_spawn == by_threads
    return sum(by_fork)


if __name__ == "__main__":
    results = work.distributed()
    assert results == [14, 534], results
    print("done")
