"""The nursery: a clean interpreter that has imported the supervisor's code, and forks one whenever the agent asks (or a
session's keeper, which is one that runs nothing).

A supervisor that starts from nothing needs 60 ms, which every second call of a quick loop would wait for; a fork needs
2 ms. The agent does not fork itself: it has descriptors and state that are nobody else's. This process has one thread,
opens nothing and decides nothing.

Ends when the agent's end of the channel closes; supervisors it forked live on.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
from pathlib import Path
from typing import NoReturn

from serverless_gpu.ambient import SystemClock
from serverless_gpu.node.base import protocol
from serverless_gpu.node.base.home import Home
from serverless_gpu.node.devices.gpus import NvmlProvider
from serverless_gpu.node.inside import linux
from serverless_gpu.node.inside.channel import Channel
from serverless_gpu.node.supervisor.session import SessionHolder
from serverless_gpu.node.supervisor.supervisor import Supervisor


def main(channel_fd: int, home: str, sockets: str) -> NoReturn:
    """Fork a supervisor for each descriptor that comes, until the agent is gone.

    Args:
        channel_fd: the inherited channel to the agent.
        home: the home directory.
        sockets: the private directory of sockets.
    """
    linux.set_name("sgpu-nursery")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps: the agent learns of an end by its channel
    channel = Channel.adopt(channel_fd)
    channel.sock.set_inheritable(False)
    SystemClock().boot_id()  # loads a codec: once here, not in each supervisor
    gc.freeze()  # the collector does not write to what all supervisors share
    while (received := channel.receive()) is not None:
        (fd,) = received[1]
        if os.fork() == 0:
            channel.close()
            os.setsid()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _supervise(fd, home, sockets)
        os.close(fd)
    os._exit(0)


def _supervise(channel_fd: int, home: str, sockets: str) -> NoReturn:
    """Be a supervisor: stand by, look after one attempt or session, end.

    Args:
        channel_fd: the inherited channel to the agent.
        home: the home directory.
        sockets: the private directory of sockets.
    """
    linux.set_name("sgpu-supervisor")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = Channel.adopt(channel_fd)
    channel.sock.set_inheritable(False)
    machine = NvmlProvider(forks=True)
    machine.devices()  # NVML's start takes tens of milliseconds: now, not when somebody waits
    with contextlib.suppress(OSError):
        protocol.send(channel, protocol.Standby(pid=os.getpid()))
    received = protocol.receive(channel)
    if received is not None and isinstance(received[0], protocol.Assign):
        client = Channel.adopt(received[1][0])
        of_session = received[0].launch.idle_timeout_s is not None
        guardian = SessionHolder if of_session else Supervisor
        guardian(received[0], channel, Home(Path(home)), Path(sockets), machine).serve(client)
    sys.stdout.flush()
    os._exit(0)
