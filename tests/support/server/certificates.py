"""Certificates for tests: an authority, and what it signs."""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

_DAY = datetime.timedelta(days=1)


class Authority:
    """Somebody whom clients trust.

    Args:
        directory: where files go.

    Attributes:
        ca: file with its certificate.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "tests")])
        certificate = (
            self._begun(self._name, self._key, days=1)
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .sign(self._key, hashes.SHA256())
        )
        self.ca = directory / "ca.pem"
        self.ca.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))

    def sign(self, *names: str, days: float = 1, file: str = "server", not_before: float = -30) -> tuple[Path, Path]:
        """Return files with a certificate and its key.

        Args:
            names: it is for.
            days: until it ends.
            file: what they are called.
            not_before: days from now, when it begins to be good.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, names[0] if names else "nobody")])
        made = self._begun(subject, key, days=days, not_before=not_before)
        if names:
            made = made.add_extension(x509.SubjectAlternativeName([_named(name) for name in names]), critical=False)
        certificate = made.sign(self._key, hashes.SHA256())
        cert_path, key_path = self._directory / f"{file}.pem", self._directory / f"{file}.key"
        cert_path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        key_path.touch(mode=0o600)
        key_path.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        return cert_path, key_path

    def _begun(
        self, subject: x509.Name, key: ec.EllipticCurvePrivateKey, *, days: float, not_before: float = -30
    ) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now + not_before * _DAY)
            .not_valid_after(now + days * _DAY)
        )


def _named(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)
