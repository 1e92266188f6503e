"""Train on several GPUs with Ray Train, as it stands, and take the model home.

    python examples/ray_train_digits.py          needs torch, scikit-learn, ray[train]; about 30 seconds on two cores

Ray Train starts its own workers, one for each GPU, makes their process group and wraps the model; the run gives it a
Ray cluster to do that on.
"""

import tempfile
from pathlib import Path

import numpy as np
import ray
import ray.train.torch
import torch
from ray import train
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from serverless_gpu.ray import ray_launch

GPUS = torch.cuda.device_count()  # all GPUs of this machine where there are any, else two CPU slots
TRAINED = 1400


def network():
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def load_data():
    images, labels = load_digits(return_X_y=True)
    return torch.from_numpy(images).float() / 16, torch.from_numpy(labels)


def work(settings):
    """One worker: train with its share of the images; the first one saves the model."""
    images, labels = load_data()
    torch.manual_seed(0)
    model = train.torch.prepare_model(network())
    loader = DataLoader(TensorDataset(images[:TRAINED], labels[:TRAINED]), batch_size=32, shuffle=True)
    loader = train.torch.prepare_data_loader(loader)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings["learning_rate"])
    context = train.get_context()
    for epoch in range(settings["epochs"]):
        if context.get_world_size() > 1:  # on a single GPU Ray Train leaves model and loader as they are
            loader.sampler.set_epoch(epoch)
        for batch, digits in loader:
            loss = nn.functional.cross_entropy(model(batch), digits)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = None
        if context.get_world_rank() == 0:
            weights = getattr(model, "module", model).state_dict()
            np.savez(Path(folder, "model.npz"), **{name: tensor.cpu().numpy() for name, tensor in weights.items()})
            checkpoint = train.Checkpoint.from_directory(folder)
        train.report({"loss": loss.item()}, checkpoint=checkpoint)


@ray_launch(gpus=GPUS or 2, gpu_type=None if GPUS else "CPU", tags={"example": "ray-train"})
def fit(epochs=10, learning_rate=0.01):
    """Train with one worker per GPU; return the last metrics, how many workers there were, and the weights."""
    gpus = int(ray.cluster_resources().get("GPU", 0))
    workers = gpus or 2
    with tempfile.TemporaryDirectory() as folder:  # several nodes need one that all of them see
        trainer = train.torch.TorchTrainer(
            work,
            train_loop_config={"epochs": epochs, "learning_rate": learning_rate},
            scaling_config=train.ScalingConfig(num_workers=workers, use_gpu=bool(gpus)),
            run_config=train.RunConfig(storage_path=folder),
        )
        result = trainer.fit()
        with result.checkpoint.as_directory() as saved:
            return result.metrics, workers, dict(np.load(Path(saved, "model.npz")))


if __name__ == "__main__":
    metrics, workers, weights = fit.distributed()[0]
    images, labels = load_data()
    model = network()
    model.load_state_dict({name: torch.from_numpy(array) for name, array in weights.items()})
    with torch.no_grad():
        right = (model(images[TRAINED:]).argmax(1) == labels[TRAINED:]).float().mean().item()
    print(f"{workers} workers, loss {metrics['loss']:.3f}; test accuracy {right:.1%}")
