"""Queries and stops the agent of a home directory."""

from __future__ import annotations

import contextlib
import select
import signal
from pathlib import Path

from serverless_gpu.errors import AgentUnavailable
from serverless_gpu.lazy_import import load
from serverless_gpu.node.agent.connection import running_agent
from serverless_gpu.node.base import protocol
from serverless_gpu.node.base.home import Home
from serverless_gpu.node.inside.channel import Channel
from serverless_gpu.node.processes import daemon

_ANSWER_S = 10.0
_END_S = 10.0


def agent_status(home: Path) -> protocol.Status | None:
    """Return the status of a home directory's agent, or None if no agent is running."""
    connection = running_agent(Home(home))
    if connection is None:
        return None
    channel, greeting = connection
    channel.sock.settimeout(_ANSWER_S)
    try:
        protocol.send(channel, protocol.StatusRequest())
        received = protocol.receive(channel)
    except TimeoutError:
        raise AgentUnavailable(f"the agent (pid {greeting.pid}) did not answer within {_ANSWER_S:.0f} s") from None
    finally:
        channel.close()
    if received is None or not isinstance(received[0], protocol.Status):
        raise AgentUnavailable("the agent of this node exited before sending its status")
    return received[0]


def stop_agent(home: Path) -> bool:
    """Stop the agent, zygotes, uplinks and monitor. Return True if the agent was running.

    Running attempts continue, because supervisors do not depend on the agent.
    """
    # Load the modules lazily, because a status request does not need them. Stop the uplinks first, because a running
    # uplink would restart the agent.
    load("serverless_gpu.node.uplink.start_stop").stop_all(Home(home))
    connection = running_agent(Home(home))
    if connection is not None:
        _retire(*connection)
    # Stop the monitor last, because a running agent would restart the monitor.
    load("serverless_gpu.node.monitor.start_stop").stop(Home(home))
    return connection is not None


def _retire(channel: Channel, greeting: protocol.Greeting) -> None:
    with daemon.opened(greeting.pid) as process, contextlib.closing(channel):
        if process is None:
            return
        with contextlib.suppress(OSError):
            protocol.send(channel, protocol.Retire())
        if not select.select([process], [], [], _END_S)[0]:
            signal.pidfd_send_signal(process, signal.SIGKILL)
            raise AgentUnavailable(
                f"the client killed the agent (pid {greeting.pid}), which did not exit within {_END_S:.0f} s"
            )
