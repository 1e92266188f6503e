"""A held session: the holders of its devices, the next in line, and when it has been idle for too long.

    ask ─▶ queue ─settle─▶ loan ─give_back─▶ idle ─▶ (warn) ─▶ (end)

What lives here: a value and the functions that return the next one. What must not: clocks, sockets, locks; the
session's process carries the decisions out (`node/supervisor/session.py`).

Runs are served in the order in which they asked: a small one does not pass a large one that waits, which would then
wait for ever. A device that could not be proven free after a run is unfit until it is inspected again.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from serverless_gpu.model.hardware import Device
from serverless_gpu.units import format_duration_ms

_WARN_AT = 0.8  # of the idle limit


class DeviceRequest(msgspec.Struct, frozen=True):
    """A run that waits for devices of the session."""

    run_id: str
    count: int


class SessionState(msgspec.Struct, frozen=True, kw_only=True):
    """Everything the next decision depends on."""

    devices: tuple[Device, ...]  # what the session holds, in LOCAL_RANK order
    idle_ns: int | None  # since when no run has or wants a device, or None
    loans: dict[str, tuple[Device, ...]] = {}  # devices by the run that has them
    queue: tuple[DeviceRequest, ...] = ()  # runs that wait, first come first served
    unfit: frozenset[str] = frozenset()  # identifiers of devices that could not be proven free
    warned: bool = False  # whether the end of the idle time was announced

    @property
    def idle(self) -> tuple[Device, ...]:
        """Return the devices no run has."""
        lent = {device.uuid for devices in self.loans.values() for device in devices}
        return tuple(device for device in self.devices if device.uuid not in lent)

    @property
    def lendable(self) -> tuple[Device, ...]:
        """Return the devices a run may have now."""
        return tuple(device for device in self.idle if device.uuid not in self.unfit)


def ask(state: SessionState, request: DeviceRequest) -> SessionState:
    """Return the state with one more run waiting."""
    return msgspec.structs.replace(state, queue=(*state.queue, request), idle_ns=None, warned=False)


def settle(state: SessionState) -> tuple[SessionState, tuple[str, ...]]:
    """Lend to the runs whose turn it is. Also returns the runs that have just been lent devices."""
    served: list[str] = []
    while state.queue and state.queue[0].count <= len(state.lendable):
        first, *rest = state.queue
        loans = {**state.loans, first.run_id: state.lendable[: first.count]}
        state = msgspec.structs.replace(state, queue=tuple(rest), loans=loans)
        served.append(first.run_id)
    return state, tuple(served)


def leave(state: SessionState, run_id: str, now_ns: int) -> SessionState:
    """Return the state without a run: it gave its devices back, or does not want any more."""
    loans = {holder: devices for holder, devices in state.loans.items() if holder != run_id}
    queue = tuple(request for request in state.queue if request.run_id != run_id)
    idle_ns = state.idle_ns
    if idle_ns is None and not loans and not queue:
        idle_ns = now_ns
    return msgspec.structs.replace(state, loans=loans, queue=queue, idle_ns=idle_ns)


def mark_unfit(state: SessionState, unfit: Collection[str]) -> SessionState:
    """Return the state with these devices, and no others, unfit."""
    return msgspec.structs.replace(state, unfit=frozenset(unfit))


def waiting_text(state: SessionState, request: DeviceRequest) -> str:
    """Return why a run of the session waits."""
    ahead = next((place for place, other in enumerate(state.queue) if other.run_id == request.run_id), 0)
    parts = [f"run {holder} has {len(devices)}" for holder, devices in state.loans.items()]
    if ahead:
        parts.append(f"{ahead} {'run is' if ahead == 1 else 'runs are'} ahead in the queue")
    if state.unfit:
        parts.append(f"{', '.join(sorted(state.unfit))} in quarantine")
    return f"waiting for {request.count} of the session's {_counted(state)}: " + "; ".join(parts)


def idle_action(state: SessionState, limit_ns: int, now_ns: int) -> tuple[SessionState, str, bool]:
    """Return what the passing of time means for a session.

    Returns the next state, a sentence for the user or "", and whether the session ends.
    """
    if state.idle_ns is None:
        return state, "", False
    idle_for_ns = now_ns - state.idle_ns
    since = format_duration_ms(idle_for_ns // 1_000_000)
    if idle_for_ns >= limit_ns:
        return state, f"the session, idle for {since}, has ended: its {_counted(state)} are given back", True
    if not state.warned and idle_for_ns >= limit_ns * _WARN_AT:
        left = format_duration_ms((limit_ns - idle_for_ns) // 1_000_000)
        sentence = f"the session has been idle for {since} and gives its {_counted(state)} back in {left}"
        return msgspec.structs.replace(state, warned=True), f"{sentence}; any call keeps it", False
    return state, "", False


def wake_ns(state: SessionState, limit_ns: int) -> int | None:
    """Return when time will mean something next, or None."""
    if state.idle_ns is None:
        return None
    return state.idle_ns + (limit_ns if state.warned else int(limit_ns * _WARN_AT))


def _counted(state: SessionState) -> str:
    count, kind = len(state.devices), state.devices[0].type
    return f"{count} {kind}" if kind != "CPU" else f"{count} CPU slot{'' if count == 1 else 's'}"
