"""Encryption of what must not be readable in a copy of the database: the callers' variables.

    sealed = form (1 byte) · identifier of the key (8) · nonce (12, random) · ciphertext and tag (AES-256-GCM)

What it belongs to (a run's identifier) is authenticated with it: the variables of one run, copied into the row of
another, do not open. The key's identifier is there so that a wrong key is told from damaged data.
"""

from __future__ import annotations

import hashlib
import os

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from serverless_gpu.errors import ServerProblem

_FORM = b"\x01"
_KEY_BYTES = 8
_NONCE_BYTES = 12
_HEAD_BYTES = len(_FORM) + _KEY_BYTES + _NONCE_BYTES


class Sealer:
    """Seals and opens with one key.

    Args:
        key: 32 bytes, `Keys.sealing`.
    """

    def __init__(self, key: bytes) -> None:
        self._identifier = hashlib.sha256(b"identifier" + key).digest()[:_KEY_BYTES]
        self._cipher = AESGCM(key)

    def seal(self, data: bytes, *, about: str) -> bytes:
        """Return data so that only this key opens it, and only for what it is about.

        Args:
            data: of any length.
            about: what it belongs to, for example a run's identifier.
        """
        nonce = os.urandom(_NONCE_BYTES)
        return _FORM + self._identifier + nonce + self._cipher.encrypt(nonce, data, about.encode())

    def is_mine(self, sealed: bytes) -> bool:
        """Return whether this key sealed it."""
        return sealed[1 : 1 + _KEY_BYTES] == self._identifier

    def unseal(self, sealed: bytes, *, about: str) -> bytes:
        """Return what was sealed.

        Raises:
            ServerProblem: it was sealed with another key, is about something else, or was changed.
        """
        if sealed[:1] != _FORM or len(sealed) < _HEAD_BYTES:
            raise ServerProblem(f"the sealed data of {about} is damaged")
        if not self.is_mine(sealed):
            message = f"the sealed data of {about} was sealed with another key"
            raise ServerProblem(message, hint="put back the file `key` that belongs to this database")
        nonce = sealed[1 + _KEY_BYTES : _HEAD_BYTES]
        try:
            return self._cipher.decrypt(nonce, sealed[_HEAD_BYTES:], about.encode())
        except InvalidTag:
            raise ServerProblem(f"the sealed data of {about} is damaged, or belongs to something else") from None
