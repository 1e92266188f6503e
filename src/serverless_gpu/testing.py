"""Fakes and helpers for testing code that uses serverless-gpu, and for our own tests.

FakeGpus(home)         declared GPUs whose processes and memory a test decides
FakeClock()            a clock that a test moves
agent_status(home)     what the agent of a home looks after
stop_agent(home)       end that agent, and everything it keeps warm
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections.abc import Mapping
from pathlib import Path

import msgspec

from serverless_gpu.client.connection import running_agent
from serverless_gpu.errors import AgentUnavailable
from serverless_gpu.node import protocol
from serverless_gpu.node.home import Home

__all__ = ["FakeClock", "FakeGpus", "agent_status", "stop_agent"]

_END_S = 10.0


class FakeGpus:
    """Declared GPUs of one home, as `SERVERLESS_GPU_FAKE` names them, in a state that a test decides.

    Args:
        home: the home directory.
    """

    def __init__(self, home: Path) -> None:
        self._path = home / "fake_gpus.json"
        self._state: dict[str, dict[str, object]] = {}

    def set(self, uuid: str, *, memory_used_bytes: int = 0, processes: Mapping[int, int] | None = None) -> None:
        """Say what NVML would say about one GPU from now on.

        Args:
            uuid: for example ``"FAKE-H100-0"``.
            memory_used_bytes: memory in use.
            processes: bytes held, by pid.
        """
        listed = [{"pid": pid, "memory_bytes": held} for pid, held in (processes or {}).items()]
        self._state[uuid] = {"memory_used_bytes": memory_used_bytes, "processes": listed}
        self._write()

    def clear(self, uuid: str) -> None:
        """Let a GPU be idle again."""
        self._state.pop(uuid, None)
        self._write()

    def _write(self) -> None:
        temporary = self._path.with_suffix(".tmp")
        temporary.write_bytes(msgspec.json.encode(self._state))
        temporary.replace(self._path)


class FakeClock:
    """A clock that stands still until a test moves it."""

    def __init__(self, *, boottime_ns: int = 1_000_000_000_000, wall_ns: int = 1_800_000_000_000_000_000) -> None:
        self._boottime_ns = boottime_ns
        self._wall_ns = wall_ns

    def advance(self, seconds: float) -> None:
        """Move both clocks forward."""
        self._boottime_ns += round(seconds * 1e9)
        self._wall_ns += round(seconds * 1e9)

    def boottime_ns(self) -> int:
        """Return nanoseconds since a boot that never was."""
        return self._boottime_ns

    def wall_ns(self) -> int:
        """Return nanoseconds since 1970."""
        return self._wall_ns

    def boot_id(self) -> str:
        """Return the same identifier always."""
        return "00000000-0000-0000-0000-000000000000"


def agent_status(home: Path) -> protocol.Status | None:
    """Return what the agent of a home looks after, or None when none is running.

    Raises:
        AgentUnavailable: it does not answer.
    """
    connection = running_agent(Home(home))
    if connection is None:
        return None
    channel, greeting = connection
    channel.sock.settimeout(_END_S)
    try:
        protocol.send(channel, protocol.StatusRequest())
        received = protocol.receive(channel)
    except TimeoutError:
        raise AgentUnavailable(f"the agent (pid {greeting.pid}) did not answer within {_END_S:.0f} s") from None
    finally:
        channel.close()
    if received is None or not isinstance(received[0], protocol.Status):
        raise AgentUnavailable("the agent of this node ended while it was asked for its status")
    return received[0]


def stop_agent(home: Path) -> bool:
    """End the agent of a home with its zygotes and wait until it is gone; running attempts go on.

    Returns:
        Whether there was one.

    Raises:
        AgentUnavailable: it did not end.
    """
    connection = running_agent(Home(home))
    if connection is None:
        return False
    channel, greeting = connection
    try:
        process = os.pidfd_open(greeting.pid)
    except ProcessLookupError:
        channel.close()
        return True
    try:
        with contextlib.suppress(OSError):
            protocol.send(channel, protocol.Retire())
        if not select.select([process], [], [], _END_S)[0]:
            signal.pidfd_send_signal(process, signal.SIGKILL)
            raise AgentUnavailable(f"the agent (pid {greeting.pid}) did not end within {_END_S:.0f} s and was killed")
    finally:
        os.close(process)
        channel.close()
    return True
