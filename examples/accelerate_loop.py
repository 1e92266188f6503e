"""Run a Hugging Face Accelerate training loop as it stands.

    python examples/accelerate_loop.py          needs torch, scikit-learn, accelerate; about 5 seconds on two cores

The body of `train` is the loop of Accelerate's own documentation, and nothing in it knows of us: `Accelerator()` finds
the rank, the world size and the GPU in the variables that `accelerate launch` would have set. Two ranks: two GPUs where
there are two, otherwise two CPU slots.
"""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from serverless_gpu import distributed

GPU_TYPE = None if torch.cuda.device_count() >= 2 else "CPU"  # two GPUs where there are two, else CPU slots


def make_model():
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 10),
    )


def make_dataloaders(batch_size):
    images, labels = load_digits(return_X_y=True)
    images = (images / 16.0).astype("float32").reshape(-1, 1, 8, 8)
    parts = train_test_split(images, labels, test_size=0.25, random_state=0, stratify=labels)
    train_images, test_images, train_labels, test_labels = (torch.from_numpy(part) for part in parts)
    training = DataLoader(TensorDataset(train_images, train_labels), batch_size, shuffle=True)
    return training, DataLoader(TensorDataset(test_images, test_labels), batch_size)


@distributed(gpus=2, gpu_type=GPU_TYPE, tags={"example": "accelerate"})
def train(epochs=8, batch_size=32, learning_rate=5e-3):
    accelerator = Accelerator()
    set_seed(0)
    model = make_model()
    loss_function = nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    training_dataloader, test_dataloader = make_dataloaders(batch_size)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, learning_rate, epochs * len(training_dataloader))

    model, optimizer, training_dataloader, test_dataloader, scheduler = accelerator.prepare(
        model, optimizer, training_dataloader, test_dataloader, scheduler
    )

    for epoch in range(epochs):
        model.train()
        for inputs, targets in training_dataloader:
            optimizer.zero_grad()
            outputs = model(inputs)
            loss = loss_function(outputs, targets)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
        accelerator.print(f"epoch {epoch + 1}: loss {loss.item():.4f}")

    model.eval()
    right = total = 0
    for inputs, targets in test_dataloader:
        with torch.no_grad():
            predictions = model(inputs).argmax(dim=-1)
        predictions, targets = accelerator.gather_for_metrics((predictions, targets))
        right += (predictions == targets).sum().item()
        total += len(targets)
    accelerator.end_training()
    return {"processes": accelerator.num_processes, "accuracy": right / total}


if __name__ == "__main__":
    results = train.distributed()
    print(f"test accuracy: {results[0]['accuracy']:.1%}, trained by {results[0]['processes']} processes")
