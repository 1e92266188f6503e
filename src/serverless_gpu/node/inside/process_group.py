"""Joins and leaves torch's process group around a rank's function.

Detects ranks that train without communicating.

    pass_gate() ──▶ join() ──▶ function(*args) ──▶ store the result ──▶ peers have returned ──▶ leave()
                    init="nccl" or "gloo" only     trained_alone()

The gate prevents connection retries in torch. In `init_process_group`, rank 0 listens on MASTER_PORT. The other ranks
connect to rank 0. PyTorch retries a refused connection only after about half a second. Without the gate, 2 % of the
launches took 500 ms instead of 30 ms. Ranks on the same node therefore wait at a pipe until rank 0 has entered the
function. After the entry of rank 0, the other ranks of its node wait up to 20 ms for rank 0 to listen on the port.
Ranks on other nodes wait only at the pipe, because they cannot check the port of rank 0.

Failure cases:

* If torch is not installed, `join` adds a note to the ImportError.
* If the user's function destroys the process group, `leave` does nothing.
* If the user's function fails, the rank keeps the process group, because peers may be in a collective.
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
_NO_TORCH = "init= requires torch. Install torch in this environment, or remove init="


_GATE_WAIT_NS = 20_000_000
_GATE_LOOK_S = 0.0005
ALONE_NOTE_SWITCH = "SERVERLESS_GPU_ALONE_NOTE"
# Libraries that let ranks communicate without a torch process group.
_MEETING = ("mpi4py.MPI", "ray", "horovod.torch", "torch_xla.core.xla_model", "hivemind", "optuna")


def pass_gate(gate: int | None, local_rank: int, local_world_size: int, *, has_store: bool) -> None:
    """Wait until this rank may enter the user's function.

    `has_store` means that rank 0 is on this node. `gate` is a pipe whose writing end belongs to the
    node's first rank. The node's other ranks have the reading end. If `gate` is None, the function returns at once.
    """
    if gate is None:
        return
    if local_rank == 0:
        os.write(gate, protocol.now_ns().to_bytes(8, "big") * (local_world_size - 1))
    else:
        # The read returns no bytes if the first rank has ended.
        entered = os.read(gate, 8)
        if entered and has_store and "torch" in sys.modules:
            until_ns, port = int.from_bytes(entered, "big") + _GATE_WAIT_NS, int(os.environ.get("MASTER_PORT", "0"))
            while protocol.now_ns() < until_ns and not _listening(port):
                select.select([], [], [], _GATE_LOOK_S)
    os.close(gate)


def _listening(port: int) -> bool:
    """Return True if a process listens on a port.

    The function tries to bind the port, because a test connection would disturb torch's store.

    The supervisor keeps the port bound with SO_REUSEADDR. A second bind with SO_REUSEADDR succeeds only while no
    process listens on the port.
    """
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as sock:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(("::", port))
    # Without IPv6, ranks do not wait for the port, because the check cannot detect a listening process.
    except OSError:
        return True
    return False


def join() -> bool:
    """Join the process group that the call requests. Return True if `join` created the process group."""
    backend = os.environ.get(PROCESS_GROUP_VARIABLE)
    if not backend:
        return False
    try:
        torch = importlib.import_module("torch")
        dist = importlib.import_module("torch.distributed")
    except ImportError as error:
        error.add_note(_NO_TORCH)
        raise
    if dist.is_initialized():  # A module that the call imports has created the process group.
        return False
    if backend == "nccl":
        # Without `set_device`, all ranks of a node would share the first GPU.
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group(backend)
    return True


def leave() -> None:
    """Destroy the process group, unless the user's function has already destroyed the group."""
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_initialized():
        # A lost peer cannot change the outcome, because the rank has already stored the result.
        with contextlib.suppress(Exception):
            dist.destroy_process_group()


def trained_alone(world_size: int) -> bool:
    """Return True if this rank has trained without communicating with another rank of the attempt.

    A rank has trained if torch created an optimizer in the rank's process. A rank has communicated if it ever joined a
    torch process group or loaded a library listed in `_MEETING`. To avoid instrumentation of user code, the check reads
    torch's state after the function has returned. The check ignores programs and ranks that create no optimizer.
    """
    if world_size < 2 or os.environ.get(ALONE_NOTE_SWITCH, "1") == "0":
        return False
    try:
        return _has_trained() and not _has_met()
    except Exception:  # noqa: BLE001 - user code may have replaced torch with any object
        return False


def _has_trained() -> bool:
    """Return whether torch has created an optimizer, which marks the `step` method of its class."""
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
    # Destroying a process group does not remove torch's exception hook.
    return bool(distributed.is_initialized()) or "_distributed_excepthook" in getattr(
        sys.excepthook, "__qualname__", ""
    )
