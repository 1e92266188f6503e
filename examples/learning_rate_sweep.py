"""Find the best learning rate: one run per candidate, as many at a time as there are GPUs.

    python examples/learning_rate_sweep.py          needs torch, scikit-learn; about 10 seconds on two cores

`.map` submits all runs at once; those that find no free GPU (or CPU slot) wait their turn by themselves. The data goes
with each run, and each brings its score back.
"""

import sys

import torch
from sklearn.datasets import load_digits
from torch import nn

from serverless_gpu import as_completed, distributed

GPU_TYPE = None if torch.cuda.device_count() else "CPU"  # GPUs where there are any, else CPU slots
LEARNING_RATES = [10 ** (exponent / 2) for exponent in range(-8, 2)]  # 0.0001 to about 3


@distributed(gpus=1, gpu_type=GPU_TYPE, tags={"example": "sweep"})
def train(learning_rate, images, labels, epochs=40):
    """Train on the first 1,400 images with this learning rate; return loss and accuracy on the others."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    images, labels = images.to(device), labels.to(device)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate, momentum=0.9)
    for _ in range(epochs):
        for batch in torch.randperm(1400, device=device).split(32):
            loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    with torch.no_grad():
        logits, truth = model(images[1400:]), labels[1400:]
    return nn.functional.cross_entropy(logits, truth).item(), (logits.argmax(1) == truth).float().mean().item()


def show_progress(done, runs):
    """Draw one line over the one before: how many runs have ended, and how many still wait for a GPU."""
    bar = "#" * done + "." * (len(runs) - done)
    waiting = sum(run.status() == "QUEUED" for run in runs)
    print(f"\r[{bar}] {done} of {len(runs)} done, {waiting} waiting ", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    images, labels = load_digits(return_X_y=True)
    images, labels = torch.from_numpy(images).float() / 16, torch.from_numpy(labels)
    runs = train.map(LEARNING_RATES, images=images, labels=labels)
    show_progress(0, runs)
    try:
        for done, _ in enumerate(as_completed(runs), start=1):
            show_progress(done, runs)
    finally:
        print(file=sys.stderr)
        for run in runs:
            run.cancel()  # after Ctrl-C; a run that has ended does not mind

    scores = {learning_rate: run.result() for learning_rate, run in zip(LEARNING_RATES, runs, strict=True)}
    best = max(scores, key=lambda learning_rate: scores[learning_rate][1])
    print("learning rate   loss   accuracy")
    for learning_rate, (loss, accuracy) in scores.items():
        print(f"{learning_rate:13.5f} {loss:6.3f} {accuracy:10.1%}{'  best' if learning_rate == best else ''}")
