"""Messages to systemd, and the unit with which it runs a server.

The unit is made here: `sgpu server unit` prints it for this machine, and a test compares it with
`deploy/serverless-gpu.service`. Two settings matter most:

    KillMode=process     stopping or restarting the server ends the server, and not the runs of its machine
    OOMPolicy=continue   a rank that the kernel ends for its memory does not take the unit with it

The agent, and with it every rank, is a descendant of the server where that offers its own machine. A restriction of the
server is then one of user code: no new privileges (`nvidia-modprobe` is setuid), no devices (GPUs), no writable
executable memory (compilers), no namespaces (environments). So a server with a node has none of these restrictions, and
one without a node (`--no-node`) all of them.

Failure cases: systemd does not listen (nothing is sent, the server goes on).
"""

from __future__ import annotations

import contextlib
import os
import shlex
import socket
from collections.abc import Sequence
from pathlib import Path

import msgspec

VARIABLE = "NOTIFY_SOCKET"
TAKEN_OVER = 3
"""Exit status of a server that another one has replaced: systemd does not restart it."""
STARTING_S = 600
"""How long a start may take: a large database is migrated in it."""
ENDING_S = 30
"""How long loops, engine and database take beside requests, at most."""


def notify(place: str, *lines: str) -> None:
    """Send lines to systemd, if it listens.

    `place` is what systemd set as `NOTIFY_SOCKET`; nothing is sent where it is "".
    """
    if not place:
        return
    address = f"\0{place[1:]}" if place.startswith("@") else place
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as to:
        to.sendto("\n".join(lines).encode(), address)


class Installation(msgspec.Struct, frozen=True, kw_only=True):
    """Paths and options of a unit."""

    command: Sequence[str]  # what starts the server
    user: str  # whom it runs as, and with it every run of its machine
    home: Path  # `$SERVERLESS_GPU_HOME`
    node: bool  # whether its machine is a node, too
    tls: bool  # whether it has a certificate of its own, which can be renewed
    stopping_s: float  # how long requests may take when it is to stop


def unit(there: Installation) -> str:
    """Return the unit for an installation."""
    home = _quoted(str(there.home))
    lines = [
        "# Made by `sgpu server unit`. Install:",
        "#   sgpu server unit | sudo tee /etc/systemd/system/serverless-gpu.service",
        "#   sudo systemctl daemon-reload && sudo systemctl enable --now serverless-gpu",
        "[Unit]",
        "Description=serverless-gpu server",
        "Wants=network-online.target",
        "After=network-online.target postgresql.service",
        "",
        "[Service]",
        "Type=notify",
        f"User={there.user}",
        f"Environment=SERVERLESS_GPU_HOME={home}",
        "# Passwords belong here, not into the command: SGPU_DATABASE=postgresql://...",
        f"EnvironmentFile=-{there.home / 'server.env'}",
        f"ExecStart={shlex.join(there.command)}",
        *(["# A renewed certificate: systemctl reload", "ExecReload=/bin/kill -HUP $MAINPID"] if there.tls else []),
        "# Only the server is stopped and started again: its machine's runs go on.",
        "KillMode=process",
        "OOMPolicy=continue",
        "Restart=on-failure",
        "# Another server has taken its database over: it does not take it back by itself.",
        f"RestartPreventExitStatus={TAKEN_OVER}",
        "RestartSec=2",
        f"TimeoutStartSec={STARTING_S}",
        f"TimeoutStopSec={round(there.stopping_s) + ENDING_S}",
        "LimitNOFILE=65536:524288",
        "TasksMax=infinity",
        "# Attempts get control groups of their own below this one.",
        "Delegate=yes",
        "UMask=0077",
        *(_NODE if there.node else _alone(home)),
        "",
        "[Install]",
        "WantedBy=multi-user.target",
    ]
    return "\n".join(lines) + "\n"


def join_unit(command: Sequence[str], *, user: str, home: Path) -> str:
    """Return the unit with which a machine is a node of a pool."""
    lines = [
        "# Made by `sgpu join … --unit`. Install:",
        "#   sgpu join … --unit | sudo tee /etc/systemd/system/serverless-gpu-join.service",
        "#   sudo systemctl daemon-reload && sudo systemctl enable --now serverless-gpu-join",
        "[Unit]",
        "Description=serverless-gpu node",
        "Wants=network-online.target",
        "After=network-online.target",
        "StartLimitIntervalSec=0",
        "",
        "[Service]",
        "Type=exec",
        f"User={user}",
        f"Environment=SERVERLESS_GPU_HOME={_quoted(str(home))}",
        f"ExecStart={shlex.join(command)}",
        "# Only the membership is stopped and started again: runs of this machine go on.",
        "KillMode=process",
        "OOMPolicy=continue",
        "Restart=always",
        "RestartSec=5",
        "TimeoutStopSec=30",
        "LimitNOFILE=65536:524288",
        "TasksMax=infinity",
        "# Attempts get control groups of their own below this one.",
        "Delegate=yes",
        "UMask=0077",
        "# No sandbox: ranks are descendants of what is started here, and it would be theirs.",
        "",
        "[Install]",
        "WantedBy=multi-user.target",
    ]
    return "\n".join(lines) + "\n"


_NODE = (
    "# No sandbox: ranks are descendants of this process, and it would be theirs. Without a node (--no-node) there is",
    "# one: `sgpu server unit` prints it then.",
)


def _alone(home: str) -> tuple[str, ...]:
    return (
        "# This server starts no ranks, so it needs nothing but its files and the network.",
        "NoNewPrivileges=yes",
        "CapabilityBoundingSet=",
        "ProtectSystem=strict",
        f"ReadWritePaths={home}",
        "PrivateTmp=yes",
        "PrivateDevices=yes",
        "ProtectClock=yes",
        "ProtectControlGroups=yes",
        "ProtectHostname=yes",
        "ProtectKernelLogs=yes",
        "ProtectKernelModules=yes",
        "ProtectKernelTunables=yes",
        "RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX",
        "RestrictNamespaces=yes",
        "RestrictRealtime=yes",
        "RestrictSUIDSGID=yes",
        "LockPersonality=yes",
        "MemoryDenyWriteExecute=yes",
        "SystemCallArchitectures=native",
        "SystemCallFilter=@system-service",
    )


def _quoted(text: str) -> str:
    return f'"{text}"' if any(letter.isspace() for letter in text) else text


def taken_from(environ: os._Environ[str]) -> str:
    """Take `NOTIFY_SOCKET` out of the variables and return it: only this process speaks for the unit."""
    return environ.pop(VARIABLE, "")
