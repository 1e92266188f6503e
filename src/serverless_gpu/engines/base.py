"""The interface of engines: an engine knows nodes, and gets an agent running on those of a gang. It decides nothing.

    scheduler ── plan(gang) ─▶ Request ── submit ─▶ Placed | Waiting | Impossible
              ── release(gang) ─▶
    reconciler ── recover() at the start · events() ─▶ NodeUp, NodeLost

What an engine places is started by the agent of that node, which dials the server (`wire/agents.py`); the engine
does not carry orders, logs or results. The liveness of an attempt is its lease with the server: `NodeLost` means "stop
counting on it", never "it is dead", and an engine's own restart ends nothing.

`testing/engines.py`, shipped as `serverless_gpu.testing.engines`, is what every engine has to pass.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence

import msgspec

from serverless_gpu.model.hardware import Device


class EngineNode(msgspec.Struct, frozen=True, kw_only=True):
    """A node as its engine knows it: before its agent has said anything."""

    name: str
    devices: tuple[Device, ...] = ()


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """How many devices of a type a gang has on one node."""

    node: str
    gpu_type: str
    count: int


class Gang(msgspec.Struct, frozen=True, kw_only=True):
    """All ranks of one attempt, as the scheduler wants them placed: whole, or not at all.

    Attributes:
        id: `run:fence`; the same identifier is the same gang, however often it is submitted.
    """

    id: str
    shares: tuple[Share, ...]


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine would do for a gang, as a value.

    Attributes:
        text: for people: `sgpu submit --dry-run` prints it, golden tests read it.
    """

    gang: Gang
    text: str


class Placed(msgspec.Struct, frozen=True, kw_only=True):
    """The gang's nodes are reserved and have agents, or will have within seconds."""

    gang: Gang


class Waiting(msgspec.Struct, frozen=True, kw_only=True):
    """Not now; the sentence says what for. Submit again later."""

    sentence: str


class Impossible(msgspec.Struct, frozen=True, kw_only=True):
    """Never; the sentence says why."""

    sentence: str


class NodeUp(msgspec.Struct, frozen=True, kw_only=True):
    """A node can be counted on."""

    node: EngineNode


class NodeLost(msgspec.Struct, frozen=True, kw_only=True):
    """A node is not to be counted on; what runs there may well go on."""

    node: str
    sentence: str


class Engine(abc.ABC):
    """One place for gangs. Every method returns soon and may be called from any thread.

    Attributes:
        queues: whether `Waiting` gangs keep a place in a queue of the engine's own.
    """

    queues: bool = False

    @abc.abstractmethod
    def nodes(self) -> Sequence[EngineNode]:
        """Return the nodes that can be counted on now."""

    @abc.abstractmethod
    def has(self, node: str) -> bool:
        """Return whether a node is one of this engine's, which reserves what runs there, lost or not."""

    @abc.abstractmethod
    def plan(self, gang: Gang) -> Request:
        """Return what `submit` would do; pure."""

    @abc.abstractmethod
    def submit(self, request: Request) -> Placed | Waiting | Impossible:
        """Reserve all nodes of a gang and get an agent running on each; again for the same gang changes nothing."""

    @abc.abstractmethod
    def release(self, gang: str) -> None:
        """Give a gang's nodes back; nothing happens when they were given back before, or never reserved."""

    @abc.abstractmethod
    def recover(self) -> Sequence[str]:
        """Return the gangs that are reserved, after this process was restarted."""

    @abc.abstractmethod
    def events(self) -> Sequence[NodeUp | NodeLost]:
        """Return what has changed since the last call, in order."""

    @abc.abstractmethod
    def close(self) -> None:
        """Leave everything as it is, and hold nothing more here."""
