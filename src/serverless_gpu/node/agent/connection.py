"""Connects to the agent of this node, and starts the agent if necessary.

Failure cases: Without an agent, or with a stale socket, the caller starts a new agent. Two callers that start an agent
at the same time connect to the same agent. The caller starts no agent if the machine or the home directory cannot
support runs. If the agent does not start, the error contains the agent's output.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
from pathlib import Path

import msgspec

from serverless_gpu.ambient import SystemClock
from serverless_gpu.errors import AgentUnavailable
from serverless_gpu.node.base import protocol
from serverless_gpu.node.base.home import Home
from serverless_gpu.node.base.requirements import require_for_runs
from serverless_gpu.node.inside.channel import Channel
from serverless_gpu.node.processes import daemon
from serverless_gpu.node.processes.spawn import clean_variables
from serverless_gpu.operating_system import require_linux

_START_S = 30.0
_LAST_WORDS_BYTES = 2_000
_ANSWER_S = 10.0

_starting = threading.Lock()


def connect(home: Home) -> tuple[Channel, protocol.Greeting]:
    """Return a connection to the agent, and the agent's greeting. Start the agent if necessary.

    Raises AgentUnavailable, HardwareError (this system cannot run ranks) or StorageError.
    """
    require_linux("ranks")
    path = protocol.agent_socket(home.sockets())
    answer = _try_connect(path)
    if answer is not None:
        return answer
    require_for_runs(home)
    with _starting:
        deadline_ns = SystemClock().boottime_ns() + int(_START_S * 1e9)
        pause_s = 0.01
        while SystemClock().boottime_ns() < deadline_ns:
            answer = _try_connect(path)  # Another thread may have started the agent in the meantime.
            if answer is not None:
                return answer
            _start_agent(home)  # The loop repeats the start, because an exiting agent may still hold the lock.
            answer = _try_connect(path)
            if answer is not None:
                return answer
            select.select([], [], [], pause_s)
            pause_s = min(2 * pause_s, 1.0)
    raise AgentUnavailable(
        f"the agent of this node did not come up within {_START_S:.0f} s; it wrote:\n{_last_words(home)}",
        hint=f"see {home.agent_log} for the agent's complete output",
    )


def running_agent(home: Home) -> tuple[Channel, protocol.Greeting] | None:
    """Return a connection to the agent, or None if no agent runs."""
    return _try_connect(protocol.agent_socket(home.sockets()))


def _try_connect(path: Path) -> tuple[Channel, protocol.Greeting] | None:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.settimeout(_ANSWER_S)
    channel = Channel(sock)
    try:
        sock.connect(str(path))
        received = protocol.receive(channel)
    except (FileNotFoundError, ConnectionRefusedError):
        channel.close()
        return None
    except TimeoutError:
        channel.close()
        pid = "unknown"
        with contextlib.suppress(OSError):
            pid = path.with_suffix(".lock").read_text(encoding="ascii", errors="replace").strip() or pid
        raise AgentUnavailable(
            f"the agent of this node (pid {pid}) did not answer within {_ANSWER_S:.0f} s",
            hint=f"end the agent with `kill -9 {pid}`. Running attempts continue, and the next call starts "
            "another agent",
        ) from None
    except (OSError, msgspec.MsgspecError):
        channel.close()
        return None
    if received is not None and isinstance(received[0], protocol.Refused):
        channel.close()
        raise AgentUnavailable(received[0].message, hint=received[0].hint)
    if received is None or not isinstance(received[0], protocol.Greeting):
        channel.close()
        return None
    sock.settimeout(None)
    return channel, received[0]


def _start_agent(home: Home) -> None:
    ready_read, ready_write = os.pipe()
    arguments = (str(home.root), str(home.sockets()), ready_write, clean_variables(os.environ))
    with open(ready_read, "rb", buffering=0) as ready:
        try:
            process = daemon.start(
                "serverless_gpu.node.agent.agent",
                arguments,
                log=home.agent_log,
                environ=os.environ,
                fds=(ready_write,),
            )
        except OSError as error:
            raise AgentUnavailable(f"could not start the agent of this node: {error}") from error
        finally:
            os.close(ready_write)
        if daemon.reap(process, _START_S):
            select.select([ready], [], [], _START_S)


def _last_words(home: Home) -> str:
    try:
        with home.agent_log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _LAST_WORDS_BYTES))
            return file.read().decode("utf-8", "replace").strip() or "(nothing)"
    except OSError as error:
        return f"(could not read the agent's log: {error.strerror})"
