"""Generates the systemd units of a server, a node and a node's spawner.

    serverless-gpu.service            sgpu up              account, no capabilities
    serverless-gpu-node.service       sgpu join            account, no capabilities    agent, uplink, supervisors
    serverless-gpu-spawner.service    sgpu node spawner    root, `CAPABILITIES`        zygotes, stems, ranks

`sgpu server unit` and `sgpu node unit` print the units. Tests compare the units with the files in `deploy/`.

Runs survive a restart of each unit (`KillMode=process`). After an out-of-memory kill of a rank, each unit continues
(`OOMPolicy=continue`). Every process of a unit inherits the unit's restrictions. A unit whose descendants are ranks
therefore restricts neither devices, memory nor system calls:

    server without a node    starts no ranks: every restriction that a server can bear
    server with a node       starts ranks: no restriction
    node with a spawner      the spawner starts the ranks: no capabilities, no new privileges
    node as root             starts ranks: no restriction
    spawner                  starts ranks: a bounding set of capabilities

The units of nodes and spawners use no option that mounts something. Under such a mount, the kernel refuses /proc to the
user namespaces of sandboxes.

systemd expands specifiers (`%`) in all values, and variables (`$`) in commands. `unit_word` and `command_line` escape
both. Paths with control characters are refused, because a line break would start another setting.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import msgspec

from serverless_gpu.errors import InvalidValue
from serverless_gpu.node.spawner import SOCKET
from serverless_gpu.server.operations.systemd import TAKEN_OVER

ACCOUNT = "serverless-gpu"
"""Default account of servers and nodes."""
STATE = Path("/var/lib/serverless-gpu")
"""Directory with the homes of servers and nodes, and with the principals of a spawner."""

STARTING_S = 600
"""Maximum seconds for a server start, which may include the migration of a large database."""
ENDING_S = 30
"""Maximum seconds for stopping loops, engine and database after the last request."""

CAPABILITIES = {
    "CAP_SYS_ADMIN": "creates namespaces and mounts",
    "CAP_SYS_CHROOT": "enters the mount namespaces of attempts",
    "CAP_SETUID": "becomes the uid of a principal, and maps the uid into a user namespace",
    "CAP_SETGID": "becomes the gid of a principal, and drops supplementary groups",
    "CAP_SETPCAP": "empties the bounding set of ranks without a user namespace",
    "CAP_CHOWN": "gives homes and result directories to principals, and the socket to the account",
    "CAP_FOWNER": "sets modes of files that belong to the account or to principals",
    "CAP_DAC_OVERRIDE": "mounts and makes files below private directories of the account and of principals",
    "CAP_SYS_PTRACE": "opens the memory file in which a rank writes its stack",
    "CAP_NET_ADMIN": "loads the network rules of principals",
    "CAP_SYSLOG": "opens the kernel log, which names failed GPUs",
}
"""Capabilities of a spawner, and the reason for each capability."""

_ACCOUNT_NAME = re.compile(r"[a-z_][a-z0-9_-]{0,30}")
_USER_HOMES = (Path("/home"), Path("/root"), Path("/run/user"))


class Installation(msgspec.Struct, frozen=True, kw_only=True):
    """Program, account and home directory of a unit."""

    command: Sequence[str]  # Command that the unit starts.
    account: str  # User of the unit's processes.
    home: Path  # Value of `$SERVERLESS_GPU_HOME`.


class ServerInstallation(Installation, frozen=True, kw_only=True):
    """Further settings of a server's unit."""

    node: bool  # True if the server's machine is also a node.
    tls: bool  # True if the server has a certificate that it can reload.
    stopping_s: float  # Maximum seconds for running requests when the server stops.
    writable: Sequence[Path] = ()  # Further directories that the server writes to, such as a store.


def server_unit(there: ServerInstallation) -> str:
    """Return the unit of a server."""
    lines = [
        *_header("server", "serverless-gpu", "sgpu server unit"),
        "Wants=network-online.target",
        "After=network-online.target postgresql.service",
        "",
        "[Service]",
        "Type=notify",
        *_identity(there),
        "# Put passwords into this file and not into the command, for example SGPU_DATABASE=postgresql://...",
        f"EnvironmentFile=-{_single_path(there.home / 'server.env')}",
        f"ExecStart={command_line(there.command)}",
        *(
            ["# To load a renewed certificate: systemctl reload", "ExecReload=/bin/kill -HUP $MAINPID"]
            if there.tls
            else []
        ),
        "Restart=on-failure",
        "# Do not restart this server after another server has taken over the database.",
        f"RestartPreventExitStatus={TAKEN_OVER}",
        "RestartSec=2",
        f"TimeoutStartSec={STARTING_S}",
        f"TimeoutStopSec={round(there.stopping_s) + ENDING_S}",
        *_LIMITS,
        *(
            [
                *_RUNS_SURVIVE,
                "# This unit has no restrictions, because ranks would inherit them. For restrictions, set node = false",
                "# in server.toml, and run the node in its own unit (sgpu node unit).",
            ]
            if there.node
            else _restrictions(there)
        ),
        *_INSTALL,
    ]
    return _joined(lines)


def node_unit(there: Installation, *, as_root: bool = False) -> str:
    """Return the unit of a node.

    Without `as_root`, the node asks a spawner for sandboxes. With `as_root`, the node is root and makes the sandboxes.
    """
    after = "network-online.target serverless-gpu.service"
    spawner = "" if as_root else " serverless-gpu-spawner.service"
    lines = [
        *_header("node", "serverless-gpu-node", "sgpu node unit"),
        f"Wants=network-online.target{spawner}",
        f"After={after}{spawner}",
        "StartLimitIntervalSec=0",
        "",
        "[Service]",
        "Type=exec",
        *_identity(there),
        "# Variables of the node, for example SERVERLESS_GPU_UIDS=FIRST-LAST.",
        f"EnvironmentFile=-{_single_path(there.home / 'node.env')}",
        *([] if as_root else [f"Environment={unit_word(f'SERVERLESS_GPU_SPAWNER={SOCKET}')}"]),
        f"ExecStart={command_line(there.command)}",
        "Restart=always",
        "RestartSec=5",
        "TimeoutStopSec=30",
        *_LIMITS,
        *_RUNS_SURVIVE,
        *(
            [
                "# This node is root, because only root can make sandboxes without a spawner. Ranks would inherit",
                "# restrictions of this unit, so the unit has none.",
            ]
            if as_root
            else [
                "# The spawner starts ranks. The processes of this unit need no rights.",
                "CapabilityBoundingSet=",
                "AmbientCapabilities=",
                "NoNewPrivileges=yes",
            ]
        ),
        *_INSTALL,
    ]
    return _joined(lines)


def spawner_unit(command: Sequence[str]) -> str:
    """Return the unit of a node's spawner. `command` names the account that may use the spawner."""
    lines = [
        *_header("spawner", "serverless-gpu-spawner", "sgpu node unit --spawner"),
        "Before=serverless-gpu-node.service",
        "StartLimitIntervalSec=0",
        "",
        "[Service]",
        "Type=exec",
        "User=root",
        f"ExecStart={command_line(command)}",
        "# Directory of the spawner's socket.",
        f"RuntimeDirectory={Path(SOCKET).parent.name}",
        "RuntimeDirectoryPreserve=restart",
        "# Map of uids, and the homes of principals.",
        f"StateDirectory={STATE.name}/principals",
        "StateDirectoryMode=0711",
        "Restart=always",
        "RestartSec=1",
        "TimeoutStopSec=30",
        *_LIMITS,
        *_RUNS_SURVIVE,
        "# The spawner holds these capabilities and no others. Ranks hold none.",
    ]
    for name, reason in CAPABILITIES.items():
        lines += [f"# {reason}", f"CapabilityBoundingSet={name}"]
    return _joined([*lines, "NoNewPrivileges=yes", *_INSTALL])


def unit_word(text: str) -> str:
    """Return one word of a setting's value, with escaped specifiers. Raises InvalidValue."""
    if any(ord(letter) < 0x20 or ord(letter) == 0x7F for letter in text):
        raise InvalidValue(f"a systemd unit cannot contain {text!r}", hint="use paths without control characters")
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{escaped}"' if escaped != text or not text or any(letter in " ';" for letter in text) else text


def command_line(words: Sequence[str]) -> str:
    """Return the value of a setting that contains a command. Raises InvalidValue."""
    return " ".join(unit_word(word).replace("$", "$$") for word in words)


def check_account(name: str) -> None:
    """Refuse the name of an account that no system accepts."""
    if not _ACCOUNT_NAME.fullmatch(name):
        raise InvalidValue(f"{name[:64]!r} is not the name of an account", hint=f"for example --account {ACCOUNT}")


def _header(what: str, unit: str, command: str) -> list[str]:
    return [
        f"# Made by `{command}`. Install:",
        f"#   {command} | sudo tee /etc/systemd/system/{unit}.service",
        f"#   sudo systemctl daemon-reload && sudo systemctl enable --now {unit}",
        "[Unit]",
        f"Description=serverless-gpu {what}",
    ]


def _identity(there: Installation) -> list[str]:
    """Return the settings of a unit's account and home directory."""
    state = (
        [f"StateDirectory={unit_word(str(there.home.relative_to('/var/lib')))}", "StateDirectoryMode=0700"]
        if there.home.is_relative_to(STATE)
        else []
    )
    return [f"User={there.account}", *state, f"Environment={unit_word(f'SERVERLESS_GPU_HOME={there.home}')}"]


def _single_path(path: Path) -> str:
    """Return the value of a setting that is one path, in which systemd expands only specifiers."""
    unit_word(str(path))
    return str(path).replace("%", "%%")


def _restrictions(there: ServerInstallation) -> list[str]:
    """Return the restrictions of a server that starts no ranks."""
    writable = [*([] if there.home.is_relative_to(STATE) else [there.home]), *there.writable]
    used = (*writable, Path(there.command[0]))
    in_user_home = any(place.is_relative_to(home) for place in used for home in _USER_HOMES)
    return [
        "# This server starts no ranks, so it needs only its files and the network. Its MLflow ends with it.",
        "KillMode=mixed",
        "CapabilityBoundingSet=",
        "AmbientCapabilities=",
        "NoNewPrivileges=yes",
        "ProtectSystem=strict",
        *(f"ReadWritePaths={unit_word(str(path))}" for path in writable),
        f"ProtectHome={'read-only' if in_user_home else 'yes'}",
        "PrivateTmp=yes",
        "PrivateDevices=yes",
        "ProtectClock=yes",
        "ProtectControlGroups=yes",
        "ProtectHostname=yes",
        "ProtectKernelLogs=yes",
        "ProtectKernelModules=yes",
        "ProtectKernelTunables=yes",
        "ProtectProc=invisible",
        "# The resolver and MLflow list network interfaces through AF_NETLINK.",
        "RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX AF_NETLINK",
        "RestrictNamespaces=yes",
        "RestrictRealtime=yes",
        "RestrictSUIDSGID=yes",
        "LockPersonality=yes",
        "MemoryDenyWriteExecute=yes",
        "SystemCallArchitectures=native",
        "SystemCallFilter=@system-service",
        "SystemCallFilter=~@privileged",
        "SystemCallErrorNumber=EPERM",
    ]


_LIMITS = ("LimitNOFILE=65536:524288", "TasksMax=infinity", "UMask=0077")
_RUNS_SURVIVE = (
    "# A stop or restart of this unit does not end runs on the machine.",
    "KillMode=process",
    "OOMPolicy=continue",
    "# Each attempt runs in a separate control group below the control group of this unit.",
    "Delegate=yes",
)
_INSTALL = ("", "[Install]", "WantedBy=multi-user.target")


def _joined(lines: Sequence[str]) -> str:
    return "\n".join(lines) + "\n"
