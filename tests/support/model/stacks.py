"""Helpers of the tests of stacks that other tests use as well."""

from __future__ import annotations

from serverless_gpu.model.hangs.stacks import StackFrame

TORCH = "/venv/lib/python3.11/site-packages/torch"
STANDARD = "/usr/lib/python3.11"
USER = ("/home/me/train.py", 30, "train")


def frames(*calls: tuple[str, int, str]) -> tuple[StackFrame, ...]:
    return tuple(StackFrame(*call) for call in calls)


WRAPPER = (f"{TORCH}/distributed/c10d_logger.py", 83, "wrapper")
ALL_REDUCE = ((f"{TORCH}/distributed/distributed_c10d.py", 3252, "all_reduce"), WRAPPER, USER)
BARRIER = ((f"{TORCH}/distributed/distributed_c10d.py", 5356, "barrier"), WRAPPER, USER)
BACKWARD = (
    (f"{TORCH}/autograd/graph.py", 979, "_engine_run_backward"),
    (f"{TORCH}/autograd/__init__.py", 395, "backward"),
    (f"{TORCH}/_tensor.py", 623, "backward"),
    USER,
)
USERS_FORWARD = (
    ("/home/me/model.py", 12, "forward"),
    (f"{TORCH}/nn/modules/module.py", 1773, "_call_impl"),
    (f"{TORCH}/distributed/fsdp/fully_sharded_data_parallel.py", 839, "forward"),
    (f"{TORCH}/nn/parallel/distributed.py", 1661, "forward"),
    USER,
)
LOADER = (
    (f"{STANDARD}/selectors.py", 415, "select"),
    (f"{STANDARD}/multiprocessing/connection.py", 947, "wait"),
    (f"{STANDARD}/multiprocessing/queues.py", 113, "get"),
    (f"{TORCH}/utils/data/dataloader.py", 1291, "_try_get_data"),
    (f"{TORCH}/utils/data/dataloader.py", 725, "__next__"),
    USER,
)
SLEEP = (USER,)
ACCEPT = ((f"{STANDARD}/socket.py", 294, "accept"), USER)
EVENT = ((f"{STANDARD}/threading.py", 331, "wait"), (f"{STANDARD}/threading.py", 629, "wait"), USER)
CHILD = ((f"{STANDARD}/subprocess.py", 2004, "_try_wait"), (f"{STANDARD}/subprocess.py", 550, "run"), USER)

OWN = "/venv/lib/python3.11/site-packages/serverless_gpu/node/inside/"
