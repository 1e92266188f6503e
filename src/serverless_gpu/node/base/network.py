"""Finds this node's network addresses, best first, and reserves a port for the rendezvous.

    SIOCGIFCONF           IPv4, with the names of `getifaddrs`, by which NCCL and Gloo choose an interface
    /proc/net/if_inet6    IPv6 that is routed

The list of addresses omits link-local addresses, because clients need an interface name for them. The loopback address
is last, because other machines cannot reach it. Addresses of container bridges come directly before the loopback
address, because they are the same on every machine. The list of addresses also omits unreadable entries and interfaces
with a comma in their name. The search for addresses never raises an exception.

A bound socket that does not listen reserves the rendezvous port until rank 0 listens on it. The kernel does not assign
a bound port to another process. The kernel also refuses to bind another socket without SO_REUSEADDR to the port.
Because torch's TCPStore sets SO_REUSEADDR, TCPStore can listen on the reserved port. Most other launchers close the
reserving socket before torch binds the port, which lets another process take the port.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import ipaddress
import socket
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path

from serverless_gpu.model.lifecycle.rendezvous import ADDRESSES_MAX, Address, is_interface, kind_of

_SIOCGIFCONF, _SIOCGIFFLAGS = 0x8912, 0x8913
_IFF_UP = 0x1
_IFREQ_BYTES = 40 if struct.calcsize("P") == 8 else 32
_INTERFACES_MAX = 512
_NOT_USABLE = 0x20 | 0x40 | 0x08  # Flags of deprecated, tentative and duplicate addresses.
_OF_CONTAINERS = ("docker", "br-", "veth", "virbr", "cni", "flannel", "cali", "podman", "lxc", "lxdbr")


def own_addresses() -> tuple[Address, ...]:
    """Return the addresses of this node, at most `ADDRESSES_MAX`."""
    there = (*ipv4_addresses(), *ipv6_addresses(Path("/proc/net/if_inet6")))
    found = list({one.address: one for one in there if is_interface(one.interface)}.values())
    found.sort(key=lambda one: (is_bridge(one), ":" in one.address))
    outside = [one for one in found if kind_of(one.address) in ("IPv4", "IPv6")]
    inside = [one for one in found if is_loopback(one)][:1]
    return (*outside[: ADDRESSES_MAX - len(inside)], *inside)


def is_loopback(one: Address) -> bool:
    """Return True if an address is reachable only from this machine."""
    return kind_of(one.address).startswith("loopback")


def is_bridge(one: Address) -> bool:
    """Return True if an address belongs to a bridge of containers.

    Such a bridge can have the same address on every machine.
    """
    return one.interface.startswith(_OF_CONTAINERS)


def ipv4_addresses() -> Iterator[Address]:
    """Yield the IPv4 addresses of interfaces that are up."""
    buffer = array.array("B", bytes(_IFREQ_BYTES * _INTERFACES_MAX))
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        asked = struct.pack("iL", len(buffer), buffer.buffer_info()[0])
        size = struct.unpack("iL", fcntl.ioctl(sock, _SIOCGIFCONF, asked))[0]
        rows = buffer.tobytes()[:size]
        for start in range(0, size, _IFREQ_BYTES):
            name = rows[start : start + 16].partition(b"\0")[0]
            flags = fcntl.ioctl(sock, _SIOCGIFFLAGS, name.ljust(_IFREQ_BYTES, b"\0"))
            if struct.unpack_from("H", flags, 16)[0] & _IFF_UP:
                address = socket.inet_ntoa(rows[start + 20 : start + 24])
                yield Address(interface=name.decode(errors="replace"), address=address)


def ipv6_addresses(path: Path) -> Iterator[Address]:
    """Yield the routed, ready IPv6 addresses in a file such as /proc/net/if_inet6."""
    with contextlib.suppress(OSError, ValueError):
        for line in path.read_text(encoding="ascii").splitlines():
            digits, _, _, scope, flags, name = line.split()
            address = ipaddress.IPv6Address(int(digits, 16))
            if scope == "00" and not int(flags, 16) & _NOT_USABLE:
                yield Address(interface=name, address=str(address))


_TRIES = 5


class NoPort(Exception):
    """Raised if no rendezvous port could be reserved."""


def reserve_port(candidates: Iterable[int] = (0,) * _TRIES) -> socket.socket:
    """Return a bound, non-listening socket for the first free candidate port (0: any).

    Closing the socket frees the port. Raises NoPort, whose message lists the candidate ports.
    """
    tried: list[str] = []
    for port in candidates:
        sock = _socket()
        try:
            sock.bind(("::" if sock.family == socket.AF_INET6 else "0.0.0.0", port))
        except OSError as error:
            sock.close()
            tried.append(f"{port or 'any port'} ({error.strerror})")
            continue
        return sock
    raise NoPort(f"no rendezvous port could be reserved: {', '.join(tried)}")


def _socket() -> socket.socket:
    # The reservation binds the IPv6 wildcard address if possible, because torch's TCPStore binds the same address.
    try:
        sock = socket.socket(socket.AF_INET6, socket.SOCK_STREAM)
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    except OSError:
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return sock
