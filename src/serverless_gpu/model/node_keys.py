"""Public keys of a node, and the exact texts that a node signs.

    NodeKeys        Ed25519 key that verifies signatures, X25519 key that seals orders, one fingerprint for both
    session_text    signed for each session: the server's challenge, the token, the keys
    rotation_text   signed by the old and by the new key: the old fingerprint, the token, the new keys
    order_text      binds a sealed part of an order to its attempt and node

Each text begins with its purpose. A signature for one purpose is therefore invalid for each other purpose. Each text
contains the hash of the node's token. A second server can therefore not use a signature of the node.
"""

from __future__ import annotations

import hashlib
from typing import Annotated

import msgspec

KEY_BYTES = 32
SIGNATURE_BYTES = 64
FINGERPRINT_CHARACTERS = 32

Key = Annotated[bytes, msgspec.Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
Signature = Annotated[bytes, msgspec.Meta(min_length=SIGNATURE_BYTES, max_length=SIGNATURE_BYTES)]


class NodeKeys(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Public keys of a node, as raw bytes.

    Attributes:
        signing: Ed25519 key. The node signs with the private key to open sessions.
        sealing: X25519 key. The server seals secrets and callers' variables to this key.
    """

    signing: Key
    sealing: Key

    @property
    def fingerprint(self) -> str:
        """Return the identifier of both keys, as 32 hexadecimal digits."""
        return hashlib.sha256(self.signing + self.sealing).hexdigest()[:FINGERPRINT_CHARACTERS]


def session_text(challenge: str, token_sha256: str, keys: NodeKeys) -> bytes:
    """Return the text that a node signs to open a session with its token and keys."""
    return _text("session", challenge, token_sha256, keys.fingerprint)


def rotation_text(old: str, token_sha256: str, keys: NodeKeys) -> bytes:
    """Return the text that a node signs to replace the keys with fingerprint `old`."""
    return _text("rotation", old, token_sha256, keys.fingerprint)


def order_text(run_id: str, fence: int, crew: int) -> bytes:
    """Return the text that binds the sealed part of an order to one node of one attempt."""
    return _text("order", run_id, str(fence), str(crew))


def _text(*parts: str) -> bytes:
    # Lengths make the text unambiguous: parts with other limits have another text.
    return b"serverless-gpu node 1\n" + b"".join(f"{len(part)}:{part}\n".encode() for part in parts)
