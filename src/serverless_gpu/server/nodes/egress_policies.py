"""Builds the network policies of pools for their nodes.

    pool's mode and allow-list ─┐
    addresses of all nodes ─────┼─▶ EgressPolicy ─▶ in each order to start, and in the answer to a heartbeat of a node
    server, database, Ray, ─────┘                   that has applied another policy
    index proxy

A node adds the address at which it reaches the server, and resolves names. Only nodes know the uids of principals.
"""

from __future__ import annotations

import contextlib
import ipaddress
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from urllib.parse import urlsplit

import sqlalchemy as sa

from serverless_gpu.ambient import Clock
from serverless_gpu.engines.base import EngineNode
from serverless_gpu.engines.ray.start_arguments import PORTS as RAY_PORTS
from serverless_gpu.errors import InvalidValue
from serverless_gpu.model.egress import Destination, EgressPolicy, destination, digest_of
from serverless_gpu.model.isolation import NONE
from serverless_gpu.node.base.network import is_loopback, own_addresses
from serverless_gpu.server.core.settings import PORT, Settings
from serverless_gpu.server.records import nodes, pools
from serverless_gpu.server.records.pools import StoredPool

_FRESH_S = 5.0
_DATABASE_PORT = 5432
_EVERYWHERE = ("0.0.0.0/0", "::/0")


class EgressPolicies:
    """Builds the network policy of each pool."""

    def __init__(
        self, *, settings: Settings, clock: Clock, engine_nodes: Callable[[], Collection[EngineNode]] = tuple
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._engine_nodes = engine_nodes
        self._lock = threading.Lock()
        self._closed: tuple[str, ...] = ()
        self._read_ns: int | None = None

    def of(self, connection: sa.Connection, pool_name: str) -> EgressPolicy | None:
        """Return the policy for the nodes of a pool, or None for a pool without isolation."""
        pool = pools.find(connection, pool_name)
        if pool is None or pool.level == NONE:
            return None
        return EgressPolicy(
            mode=pool.mode,
            allow=pool.allow,
            closed=self._endpoints(connection),
            index_proxy=tuple(each.text for each in index_proxy_endpoints(self._settings)),
        )

    def news(self, connection: sa.Connection, node_id: str, applied: str | None) -> EgressPolicy | None:
        """Return the policy for a node that has applied another policy, or None.

        `applied` is the digest that the node sent, or None for a node without network policies.
        """
        if applied is None:
            return None
        policy = self.of(connection, nodes.pool_of(connection, node_id))
        return None if policy is None or digest_of(policy) == applied else policy

    def _endpoints(self, connection: sa.Connection) -> tuple[str, ...]:
        """Return the control endpoints, at most a few seconds old."""
        with self._lock:
            now_ns = self._clock.boottime_ns()
            if self._read_ns is None or now_ns - self._read_ns > _FRESH_S * 1e9:
                found = {address for node in nodes.every(connection) for address in node.hello.addresses}
                # A node reports no address of a bridge, but an engine may use this address.
                found |= {host for node in self._engine_nodes() for host in _outside(node.endpoints)}
                own = [each.text for each in control_endpoints(self._settings)]
                self._closed = tuple(dict.fromkeys((*own, *sorted(found))))
                self._read_ns = now_ns
            return self._closed


def control_endpoints(settings: Settings) -> list[Destination]:
    """Return the endpoints of the server, of its index proxy, of its database and of Ray."""
    ports = {settings.port or PORT}
    with contextlib.suppress(OSError, ValueError):
        ports.add(int((settings.directory / "port").read_text(encoding="ascii")))
    found = [Destination(host, port, port) for host in _hosts(settings.host) for port in sorted(ports)]
    for name in settings.hosts:
        with contextlib.suppress(InvalidValue):
            found += [Destination(destination(name).host, port, port) for port in sorted(ports)]
    found += [each for each in index_proxy_endpoints(settings) if not _is_loopback(each)]
    # The URL may list several database servers, or name the directory of a Unix socket.
    for place in urlsplit(settings.database).netloc.rpartition("@")[2].split(","):
        with contextlib.suppress(InvalidValue):
            each = destination(place)
            found.append(each if each.first else Destination(each.host, _DATABASE_PORT, _DATABASE_PORT))
    if settings.ray is not None:
        first, last = settings.ray.port, settings.ray.port + RAY_PORTS - 1
        found += [Destination(network, first, last) for network in _EVERYWHERE]
        host, _, port_text = settings.ray.address.rpartition(":")
        if host and port_text.isdigit():
            found.append(Destination(_canonical(host.strip("[]")), int(port_text), int(port_text)))
    return found


def index_proxy_endpoints(settings: Settings) -> list[Destination]:
    """Return the endpoint of the index proxy, and its endpoint behind another name."""
    asked = settings.index_proxy
    if asked is None:
        return []
    found = [Destination(_canonical(asked.host), asked.port, asked.port)]
    parts = urlsplit(asked.url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    with contextlib.suppress(InvalidValue):
        found.append(Destination(destination(parts.hostname or "").host, port, port))
    return list(dict.fromkeys(found))


def policy_changes(before: StoredPool, now: StoredPool) -> bool:
    """Return True if a node's move from a pool to another pool changes the rules for its running attempts."""
    if before.level == NONE:
        return False
    return (before.level, before.mode, before.allow) != (now.level, now.mode, now.allow)


def _hosts(host: str) -> list[str]:
    """Return the addresses other than loopback on which the server listens."""
    with contextlib.suppress(ValueError):
        address = ipaddress.ip_address(host)
        if address.is_unspecified:
            return [_canonical(one.address) for one in own_addresses() if not is_loopback(one)]
        return [] if address.is_loopback else [_canonical(host)]
    return [] if host == "localhost" else [host.lower()]


def _is_loopback(each: Destination) -> bool:
    return each.host == "localhost" if each.network is None else each.network.is_loopback


def _outside(endpoints: Iterable[str]) -> Iterator[str]:
    """Yield the addresses of endpoints, except loopback addresses."""
    for each in endpoints:
        with contextlib.suppress(ValueError):
            address = ipaddress.ip_address(each.rpartition(":")[0].strip("[]"))
            if not address.is_loopback:
                yield str(address)


def _canonical(host: str) -> str:
    """Return the notation of a host in a `Destination`."""
    try:
        return str(ipaddress.ip_network(host))
    except ValueError:
        return host.lower()
