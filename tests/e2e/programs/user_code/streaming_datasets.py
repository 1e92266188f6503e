"""A stream of examples, shuffled and mapped on the fly, split over the ranks; a Parquet file read as a stream."""

import datasets
from datasets.distributed import split_dataset_by_node
from torch.utils.data import DataLoader

from serverless_gpu import distributed


def examples(shards):
    for shard in shards:
        for number in range(4):
            yield {"number": 4 * shard + number}


def double(example):
    return {"double": 2 * example["number"]}


stream = datasets.IterableDataset.from_generator(examples, gen_kwargs={"shards": list(range(4))})
stream = stream.map(double).shuffle(seed=0, buffer_size=4)


@distributed(gpus=2, gpu_type="CPU", quiet=True)
def read(rank=0, world_size=1):
    mine = split_dataset_by_node(stream, rank=rank, world_size=world_size)
    loader = DataLoader(mine.with_format("torch"), batch_size=2, num_workers=2)
    return sorted(number for batch in loader for number in batch["double"].tolist())


@distributed(gpus=2, gpu_type="CPU", quiet=True)
def read_file(path, rank=0, world_size=1):
    rows = datasets.load_dataset("parquet", data_files=path, split="train", streaming=True, cache_dir="cache")
    return [row["number"] for row in split_dataset_by_node(rows, rank=rank, world_size=world_size)]


if __name__ == "__main__":
    parts = read.distributed()
    assert [len(part) for part in parts] == [8, 8] and sorted(sum(parts, [])) == list(range(0, 32, 2)), parts
    datasets.Dataset.from_dict({"number": list(range(6))}).to_parquet("numbers.parquet")
    parts = read_file.distributed("numbers.parquet")
    assert sorted(sum(parts, [])) == list(range(6)), parts
    print("done")
