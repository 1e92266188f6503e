"""Samples in tar files: every rank reads its shards, every DataLoader worker its part of them."""

import os

import torch
import webdataset as wds

from serverless_gpu import distributed

SHARDS, SAMPLES = 4, 5


@distributed(gpus=2, gpu_type="CPU", quiet=True)
def read(url):
    dataset = (
        wds.WebDataset(url, nodesplitter=wds.split_by_node, shardshuffle=False, empty_check=False)
        .decode()
        .to_tuple("__key__", "x.pyd", "label.cls")
        .batched(2)
    )
    loader = wds.WebLoader(dataset, batch_size=None, num_workers=2).unbatched()
    return sorted((key, int(x.sum()), label) for key, x, label in loader)


if __name__ == "__main__":
    os.makedirs("shards")
    for shard in range(SHARDS):
        with wds.TarWriter(f"shards/{shard:02}.tar") as sink:
            for sample in range(SAMPLES):
                number = SAMPLES * shard + sample
                value = torch.full((2,), number)
                sink.write({"__key__": f"{number:03}", "x.pyd": value, "label.cls": number % 2})
    parts = read.distributed(f"shards/{{00..{SHARDS - 1:02}}}.tar")
    everything = sorted(sum(parts, []))
    assert everything == [(f"{n:03}", 2 * n, n % 2) for n in range(SHARDS * SAMPLES)], parts
    assert {len(part) for part in parts} == {SHARDS * SAMPLES // 2}
    print("done")
