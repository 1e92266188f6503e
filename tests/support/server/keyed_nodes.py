"""A node with keys of its own that a test plays by hand: it opens sessions and replaces its keys as an uplink does."""

from __future__ import annotations

import base64
import hashlib
from typing import Any

import msgspec

from serverless_gpu.model.node_keys import rotation_text, session_text
from serverless_gpu.node.uplink.node_key_file import PrivateKeys
from tests.support.server.agents import hello
from tests.support.server.principals import Answer, Api


class KeyedNode:
    """A node.

    Args:
        api: of its server.
        token: its own.
        keys: another node's, for a home that was copied.
    """

    def __init__(self, api: Api, token: str, keys: PrivateKeys | None = None) -> None:
        self.api = api
        self.token = token
        self.keys = keys or PrivateKeys.generate()
        self.session = ""

    def request(self, challenge: str = "") -> dict[str, Any]:
        """Return a request for a session, for a new challenge unless one is given."""
        challenge = challenge or self.api.do(self.token, "POST", "/agents/challenge")["challenge"]
        public = self.keys.public
        signature = self.keys.sign(session_text(challenge, _digest(self.token), public))
        return {"challenge": challenge, "keys": self.public(), "signature": _text(signature)}

    def public(self) -> dict[str, str]:
        """Return its public keys as JSON has them."""
        return {"signing": _text(self.keys.public.signing), "sealing": _text(self.keys.public.sealing)}

    def open(self) -> Answer:
        """Ask for a session, and use it from then on."""
        status, said = self.api.ask(self.token, "POST", "/agents/session", self.request())
        if status == 200:
            self.session = said["token"]
        return status, said

    def hello(self, name: str = "n1", **fields: object) -> Answer:
        """Say hello in a session."""
        if not self.session:
            assert self.open()[0] == 200
        said = hello(name, **{"instance": "i1", **fields})  # type: ignore[arg-type]  # text for each field
        body = msgspec.to_builtins(msgspec.structs.replace(said, keys=self.keys.public))
        return self.api.ask(self.session, "POST", "/agents", body)

    def joined(self, name: str = "n1", **fields: object) -> str:
        """Say hello, and return the node's identifier."""
        status, said = self.hello(name, **fields)
        assert status == 200, said
        return str(said["node"])

    def beat(self, node_id: str) -> Answer:
        """Send a heartbeat."""
        return self.api.ask(self.session, "POST", f"/agents/{node_id}/heartbeat", {"devices": [], "instance": "i1"})

    def rotation(self, new: PrivateKeys, *, signed_by: PrivateKeys | None = None) -> dict[str, Any]:
        """Return a request for other keys, signed by the present ones unless others are given."""
        text = rotation_text(self.keys.public.fingerprint, _digest(self.token), new.public)
        public = {"signing": _text(new.public.signing), "sealing": _text(new.public.sealing)}
        return {"keys": public, "old": _text((signed_by or self.keys).sign(text)), "new": _text(new.sign(text))}


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()
