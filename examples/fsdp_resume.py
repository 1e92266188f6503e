"""Train with FSDP, stop the run half-way, and go on from its checkpoint as if nothing had happened.

    python examples/fsdp_resume.py          needs torch, scikit-learn; about 20 seconds on two cores

Each of two ranks holds half of every parameter and of the optimizer's state (`fully_shard`), and writes its half with
torch.distributed.checkpoint. The run is cancelled as soon as there is a checkpoint; a second run goes on from there;
a third one trains without a break, for comparison. Two GPUs where there are two, otherwise two CPU slots.
"""

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from serverless_gpu import distributed
from serverless_gpu import runtime as rt

GPU_TYPE = None if torch.cuda.device_count() >= 2 else "CPU"  # two GPUs where there are two, else CPU slots
STEPS, CHECKPOINT_EVERY = 200, 50


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x):
        return x + self.mlp(self.norm(x))


def make_sharded_model(mesh, width=128):
    """Return the network, the same on every rank, then cut into one shard per rank."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, width), *(Block(width) for _ in range(4)), nn.Linear(width, 10))
    model.to(mesh.device_type)
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


class Training:
    """All that a run needs to go on later; torch.distributed.checkpoint calls the two methods."""

    def __init__(self, model):
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        self.step = 0

    def state_dict(self):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "step": self.step}

    def load_state_dict(self, state):
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        self.step = state["step"]


def latest_checkpoint(folder):
    """Return the newest complete one: `.metadata` is written last, when the shards of every rank are on disk."""
    return max((path.parent for path in folder.glob("step-*/.metadata")), default=None)


def batch_of(step, size=64):
    """Return this rank's part of a batch that depends on the step alone, so that a resumed run sees the same ones."""
    indices = torch.randint(1400, (size,), generator=torch.Generator().manual_seed(step))
    return indices[rt.get_global_rank() :: rt.get_world_size()]


@distributed(gpus=2, gpu_type=GPU_TYPE, tags={"example": "fsdp"})
def train(folder):
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", rt.get_local_rank()) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    images, labels = (torch.from_numpy(part).to(device) for part in load_digits(return_X_y=True))
    images = images.float() / 16

    training = Training(make_sharded_model(init_device_mesh(device.type, (rt.get_world_size(),))))
    found = latest_checkpoint(folder)
    if found:
        checkpoint.load({"training": training}, checkpoint_id=found)
        print(f"resumed from {found.name}")

    model, optimizer = training.model, training.optimizer
    while training.step < STEPS:
        training.step += 1
        indices = batch_of(training.step)
        loss = nn.functional.cross_entropy(model(images[indices]), labels[indices])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if training.step % CHECKPOINT_EVERY == 0:
            checkpoint.save({"training": training}, checkpoint_id=folder / f"step-{training.step:06}")
            print(f"step {training.step}: checkpoint")

    with torch.no_grad():
        logits, truth = model(images[1400:]), labels[1400:]  # the rest of the images were not trained on
    dist.destroy_process_group()
    return {
        "step": training.step,
        "loss": round(nn.functional.cross_entropy(logits, truth).item(), 6),
        "accuracy": (logits.argmax(1) == truth).float().mean().item(),
    }


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, "stopped")
        run = train.submit(folder)
        while not latest_checkpoint(folder):
            if run.wait(timeout=0.05):
                run.results()  # it ended before its first checkpoint: raises the reason
        run.cancel()
        run.wait()
        newest = latest_checkpoint(folder)
        assert newest, "the run had saved one"
        print(f"{run.status()}, newest checkpoint: {newest.name}")

        resumed = train.distributed(folder)[0]
        unbroken = train.distributed(Path(name, "unbroken"))[0]
    print("resumed: ", resumed)
    print("unbroken:", unbroken)
