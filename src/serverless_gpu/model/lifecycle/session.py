"""Sessions hold devices, allocate the devices to their runs in order, and end after an idle limit.

    ask ─▶ queue ─settle─▶ loan ─give_back─▶ idle ─▶ (warn) ─▶ (end)

The module contains only values and pure functions, without clocks, sockets or locks. The session process
(`node/supervisor/session.py`) executes the decisions of this module.

The session serves runs in the order of their requests. A small run never overtakes a large run, because the large run
could otherwise wait forever. A device stays unfit until the next inspection if the node could not prove the device's
release.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from serverless_gpu.model.hardware import Device
from serverless_gpu.units import format_duration_ms

_WARN_AT = 0.8  # Fraction of the idle limit after which the session warns.


class DeviceRequest(msgspec.Struct, frozen=True):
    """A run that waits for devices of the session."""

    run_id: str
    count: int


class SessionState(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a session, with all inputs for its next decision."""

    devices: tuple[Device, ...]  # All devices of the session, in LOCAL_RANK order.
    idle_ns: int | None  # Start of the idle time, or None while a run has or awaits devices.
    loans: dict[str, tuple[Device, ...]] = {}  # Run → allocated devices.
    queue: tuple[DeviceRequest, ...] = ()  # Waiting runs in the order of their requests.
    unfit: frozenset[str] = frozenset()  # Identifiers of devices whose release the node could not prove.
    warned: bool = False  # True after the session has warned the user about its approaching end.

    @property
    def idle(self) -> tuple[Device, ...]:
        """Return the session devices that no run uses."""
        lent = {device.uuid for devices in self.loans.values() for device in devices}
        return tuple(device for device in self.devices if device.uuid not in lent)

    @property
    def lendable(self) -> tuple[Device, ...]:
        """Return the devices that the session can allocate to a run now."""
        return tuple(device for device in self.idle if device.uuid not in self.unfit)


def ask(state: SessionState, request: DeviceRequest) -> SessionState:
    """Return the session's state with another waiting run."""
    return msgspec.structs.replace(state, queue=(*state.queue, request), idle_ns=None, warned=False)


def settle(state: SessionState) -> tuple[SessionState, tuple[str, ...]]:
    """Allocate devices to queued runs, and return the next state and the runs that received devices."""
    served: list[str] = []
    while state.queue and state.queue[0].count <= len(state.lendable):
        first, *rest = state.queue
        loans = {**state.loans, first.run_id: state.lendable[: first.count]}
        state = msgspec.structs.replace(state, queue=tuple(rest), loans=loans)
        served.append(first.run_id)
    return state, tuple(served)


def leave(state: SessionState, run_id: str, now_ns: int) -> SessionState:
    """Return the session's state without a run that released its devices or stopped waiting."""
    loans = {holder: devices for holder, devices in state.loans.items() if holder != run_id}
    queue = tuple(request for request in state.queue if request.run_id != run_id)
    idle_ns = state.idle_ns
    if idle_ns is None and not loans and not queue:
        idle_ns = now_ns
    return msgspec.structs.replace(state, loans=loans, queue=queue, idle_ns=idle_ns)


def mark_unfit(state: SessionState, unfit: Collection[str]) -> SessionState:
    """Return the session's state with exactly the given devices marked as unfit."""
    return msgspec.structs.replace(state, unfit=frozenset(unfit))


def waiting_text(state: SessionState, request: DeviceRequest) -> str:
    """Return the reason why a run of the session waits."""
    ahead = next((place for place, other in enumerate(state.queue) if other.run_id == request.run_id), 0)
    parts = [f"run {holder} has {len(devices)}" for holder, devices in state.loans.items()]
    if ahead:
        parts.append(f"{ahead} {'run is' if ahead == 1 else 'runs are'} ahead in the queue")
    if state.unfit:
        parts.append(f"{', '.join(sorted(state.unfit))} in quarantine")
    return f"waiting for {request.count} of the session's {_counted(state)}: " + "; ".join(parts)


def idle_action(state: SessionState, limit_ns: int, now_ns: int) -> tuple[SessionState, str, bool]:
    """Decide whether an idle session warns its user, ends or continues.

    Returns the next state, a message for the user or "", and True if the session ends.
    """
    if state.idle_ns is None:
        return state, "", False
    idle_for_ns = now_ns - state.idle_ns
    since = format_duration_ms(idle_for_ns // 1_000_000)
    if idle_for_ns >= limit_ns:
        return state, f"the session ended after it was idle for {since}: it released its {_counted(state)}", True
    if not state.warned and idle_for_ns >= limit_ns * _WARN_AT:
        left = format_duration_ms((limit_ns - idle_for_ns) // 1_000_000)
        sentence = f"the session has been idle for {since} and will release its {_counted(state)} in {left}"
        return (
            msgspec.structs.replace(state, warned=True),
            f"{sentence}. Call a function of the session to keep the devices",
            False,
        )
    return state, "", False


def wake_ns(state: SessionState, limit_ns: int) -> int | None:
    """Return the time at which an idle session next warns or ends, or None while a run uses the session."""
    if state.idle_ns is None:
        return None
    return state.idle_ns + (limit_ns if state.warned else int(limit_ns * _WARN_AT))


def _counted(state: SessionState) -> str:
    count, kind = len(state.devices), state.devices[0].type
    return f"{count} {kind}" if kind != "CPU" else f"{count} CPU slot{'' if count == 1 else 's'}"
