"""The Ray of a pool on this machine: whether it asks for a token, what it listens on, and whether ranks can reach it.

Everything comes from files of ours and from /proc; Ray is not asked. Failure cases: no pool (nothing is reported);
its processes are another user's, or end meanwhile (what could be read is kept).
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil

from serverless_gpu.doctor.facts import ListeningPort, PoolFacts
from serverless_gpu.engines.ray import ray_machine, start_arguments
from serverless_gpu.engines.ray.ray_keeper import marked_pids
from serverless_gpu.node.base.home import find_home, ray_keepers
from serverless_gpu.node.base.private_files import readers
from serverless_gpu.node.inside import linux
from serverless_gpu.node.inside.linux import descendants

_LISTEN = "0A"
_VERSION = re.compile(r'^version = "([^"]+)"', re.MULTILINE)
_VERSION_BYTES = 10_000
_ADDRESS = re.compile(rb"--node[-_]ip[-_]address=(\S+)")


def look_at_pool(environ: Mapping[str, str]) -> PoolFacts:
    """Return what can be seen of the pool that this home is in.

    Raises:
        StorageError: there is no home.
    """
    found = ray_keepers(find_home(environ).root)
    if not found:
        return PoolFacts()
    directory = found[0]
    roots = marked_pids(ray_machine.directory_of(directory))
    pids = sorted({*roots, *(each for pid in roots for each in descendants(pid))})
    return PoolFacts(
        directory=str(directory),
        address=_address(roots),
        version=_version(pids),
        without_token=tuple(_called(pid) for pid in roots if not _asks_for_token(pid)),
        token_problem=_token_problem(directory / ray_machine.TOKEN),
        listeners=tuple(sorted(_listeners(pids))),
        addresses=_addresses(),
        unfenced=linux.landlock_refusal(),
        processes=len(pids),
    )


def _asks_for_token(pid: int) -> bool:
    wanted = start_arguments.variables("")["RAY_AUTH_MODE"]
    return f"RAY_AUTH_MODE={wanted}".encode() in _bytes(pid, "environ").split(b"\0")


def _address(pids: list[int]) -> str:
    for pid in pids:
        found = _ADDRESS.search(_bytes(pid, "cmdline").replace(b"\0", b" "))
        if found is not None:
            return str(found[1], "ascii", "replace")
    return ""


def _version(pids: list[int]) -> str:
    """Return the version of the Ray that runs, which need not be the one that is installed by now."""
    for pid in pids:
        with contextlib.suppress(OSError):
            program = Path(os.readlink(f"/proc/{pid}/exe"))
            if program.name in ("raylet", "gcs_server"):
                package = next(each for each in program.parents if each.name == "core").parent
                text = (package / "_version.py").read_text(encoding="utf-8")[:_VERSION_BYTES]
                known = _VERSION.search(text)
                return "" if known is None else str(known[1])
    return ""


def _token_problem(path: Path) -> str:
    try:
        return readers(path)
    except OSError as error:
        return f"it cannot be read: {error.strerror}"


def _listeners(pids: list[int]) -> Iterator[ListeningPort]:
    """Yield what processes listen on; an address of all is "*"."""
    inodes = {inode: pid for pid in pids for inode in _sockets(pid)}
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path("/proc/net", name).read_text(encoding="ascii").splitlines()[1:]:
                words = line.split()
                if words[3] == _LISTEN and (pid := inodes.get(words[9])) is not None:
                    text, _, port = words[1].rpartition(":")
                    yield ListeningPort(port=int(port, 16), address=readable_address(text), process=_called(pid))


def readable_address(text: str) -> str:
    """Return an address of /proc/net as people write it: words of 32 bits, each in this machine's order."""
    raw = b"".join(bytes.fromhex(text[at : at + 8])[::-1] for at in range(0, len(text), 8))
    address = ipaddress.ip_address(raw)
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return "*" if address.is_unspecified else str(address)


def _sockets(pid: int) -> Iterator[str]:
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                target = os.readlink(f"/proc/{pid}/fd/{name}")
                if target.startswith("socket:["):
                    yield target[8:-1]


def _addresses() -> tuple[str, ...]:
    """Return the addresses of this machine that are not loopback's or of one link."""
    found: list[str] = []
    for addresses in psutil.net_if_addrs().values():
        for each in addresses:
            with contextlib.suppress(ValueError):
                address = ipaddress.ip_address(each.address.partition("%")[0])
                if not address.is_loopback and not address.is_link_local:
                    found.append(str(address))
    return tuple(dict.fromkeys(found))


def _called(pid: int) -> str:
    return _bytes(pid, "comm").decode("utf-8", "replace").strip() or f"pid {pid}"


def _bytes(pid: int, name: str) -> bytes:
    try:
        return Path("/proc", str(pid), name).read_bytes()
    except OSError:
        return b""
