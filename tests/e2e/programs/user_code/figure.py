"""A figure that rank 0 writes, one that comes back, and paths relative to the working directory."""

import os

import matplotlib.pyplot as plt

from serverless_gpu import distributed


@distributed(gpus=2, gpu_type="CPU", quiet=True)
def draw(rank=0):
    figure, axes = plt.subplots()
    axes.plot([0, 1], [rank, rank + 1], label="loss")
    axes.legend()
    os.makedirs("figures", exist_ok=True)
    figure.savefig(f"figures/{rank}.png")
    return figure


if __name__ == "__main__":
    figures = draw.distributed()
    assert sorted(os.listdir("figures")) == ["0.png", "1.png"]
    with open("figures/1.png", "rb") as file:
        assert file.read(4) == b"\x89PNG"
    figures[1].savefig("figures/again.svg")
    assert list(figures[1].axes[0].lines[0].get_ydata()) == [1, 2]
    print("done")
