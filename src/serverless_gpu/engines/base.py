"""Defines the interface of engines. An engine lists nodes and starts an agent on each node of a gang.

    scheduler ── plan(gang) ─▶ Request ── submit ─▶ Placed | Waiting | Impossible
              ── release(gang) ─▶
    reconciler ── recover() at the start · events() ─▶ NodeUp, NodeLost

An engine makes no scheduling decisions. The agent of a node starts the gang that the engine placed on the node. The
agent connects to the server (`wire/agents.py`). The engine transfers no orders, logs or results.

The lease with the server decides whether an attempt is alive. After `NodeLost`, the scheduler must not use the node.
The node's attempts may continue. A restart of an engine ends no attempt.

Every engine must pass the suite `testing/engines.py`, which is shipped as `serverless_gpu.testing.engines`.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence

import msgspec

from serverless_gpu.model.hardware import Device


class EngineNode(msgspec.Struct, frozen=True, kw_only=True):
    """A node as the engine describes it before the node's agent connects."""

    name: str
    devices: tuple[Device, ...] = ()


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """The number of devices of one type that a gang has on one node."""

    node: str
    gpu_type: str
    count: int


class Gang(msgspec.Struct, frozen=True, kw_only=True):
    """All ranks of one attempt. The engine places all ranks or none.

    Attributes:
        id: text of the form `run:fence`. An engine treats two submissions with the same identifier as one gang.
    """

    id: str
    shares: tuple[Share, ...]


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """The reservation that an engine would make for a gang, as a value.

    Attributes:
        text: description for people, which `sgpu submit --dry-run` prints.
    """

    gang: Gang
    text: str


class Placed(msgspec.Struct, frozen=True, kw_only=True):
    """The engine has reserved the gang's nodes. The nodes' agents run or start within seconds."""

    gang: Gang


class Waiting(msgspec.Struct, frozen=True, kw_only=True):
    """The engine cannot place the gang now, for the reason in `sentence`. The scheduler retries later."""

    sentence: str


class Impossible(msgspec.Struct, frozen=True, kw_only=True):
    """The engine can never place the gang, for the reason in `sentence`."""

    sentence: str


class NodeUp(msgspec.Struct, frozen=True, kw_only=True):
    """Reports that the scheduler can use a node."""

    node: EngineNode


class NodeLost(msgspec.Struct, frozen=True, kw_only=True):
    """Reports that the scheduler must not use a node. The node's attempts may continue."""

    node: str
    sentence: str


class Engine(abc.ABC):
    """A cluster or machine that can run gangs.

    Methods return without long waits. Any thread may call a method.

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
        """Reserve all nodes of a gang and start an agent on each node. A repeated call changes nothing."""

    @abc.abstractmethod
    def release(self, gang: str) -> None:
        """Release the nodes of a gang. Do nothing if the gang has no reservation."""

    @abc.abstractmethod
    def recover(self) -> Sequence[str]:
        """Return the gangs that have reservations after a restart of this process."""

    @abc.abstractmethod
    def events(self) -> Sequence[NodeUp | NodeLost]:
        """Return the node changes since the last call, oldest first."""

    @abc.abstractmethod
    def close(self) -> None:
        """Free the engine's resources in this process. Reservations and agents remain."""
