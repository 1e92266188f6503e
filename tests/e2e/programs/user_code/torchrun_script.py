"""Trains as a script for torchrun does: options from argparse, its place from variables, an errors file by @record."""

import argparse
import os

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--out", required=True)
    return parser.parse_args()


@record
def main():
    args = parse_args()
    local_rank = int(os.environ["LOCAL_RANK"])
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    for _ in range(args.epochs):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
    weights = [torch.zeros(1, 4) for _ in range(world_size)]
    dist.all_gather(weights, model.module.weight.detach())
    if rank == 0:
        torch.save(model.module.state_dict(), args.out)
    print(f"rank {rank} local {local_rank} of {world_size}: equal {all(torch.equal(weights[0], w) for w in weights)}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
