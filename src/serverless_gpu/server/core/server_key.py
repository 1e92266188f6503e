"""Reads the server's 32-byte key from a private file, and derives other keys from the server's key.

    key ─┬─ "sealing"  ─▶ `Sealer`: encrypts callers' variables and secrets in the database
         ├─ "attempts" ─▶ tokens of attempts, one for each supervisor
         ├─ "sessions" ─▶ tokens of nodes' sessions
         ├─ "indexes"  ─▶ tokens of the index proxy, and signatures of its links
         └─ "requests" ─▶ fingerprints that identify repeated requests

    sealed = form (1 byte) · identifier of the key (8) · nonce (12, random) · ciphertext and tag (AES-256-GCM)

The encryption also authenticates the owner's identifier, such as a run identifier. Sealed data copied into another
run's row therefore cannot be decrypted. The key identifier distinguishes a wrong key from damaged data.

The server computes attempt tokens and does not store attempt tokens. The server can therefore resend orders after a
restart and renew leases without database writes. Each attempt token contains its expiry time.

    sgpa_<run>_<fence>_<until>_<43 characters>     until: seconds since 1970
    sgpa_<run>_<fence>_<43 characters>             for nodes without renewal; the database has its hash. No expiry
    sgpa_<run>_<fence>-<crew>_…                    for later supervisors of a gang on several nodes

The server computes session tokens in the same way. A session token is valid while the node's own token is valid and
bound to no other key.

    sgpn_<node's own token>_<fingerprint of the node's keys>_<until>_<43 characters>

Tokens of the index proxy name their holder (a build, an attempt or a user) in hexadecimal.

    sgpx_<holder>_<until>_<43 characters>

A database copy alone reveals neither callers' variables nor attempt tokens. Without the key file, sealed data is lost.
`sgpu server backup` therefore saves the key file with the database. Keep a backup as confidential as the server.
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
from typing import NamedTuple

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
SESSION_PREFIX = "sgpn_"
_SESSION = re.compile(
    SESSION_PREFIX + r"(?P<token>[^_]{26})_(?P<key>[0-9a-f]{32})_(?P<until>[1-9][0-9]{0,11})_[A-Za-z0-9_-]{43}"
)
INDEX_PREFIX = "sgpx_"
_INDEX = re.compile(INDEX_PREFIX + r"(?P<holder>(?:[0-9a-f]{2}){1,256})_(?P<until>[1-9][0-9]{0,11})_[A-Za-z0-9_-]{43}")
_UNNAMED = re.compile(r"\.(key|key\.next|rotation\.json|token|node\.token|join\.token|[^/]+\.mark)\.[0-9a-f]{16}")


_FORM = b"\x01"
_KEY_BYTES = 8
_NONCE_BYTES = 12
_HEAD_BYTES = len(_FORM) + _KEY_BYTES + _NONCE_BYTES


class NodeSession(NamedTuple):
    """A session of a node: its own token, the fingerprint of its keys, and the end in seconds since 1970."""

    token_id: str
    key: str
    until_s: int


class Keys:
    """Derived keys for sealing, attempt tokens and request fingerprints."""

    def __init__(self, key: bytes) -> None:
        if len(key) != KEY_BYTES:
            raise ServerProblem(f"the server's key file has {len(key)} bytes instead of {KEY_BYTES}")
        self.sealing = _derived(key, "sealing")
        self._attempts = _derived(key, "attempts")
        self._requests = _derived(key, "requests")
        self._sessions = _derived(key, "sessions")
        self._indexes = _derived(key, "indexes")

    def attempt_token(self, run_id: str, fence: int, crew: int = 0, *, until_s: int | None = None) -> str:
        """Return the attempt token of one supervisor. Equal arguments produce the same token.

        Args:
            run_id: the run.
            fence: number of the attempt.
            crew: number of the supervisor in its gang. The token of supervisor 0 contains no number.
            until_s: expiry, seconds since 1970; None for a node that does not renew tokens.
        """
        whose = [run_id, f"{fence}-{crew}" if crew else f"{fence}", *([] if until_s is None else [f"{until_s}"])]
        said = hmac.digest(self._attempts, ":".join(["attempt", *whose]).encode(), "sha256")
        return PREFIX + "_".join([*whose, encode(said)])

    def has_signed(self, token: str) -> bool:
        """Return True if this server signed the token and the token has an expiry time."""
        whose, until_s = parse_attempt_token(token), token_until_s(token)
        if whose is None or until_s is None:
            return False
        return hmac.compare_digest(token, self.attempt_token(*whose, until_s=until_s))

    def session_token(self, session: NodeSession) -> str:
        """Return the token of a node's session. Equal sessions have the same token."""
        parts = [session.token_id, session.key, f"{session.until_s}"]
        said = hmac.digest(self._sessions, ":".join(["session", *parts]).encode(), "sha256")
        return SESSION_PREFIX + "_".join([*parts, encode(said)])

    def node_session(self, token: str) -> NodeSession | None:
        """Return the session of a token that this server signed, or None for any other token."""
        match = _SESSION.fullmatch(token)
        if match is None:
            return None
        session = NodeSession(match["token"], match["key"], int(match["until"]))
        return session if hmac.compare_digest(token, self.session_token(session)) else None

    def index_token(self, holder: str, *, until_s: int) -> str:
        """Return a token of the index proxy. Equal arguments produce the same token."""
        parts = [holder.encode().hex(), f"{until_s}"]
        said = hmac.digest(self._indexes, ":".join(["token", *parts]).encode(), "sha256")
        return INDEX_PREFIX + "_".join([*parts, encode(said)])

    def index_holder(self, token: str) -> tuple[str, int] | None:
        """Return the holder of a token of the index proxy and its end in seconds since 1970, or None."""
        match = _INDEX.fullmatch(token)
        if match is None:
            return None
        holder, until_s = bytes.fromhex(match["holder"]).decode("utf-8", "replace"), int(match["until"])
        signed = self.index_token(holder, until_s=until_s)
        return (holder, until_s) if hmac.compare_digest(token, signed) else None

    def link_signature(self, link: str) -> str:
        """Return the signature of a link of the index proxy, 128 bits in 22 characters."""
        return encode(hmac.digest(self._indexes, f"link:{link}".encode(), "sha256")[:16])

    def fingerprint(self, request: bytes) -> str:
        """Return a keyed 64-character hash of a request.

        The request contains the caller's variables. With a plain hash, a database reader could test password guesses.
        """
        return hmac.digest(self._requests, request, "sha256").hex()


def read_keys(directory: Path) -> Keys:
    """Return a server's derived keys. On the first start, create the server's key."""
    path = directory / "key"
    with contextlib.suppress(FileNotFoundError):
        return Keys(path.read_bytes())
    write_private(path, secrets.token_bytes(KEY_BYTES), replace=False)
    return Keys(path.read_bytes())


def parse_attempt_token(token: str) -> tuple[str, int, int] | None:
    """Return an attempt token's run, fence and supervisor number, or None for any other token."""
    match = _ATTEMPT.fullmatch(token)
    return None if match is None else (match["run"], int(match["fence"]), int(match["crew"] or 0))


def token_until_s(token: str) -> int | None:
    """Return an attempt token's expiry in seconds since 1970, or None if the token never expires."""
    match = _ATTEMPT.fullmatch(token)
    return None if match is None or match["until"] is None else int(match["until"])


def sha256(token: str) -> str:
    """Return a token's hash for the database. A fast hash is enough, because tokens are random."""
    return hashlib.sha256(token.encode()).hexdigest()


def encode(data: bytes) -> str:
    """Return bytes as letters, digits, "-" and "_"."""
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def remove_unnamed(directory: Path) -> None:
    """Remove temporary files of an interrupted `write_private`."""
    for path in directory.glob(".*"):
        if _UNNAMED.fullmatch(path.name):
            path.unlink(missing_ok=True)


def _derived(key: bytes, purpose: str) -> bytes:
    return hmac.digest(key, f"serverless-gpu {purpose} 1".encode(), "sha256")


class Sealer:
    """Encrypts and decrypts data with one key."""

    def __init__(self, key: bytes) -> None:
        self._identifier = hashlib.sha256(b"identifier" + key).digest()[:_KEY_BYTES]
        self._cipher = AESGCM(key)

    def seal(self, data: bytes, *, about: str) -> bytes:
        """Encrypt data for one owner. Decryption requires the same key and the same `about` value.

        Args:
            data: bytes of any length.
            about: identifier of the owner, for example a run.
        """
        nonce = os.urandom(_NONCE_BYTES)
        return _FORM + self._identifier + nonce + self._cipher.encrypt(nonce, data, about.encode())

    def is_mine(self, sealed: bytes) -> bool:
        """Return True if this key sealed the data."""
        return sealed[1 : 1 + _KEY_BYTES] == self._identifier

    def unseal(self, sealed: bytes, *, about: str) -> bytes:
        """Return the decrypted data.

        Raises:
            ServerProblem: the data was sealed with another key, belongs to another owner, or was changed.
        """
        if sealed[:1] != _FORM or len(sealed) < _HEAD_BYTES:
            raise ServerProblem(f"the sealed data of {about} is damaged")
        if not self.is_mine(sealed):
            message = f"the sealed data of {about} was sealed with another key"
            raise ServerProblem(message, hint="restore the file `key` that belongs to this database")
        nonce = sealed[1 + _KEY_BYTES : _HEAD_BYTES]
        try:
            return self._cipher.decrypt(nonce, sealed[_HEAD_BYTES:], about.encode())
        except InvalidTag:
            raise ServerProblem(f"the sealed data of {about} is damaged, or belongs to another owner") from None
