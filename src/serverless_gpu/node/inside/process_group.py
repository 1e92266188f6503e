"""torch's process group around a rank's function: the gate before it, joining and leaving it, who trained alone.

    pass_gate() ──▶ join() ──▶ function(*args) ──▶ store the result ──▶ others have returned ──▶ leave()
                    init="nccl" or "gloo" only     trained_alone()

The gate: `init_process_group` has rank 0 listen on MASTER_PORT and the others connect to it. torch retries a refused
connection after about half a second: a launch of 30 ms becomes one of 500, for one call in fifty. So the others of its
node wait at a pipe until rank 0 has entered, and then until the port listens, 20 ms at most. On other nodes the port
cannot be seen, and ranks wait only at the pipe.

Failure cases: torch is not installed (its ImportError, with a note); the function destroys the group itself (`leave`
does nothing); the function fails (the group stays as it is: the peers may stand in a collective, and the process ends).
"""

from __future__ import annotations

import contextlib
import importlib
import os
import select
import socket
import sys

from . import protocol

PROCESS_GROUP_VARIABLE = "SGPU_PROCESS_GROUP"
_NO_TORCH = "init= makes a process group of torch: install torch in this environment, or leave init= out"


_GATE_WAIT_NS = 20_000_000
_GATE_LOOK_S = 0.0005
ALONE_NOTE_SWITCH = "SERVERLESS_GPU_ALONE_NOTE"
# By these ranks meet without torch's process group.
_MEETING = ("mpi4py.MPI", "ray", "horovod.torch", "torch_xla.core.xla_model", "hivemind", "optuna")


def pass_gate(gate: int | None, local_rank: int, local_world_size: int, *, has_store: bool) -> None:
    """Return when this rank may enter the function; `has_store` says that rank 0 is on this node.

    `gate` is a pipe: the node's first rank has its writing end, the others the reading end; None needs no wait.
    """
    if gate is None:
        return
    if local_rank == 0:
        os.write(gate, protocol.now_ns().to_bytes(8, "big") * (local_world_size - 1))
    else:
        entered = os.read(gate, 8)  # empty when the first is gone: then there is nothing to wait for
        if entered and has_store and "torch" in sys.modules:
            until_ns, port = int.from_bytes(entered, "big") + _GATE_WAIT_NS, int(os.environ.get("MASTER_PORT", "0"))
            while protocol.now_ns() < until_ns and not _listening(port):
                select.select([], [], [], _GATE_LOOK_S)
    os.close(gate)


def _listening(port: int) -> bool:
    """Return whether a port listens, without connecting, which would disturb the store.

    A port that is merely bound, as the supervisor keeps it, can be bound again with SO_REUSEADDR.
    """
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as sock:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(("::", port))
    except OSError:  # also where there is no IPv6: better not to wait than to wait in vain
        return True
    return False


def join() -> bool:
    """Join the process group that the call asks for; return whether this rank made one."""
    backend = os.environ.get(PROCESS_GROUP_VARIABLE)
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


def trained_alone(world_size: int) -> bool:
    """Return whether this rank of several has trained and has never met another one.

    It trained when torch has made an optimizer in it. It met others when it has joined a process group of torch's, also
    one that is gone again, or has loaded a library by which ranks meet. Both are looked up in what torch leaves behind:
    nothing is watched while user code runs. Ranks that train nothing, and programs, are not judged.
    """
    if world_size < 2 or os.environ.get(ALONE_NOTE_SWITCH, "1") == "0":
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
