"""Decides what an account without rights may ask of the spawner.

The account can act for each principal of its node, but never for root or for another account. The spawner therefore
executes a verb only for files of the account, and only with a uid of a principal. The kernel's permissions still apply
to the principal's processes. The spawner hides nothing from the account that the account could read without it.

Failure cases: The spawner answers a request that is not permitted with `IsolationUnavailable`. The message names the
file or the uid.
"""

from __future__ import annotations

import ipaddress
import os
import re
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path

from serverless_gpu.errors import InvalidValue, IsolationUnavailable
from serverless_gpu.model.egress import METADATA, EgressPolicy, check_allowed, destination
from serverless_gpu.node.inside import sandbox

_ATTEMPT = re.compile(re.escape(sandbox.ATTEMPT) + r"/[0-9a-f]{8}")
_DEVICE = re.compile(r"/dev/(nvidia[a-z0-9-]*|nvidia-caps/nvidia-cap[0-9]+|infiniband/[a-z0-9_]+)")
CLOSED_MAX = 20_000
"""Maximum number of control endpoints in a network policy."""
GANG_MAX = 4_096
"""Maximum number of addresses in one request for a gang."""
NOTE_CHARACTERS_MAX = 1_000
PIDS_MAX = 1_000
_HINT = "start agent, uplink and supervisors with the account of the spawner, and keep their files in its home"


def check_uid(uid: int | None, uids: range) -> int:
    """Return a uid of a principal of this node. Raises IsolationUnavailable for another uid, or for None."""
    if uid is None or uid not in uids:
        raise IsolationUnavailable(f"uid {uid} belongs to no principal of this node", hint=_HINT)
    return uid


def check_file(path: str, owners: Sequence[int]) -> None:
    """Raise IsolationUnavailable unless a file belongs to one of the uids. Raises OSError."""
    os.close(open_file(path, owners))


def open_file(path: str, owners: Sequence[int]) -> int:
    """Return a descriptor of a file or directory that belongs to one of the uids.

    The descriptor permits neither reading nor writing (O_PATH). Raises IsolationUnavailable or OSError.
    """
    if not path.startswith("/") or os.path.normpath(path) != path:
        raise IsolationUnavailable(f"{path!r} is not an absolute path without `..`", hint=_HINT)
    fd = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    status = os.fstat(fd)
    if status.st_uid not in owners or not (stat.S_ISDIR(status.st_mode) or stat.S_ISREG(status.st_mode)):
        os.close(fd)
        raise IsolationUnavailable(f"{path} is no file or directory of the node's account", hint=_HINT)
    return fd


def check_device(path: str) -> None:
    """Raise IsolationUnavailable unless a path is a device node of an accelerator. Raises OSError."""
    if not _DEVICE.fullmatch(path) or not stat.S_ISCHR(os.lstat(path).st_mode):
        raise IsolationUnavailable(f"{path} is no device node of an accelerator", hint=_HINT)


def check_interpreter(python: str, account: int, own: Sequence[str]) -> None:
    """Raise IsolationUnavailable unless every user may execute an interpreter, or it is known.

    Interpreters below the directories `own` and interpreters of the account are known. Raises OSError.
    """
    real = os.path.realpath(python, strict=True)
    for path in dict.fromkeys((python, real)):
        place = os.path.realpath(os.path.dirname(path))
        if os.stat(path).st_uid == account or any(place.startswith(f"{each}/") for each in own):
            continue
        if not all(os.stat(each).st_mode & stat.S_IXOTH for each in (Path(path), *Path(path).parents)):
            raise IsolationUnavailable(
                f"the interpreter {python} is not executable for every user of the node",
                hint="install the interpreter in a directory that every user may enter, for example /usr or /opt",
            )


def overlay_sources(overlays: Sequence[Mapping[str, object]]) -> list[str]:
    """Return the directories that overlays show or cover (`node/inside/namespaces.py`), without links.

    The mount points of inner overlays exist only in the outer overlay. They must be below its mount point. Raises
    OSError for a missing directory, and IsolationUnavailable for invalid overlays.
    """
    found: list[str] = []
    outer = ""
    for overlay in overlays:
        at, directory, layers = overlay.get("at"), overlay.get("directory"), overlay.get("layers")
        if not (isinstance(at, str) and isinstance(directory, str) and isinstance(layers, list)):
            raise IsolationUnavailable("a mount of the environment is not valid", hint=_HINT)
        if not outer:
            outer = at
            found.append(os.path.realpath(at, strict=True))
        elif os.path.normpath(at) != at or not at.startswith(f"{outer}/"):
            raise IsolationUnavailable(f"{at} is not below {outer}", hint=_HINT)
        found += [os.path.realpath(os.path.join(directory, str(layer)), strict=True) for layer in layers]
    return list(dict.fromkeys(found))


def check_attempt(directory: str) -> None:
    """Raise IsolationUnavailable unless a path is the directory of an attempt in a mount namespace."""
    if not _ATTEMPT.fullmatch(directory):
        raise IsolationUnavailable(f"{directory!r} is no directory of an attempt", hint=_HINT)


def checked_policy(policy: EgressPolicy) -> EgressPolicy:
    """Return a network policy in its canonical notation. Raises IsolationUnavailable.

    An allow-list cannot name the metadata services of clouds.
    """
    if len(policy.closed) > CLOSED_MAX:
        problem = f"a network policy closes at most {CLOSED_MAX} endpoints, but {len(policy.closed)} are given"
        raise IsolationUnavailable(problem, hint=_HINT)
    try:
        closed = tuple(destination(text).text for text in policy.closed)
        # Builds reach the index proxy only. Its address obeys the rules for an allow-list.
        proxy = check_allowed(policy.index_proxy)
        return EgressPolicy(mode=policy.mode, allow=check_allowed(policy.allow), closed=closed, index_proxy=proxy)
    except InvalidValue as error:
        raise IsolationUnavailable(f"the network policy is not valid: {error.message}", hint=error.hint or "") from None


def check_gang(addresses: Sequence[str]) -> None:
    """Raise IsolationUnavailable unless each text is the address of one other machine.

    The rules open all ports of these addresses, before they close the metadata services of clouds.
    """
    if len(addresses) > GANG_MAX:
        raise IsolationUnavailable(f"a gang has at most {GANG_MAX} addresses, not {len(addresses)}", hint=_HINT)
    for text in addresses:
        try:
            address = ipaddress.ip_address(text)
        except ValueError:
            raise IsolationUnavailable(f"{text[:100]!r} is not an address of a node", hint=_HINT) from None
        if getattr(address, "scope_id", None) or _is_closed(address):
            raise IsolationUnavailable(f"{text} cannot be the address of another node", hint=_HINT)


def _is_closed(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    mapped = getattr(address, "ipv4_mapped", None)
    if mapped is not None or address.is_multicast or address.is_unspecified:
        return True
    return any(address in ipaddress.ip_network(text) for text in METADATA)


def check_note(note: str) -> None:
    """Raise IsolationUnavailable unless a finding of the agent is one line of bounded length."""
    if len(note) > NOTE_CHARACTERS_MAX or not note.isprintable():
        raise IsolationUnavailable(f"a finding has at most {NOTE_CHARACTERS_MAX} characters in one line", hint=_HINT)


def check_count(pids: Sequence[int]) -> None:
    """Raise IsolationUnavailable for too many processes."""
    if len(pids) > PIDS_MAX:
        raise IsolationUnavailable(f"a request names at most {PIDS_MAX} processes, not {len(pids)}", hint=_HINT)
