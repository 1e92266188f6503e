"""A script as `accelerate launch` starts it: gradient accumulation, a checkpoint, nothing of ours."""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir", required=True)
    args = parser.parse_args()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, project_dir=args.output_dir)
    set_seed(0)
    x = torch.arange(32.0).reshape(16, 2) / 32
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(x, x.sum(dim=1, keepdim=True)), batch_size=2, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    weights = accelerator.gather(accelerator.unwrap_model(model).weight.detach())
    accelerator.print("processes", accelerator.num_processes, "equal", bool((weights == weights[0]).all()))
    accelerator.save_state(f"{args.output_dir}/checkpoint")
    accelerator.end_training()


if __name__ == "__main__":
    main()
