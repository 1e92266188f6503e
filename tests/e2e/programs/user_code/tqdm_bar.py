"""A progress bar around the loop, on rank 0 only, with messages written above it."""

from tqdm import tqdm, trange

from serverless_gpu import distributed


@distributed(gpus=2, gpu_type="CPU", quiet=True)
def train(rank=0):
    with tqdm(total=3, desc="training", disable=rank != 0) as bar:
        for step in range(3):
            bar.update()
            bar.set_postfix(loss=1 / (step + 1))
            tqdm.write(f"step {step}")
    return sum(trange(4, disable=rank != 0, leave=False))


if __name__ == "__main__":
    assert train.distributed() == [6, 6]
    print("done")
