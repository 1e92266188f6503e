"""Notifies systemd of the server's state, and generates systemd units.

`sgpu server unit` prints the unit for this machine. A test compares the unit with `deploy/serverless-gpu.service`. The
most important settings of the unit:

    KillMode=process     a stop or restart ends only the server, and not the runs on its machine
    OOMPolicy=continue   the unit survives when the kernel kills a rank for its memory

If the server's own machine is a node, the agent and every rank are descendants of the server. On a node, systemd
restrictions of the server would also apply to user code:

    no new privileges                `nvidia-modprobe` is setuid
    no devices                       runs need GPUs
    no writable executable memory    compilers need it
    no namespaces                    environments need them

Only the unit of a server without a node (`--no-node`) therefore restricts the server process. If systemd does not
answer, the server continues without notifications.
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
"""Exit status of a server that another server has replaced, so that systemd does not restart it."""
STARTING_S = 600
"""Maximum seconds for a server start, which may include the migration of a large database."""
ENDING_S = 30
"""Maximum seconds for stopping loops, engine and database after the last request."""


def notify(place: str, *lines: str) -> None:
    """Send lines to systemd's notification socket at `place`, the value of `NOTIFY_SOCKET`.

    If `place` is "", the function does nothing.
    """
    if not place:
        return
    address = f"\0{place[1:]}" if place.startswith("@") else place
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as to:
        to.sendto("\n".join(lines).encode(), address)


class Installation(msgspec.Struct, frozen=True, kw_only=True):
    """Paths and options of a systemd unit for the server."""

    command: Sequence[str]  # Command that starts the server.
    user: str  # User of the server and of every run on its machine.
    home: Path  # Value of `$SERVERLESS_GPU_HOME`.
    node: bool  # True if the server's machine is also a node.
    tls: bool  # True if the server has a certificate that it can reload.
    stopping_s: float  # Maximum seconds for running requests when the server stops.


def unit(there: Installation) -> str:
    """Return the text of the systemd unit for an installation."""
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
        "# Put passwords here and not into the command: SGPU_DATABASE=postgresql://...",
        f"EnvironmentFile=-{there.home / 'server.env'}",
        f"ExecStart={shlex.join(there.command)}",
        *(
            ["# To load a renewed certificate: systemctl reload", "ExecReload=/bin/kill -HUP $MAINPID"]
            if there.tls
            else []
        ),
        "# A stop or restart of this unit does not end runs on the machine.",
        "KillMode=process",
        "OOMPolicy=continue",
        "Restart=on-failure",
        "# Do not restart this server after another server has taken over the database.",
        f"RestartPreventExitStatus={TAKEN_OVER}",
        "RestartSec=2",
        f"TimeoutStartSec={STARTING_S}",
        f"TimeoutStopSec={round(there.stopping_s) + ENDING_S}",
        "LimitNOFILE=65536:524288",
        "TasksMax=infinity",
        "# Each attempt runs in a separate control group below the control group of this unit.",
        "Delegate=yes",
        "UMask=0077",
        *(_NODE if there.node else _alone(home)),
        "",
        "[Install]",
        "WantedBy=multi-user.target",
    ]
    return "\n".join(lines) + "\n"


def join_unit(command: Sequence[str], *, user: str, home: Path) -> str:
    """Return the text of the systemd unit for a machine that joins a pool as a node."""
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
        "# A stop or restart of this unit does not end runs on the machine.",
        "KillMode=process",
        "OOMPolicy=continue",
        "Restart=always",
        "RestartSec=5",
        "TimeoutStopSec=30",
        "LimitNOFILE=65536:524288",
        "TasksMax=infinity",
        "# Each attempt runs in a separate control group below the control group of this unit.",
        "Delegate=yes",
        "UMask=0077",
        "# This unit has no sandbox, because ranks would inherit the sandbox.",
        "",
        "[Install]",
        "WantedBy=multi-user.target",
    ]
    return "\n".join(lines) + "\n"


_NODE = (
    "# This unit has no sandbox, because ranks would inherit the sandbox. For a server without a node",
    "# (--no-node), `sgpu server unit` prints a unit with a sandbox.",
)


def _alone(home: str) -> tuple[str, ...]:
    return (
        "# This server starts no ranks, so it needs only its files and the network.",
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
    """Remove `NOTIFY_SOCKET` from the environment so that child processes lack it, and return its value."""
    return environ.pop(VARIABLE, "")
