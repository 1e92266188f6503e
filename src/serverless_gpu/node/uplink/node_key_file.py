"""The private keys of a node: one file of mode 0600 in the node's home, which never leaves the home.

    node.key        the keys that the server knows
    node.key.next   new keys of a rotation, until the server has confirmed them

`NodeKeyFile` keeps old keys in memory for orders that the server sealed before a rotation.

Failure cases:

- The process is killed between the server's confirmation and the rename. The server refuses `node.key`, and the next
  process continues with `node.key.next`.

- The file is lost. The node makes other keys, and the server refuses them until the machine has joined again.

- Other users can read the file. The node refuses to start, because other users may have copied the keys.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from serverless_gpu.errors import InvalidValue, StorageError
from serverless_gpu.json_codec import from_json
from serverless_gpu.model.node_keys import Key, NodeKeys
from serverless_gpu.node.base.home import Home
from serverless_gpu.node.base.private_files import readers, write_private
from serverless_gpu.wire.node_crypto import SUITE

NAME = "node.key"


class StoredKeys(msgspec.Struct, frozen=True, kw_only=True):
    """Private keys as raw bytes, in the format of the file."""

    signing: Key
    sealing: Key


class PrivateKeys:
    """Private keys of a node, with their public keys."""

    def __init__(self, stored: StoredKeys) -> None:
        self.stored = stored
        self._signing = Ed25519PrivateKey.from_private_bytes(stored.signing)
        self._sealing = X25519PrivateKey.from_private_bytes(stored.sealing)
        self.public = NodeKeys(
            signing=self._signing.public_key().public_bytes_raw(),
            sealing=self._sealing.public_key().public_bytes_raw(),
        )

    @classmethod
    def generate(cls) -> PrivateKeys:
        """Return new random keys."""
        signing, sealing = Ed25519PrivateKey.generate(), X25519PrivateKey.generate()
        return cls(StoredKeys(signing=signing.private_bytes_raw(), sealing=sealing.private_bytes_raw()))

    def sign(self, text: bytes) -> bytes:
        """Return the signature of a text."""
        return self._signing.sign(text)

    def open(self, sealed: bytes, *, about: bytes) -> bytes | None:
        """Return the content of sealed data, or None if the data is not for these keys."""
        with contextlib.suppress(InvalidTag, ValueError):
            return SUITE.decrypt(sealed, self._sealing, about)
        return None


class NodeKeyFile:
    """The keys of a home. The first use makes the keys.

    Raises StorageError if the home is not writable. Raises InvalidValue for a damaged file, or a file that other users
    can read.
    """

    def __init__(self, home: Home) -> None:
        self._path = home.root / NAME
        self._next_path = home.root / f"{NAME}.next"
        try:
            if not self._path.exists():
                # If another process of this home makes keys at the same time, the first file stays.
                write_private(self._path, _encoded(PrivateKeys.generate()), replace=False)
        except OSError as error:
            raise StorageError(f"cannot write {self._path}: {error}") from error
        self.current = _read(self._path)
        self._known = [self.current]

    def next(self) -> PrivateKeys | None:
        """Return the keys of an unfinished rotation, or None."""
        return self._remember(_read(self._next_path)) if self._next_path.exists() else None

    def make_next(self) -> PrivateKeys:
        """Return the keys of a rotation, and store them durably before the server knows them."""
        try:
            if not self._next_path.exists():
                write_private(self._next_path, _encoded(PrivateKeys.generate()))
        except OSError as error:
            raise StorageError(f"cannot write {self._next_path}: {error}") from error
        return self._remember(_read(self._next_path))

    def promote(self, keys: PrivateKeys) -> None:
        """Use the keys of a rotation from now on."""
        try:
            self._next_path.replace(self._path)
        except OSError as error:
            raise StorageError(f"cannot rename {self._next_path}: {error}") from error
        self.current = keys

    def open(self, sealed: bytes, *, about: bytes) -> bytes | None:
        """Return the content of data that the server sealed to any key of this process, or None."""
        return next((data for keys in reversed(self._known) if (data := keys.open(sealed, about=about))), None)

    def _remember(self, keys: PrivateKeys) -> PrivateKeys:
        """Open data of these keys too, because the server can use new keys before its confirmation arrives."""
        if all(known.stored != keys.stored for known in self._known):
            self._known.append(keys)
        return keys


def _encoded(keys: PrivateKeys) -> bytes:
    return msgspec.json.encode(keys.stored) + b"\n"


def _read(path: Path) -> PrivateKeys:
    hint = f"delete {path}, and join this machine again: `sgpu node invite`, then `sgpu join`"
    try:
        others = readers(path)
        data = path.read_bytes()
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error}") from error
    if others:
        raise InvalidValue(f"the node's key {path} is not private: {others}", hint=hint)
    try:
        return PrivateKeys(from_json(data, StoredKeys))
    except (msgspec.MsgspecError, ValueError):
        raise InvalidValue(f"{path} does not contain the keys of a node", hint=hint) from None
