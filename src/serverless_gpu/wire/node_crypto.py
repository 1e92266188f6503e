"""Verifies signatures of nodes, and seals data to the key of a node.

    server   verifies(keys, text, signature)      Ed25519
             sealed(keys, data, about=text)       HPKE (RFC 9180): X25519, HKDF-SHA256, AES-256-GCM; `about` is its info
    node     `node/uplink/node_key_file.py` has the private keys

HPKE makes a new key for each message. Sealed data is as long as its content plus 48 bytes.
"""

from __future__ import annotations

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey
from cryptography.hazmat.primitives.hpke import AEAD, KDF, KEM, Suite

from serverless_gpu.errors import InvalidValue
from serverless_gpu.model.node_keys import NodeKeys

SUITE = Suite(KEM.X25519, KDF.HKDF_SHA256, AEAD.AES_256_GCM)


def verifies(keys: NodeKeys, text: bytes, signature: bytes) -> bool:
    """Return True if the owner of the keys has signed a text."""
    try:
        Ed25519PublicKey.from_public_bytes(keys.signing).verify(signature, text)
    except (InvalidSignature, ValueError):
        return False
    return True


def sealed(keys: NodeKeys, data: bytes, *, about: bytes) -> bytes:
    """Encrypt data that only the owner of the keys can open, and only with the same `about` text."""
    return SUITE.encrypt(data, X25519PublicKey.from_public_bytes(keys.sealing), about)


def check_sealing(keys: NodeKeys) -> None:
    """Raise InvalidValue for a key with which sealing cannot work, such as a point of small order."""
    try:
        sealed(keys, b"", about=b"")
    except ValueError as error:
        raise InvalidValue(f"the node's key for sealing is not a valid X25519 key: {error}") from None
