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


def ask(book: SessionState, asker: DeviceRequest) -> SessionState:
    """Return the book with one more run waiting."""
    return msgspec.structs.replace(book, queue=(*book.queue, asker), idle_ns=None, warned=False)


def settle(book: SessionState) -> tuple[SessionState, tuple[str, ...]]:
    """Lend to the runs whose turn it is. Also returns the runs that have just been lent devices."""
    served: list[str] = []
    while book.queue and book.queue[0].count <= len(book.lendable):
        first, *rest = book.queue
        loans = {**book.loans, first.run_id: book.lendable[: first.count]}
        book = msgspec.structs.replace(book, queue=tuple(rest), loans=loans)
        served.append(first.run_id)
    return book, tuple(served)


def leave(book: SessionState, run_id: str, now_ns: int) -> SessionState:
    """Return the book without a run: it gave its devices back, or does not want any more."""
    loans = {holder: devices for holder, devices in book.loans.items() if holder != run_id}
    queue = tuple(asker for asker in book.queue if asker.run_id != run_id)
    idle_ns = book.idle_ns
    if idle_ns is None and not loans and not queue:
        idle_ns = now_ns
    return msgspec.structs.replace(book, loans=loans, queue=queue, idle_ns=idle_ns)


def mark_unfit(book: SessionState, unfit: Collection[str]) -> SessionState:
    """Return the book with these devices, and no others, unfit."""
    return msgspec.structs.replace(book, unfit=frozenset(unfit))


def waiting_text(book: SessionState, asker: DeviceRequest) -> str:
    """Return why a run of the session waits."""
    ahead = next((place for place, other in enumerate(book.queue) if other.run_id == asker.run_id), 0)
    parts = [f"run {holder} has {len(devices)}" for holder, devices in book.loans.items()]
    if ahead:
        parts.append(f"{ahead} {'run is' if ahead == 1 else 'runs are'} ahead in the queue")
    if book.unfit:
        parts.append(f"{', '.join(sorted(book.unfit))} in quarantine")
    return f"waiting for {asker.count} of the session's {_counted(book)}: " + "; ".join(parts)


def idle_action(book: SessionState, limit_ns: int, now_ns: int) -> tuple[SessionState, str, bool]:
    """Return what the passing of time means for a session.

    Returns the next book, a sentence for the user or "", and whether the session ends.
    """
    if book.idle_ns is None:
        return book, "", False
    idle_for_ns = now_ns - book.idle_ns
    since = format_duration_ms(idle_for_ns // 1_000_000)
    if idle_for_ns >= limit_ns:
        return book, f"the session, idle for {since}, has ended: its {_counted(book)} are given back", True
    if not book.warned and idle_for_ns >= limit_ns * _WARN_AT:
        left = format_duration_ms((limit_ns - idle_for_ns) // 1_000_000)
        sentence = f"the session has been idle for {since} and gives its {_counted(book)} back in {left}"
        return msgspec.structs.replace(book, warned=True), f"{sentence}; any call keeps it", False
    return book, "", False


def wake_ns(book: SessionState, limit_ns: int) -> int | None:
    """Return when time will mean something next, or None."""
    if book.idle_ns is None:
        return None
    return book.idle_ns + (limit_ns if book.warned else int(limit_ns * _WARN_AT))


def _counted(book: SessionState) -> str:
    count, kind = len(book.devices), book.devices[0].type
    return f"{count} {kind}" if kind != "CPU" else f"{count} CPU slot{'' if count == 1 else 's'}"
