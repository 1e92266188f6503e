"""Settles an attempt without a supervisor under its own lock, so that none can begin it meanwhile.

    no facts                        refused: nothing of the user's ran, and nothing will
    facts, even damaged ones        its supervisor was lost; its devices' locks say when its processes are gone
    an ending, and no receipt       a receipt that says what is known

The files are what a supervisor would have written.
"""

from __future__ import annotations

from pathlib import Path

from serverless_gpu.ambient import Clock
from serverless_gpu.model.lifecycle.attempt import Reason
from serverless_gpu.node.attempt.history import first_facts
from serverless_gpu.node.attempt.server_attempt import ServerAttempt
from serverless_gpu.node.attempt.supervisor_loss import LostAttempt, settle_loss
from serverless_gpu.node.base import protocol
from serverless_gpu.node.base.home import Home
from serverless_gpu.node.base.lock_files import held_note
from serverless_gpu.node.devices.locks import MACHINE_DIRECTORIES, holder_run_id
from serverless_gpu.node.uplink.delivery import stopped_without_ranks


def still_held(home: Home, directory: Path) -> bool:
    """Return whether a process of an attempt still holds one of its devices."""
    run_id = directory.parent.name
    uuids = {uuid for fact in first_facts(directory) for uuid in fact.gpus}
    for base in (home.locks, *MACHINE_DIRECTORIES):
        for uuid in uuids:
            note = held_note(base / f"{uuid}.lock")
            if note is not None and holder_run_id(note) in (run_id, ""):
                return True
    return False


def settle(
    directory: Path, remote: ServerAttempt, detail: str, clock: Clock, *, seen_ns: int | None = None
) -> protocol.Stopped:
    """Write the missing ending and receipt, the attempt's lock being held; return how it ended.

    `detail` is why it never started, if so. `seen_ns` is the boottime at which something of it was seen last; None if
    unwatched.
    """
    # A damaged record, or a file of facts without one, is no proof that nothing began.
    may_have_begun = first_facts(directory) or remote.recovered or (directory / "facts.jsonl").exists()
    stopped = None if may_have_begun else stopped_without_ranks(Reason.REFUSED, detail, clock)
    lost = LostAttempt(
        run_id=remote.run_id,
        fence=remote.fence,
        gpu_type=remote.gpu_type,
        world_size=remote.world_size,
        tariff=remote.tariff,
    )
    return settle_loss(directory, clock, seen_ns=seen_ns, stopped=stopped, lost=lost)
