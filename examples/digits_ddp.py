"""Train a small network on scikit-learn's digits with DistributedDataParallel on two ranks.

    make demo          or: python examples/digits_ddp.py, with torch and scikit-learn; about 6 seconds on two cores

Two GPUs where there are two, otherwise two CPU slots.
"""

import os

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from serverless_gpu import distributed
from serverless_gpu import runtime as rt

GPU_TYPE = None if torch.cuda.device_count() >= 2 else "CPU"  # two GPUs where there are two, else CPU slots


def make_network():
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def load_data(test_size=0.25):
    images, labels = load_digits(return_X_y=True)
    images = (images / 16.0).astype("float32")
    parts = train_test_split(images, labels, test_size=test_size, random_state=0, stratify=labels)
    return [torch.from_numpy(part) for part in parts]


@distributed(gpus=2, gpu_type=GPU_TYPE, tags={"example": "digits"})
def train(epochs=30, batch_size=32, learning_rate=0.01):
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    torch.manual_seed(0)

    train_images, test_images, train_labels, test_labels = load_data()
    dataset = TensorDataset(train_images, train_labels)
    sampler = DistributedSampler(dataset, seed=0)
    loader = DataLoader(dataset, batch_size=batch_size, sampler=sampler)

    network = DistributedDataParallel(make_network().to(device))
    optimizer = torch.optim.AdamW(network.parameters(), lr=learning_rate)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            loss = nn.functional.cross_entropy(network(images.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if epoch % 10 == 9:
            print(f"epoch {epoch + 1:2}: loss {loss.item():.4f}")

    # Each rank scores its own share of the test images, then the shares are added up.
    share = slice(rt.get_global_rank(), None, rt.get_world_size())
    with torch.no_grad():
        right = (network(test_images[share].to(device)).argmax(1).cpu() == test_labels[share]).sum()
    counts = torch.tensor([int(right), len(test_labels[share])], device=device)
    dist.all_reduce(counts)
    dist.destroy_process_group()
    return {
        "rank": rt.get_global_rank(),
        "final_loss": round(loss.item(), 4),
        "accuracy": (counts[0] / counts[1]).item(),
    }


if __name__ == "__main__":
    results = train.distributed()
    for result in results:
        print(result)
    print(f"test accuracy: {results[0]['accuracy']:.1%}")
