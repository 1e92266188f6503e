"""Goes on in the middle of an epoch: a StatefulDataLoader whose state comes back with the result, rank by rank."""

from torch.utils.data import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from serverless_gpu import distributed

NUMBERS = list(range(24))


@distributed(gpus=2, gpu_type="CPU", quiet=True)
def read(states, limit, rank=0, world_size=1):
    from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

    sampler = StatefulDistributedSampler(NUMBERS, world_size, rank, shuffle=True, seed=1)
    assert isinstance(sampler, DistributedSampler)
    loader = StatefulDataLoader(NUMBERS, batch_size=2, sampler=sampler, num_workers=2)
    if states:
        loader.load_state_dict(states[rank])
    seen = []
    for batch in loader:
        seen.append(batch.tolist())
        if len(seen) == limit:
            break
    return seen, loader.state_dict()


if __name__ == "__main__":
    whole = [seen for seen, _ in read.distributed(None, 0)]
    first, states = zip(*read.distributed(None, 2))
    rest = [seen for seen, _ in read.distributed(states, 0)]
    assert [a + b for a, b in zip(first, rest)] == whole, (first, rest, whole)
    assert sorted(n for rank in whole for batch in rank for n in batch) == NUMBERS
    print("done")
