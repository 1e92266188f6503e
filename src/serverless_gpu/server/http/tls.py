"""Reads the server's TLS certificate and key at the start and after each renewal.

    tls_cert  PEM: the certificate, then its intermediate certificates          SIGHUP ─▶ read, checked, used for new
    tls_key   PEM: its key; readable by the server's user only                            connections

A certificate renewal does not interrupt open connections.

    server/certificate.json    path and expiry of the certificate in use, for `sgpu doctor`; missing without TLS

Failure cases:

* A certificate file is missing or invalid, or other users may read the key. The server refuses to start with an invalid
  certificate. During a renewal, the server logs the error and keeps the current certificate.

* The certificate has expired or is not yet valid. A starting server logs an error and continues, because local runs use
  loopback without TLS. During a renewal, the server refuses the expired certificate and keeps the current certificate.
"""

from __future__ import annotations

import logging
import os
import ssl
import stat
from pathlib import Path

import msgspec
from cryptography import x509

from serverless_gpu.ambient import Clock
from serverless_gpu.errors import InvalidValue
from serverless_gpu.units import format_days_ms

SOON_NS = 21 * 86_400 * 1_000_000_000
"""Nanoseconds before a certificate's expiry at which the server starts to warn."""
FILE = "certificate.json"
_log = logging.getLogger(__name__)


class CertificateInUse(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of `certificate.json`."""

    path: str
    until_ns: int
    names: tuple[str, ...]

    def sentence(self, now_ns: int) -> str:
        """Return a message about the certificate's expiry."""
        apart = format_days_ms(abs(self.until_ns - now_ns) // 1_000_000)
        when = f"ended {apart} ago" if self.until_ns <= now_ns else f"ends in {apart}"
        return f"the certificate {self.path} ({', '.join(self.names) or 'without names'}) {when}"


class Certificate:
    """The server's certificate and its SSL context."""

    def __init__(self, cert: str, key: str, *, directory: Path, clock: Clock) -> None:
        self._cert, self._key = Path(cert), Path(key)
        self._directory = directory
        self._clock = clock
        self.context = _context()
        self.in_use = self._take(ended_too=True)

    def sentence(self) -> str:
        """Return a message about the certificate's expiry."""
        return self.in_use.sentence(self._clock.wall_ns())

    def renew(self) -> None:
        """Read the certificate files again. On an error, log the reason and keep the current certificate."""
        try:
            self.in_use = self._take(ended_too=False)
        except InvalidValue as error:
            _log.error(
                "the server did not renew its certificate and continues with the current certificate: %s", error.message
            )

    @property
    def is_over(self) -> bool:
        """Return True if the current certificate has expired."""
        return self.in_use.until_ns <= self._clock.wall_ns()

    def _take(self, *, ended_too: bool) -> CertificateInUse:
        _check_private(self._key)
        found, from_ns = _read(self._cert)
        now_ns = self._clock.wall_ns()
        if not ended_too and found.until_ns <= now_ns:
            raise InvalidValue(found.sentence(now_ns), hint="install a valid certificate, then send SIGHUP again")
        if not ended_too and from_ns > now_ns:
            begins = format_days_ms((from_ns - now_ns) // 1_000_000)
            raise InvalidValue(f"the certificate {found.path} is not valid yet; it becomes valid in {begins}")
        try:
            # Test the files in a separate SSL context first, because a failed load may change the context.
            _context().load_cert_chain(self._cert, self._key, self._no_passphrase)
            self.context.load_cert_chain(self._cert, self._key, self._no_passphrase)
        except (OSError, ssl.SSLError) as error:
            hint = "check that the key belongs to the certificate"
            raise InvalidValue(
                f"the certificate {self._cert} and the key {self._key} do not match: {error}", hint=hint
            ) from error
        soon = logging.WARNING if found.until_ns - now_ns < SOON_NS else logging.INFO
        _log.log(logging.ERROR if found.until_ns <= now_ns else soon, "%s", found.sentence(now_ns))
        self._write_down(found)
        return found

    def _write_down(self, found: CertificateInUse) -> None:
        """Record the current certificate for `sgpu doctor`."""
        beside = self._directory / f".{FILE}"
        try:
            beside.write_bytes(msgspec.json.encode(found))
            beside.replace(self._directory / FILE)
        except OSError as error:
            _log.warning("the server could not write %s: %s", self._directory / FILE, error.strerror)

    def _no_passphrase(self) -> str:
        hint = (
            f"remove the passphrase: openssl pkey -in {self._key} -out FILE, and make FILE readable only "
            "for the server's user"
        )
        raise InvalidValue(
            f"the server does not support encrypted keys, but the TLS key {self._key} has a passphrase", hint=hint
        )


def is_its_own(text: str) -> bool:
    """Return True if a certificate is self-signed.

    Args:
        text: PEM, the certificate first.
    """
    try:
        first = x509.load_pem_x509_certificates(text.encode())[0]
    except ValueError:
        return False
    return first.issuer == first.subject


def _context() -> ssl.SSLContext:
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    made.minimum_version = ssl.TLSVersion.TLSv1_2
    made.options |= ssl.OP_NO_RENEGOTIATION
    made.set_alpn_protocols(["http/1.1"])
    return made


def _read(path: Path) -> tuple[CertificateInUse, int]:
    """Return a certificate's contents, and the start of its validity in nanoseconds since 1970."""
    try:
        first = x509.load_pem_x509_certificates(path.read_bytes())[0]
    except (OSError, ValueError) as error:
        raise InvalidValue(
            f"{path} is not a certificate: {error}",
            hint="write a PEM file that contains the certificate and then its chain",
        ) from error
    try:
        alternatives = first.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        names: tuple[str, ...] = ()
    else:
        addresses = (str(address) for address in alternatives.get_values_for_type(x509.IPAddress))
        names = (*alternatives.get_values_for_type(x509.DNSName), *addresses)
    until_ns, from_ns = (
        round(when.timestamp()) * 1_000_000_000 for when in (first.not_valid_after_utc, first.not_valid_before_utc)
    )
    return CertificateInUse(path=str(path), until_ns=until_ns, names=names), from_ns


def _check_private(key: Path) -> None:
    """Refuse a key that other users may read. A group may read a key that root owns."""
    try:
        status = key.stat()
    except OSError as error:
        raise InvalidValue(f"{key} cannot be read: {error.strerror}") from error
    if stat.S_ISDIR(status.st_mode):
        raise InvalidValue(f"{key} is a directory", hint="pass the key file with --tls-key")
    forbidden = 0o077 if status.st_uid == os.geteuid() != 0 else 0o027
    if status.st_mode & forbidden:
        raise InvalidValue(f"other users can read the TLS key {key}", hint=f"chmod 600 {key}")
