"""Train on scikit-learn's digits, register the model with MLflow, and load it back by its name.

    python examples/mlflow_digits.py, with torch, scikit-learn and mlflow; about 30 seconds on two cores

Nothing here says where to log: the run of `train` has one MLflow run, in which every rank's lines land. It is on the
server that `MLFLOW_TRACKING_URI` names, otherwise on one that is started for you; `sgpu mlflow` says where.
"""

import mlflow
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
MODEL = "digits"


def load_data():
    images, labels = load_digits(return_X_y=True)
    images = (images / 16.0).astype("float32")
    parts = train_test_split(images, labels, test_size=0.25, random_state=0, stratify=labels)
    return [torch.from_numpy(part) for part in parts]


@distributed(gpus=2, gpu_type=GPU_TYPE)
def train(epochs=20, learning_rate=0.01):
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    device = torch.device("cuda", rt.get_local_rank()) if cuda else torch.device("cpu")
    torch.manual_seed(0)
    images, _, labels, _ = load_data()
    sampler = DistributedSampler(TensorDataset(images, labels), seed=0)
    loader = DataLoader(sampler.dataset, batch_size=32, sampler=sampler)
    network = DistributedDataParallel(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(device))
    optimizer = torch.optim.AdamW(network.parameters(), lr=learning_rate)

    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for batch, digits in loader:
            loss = nn.functional.cross_entropy(network(batch.to(device)), digits.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        mlflow.log_metric(f"loss/rank_{rt.get_global_rank()}", loss.item(), step=epoch)

    dist.destroy_process_group()
    if rt.get_global_rank() != 0:
        return None
    info = mlflow.pytorch.log_model(
        network.module.cpu(),
        name="model",
        registered_model_name=MODEL,
        pip_requirements=["torch"],  # else MLflow loads the model in another process, to see what it needs
        serialization_format="pickle",
    )
    return info.registered_model_version


if __name__ == "__main__":
    run = train.submit()
    version = run.results()[0]
    tracked = run.tracked()
    assert tracked, "run it where MLflow is installed"
    print(f"MLflow run: {tracked.url}")

    mlflow.set_tracking_uri(tracked.uri)
    network = mlflow.pytorch.load_model(f"models:/{MODEL}/{version}")
    _, images, _, labels = load_data()
    with torch.no_grad():
        right = (network(images).argmax(1) == labels).float().mean().item()
    print(f"{MODEL} version {version}, loaded from the registry: test accuracy {right:.1%}")
