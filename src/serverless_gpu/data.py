"""Reserves the name `serverless_gpu.data`.

Importing `serverless_gpu.data` raises an ImportError that names alternatives.
"""

from __future__ import annotations

raise ImportError(
    "serverless_gpu.data does not exist in this version. Read data in the function with a loader that knows the "
    "rank: torch.utils.data.DistributedSampler, or datasets.distributed.split_dataset_by_node(dataset, rank, "
    "world_size)",
    name="serverless_gpu.data",
)
