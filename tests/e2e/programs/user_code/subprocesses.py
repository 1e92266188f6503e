"""Programs that ranks start: another Python, a shell, one that is left behind."""

import subprocess
import sys
import time

from serverless_gpu import distributed


@distributed(gpus=2, gpu_type="CPU", quiet=True)
def work(rank=0):
    code = "import os, sys; print(os.environ['RANK'], sys.prefix)"
    said = subprocess.check_output([sys.executable, "-c", code], text=True).strip().split(maxsplit=1)
    shell = subprocess.run("echo $WORLD_SIZE; exit 3", shell=True, capture_output=True, text=True, check=False)
    subprocess.run(["echo", "a line of a program"], check=True)
    subprocess.Popen(["sleep", "600"])
    return int(said[0]) == rank, said[1] == sys.prefix, shell.stdout, shell.returncode


if __name__ == "__main__":
    start = time.monotonic()
    results = work.distributed()
    assert results == [(True, True, "2\n", 3)] * 2, results
    assert time.monotonic() - start < 300, "what a rank leaves behind does not keep the run"
    print("done")
