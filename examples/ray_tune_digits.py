"""Search for good settings with Ray Tune: trials share the GPUs of one run, and those that lag are stopped early.

    python examples/ray_tune_digits.py          needs torch, scikit-learn, ray[tune]; about 40 seconds on two cores

The decorated function is Ray's driver: it runs once, on a Ray cluster of the run's own, which is there when it begins
and gone when it has returned. Nothing in it says where that cluster is.
"""

import tempfile

import ray
import torch
from ray import tune
from ray.tune.schedulers import ASHAScheduler
from ray.tune.search import BasicVariantGenerator
from sklearn.datasets import load_digits
from torch import nn

from serverless_gpu.ray import ray_launch

GPUS = torch.cuda.device_count()  # all GPUs of this machine where there are any, else two CPU slots
TRIALS, EPOCHS = 12, 27


def train(settings, images, labels):
    """One trial: train on the first 1,400 images, and report after each epoch how many of the others are recognized."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # a trial sees the one GPU it was given
    images, labels = images.to(device), labels.to(device)
    torch.manual_seed(0)
    width = settings["width"]
    model = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=settings["learning_rate"], momentum=0.9)
    for _ in range(EPOCHS):
        for batch in torch.randperm(1400, device=device).split(32):
            loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            right = (model(images[1400:]).argmax(1) == labels[1400:]).float().mean()
        tune.report({"accuracy": right.item()})


@ray_launch(gpus=GPUS or 2, gpu_type=None if GPUS else "CPU", tags={"example": "ray-tune"})
def search():
    """Run the trials, as many at a time as there are GPUs; return settings, epochs and accuracy of each."""
    images, labels = load_digits(return_X_y=True)
    trial = tune.with_parameters(train, images=torch.from_numpy(images).float() / 16, labels=torch.from_numpy(labels))
    gpus = 1 if ray.cluster_resources().get("GPU") else 0
    with tempfile.TemporaryDirectory() as folder:
        tuner = tune.Tuner(
            tune.with_resources(trial, {"cpu": 1, "gpu": gpus}),
            param_space={"learning_rate": tune.loguniform(1e-4, 1), "width": tune.choice([32, 64, 128])},
            tune_config=tune.TuneConfig(
                metric="accuracy",
                mode="max",
                num_samples=TRIALS,
                search_alg=BasicVariantGenerator(random_state=0),
                scheduler=ASHAScheduler(max_t=EPOCHS, grace_period=3, reduction_factor=3),
                reuse_actors=True,  # the next trial has imported torch already
            ),
            run_config=tune.RunConfig(
                storage_path=folder, verbose=0
            ),  # several nodes need a folder that all of them see
        )
        results = [(result.config, result.metrics) for result in tuner.fit()]
    return [(settings, metrics["training_iteration"], metrics["accuracy"]) for settings, metrics in results]


if __name__ == "__main__":
    trials = search.distributed()[0]
    print("learning rate  width  epochs  accuracy")
    for settings, epochs, accuracy in sorted(trials, key=lambda trial: trial[2], reverse=True):
        print(f"{settings['learning_rate']:13.5f} {settings['width']:6} {epochs:7} {accuracy:9.1%}")
