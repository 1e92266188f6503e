"""The nursery: a clean interpreter that has imported the supervisor's code and forks supervisors.

A supervisor starts in 60 ms from scratch and in 2 ms by a fork. The nursery forks the supervisors, because the agent's
own children would inherit the agent's descriptors and state. The nursery has one thread, opens no files and makes no
decisions. The nursery also forks the session holders. When the agent closes the channel, the nursery exits. The forked
supervisors continue.
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
from serverless_gpu.node.devices.inventory import NvmlProvider
from serverless_gpu.node.inside import linux
from serverless_gpu.node.inside.channel import Channel
from serverless_gpu.node.supervisor.session import SessionHolder
from serverless_gpu.node.supervisor.supervisor import Supervisor


def main(channel_fd: int, home: str, sockets: str) -> NoReturn:
    """Fork a supervisor for each received descriptor until the agent exits."""
    linux.set_name("sgpu-nursery")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The kernel reaps the nursery's ended children. The agent detects the end of a supervisor by end of file on its
    # channel.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    channel = Channel.adopt(channel_fd)
    channel.sock.set_inheritable(False)
    SystemClock().boot_id()  # The nursery loads the text codec once for all supervisors.
    gc.freeze()  # Freezing keeps the garbage collector from writing to memory pages that supervisors share.
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
    """Run one supervisor, which controls one attempt or session and then exits."""
    linux.set_name("sgpu-supervisor")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = Channel.adopt(channel_fd)
    channel.sock.set_inheritable(False)
    machine = NvmlProvider(forks=True)
    # A standby supervisor initialises NVML in advance, because the initialisation takes tens of milliseconds.
    machine.devices()
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
