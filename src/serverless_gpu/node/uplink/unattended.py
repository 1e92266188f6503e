"""What becomes of an attempt that no supervisor looks after: decided under the attempt's own lock, so that none can
come and begin it meanwhile.

    nobody ever had it (no facts)   refused: nothing of the user's ran, and nothing will
    facts, and no ending            its supervisor was lost; its devices' locks say when its processes are gone
    an ending, and no receipt       a receipt that says what is known

Written like a supervisor would have written it, so that whoever reads the directory need not know.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from serverless_gpu.ambient import Clock
from serverless_gpu.model.attempt import MEANINGS, Failure, Reason
from serverless_gpu.model.facts import Fact, FactKind
from serverless_gpu.model.hardware import DeviceKind
from serverless_gpu.model.receipt import Receipt, Segments
from serverless_gpu.node import protocol
from serverless_gpu.node.account import reckon, write_json
from serverless_gpu.node.flocks import held_note
from serverless_gpu.node.history import first_facts, meter_of, read_ending, read_price, read_receipt, spec_of
from serverless_gpu.node.home import Home
from serverless_gpu.node.locks import MACHINE_DIRECTORIES, Holder
from serverless_gpu.node.remote import Remote
from serverless_gpu.serialized import from_json

_COUNTED = "the time is counted up to the last sign of life of the run's supervisor; how much more it was is not known"


def refusal(detail: str, clock: Clock) -> protocol.Stopped:
    """Return the ending of an attempt that this node has not started.

    Args:
        detail: why.
        clock: where time comes from.
    """
    return _stopped(Reason.REFUSED, detail, clock)


def lost_upload(detail: str, clock: Clock) -> protocol.Stopped:
    """Return the ending of an attempt whose results could not be sent."""
    return _stopped(Reason.RESULT_UPLOAD, detail, clock)


def cancelled_upload(detail: str, clock: Clock) -> protocol.Stopped:
    """Return the ending of an attempt that was cancelled while its results were sent."""
    return _stopped(Reason.CANCELLED, detail, clock)


def still_held(home: Home, directory: Path) -> bool:
    """Return whether a process of an attempt still holds one of its devices."""
    run_id = directory.parent.name
    uuids = {uuid for fact in first_facts(directory) for uuid in fact.gpus}
    for base in (home.locks, *MACHINE_DIRECTORIES):
        for uuid in uuids:
            note = held_note(base / f"{uuid}.lock")
            if note is not None and _holder(note) in (run_id, ""):
                return True
    return False


def settle(directory: Path, remote: Remote, detail: str, clock: Clock) -> protocol.Stopped:
    """Write the ending and the receipt that are missing; the attempt's lock is held.

    Args:
        directory: of the attempt.
        remote: whose it is.
        detail: why it was never started, if it was not.
        clock: where time comes from.

    Returns:
        How it ended.
    """
    facts = first_facts(directory)
    stopped = read_ending(directory)
    if stopped is None:
        stopped = _stopped(Reason.SUPERVISOR_LOST, "", clock) if facts else refusal(detail, clock)
        write_json(directory / "stopped.json", stopped)
    if read_receipt(directory) is None:
        write_json(directory / "receipt.json", _receipt(directory, remote, stopped, facts))
    return stopped


def _stopped(reason: Reason, detail: str, clock: Clock) -> protocol.Stopped:
    cause = Failure(rank=None, reason=reason, at_ns=clock.boottime_ns(), detail=detail) if detail else None
    return protocol.Stopped(state=MEANINGS[reason].state, reason=reason, cause=cause, consequences=())


def _receipt(directory: Path, remote: Remote, stopped: protocol.Stopped, facts: list[Fact]) -> Receipt:
    gpus = tuple(dict.fromkeys(uuid for fact in facts for uuid in fact.gpus))
    unknown = "not known: the run's supervisor ended before it could look"
    meter, count = meter_of(directory)
    _, launched = read_price(directory)
    tariff = launched or remote.tariff
    gpu_ms, micros, bill = reckon(meter, tariff, stopped.reason)
    spec = spec_of(directory)
    return Receipt(
        run_id=remote.run_id,
        fence=remote.fence,
        state=stopped.state.value,
        reason=stopped.reason.value,
        gpu_type=remote.gpu_type,
        gpus=gpus,
        kind=_kind(gpus),
        segments=Segments(),
        gpu_ms=gpu_ms,
        micros=micros,
        currency=tariff.currency,
        peak_memory_bytes=None,
        warm=False,
        warm_reason="not known",
        gate=unknown if gpus else "nothing was taken",
        quarantined=(),
        tags=spec.tags if spec is not None else {},
        facts=count,
        world_size=remote.world_size,
        notes=(_COUNTED,) if any(fact.kind is FactKind.EXEC for fact in facts) else (),
        policy=(spec.policy or "") if spec is not None else "",
        bill=bill,
    )


def _kind(gpus: tuple[str, ...]) -> DeviceKind:
    if gpus and gpus[0].startswith("FAKE-"):
        return DeviceKind.FAKE
    return DeviceKind.GPU if gpus and gpus[0].startswith("GPU-") else DeviceKind.CPU


def _holder(note: bytes) -> str:
    try:
        return from_json(note, Holder).run_id
    except msgspec.MsgspecError:
        return ""
