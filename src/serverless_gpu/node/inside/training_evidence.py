"""Tells a rank that trained by itself from one that trained with others.

A rank trained when torch has made an optimizer in it. It met others when it has joined a process group of torch's, also
one that is gone again, or has loaded a library by which ranks meet. Both are looked up in what torch leaves behind:
nothing is watched while user code runs. Ranks that train nothing, and programs, are not judged.
"""

from __future__ import annotations

import os
import sys

SWITCH = "SERVERLESS_GPU_ALONE_NOTE"

# By these ranks meet without torch's process group.
_MEETING = ("mpi4py.MPI", "ray", "horovod.torch", "torch_xla.core.xla_model", "hivemind", "optuna")


def trained_alone(world_size: int) -> bool:
    """Return whether this rank of several has trained and has never met another one."""
    if world_size < 2 or os.environ.get(SWITCH, "1") == "0":
        return False
    try:
        return _has_trained() and not _has_met()
    except Exception:  # noqa: BLE001 - user code may have put anything in the place of torch
        return False


def _has_trained() -> bool:
    """Return whether an optimizer was made: torch marks the `step` of its class then."""
    base = getattr(sys.modules.get("torch.optim.optimizer"), "Optimizer", None)
    pending = [base] if isinstance(base, type) else []
    while pending:
        kind = pending.pop()
        if getattr(vars(kind).get("step"), "hooked", False):
            return True
        pending += kind.__subclasses__()
    return False


def _has_met() -> bool:
    if any(name in sys.modules for name in _MEETING):
        return True
    distributed = getattr(sys.modules.get("torch"), "distributed", None)
    if distributed is None or not distributed.is_available():
        return False
    # torch leaves its hook when a process group is destroyed.
    return bool(distributed.is_initialized()) or "_distributed_excepthook" in getattr(
        sys.excepthook, "__qualname__", ""
    )
