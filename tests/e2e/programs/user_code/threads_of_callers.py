"""Calls from threads of the caller, as sweeps with a thread pool make them."""

from concurrent.futures import ThreadPoolExecutor

from serverless_gpu import distributed


@distributed(gpus=1, gpu_type="CPU", quiet=True)
def score(lr):
    print("lr", lr)
    return -((lr - 3) ** 2)


def objective(lr):
    return lr, score.distributed(lr)[0]


if __name__ == "__main__":
    with ThreadPoolExecutor(3) as pool:
        scores = dict(pool.map(objective, range(6)))
    assert max(scores, key=scores.get) == 3, scores
    print("done")
