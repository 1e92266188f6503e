"""Validates definitions of package indexes, names of projects, and network addresses. Pure.

    sgpu index set pypi https://pypi.org/simple/ --file-host files.pythonhosted.org

An index has one URL, and the hosts from which its pages may link files. The proxy connects to these hosts only. An
address of a private network, or of the server's own machine, needs the definition's permission. Link-local addresses
and metadata services of clouds stay closed in every case, because they give the rights of the machine.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from urllib.parse import SplitResult, urlsplit

import msgspec

from serverless_gpu.errors import InvalidValue
from serverless_gpu.model.egress import METADATA, destination

INDEXES_MAX = 24
FILE_HOSTS_MAX = 16
URL_CHARACTERS_MAX = 1_000
KNOWN_FILE_HOSTS = {
    "pypi.org": ("files.pythonhosted.org",),
    "test.pypi.org": ("test-files.pythonhosted.org",),
    "download.pytorch.org": ("download-r2.pytorch.org",),
}
"""Hosts from which public indexes link files."""
PORTS = {"http": 80, "https": 443}
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?")
_PROJECT = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,126}[A-Za-z0-9])?")
_SEPARATORS = re.compile(r"[-_.]+")
_HINT = "use the URL of a simple repository, for example https://pypi.org/simple/"
_CLOSED = tuple(ipaddress.ip_network(text) for text in METADATA)

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class IndexDefinition(msgspec.Struct, frozen=True, kw_only=True):
    """A package index.

    Attributes:
        name: name in the URLs of the proxy.
        url: URL of the simple repository, with a slash at its end and without credentials.
        file_hosts: hosts of files beside the URL's own host, as `HOST` or `HOST:PORT`.
        private: True if the hosts may have addresses of private networks or of the server's machine.
    """

    name: str
    url: str
    file_hosts: tuple[str, ...] = ()
    private: bool = False

    @property
    def scheme(self) -> str:
        """Return "http" or "https"."""
        return urlsplit(self.url).scheme

    @property
    def authority(self) -> str:
        """Return the host of the URL, with its port unless the port is usual."""
        return authority(self.url)

    def has_host(self, scheme: str, host: str) -> bool:
        """Return True if the proxy may connect to a host for this index. HTTPS never becomes HTTP."""
        if scheme not in PORTS or (self.scheme == "https" and scheme != "https"):
            return False
        return host == self.authority or host in self.file_hosts


def checked(name: str, url: str, *, file_hosts: Sequence[str] | None = None, private: bool = False) -> IndexDefinition:
    """Return a definition in its canonical form. Raises InvalidValue.

    `file_hosts` is None to use the known hosts of a public index.
    """
    if not _NAME.fullmatch(name):
        raise InvalidValue(
            f"an index cannot be named {name[:64]!r}", hint="use up to 32 lower-case letters, digits and hyphens"
        )
    url = _checked_url(url)
    host = urlsplit(url).hostname or ""
    if file_hosts is None:
        file_hosts = KNOWN_FILE_HOSTS.get(authority(url), ())
    if len(file_hosts) > FILE_HOSTS_MAX:
        raise InvalidValue(f"an index has at most {FILE_HOSTS_MAX} file hosts, but {len(file_hosts)} are given")
    hosts = tuple(dict.fromkeys(_checked_host(text) for text in file_hosts))
    for each in (host, *(urlsplit(f"//{text}").hostname or "" for text in hosts)):
        _check_literal(each, private=private)
    return IndexDefinition(name=name, url=url, file_hosts=hosts, private=private)


def authority(url: str) -> str:
    """Return the lower-case host of a URL, with its port unless the port is usual. Raises ValueError."""
    return authority_of(urlsplit(url))


def authority_of(parts: SplitResult) -> str:
    """Return the lower-case host of a URL, with its port unless the port is usual. Raises ValueError."""
    host, port = _bracketed(parts.hostname or ""), parts.port
    return host if port in (None, PORTS.get(parts.scheme)) else f"{host}:{port}"


def is_open_address(address: str, *, private: bool) -> bool:
    """Return True if the proxy may connect to an address.

    `private` permits private networks and the server's own machine, but neither metadata services nor multicast.
    """
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    found = _embedded(found)
    if found.is_multicast or found.is_unspecified or found.is_link_local:
        return False
    if any(found.version == network.version and found in network for network in _CLOSED):
        return False
    return private or found.is_global


def normalized(project: str) -> str | None:
    """Return the normalized name of a project (PEP 503), or None for an invalid name."""
    return _SEPARATORS.sub("-", project).lower() if _PROJECT.fullmatch(project) else None


def _checked_url(text: str) -> str:
    shown = re.sub(r"//[^/@]*@", "//…@", text[:200])
    if len(text) > URL_CHARACTERS_MAX or not text.isascii() or not text.isprintable() or " " in text:
        raise InvalidValue(f"{shown!r} is not a URL of an index", hint=_HINT)
    try:
        parts = urlsplit(text)
        _ = parts.port
    except ValueError:
        raise InvalidValue(f"{shown!r} is not a URL of an index", hint=_HINT) from None
    if parts.username is not None or parts.password is not None:
        raise InvalidValue(
            "the URL of an index contains credentials, which pages, logs and locks would show",
            hint="store them as a secret (sgpu secret set NAME) and name the secret: --secret NAME",
        )
    if parts.scheme not in PORTS or not parts.hostname or parts.query or parts.fragment:
        raise InvalidValue(f"{shown!r} is not a URL of an index", hint=_HINT)
    _checked_host(parts.netloc)
    return f"{parts.scheme}://{authority(text)}{parts.path.rstrip('/')}/"


def _checked_host(text: str) -> str:
    """Return `HOST` or `HOST:PORT` in its canonical notation."""
    if any(letter in text for letter in "/@?#\\ "):
        raise InvalidValue(f"{text[:100]!r} is not a host", hint="name a host without scheme and path")
    where = destination(text)
    if where.first != where.last or (where.network is not None and where.network.num_addresses > 1):
        raise InvalidValue(f"{text[:100]!r} is not a host", hint="name one host, with at most one port")
    if where.first not in (0, *PORTS.values()):
        return where.text
    return _bracketed(msgspec.structs.replace(where, first=0, last=0).text)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _check_literal(host: str, *, private: bool) -> None:
    """Refuse an address that the proxy would never connect to."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return
    if is_open_address(host, private=private):
        return
    if is_open_address(host, private=True):
        raise InvalidValue(
            f"{host} is an address of a private network", hint="permit private addresses for this index: --private"
        )
    raise InvalidValue(
        f"{host} is link-local or an address of a cloud's metadata service, which stays closed",
        hint="name the host of a package index",
    )


def _embedded(address: Address) -> Address:
    """Return the IPv4 address inside an IPv6 address, because the network delivers to the IPv4 address."""
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour or (address.teredo[1] if address.teredo else None)
        if inner is None and address in _NAT64:
            inner = ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF)
        return inner or address
    return address


_NAT64 = ipaddress.ip_network("64:ff9b::/96")
