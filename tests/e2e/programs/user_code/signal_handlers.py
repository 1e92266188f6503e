"""Handlers that ranks install: an alarm, a user signal, and SIGTERM with a checkpoint when the run is cancelled."""

import os
import signal
import time

from serverless_gpu import distributed
from serverless_gpu.errors import RunCancelled


@distributed(gpus=2, gpu_type="CPU", quiet=True)
def handle():
    seen = []
    signal.signal(signal.SIGUSR1, lambda number, frame: seen.append(number))
    signal.signal(signal.SIGALRM, lambda number, frame: seen.append(number))
    os.kill(os.getpid(), signal.SIGUSR1)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    while len(seen) < 2:
        time.sleep(0.01)
    return [signal.Signals(number).name for number in seen]


@distributed(gpus=2, gpu_type="CPU", quiet=True, grace=30)
def train(rank=0):
    def save(number, frame):
        with open(f"saved-{rank}", "w") as file:
            file.write(signal.Signals(number).name)
        raise SystemExit(0)

    signal.signal(signal.SIGTERM, save)
    open(f"started-{rank}", "w").close()
    while True:
        time.sleep(0.05)


if __name__ == "__main__":
    assert handle.distributed() == [["SIGUSR1", "SIGALRM"]] * 2
    run = train.submit()
    while not all(os.path.exists(f"started-{rank}") for rank in range(2)):
        time.sleep(0.01)
    run.cancel()
    try:
        run.results()
    except RunCancelled:
        pass
    else:
        raise AssertionError("a cancelled run has no results")
    for rank in range(2):
        with open(f"saved-{rank}") as file:
            assert file.read() == "SIGTERM"
    print("done")
