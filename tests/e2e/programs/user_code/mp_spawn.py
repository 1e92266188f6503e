"""One rank that starts processes with torch.multiprocessing.spawn, as scripts for one machine do."""

import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from serverless_gpu import distributed


def worker(rank, world_size, total):
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", "0"
    store = dist.FileStore(os.environ["STORE"], world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    value = torch.tensor([rank + 1])
    dist.all_reduce(value)
    total.put(int(value))
    dist.barrier()
    dist.destroy_process_group()


@distributed(gpus=1, gpu_type="CPU", quiet=True)
def main(store):
    os.environ["STORE"] = store
    context = mp.get_context("spawn")
    total = context.SimpleQueue()
    mp.spawn(worker, args=(2, total), nprocs=2)
    return [total.get(), total.get()]


if __name__ == "__main__":
    results = main.distributed(os.path.abspath("store"))
    assert results == [[3, 3]], results
    print("done")
