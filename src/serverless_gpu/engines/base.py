"""Defines the engine interface.

    scheduler ── plan(gang) ─▶ Request ── submit ─▶ Placed | Waiting | Impossible
              ── release(gang) ─▶
    reconciler ── recover() at the start · events() ─▶ NodeUp, NodeLost

An engine lists nodes, and starts an agent on each node of a gang. An engine makes no scheduling decisions. Each agent
connects to the server (`wire/agents.py`) and starts its node's ranks. Orders, logs and results bypass the engine.

An attempt is alive while it holds its lease from the server. After a `NodeLost` event, the scheduler must not use the
lost node, although the node's attempts may continue. Attempts survive an engine restart.

Every engine must pass the public test suite `serverless_gpu.testing.engines`.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence

import msgspec

from serverless_gpu.model.hardware import Device


class EngineNode(msgspec.Struct, frozen=True, kw_only=True):
    """Description of a node before the node's agent connects to the server.

    Attributes:
        endpoints: addresses (``HOST:PORT``) at which the engine's own processes listen on the node.
    """

    name: str
    devices: tuple[Device, ...] = ()
    endpoints: tuple[str, ...] = ()


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """Number of devices of one type that a gang uses on one node."""

    node: str
    gpu_type: str
    count: int


class Gang(msgspec.Struct, frozen=True, kw_only=True):
    """All ranks of one attempt, which the engine places together or not at all.

    Attributes:
        id: text of the form `run:fence`. An engine treats two submissions with the same identifier as one gang.
    """

    id: str
    shares: tuple[Share, ...]


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """Description of the reservation that an engine would make for a gang.

    Attributes:
        text: description for people, which `sgpu submit --dry-run` prints.
    """

    gang: Gang
    text: str


class Placed(msgspec.Struct, frozen=True, kw_only=True):
    """Answer for a gang after the engine has reserved its nodes. The nodes' agents start within seconds."""

    gang: Gang


class Waiting(msgspec.Struct, frozen=True, kw_only=True):
    """Answer for a gang that must wait for the reason in `sentence`.

    The scheduler submits the gang again later.
    """

    sentence: str


class Impossible(msgspec.Struct, frozen=True, kw_only=True):
    """Answer for a gang that the engine can never place. `sentence` states the reason."""

    sentence: str


class NodeUp(msgspec.Struct, frozen=True, kw_only=True):
    """Reports that the scheduler can use a node."""

    node: EngineNode


class NodeLost(msgspec.Struct, frozen=True, kw_only=True):
    """Reports that the scheduler must not use a node, although the node's attempts may continue."""

    node: str
    sentence: str


class Engine(abc.ABC):
    """A cluster or machine that can run gangs.

    Engine methods return quickly and are thread-safe.

    Attributes:
        queues: True if the engine puts `Waiting` gangs into its own queue.
    """

    queues: bool = False

    @abc.abstractmethod
    def nodes(self) -> Sequence[EngineNode]:
        """Return the nodes that the scheduler can use now."""

    @abc.abstractmethod
    def has(self, node: str) -> bool:
        """Return True if a node belongs to this engine, even if the node is lost."""

    @abc.abstractmethod
    def plan(self, gang: Gang) -> Request:
        """Return the reservation that `submit` would make, without side effects."""

    @abc.abstractmethod
    def submit(self, request: Request) -> Placed | Waiting | Impossible:
        """Reserve all nodes of a gang and start an agent on each node. Repeated calls have no effect."""

    @abc.abstractmethod
    def release(self, gang: str) -> None:
        """Release the nodes of a gang, or do nothing for a gang without a reservation."""

    @abc.abstractmethod
    def recover(self) -> Sequence[str]:
        """Return the gangs that still have reservations after a server restart."""

    @abc.abstractmethod
    def events(self) -> Sequence[NodeUp | NodeLost]:
        """Return the node events since the last call, oldest first."""

    @abc.abstractmethod
    def close(self) -> None:
        """Free the engine's resources in the server process, but preserve reservations and agents."""
