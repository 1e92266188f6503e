"""DataLoader workers in ranks: started by spawn and by fork, kept over epochs, the data set defined in the script."""

import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from serverless_gpu import distributed


class Squares(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.tensor([index**2, get_worker_info().id])


@distributed(gpus=2, gpu_type="CPU", quiet=True)
def train(start, rank=0, world_size=1):
    sampler = torch.utils.data.DistributedSampler(Squares(), world_size, rank, shuffle=False)
    loader = DataLoader(
        Squares(),
        batch_size=2,
        sampler=sampler,
        num_workers=2,
        multiprocessing_context=start,
        persistent_workers=True,
    )
    epochs = [torch.cat(list(loader)) for _ in range(2)]
    assert torch.equal(*epochs)
    return epochs[0][:, 0].tolist(), sorted(set(epochs[0][:, 1].tolist()))


if __name__ == "__main__":
    for start in ("fork", "spawn"):
        results = train.distributed(start)
        assert results == [([0, 4, 16, 36], [0, 1]), ([1, 9, 25, 49], [0, 1])], results
    print("done")
