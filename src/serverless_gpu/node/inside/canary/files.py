"""Attempts on files of the node, of the server and of other principals."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Mapping

from .base import Attempt, Targets, check, open_for_writing, read_byte, system_call, try_each

_HANDLE_BYTES = 128


def _read(target: str) -> Attempt:
    return lambda targets: read_byte(targets.text(target))


def _write(target: str) -> Attempt:
    return lambda targets: open_for_writing(targets.text(target))


def _create_in(target: str) -> Attempt:
    """Create a file without a name in a directory, which leaves nothing behind."""

    def attempt(targets: Targets) -> None:
        os.close(os.open(targets.text(target), os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o600))

    return attempt


def _list(target: str) -> Attempt:
    def attempt(targets: Targets) -> None:
        if not os.listdir(targets.text(target)):
            raise OSError(errno.ENOENT, "the directory is empty")

    return attempt


def _read_through_init(targets: Targets) -> None:
    read_byte(f"/proc/1/root{targets.text('public_file')}")


def _open_by_handle(targets: Targets) -> None:
    """Open a file by its inode instead of its path, which ignores directories and mounts."""
    handle = bytes.fromhex(targets.text("handle"))
    buffer = ctypes.create_string_buffer(handle, _HANDLE_BYTES)

    def open_on(place: str) -> None:
        mount = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.close(check(system_call("open_by_handle_at", mount, buffer, os.O_RDONLY)))
        finally:
            os.close(mount)

    try_each(["/", os.getcwd(), os.path.expanduser("~"), os.path.dirname(targets.text("package"))], open_on)


def _inherited_descriptors(targets: Targets) -> None:
    """Use a descriptor of a file of the node that a parent process left open."""
    places = targets.texts("node_places")
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue  # The descriptor of the listing itself is already closed.
        if int(name) > 2 and target.startswith(tuple(f"{place}/" for place in places)):
            return
    raise OSError(errno.EBADF, "no descriptor of a file of the node is open")


ATTEMPTS: Mapping[str, Attempt] = {
    "server-key": _read("server_key"),
    "administrator-token": _read("administrator_token"),
    "node-token": _read("node_token"),
    "node-key": _read("node_key"),
    "join-token": _read("join_token"),
    "ray-token": _read("ray_token"),
    "database": _read("database"),
    "attempt-token": _read("attempt_token"),
    "other-log": _read("log"),
    "forge-log": _write("log"),
    "other-arguments": _read("arguments"),
    "other-result": _read("result"),
    "own-facts": _write("own_facts"),
    "other-facts": _write("other_facts"),
    "own-receipt": _create_in("own_directory"),
    "own-order": _write("own_order"),
    "other-secret": _read("secret"),
    "other-home": _read("other_home"),
    "node-home": _read("node_file"),
    "uid-map": _write("uid_map"),
    "cached-unit": _read("unit"),
    "poison-unit": _write("unit"),
    "poison-cache": _create_in("cache"),
    "poison-package": _write("package"),
    "poison-interpreter": lambda _: open_for_writing(os.__file__),
    "passwords": lambda _: read_byte("/etc/shadow"),
    "accounts": lambda _: open_for_writing("/etc/passwd"),
    "public-file": _read("public_file"),
    "public-tmp-file": _read("tmp_file"),
    "list-other-runs": _list("runs"),
    "root-of-init": _read_through_init,
    "file-by-handle": _open_by_handle,
    "inherited-descriptor": _inherited_descriptors,
}
