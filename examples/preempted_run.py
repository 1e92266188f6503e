"""A run that has to make room for another in the middle of training, and goes on as if nothing had happened.

    sgpu up                                 once, in another terminal
    python examples/preempted_run.py        needs torch, scikit-learn; about 30 seconds on two cores

When it is told to stop, the run saves everything the next step depends on: weights, the optimizer's state, the position
in the data, and the random numbers that dropout draws. The server starts it again as a new attempt, which continues
there. At the end its losses are compared, bit for bit, with those of a run that nobody disturbed.
"""

import os
import time

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from serverless_gpu import distributed
from serverless_gpu import runtime as rt

GPU_TYPE = None if torch.cuda.device_count() >= 2 else "CPU"  # two GPUs where there are two, else CPU slots
STEPS, STEP_S = 120, 0.03


def asked_to_stop(device):
    """Return whether any rank was asked to stop: all ranks leave the loop at the same step, or none does."""
    vote = torch.tensor(int(rt.should_stop()), device=device)
    dist.all_reduce(vote, op=dist.ReduceOp.MAX)
    return bool(vote.item())


def random_state(device):
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def set_random_state(device, state):
    torch.cuda.set_rng_state(state, device) if device.type == "cuda" else torch.set_rng_state(state)


def save(device, model, optimizer, losses):
    """Leave one file that is whole or not there, written by rank 0; the generators of all ranks are in it."""
    states = [None] * rt.get_world_size()
    dist.all_gather_object(states, random_state(device))
    if rt.get_global_rank() == 0:
        file = rt.checkpoint_dir() / "state.pt"
        with open(f"{file}.tmp", "wb") as unfinished:
            torch.save(
                {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "losses": losses, "random": states},
                unfinished,
            )
            unfinished.flush()
            os.fsync(unfinished.fileno())
        os.rename(f"{file}.tmp", file)
        print(f"{rt.stop_reason()}: saved after step {len(losses)}")
    dist.barrier()


def resume(device, model, optimizer):
    """Return the losses so far, everything else put back to where it was."""
    found = rt.resume_dir()
    if found is None:
        return []
    state = torch.load(found / "state.pt", map_location="cpu", weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    set_random_state(device, state["random"][rt.get_global_rank()])
    if rt.get_global_rank() == 0:
        print(f"goes on after step {len(state['losses'])}")
    return state["losses"]


def batch_of(step, size=64):
    """Return this rank's part of a batch that depends on the step alone: the step is the position in the data."""
    indices = torch.randint(1797, (size,), generator=torch.Generator().manual_seed(step))
    return indices[rt.get_global_rank() :: rt.get_world_size()]


@distributed(gpus=2, gpu_type=GPU_TYPE, remote=True, resume=True)
def train():
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", rt.get_local_rank()) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    images, labels = (torch.from_numpy(part).to(device) for part in load_digits(return_X_y=True))
    images = images.float() / 16

    torch.manual_seed(rt.get_global_rank())  # dropout differs from rank to rank; DDP makes the weights equal
    network = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 10))
    model = DistributedDataParallel(network.to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = resume(device, model, optimizer)

    while len(losses) < STEPS:
        indices = batch_of(len(losses))
        loss = nn.functional.cross_entropy(model(images[indices]), labels[indices])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item() / rt.get_world_size())
        time.sleep(STEP_S)  # a step of a real model takes longer
        if len(losses) % 20 == 0 and rt.get_global_rank() == 0:
            print(f"step {len(losses)}: loss {losses[-1]:.3f}")
        if asked_to_stop(device):
            save(device, model, optimizer, losses)
            break
    dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    run = train.submit()
    while "step 20" not in run.logs() and not run.wait(timeout=0.05):
        pass
    run.preempt()  # what a server does when a more urgent run needs the GPUs
    disturbed = run.results()
    print(f"the second attempt {run.logs().splitlines()[0]}")
    undisturbed = train.distributed()
    print(f"{len(disturbed[0])} steps each, every loss the same: {disturbed == undisturbed}")
