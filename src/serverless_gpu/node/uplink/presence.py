"""Describes this node to the server: identity, devices, devices in use, attempts.

    AgentHello   at the start, after every lost connection, and if the server does not know the node
    Heartbeat    every few seconds

The node offers the devices that a local client could use. Declared devices replace real devices, and
`CUDA_VISIBLE_DEVICES` hides devices. The node reports devices in quarantine, and devices in use by other runs or users,
as unavailable. The server already knows the devices of this uplink's own attempts.
"""

from __future__ import annotations

import itertools
import os
import platform
import socket
import sys
from collections.abc import Collection, Sequence

import msgspec

from serverless_gpu.ambient import SystemClock, host, machine, new_run_id
from serverless_gpu.environment.restore.interpreters import minors
from serverless_gpu.errors import IsolationUnavailable, ServerlessGpuError, StorageError
from serverless_gpu.model.hardware import Device, DeviceKind, GpuType
from serverless_gpu.model.isolation import NONE
from serverless_gpu.model.lifecycle.attempt import Reason
from serverless_gpu.model.node_keys import NodeKeys
from serverless_gpu.model.placement import restrict
from serverless_gpu.model.xid import XidKind
from serverless_gpu.node.base.home import Home
from serverless_gpu.node.base.lock_files import held_note
from serverless_gpu.node.base.network import is_bridge, is_loopback, own_addresses
from serverless_gpu.node.base.private_files import write_private
from serverless_gpu.node.devices.gpu_gate import foreign
from serverless_gpu.node.devices.inventory import Inventory, NvmlProvider, offered
from serverless_gpu.node.devices.locks import DeviceLocks, Quarantine, holder_run_id, lock_directory
from serverless_gpu.node.devices.nvml import Usage, unknown_usage
from serverless_gpu.node.devices.reservation import find_provider, retest_quarantined
from serverless_gpu.node.isolation.levels import OfferedLevel, problem_of_cgroups
from serverless_gpu.node.spawner.client import find_spawner
from serverless_gpu.node.spawner.verbs import Spawner
from serverless_gpu.node.supervisor.gpu_faults import NodeFaults
from serverless_gpu.node.uplink.server import UplinkProfile
from serverless_gpu.version import __version__
from serverless_gpu.wire.agents import AgentHello, AttemptSeen, ClockReading, DeviceSample, Heartbeat
from serverless_gpu.wire.base import PROTOCOL

TAKES = ("renewal", "secrets", "without", "max_run", "crews", "canary", "egress", "tunnels")
"""Capabilities that this version has in addition to the first version of the protocol."""
LEFT = "left"
"""Marker file beside the profile of a machine that has left its server while its runs continue."""
_JOINED = ("ray", "node")  # Directories of `sgpu join` with and without Ray.
PYTHONS_S = 30.0
"""Longest time in seconds until the node offers a newly installed interpreter."""


class NodeOffer(msgspec.Struct, frozen=True, kw_only=True):
    """The node's current offer to the server."""

    devices: tuple[Device, ...] = ()
    own_types: tuple[GpuType, ...] = ()
    unavailable: tuple[str, ...] = ()  # UUIDs of devices that other processes use or that are in quarantine.
    draining: str = ""  # Reason why the node accepts no new runs, or "" if it accepts runs.
    degraded: str = ""  # Reason why the state of the devices is unknown, or "".
    findings: tuple[str, ...] = ()  # Further messages about the node's devices.
    problem: str = ""  # Reason why the node cannot run any attempt, or "".


class NodePresence:
    """Builds the node's messages to the server. Raises StorageError if the home is not writable."""

    def __init__(self, home: Home) -> None:
        # Identifier that distinguishes this home from another home with the same name.
        self.instance = instance_of(home)
        self.process = new_run_id()  # Identifier that distinguishes this uplink from another uplink of the same home.
        self._home = home
        self._inventory = Inventory(home)
        self._machine = NvmlProvider()
        self._clock = SystemClock()
        self._faults = NodeFaults(home, self._clock)
        self._looked_ns: int | None = None
        self._found: tuple[str, ...] = ()
        self._spawner = find_spawner(os.environ)
        self.level = _offered_level(self._spawner)

    def hello(
        self,
        profile: UplinkProfile,
        attempts: tuple[AttemptSeen, ...],
        *,
        keys: NodeKeys,
        egress_problem: str = "",
    ) -> AgentHello:
        """Return the node's hello message. The profile has its name and pool, and the session its keys."""
        offer = self.offer(attempts)
        return AgentHello(
            name=profile.name or socket.gethostname(),
            machine=machine(),
            boot_id=self._clock.boot_id(),
            version=__version__,
            protocol=PROTOCOL,
            python=f"{sys.version_info.major}.{sys.version_info.minor}",
            platform=f"{sys.platform}-{platform.machine()}",
            pythons=self._pythons(),
            instance=self.instance,
            pool=profile.pool,
            devices=offer.devices,
            own_types=offer.own_types,
            unavailable=offer.unavailable,
            draining=offer.draining,
            degraded=offer.degraded,
            findings=offer.findings,
            attempts=attempts,
            problem=offer.problem,
            takes=TAKES,
            process=self.process,
            isolation=self.level.level,
            isolation_problem=self.level.problem,
            addresses=tuple(one.address for one in own_addresses() if not is_loopback(one) and not is_bridge(one)),
            egress_problem=egress_problem,
            keys=keys,
            host=host(),
        )

    def heartbeat(
        self,
        attempts: tuple[AttemptSeen, ...],
        *,
        renew: tuple[str, ...] = (),
        clock: ClockReading | None = None,
        egress: str | None = None,
        samples: tuple[DeviceSample, ...] = (),
    ) -> Heartbeat:
        """Return a heartbeat.

        `renew` lists gangs that need another token. `clock` is the error of this node's clock, if known. `egress` and
        `samples` are as in `Heartbeat`.
        """
        offer = self.offer(attempts)
        return Heartbeat(
            devices=offer.devices,
            instance=self.instance,
            pythons=self._pythons(),
            unavailable=offer.unavailable,
            draining=offer.draining,
            degraded=offer.degraded,
            findings=offer.findings,
            attempts=attempts,
            problem=offer.problem,
            renew=renew,
            clock=clock,
            process=self.process,
            egress=egress,
            samples=samples,
        )

    def offer(self, attempts: Collection[AttemptSeen]) -> NodeOffer:
        """Return the node's current offer. Devices of `attempts` do not count as used by other runs."""
        self._inventory.refresh()
        greeting = self._inventory.greeting(__version__)
        try:
            devices = tuple(restrict(offered(greeting, os.environ), os.environ.get("CUDA_VISIBLE_DEVICES")))
            self._faults.look(devices)
            found = self._taken(devices, {attempt.run_id for attempt in attempts})
            silence = found.degraded or self._inventory.silence
            findings = (*self._faults.findings(), *self._left_behind())
            changes = {"own_types": greeting.own_types, "degraded": silence, "findings": findings}
            if not found.draining and any((self._home.root / place / LEFT).exists() for place in _JOINED):
                changes["draining"] = "the machine has left the pool: its `sgpu join` process has ended"
            return msgspec.structs.replace(found, devices=devices, **changes)
        except ServerlessGpuError as error:
            return NodeOffer(problem=str(error))

    def _left_behind(self) -> tuple[str, ...]:
        """Return the findings about principals that the sweeper of this node keeps."""
        try:
            return self._spawner.findings().findings.sentences()
        except (OSError, msgspec.MsgspecError, IsolationUnavailable):
            return ()  # `sgpu doctor` reports unreadable findings.

    def _pythons(self) -> tuple[str, ...]:
        """Return the interpreters on this node. Search periodically, because users may install interpreters."""
        now_ns = self._clock.boottime_ns()
        if self._looked_ns is None or now_ns - self._looked_ns > PYTHONS_S * 1e9:
            self._looked_ns, self._found = now_ns, minors(os.environ)
        return self._found

    def _taken(self, devices: Sequence[Device], own: Collection[str]) -> NodeOffer:
        """Return the unavailable devices, and the reason if the whole node is unavailable."""
        found: list[str] = []
        draining, degraded = "", ""
        for kind in dict.fromkeys(device.kind for device in devices):
            uuids = [device.uuid for device in devices if device.kind is kind]
            locks = DeviceLocks(lock_directory(kind, self._home.root), clock=self._clock)
            holders = {uuid: held_note(locks.directory / f"{uuid}.lock") for uuid in uuids}
            quarantined = self._quarantined(kind, locks, uuids)
            draining = draining or next(filter(None, itertools.starmap(_drains, quarantined.items())), "")
            free = [uuid for uuid in uuids if holders[uuid] is None and uuid not in quarantined]
            usage = {} if kind is DeviceKind.CPU else self._usage(kind, uuids)
            busy = {uuid for uuid in free if uuid in usage and foreign(usage[uuid]) is not None}
            degraded = degraded or next((used.problem for used in usage.values() if used.silent), "")
            for uuid in uuids:
                note = holders[uuid]
                if uuid in quarantined or uuid in busy or (note is not None and holder_run_id(note) not in own):
                    found.append(uuid)
        return NodeOffer(unavailable=tuple(found), draining=draining, degraded=degraded)

    def _quarantined(self, kind: DeviceKind, locks: DeviceLocks, uuids: list[str]) -> dict[str, Quarantine]:
        """Test quarantined devices again and return the devices that stay in quarantine.

        Without a run, no other process tests quarantined devices.
        """
        try:
            if not locks.quarantined():
                return {}
            provider = find_provider(kind, os.environ, self._home, self._machine)
            return retest_quarantined(locks, provider, uuids)
        except StorageError:
            return {}

    def _usage(self, kind: DeviceKind, uuids: list[str]) -> dict[str, Usage]:
        """Return the usage of all devices, because processes may use unlocked devices too."""
        usage = find_provider(kind, os.environ, self._home, self._machine).usage(uuids)
        return {uuid: usage.get(uuid, unknown_usage("the driver returned no usage for this device")) for uuid in uuids}


def instance_of(home: Home) -> str:
    """Return the identity of a home. Create the identity on first use.

    If a disk failure has emptied the identity's file, `instance_of` creates another identity. Raises StorageError if
    the home is not writable.
    """
    path = home.root / "instance"
    try:
        is_empty = path.exists() and not path.read_bytes().strip()
        if is_empty or not path.exists():
            # If another uplink of this home wrote the identity first, the existing file stays.
            write_private(path, new_run_id().encode(), replace=is_empty)
        return path.read_text(encoding="ascii").strip()
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error}") from error


def _offered_level(spawner: Spawner) -> OfferedLevel:
    """Return the isolation level of this node."""
    offered = spawner.measure()
    problem = "" if offered.level == NONE else problem_of_cgroups(os.environ)
    return OfferedLevel(NONE, problem) if problem else offered


def _drains(uuid: str, note: Quarantine) -> str:
    """Return why a node with an unusable device accepts no new runs, or ""."""
    if note.left:
        return f"unkillable: {note.reason}"
    return f"{Reason.GPU_LOST.value}: {uuid}: {note.reason}" if note.fault == XidKind.LOST else ""
