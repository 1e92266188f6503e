"""Runs `nft`, opens the addresses of a gang's nodes, and adds principals."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import ipaddress
import os
import shutil
import socket
import struct
import subprocess
from collections.abc import Iterable, Mapping, Sequence

from serverless_gpu.errors import IsolationUnavailable
from serverless_gpu.node.isolation.egress_rules import FAMILY, TABLE, admission
from serverless_gpu.node.isolation.principals import PLACE, RANGE, uid_range
from serverless_gpu.node.processes.spawn import clean_variables

HINT = "install nftables on the node, and start the node again"
MISSING = "nft is missing: install nftables"
_LIMIT_S = 10.0
_NS_GET_USERNS = 0xB701
_NETFILTER, _INET, _TABLE_NAME, _REQUEST, _ERROR = 12, 1, 1, 1, 2
_GET_TABLE = 10 << 8 | 1  # NFNL_SUBSYS_NFTABLES and NFT_MSG_GETTABLE.
_ANSWER_BYTES_MAX = 8_192
_PLACES = ("/usr/sbin", "/sbin", "/usr/local/sbin")


def find(environ: Mapping[str, str]) -> str | None:
    """Return the path of nft. The PATH of a service may lack its directory."""
    return shutil.which("nft", path=os.pathsep.join((environ.get("PATH", os.defpath), *_PLACES)))


def rights_problem() -> str:
    """Return the reason why this process may not change the network rules of the machine, or ""."""
    if os.geteuid() != 0:
        return "network rules need the rights of root"
    with open("/proc/self/ns/net", "rb") as namespace:
        try:
            os.close(fcntl.ioctl(namespace, _NS_GET_USERNS))
        except PermissionError:  # The network belongs to a user namespace above the one of this process.
            return "network rules need the rights of root, and this node has subordinate uids only"
        except OSError:
            pass  # The kernel cannot tell the owner. The trial of the rules decides.
    return ""


def table_of(environ: Mapping[str, str]) -> str:
    """Return the name of the table for the principals of a map.

    Agents with another map of principals have another table. Each connection must pass all tables.
    """
    place = environ.get(PLACE)
    return f"{TABLE}_{hashlib.sha256(place.encode()).hexdigest()[:8]}" if place else TABLE


def run(text: str, environ: Mapping[str, str]) -> None:
    """Give commands to nft, which executes all or none of them. Raises IsolationUnavailable."""
    done = _started(("-f", "-"), environ, text)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"nft ended with exit code {done.returncode}"]
        raise IsolationUnavailable(f"the node cannot load its network rules: {lines[0]}", hint=HINT)


def exists(environ: Mapping[str, str]) -> bool:
    """Return True if the table of the rules exists. Raises IsolationUnavailable.

    Each start of an attempt asks the kernel by netlink (`linux/netfilter/nf_tables.h`). A process of `nft` would take
    several milliseconds.
    """
    name = table_of(environ).encode() + b"\0"
    attribute = struct.pack("=HH", 4 + len(name), _TABLE_NAME) + name.ljust(-(-len(name) // 4) * 4, b"\0")
    body = struct.pack("=BBH", _INET, 0, 0) + attribute
    header = struct.pack("=IHHII", 16 + len(body), _GET_TABLE, _REQUEST, 1, 0)
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETFILTER) as kernel:
            kernel.settimeout(_LIMIT_S)
            kernel.send(header + body)
            answer = kernel.recv(_ANSWER_BYTES_MAX)
    except OSError as error:
        raise IsolationUnavailable(f"the kernel does not tell its network rules: {error}", hint=HINT) from None
    (kind,) = struct.unpack_from("=H", answer, 4)
    if kind != _ERROR:
        return True
    (code,) = struct.unpack_from("=i", answer, 16)
    if code != -errno.ENOENT:
        problem = f"the kernel does not tell its network rules: {os.strerror(-code)}"
        raise IsolationUnavailable(problem, hint=HINT)
    return False


def admit(uid: int, addresses: Iterable[str], environ: Mapping[str, str]) -> None:
    """Open the addresses of a gang's nodes for a uid. Raises IsolationUnavailable.

    The addresses stay open for `egress_rules.GANG_S`.
    """
    outside = [one for one in addresses if not ipaddress.ip_address(one).is_loopback]
    if outside:
        run(admission(uid, outside, table_of(environ)), environ)


def cover(uid: int, environ: Mapping[str, str]) -> None:
    """Ensure that the rules apply to a principal's uid. Raises IsolationUnavailable.

    The rules know the configured range. An account of the operating system can have a uid outside the range.
    """
    if uid in uid_range(environ.get(RANGE, "")):
        return
    element = ("element", FAMILY, table_of(environ), "principals", f"{{ {uid} }}")
    if _started(("get", *element), environ).returncode:
        run(f"add {' '.join(element)}\n", environ)


def _started(options: Sequence[str], environ: Mapping[str, str], text: str = "") -> subprocess.CompletedProcess[str]:
    program = find(environ)
    if program is None:
        raise IsolationUnavailable("the node has no `nft` for its network rules", hint=HINT)
    try:
        return subprocess.run(
            (program, *options),
            input=text,
            capture_output=True,
            text=True,
            errors="replace",
            cwd="/",
            env=clean_variables(environ),
            timeout=_LIMIT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise IsolationUnavailable(f"the node cannot run `nft`: {error}", hint=HINT) from None
