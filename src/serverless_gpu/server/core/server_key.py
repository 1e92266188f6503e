"""The server's key: 32 random bytes in a private file, and what is derived from them.

    key ─┬─ "sealing"  ─▶ `Sealer`: encrypts callers' variables and secrets in the database
         ├─ "attempts" ─▶ tokens of attempts, one for each of their crews
         └─ "requests" ─▶ fingerprints, by which a request that comes again is known

    sealed = form (1 byte) · identifier of the key (8) · nonce (12, random) · ciphertext and tag (AES-256-GCM)

What sealed data belongs to (a run's identifier) is authenticated with it: the variables of one run, copied into the row
of another, do not open. The key's identifier tells a wrong key from damaged data.

A token of an attempt is computed, not remembered, so that an order can be delivered again after a restart, and a lease
be renewed without a write. It ends: its last second is a part of it.

    sgpa_<run>_<fence>_<until>_<43 characters>     until: seconds since 1970
    sgpa_<run>_<fence>_<43 characters>             of nodes that take no renewal; the database has its hash. No end
    sgpa_<run>_<fence>-<crew>_…                    of another crew than the first, of a gang on several nodes

A reader of the database who lacks this file can neither read the callers' variables nor speak for an attempt. Without
the file, what was sealed is lost, so `sgpu server backup` takes both: a backup is as secret as the server.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import os
import re
import secrets
from pathlib import Path

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from serverless_gpu.errors import ServerProblem
from serverless_gpu.node.base.private_files import write_private

KEY_BYTES = 32
PREFIX = "sgpa_"
_ATTEMPT = re.compile(
    PREFIX + r"(?P<run>[^_]{26})_(?P<fence>[0-9]{1,9})(?:-(?P<crew>[1-9][0-9]{0,3}))?"
    r"(?:_(?P<until>[1-9][0-9]{0,11}))?_(?P<secret>[A-Za-z0-9_-]{43})"
)
_UNNAMED = re.compile(r"\.(key|key\.next|rotation\.json|token|node\.token|join\.token|[^/]+\.mark)\.[0-9a-f]{16}")


_FORM = b"\x01"
_KEY_BYTES = 8
_NONCE_BYTES = 12
_HEAD_BYTES = len(_FORM) + _KEY_BYTES + _NONCE_BYTES


class Keys:
    """What is derived from the server's key."""

    def __init__(self, key: bytes) -> None:
        if len(key) != KEY_BYTES:
            raise ServerProblem(f"the server's key has {len(key)} bytes and not {KEY_BYTES}")
        self.sealing = _derived(key, "sealing")
        self._attempts = _derived(key, "attempts")
        self._requests = _derived(key, "requests")

    def attempt_token(self, run_id: str, fence: int, crew: int = 0, *, until_s: int | None = None) -> str:
        """Return the token of a crew of an attempt; the same one each time.

        Args:
            run_id: the run.
            fence: number of the attempt.
            crew: number of the crew; the first one's looks as if there were no others.
            until_s: when it ends, seconds since 1970; None for one that a node without renewal gets.
        """
        whose = [run_id, f"{fence}-{crew}" if crew else f"{fence}", *([] if until_s is None else [f"{until_s}"])]
        said = hmac.digest(self._attempts, ":".join(["attempt", *whose]).encode(), "sha256")
        return PREFIX + "_".join([*whose, encode(said)])

    def has_signed(self, token: str) -> bool:
        """Return whether a token of an attempt that has an end is of this server's making."""
        whose, until_s = parse_attempt_token(token), token_until_s(token)
        if whose is None or until_s is None:
            return False
        return hmac.compare_digest(token, self.attempt_token(*whose, until_s=until_s))

    def fingerprint(self, request: bytes) -> str:
        """Return 64 characters that tell one request from another, and nothing of what is in it.

        With a plain hash, a reader of the database could try passwords: the request holds the caller's variables.
        """
        return hmac.digest(self._requests, request, "sha256").hex()


def read_keys(directory: Path) -> Keys:
    """Return the keys of a server; makes its key at the first start."""
    path = directory / "key"
    with contextlib.suppress(FileNotFoundError):
        return Keys(path.read_bytes())
    write_private(path, secrets.token_bytes(KEY_BYTES), replace=False)
    return Keys(path.read_bytes())


def parse_attempt_token(token: str) -> tuple[str, int, int] | None:
    """Return run, fence and crew that a token says it is for, or None when it is no token of an attempt."""
    match = _ATTEMPT.fullmatch(token)
    return None if match is None else (match["run"], int(match["fence"]), int(match["crew"] or 0))


def token_until_s(token: str) -> int | None:
    """Return when a token of an attempt says that it ends, seconds since 1970, or None when it does not."""
    match = _ATTEMPT.fullmatch(token)
    return None if match is None or match["until"] is None else int(match["until"])


def sha256(token: str) -> str:
    """Return what the database has of a token. They are random: guessing one is hopeless without a slow hash, too."""
    return hashlib.sha256(token.encode()).hexdigest()


def encode(data: bytes) -> str:
    """Return bytes as letters, digits, "-" and "_"."""
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def remove_unnamed(directory: Path) -> None:
    """Remove what `write_private` has left of a process that was killed in it; no process may be writing there now."""
    for path in directory.glob(".*"):
        if _UNNAMED.fullmatch(path.name):
            path.unlink(missing_ok=True)


def _derived(key: bytes, purpose: str) -> bytes:
    return hmac.digest(key, f"serverless-gpu {purpose} 1".encode(), "sha256")


class Sealer:
    """Seals and opens with one key."""

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
