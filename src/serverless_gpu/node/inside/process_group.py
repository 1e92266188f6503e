"""torch's process group that a rank joins before its function, for `init="nccl"` or `"gloo"`.

    pass the gate ──▶ join() ──▶ function(*args) ──▶ store the result ──▶ others have returned ──▶ leave()

Failure cases: torch is not installed (its ImportError, with a note); the function destroys the group itself (`leave`
does nothing); the function fails (the group stays as it is: the peers may stand in a collective, and the process ends).
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys

VARIABLE = "SGPU_PROCESS_GROUP"
_NO_TORCH = "init= makes a process group of torch: install torch in this environment, or leave init= out"


def join() -> bool:
    """Join the process group that the call asks for; return whether this rank made one."""
    backend = os.environ.get(VARIABLE)
    if not backend:
        return False
    try:
        torch = importlib.import_module("torch")
        dist = importlib.import_module("torch.distributed")
    except ImportError as error:
        error.add_note(_NO_TORCH)
        raise
    if dist.is_initialized():  # a module of the call did it on import
        return False
    if backend == "nccl":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))  # else all ranks of a node share the first GPU
    dist.init_process_group(backend)
    return True


def leave() -> None:
    """Destroy the process group, unless the function did."""
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_initialized():
        with contextlib.suppress(Exception):  # the result is stored: a peer that is gone changes nothing
            dist.destroy_process_group()
