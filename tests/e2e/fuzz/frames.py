"""What may arrive on a socket between two of our processes when somebody is at its other end who means no good."""

from __future__ import annotations

import json
import os
import socket

import msgspec
from hypothesis import strategies as st

from serverless_gpu.node.base import protocol
from serverless_gpu.node.inside import channel

INLINE, MEMFD = channel.INLINE, channel.MEMFD

_numbers = st.integers() | st.sampled_from([-1, 0, 2**31, 2**63, 10**400]) | st.floats(allow_nan=False)
_words = st.text(max_size=20) | st.sampled_from(["\x1b[2J", "\u202e", "\0", "../../etc", "\udcff"])
values = st.recursive(
    st.none() | st.booleans() | _numbers | _words,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_words, inner, max_size=4),
    max_leaves=12,
)
"""Anything that JSON can say, and some that its readers do not expect."""
nested = st.integers(1, 6).map(lambda power: b'{"x":' + b"[" * 10**power)
"""What has no end for a reader that calls itself."""


def encoded(value: object) -> bytes:
    """Return a value as JSON."""
    return json.dumps(value).encode()


def messages(names: list[str], fields: dict[str, st.SearchStrategy[object]], key: str) -> st.SearchStrategy[bytes]:
    """Return messages of known names with fields of known names, and any values.

    Args:
        names: of messages.
        fields: by name, what is likely in them; anything else comes, too.
        key: under which a message's name stands.
    """
    some = st.fixed_dictionaries({}, optional={name: likely | values for name, likely in fields.items()})
    return st.tuples(st.sampled_from(names), some).map(lambda pair: encoded({key: pair[0], **pair[1]}))


bodies = nested | st.binary(max_size=300) | values.map(encoded)
"""Bodies of frames that no program of ours makes."""


def tags() -> list[str]:
    """Return the names of all messages between clients, agent and supervisors."""
    return [str(each.__struct_config__.tag) for each in protocol.AnyMessage.__args__]


def bare_tags() -> list[str]:
    """Return the names of those that are whole without a field."""
    return [
        str(each.__struct_config__.tag)
        for each in protocol.AnyMessage.__args__
        if not any(field.required for field in msgspec.structs.fields(each))
    ]


def fields() -> dict[str, st.SearchStrategy[object]]:
    """Return the names of their fields."""
    names = {field.encode_name for each in protocol.AnyMessage.__args__ for field in msgspec.structs.fields(each)}
    return dict.fromkeys(sorted(names), st.nothing())


class Frame(msgspec.Struct, frozen=True):
    """One packet: its first byte, its body, and how many descriptors come with it."""

    kind: bytes
    body: bytes
    fds: int

    def send(self, sock: socket.socket) -> None:
        """Send it; what nobody takes any more is nobody's."""
        files = [os.memfd_create("fuzz") for _ in range(self.fds)]
        try:
            for file in files:
                os.write(file, self.body)
            socket.send_fds(sock, [self.kind + self.body[:60_000]], files)
        except (BrokenPipeError, ConnectionResetError):
            pass
        finally:
            for file in files:
                os.close(file)


def frames(body: st.SearchStrategy[bytes]) -> st.SearchStrategy[Frame]:
    """Return packets with these bodies, well made and not."""
    kinds = st.sampled_from([INLINE, INLINE, INLINE, MEMFD, b"\2", b""])
    return st.builds(Frame, kinds, body, st.sampled_from([0, 0, 0, 1, 3]))
