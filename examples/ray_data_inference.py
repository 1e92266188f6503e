"""Put images through a model with Ray Data: CPUs prepare the next batches while the GPUs work on these.

    python examples/ray_data_inference.py          needs torch, scikit-learn, ray[data]; about 30 seconds on two cores

How well does a model that has learned centred digits read shifted ones? It is trained in a run of its own; then Ray
Data reads the images from Parquet files, shifts each by up to a pixel, classifies all of them with one model per GPU,
and writes what came out to Parquet files again.
"""

import tempfile
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import ray
import torch
from sklearn.datasets import load_digits
from torch import nn

from serverless_gpu import distributed
from serverless_gpu.ray import ray_launch

GPUS = torch.cuda.device_count()  # all GPUs of this machine where there are any, else two CPU slots
KIND = None if GPUS else "CPU"
TRAINED, FILES = 1000, 8
SHIFTS = (-1, 0, 1)  # pixels


def network():
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


@distributed(gpus=1, gpu_type=KIND, tags={"example": "ray-data"})
def train(images, labels, epochs=40):
    """Learn these images; return the weights."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    images, labels = torch.from_numpy(images).to(device), torch.from_numpy(labels).to(device)
    torch.manual_seed(0)
    model = network().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(epochs):
        for batch in torch.randperm(len(images), device=device).split(64):
            loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model.cpu().state_dict()


def shifted(batch):
    """Return each image of a batch nine times: as it is, and moved by a pixel to each side."""
    pixels = np.stack(batch["pixels"]).reshape(-1, 8, 8)
    moves = [(down, right) for down in SHIFTS for right in SHIFTS]
    moved = [np.roll(pixels, move, axis=(1, 2)).reshape(-1, 64) for move in moves]
    return {
        "pixels": np.concatenate(moved),
        "label": np.tile(batch["label"], len(moves)),
        "down": np.repeat([down for down, _ in moves], len(pixels)),
        "right": np.repeat([right for _, right in moves], len(pixels)),
    }


class Classifier:
    """A model that is loaded once, and then takes batch after batch. Ray keeps one for each GPU."""

    def __init__(self, weights):
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model = network().to(self.device)
        self.model.load_state_dict(weights)

    def __call__(self, batch):
        with torch.inference_mode():
            logits = self.model(torch.from_numpy(batch.pop("pixels")).to(self.device))
        return {**batch, "digit": logits.argmax(1).cpu().numpy()}


@ray_launch(gpus=GPUS or 2, gpu_type=KIND, tags={"example": "ray-data"})
def classify(weights, source, target):
    """Read the images, classify each nine times, and write the answers."""
    ray.data.DataContext.get_current().enable_progress_bars = False
    gpus = int(ray.cluster_resources().get("GPU", 0))
    answers = (
        ray.data.read_parquet(source)
        .map_batches(shifted, batch_format="numpy")
        .map_batches(
            Classifier,
            fn_constructor_args=(weights,),
            batch_format="numpy",
            batch_size=1024,
            num_gpus=1 if gpus else 0,
            compute=ray.data.ActorPoolStrategy(size=gpus or 1),
        )
    )
    answers.write_parquet(target)  # now it runs, piece by piece: nothing has to fit into memory as a whole


if __name__ == "__main__":
    pixels, labels = load_digits(return_X_y=True)
    pixels = (pixels / 16).astype("float32")
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "images"), Path(folder, "answers")
        source.mkdir()
        for index, rows in enumerate(np.array_split(np.arange(TRAINED, len(labels)), FILES)):
            table = {"pixels": list(pixels[rows]), "label": labels[rows]}
            pyarrow.parquet.write_table(pyarrow.table(table), source / f"{index}.parquet")

        weights = train.distributed(pixels[:TRAINED], labels[:TRAINED])[0]
        classify.distributed(weights, str(source), str(target))
        answers = pyarrow.parquet.read_table(target).to_pandas()

    print(f"{len(answers)} images; recognized, by how far they were shifted:")
    recognized = (answers["digit"] == answers["label"]).groupby([answers["down"], answers["right"]]).mean().unstack()
    for row in recognized.to_numpy():  # down, from -1 to 1; in each row to the right, from -1 to 1
        print("".join(f"{share:8.1%}" for share in row))
