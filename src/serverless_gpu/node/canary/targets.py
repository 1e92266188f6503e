"""Targets on the node that attempts of the canary try to reach.

A target is a file of the node itself, such as the server's key, or a new object with the same permissions. The canary
removes each new object. Names of new objects contain the mark of the canary.

Failure cases: A target that the node cannot prepare is missing. The verdict on an attempt without its target is
unknown. If the canary is killed, files whose names begin with ``sgpu-canary-`` remain.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import shutil
import socket
import stat
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import urlsplit

from serverless_gpu.node.base import protocol
from serverless_gpu.node.base.home import Home
from serverless_gpu.node.inside.canary.base import check, libc, system_call
from serverless_gpu.node.isolation.principals import MAP, PrincipalMap
from serverless_gpu.node.isolation.views import device_nodes
from serverless_gpu.node.processes.spawn import PACKAGE

MEMORY_BYTES = 128 << 20
"""Memory limit of the canary's run."""
_SERVER_FILES = {
    "server_key": ("server/key",),
    "administrator_token": ("server.json", "server/token"),
    "node_token": ("server/node.token", "ray/profile.json", "node/profile.json", "node.token"),
    "node_key": ("node.key",),
    "join_token": ("server/join.token",),
    "ray_token": ("server/ray/token", "ray/token"),
    "database": ("server/server.db",),
}
_RAYLET = "raylet"
_RAY_SOCKETS = "sgpu-pool-*/*/session_latest/sockets/raylet"
_TIMERS = ("/etc/cron.d", "/var/spool/cron/crontabs", "/var/spool/cron", "/var/spool/at", "/etc/systemd/system")
_CONTENT = b"a target of sgpu node canary\n"
_IPC_CREAT, _IPC_EXCL, _IPC_RMID = 0o1000, 0o2000, 0
_ALL = 0o666
_NULL = (1, 3)  # Device numbers of /dev/null.
_SESSION_KEYRING, _KEYCTL_UNLINK = -3, 9
_HANDLE_BYTES = 128
_AT_FDCWD = -100
_DISK_KINDS = ("loop", "ram", "zram")


def server_address(url: str) -> dict[str, str]:
    """Return the targets of attempts on a server, from its URL."""
    found = urlsplit(url)
    if not found.hostname:
        return {}
    port = found.port or (443 if found.scheme == "https" else 80)
    return {"server_url": url, "server_port": f"{found.hostname}:{port}"}


def new_mark() -> str:
    """Return a random name for the objects of one canary."""
    return f"sgpu-canary-{secrets.token_hex(6)}"


@contextlib.contextmanager
def prepared(home: Home, environ: Mapping[str, str], mark: str) -> Iterator[dict[str, object]]:
    """Yield the targets of this node by name, then remove new objects. Raises OSError or StorageError."""
    with contextlib.ExitStack() as stack:
        private = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=f"{mark}-", dir=home.root)))
        found: dict[str, object] = {"memory_bytes": MEMORY_BYTES, "node_places": [str(home.root)]}
        found |= _files(home, environ, private)
        for prepare in (_public_files, _sockets, _ipc, _devices, _keyring):
            # A node may refuse one kind of object, for example System V IPC. The other targets remain useful.
            with contextlib.suppress(OSError):
                found |= prepare(stack, mark)
        found["handle"] = _handle(str(found["node_file"]))
        found |= _machine(home)
        found |= _ray()
        yield found


def _files(home: Home, environ: Mapping[str, str], private: Path) -> dict[str, object]:
    def own(name: str) -> str:
        path = private / name
        path.write_bytes(_CONTENT)
        path.chmod(0o600)
        return str(path)

    found: dict[str, object] = {"node_file": own("node_file"), "package": str(PACKAGE / "__init__.py")}
    for name, places in _SERVER_FILES.items():
        there = [home.root / place for place in places if (home.root / place).is_file()]
        found[name] = str(there[0]) if there else own(name)
    uids = PrincipalMap(environ).place / MAP
    found["uid_map"] = str(uids) if uids.exists() else own("uid_map")
    home.environments.mkdir(mode=0o700, exist_ok=True)
    units = sorted(home.environments.glob("units/*/*/unit"))
    found["unit"] = str(units[0]) if units else own("unit")
    found["cache"] = str(home.environments)
    found["runs"] = str(home.runs)
    found["agent_socket"] = str(protocol.agent_socket(home.sockets()))
    return found


def _public_files(stack: contextlib.ExitStack, mark: str) -> dict[str, object]:
    """Create files that every account of the machine may read."""
    place = tempfile.mkdtemp(prefix=f"{mark}-", dir="/var/tmp")
    stack.callback(shutil.rmtree, place, ignore_errors=True)
    os.chmod(place, 0o755)
    found: dict[str, object] = {}
    for name, path in (
        ("public_file", f"{place}/public"),
        ("tmp_file", f"/tmp/{mark}.public"),
        ("segment", f"/dev/shm/{mark}.public"),
    ):
        with open(path, "xb") as file:
            stack.callback(_remove, path)
            file.write(_CONTENT)
        os.chmod(path, 0o644)
        found[name] = path
    return found


def _sockets(stack: contextlib.ExitStack, mark: str) -> dict[str, object]:
    """Open listeners that accept connections of every account."""
    found: dict[str, object] = {}
    for name, address in (
        ("abstract", f"\0{mark}"),
        ("public_socket", f"/tmp/{mark}.sock"),
        ("service_socket", f"/run/{mark}.sock"),
    ):
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        try:
            listener.bind(address)
        except OSError:
            continue  # Only root may write to /run.
        if not address.startswith("\0"):
            stack.callback(_remove, address)
            os.chmod(address, 0o777)
        listener.listen()
        found[name] = address.lstrip("\0")
    port = stack.enter_context(socket.socket())
    port.bind(("127.0.0.1", 0))
    port.listen()
    found["node_port"] = f"127.0.0.1:{port.getsockname()[1]}"
    return found


def _ipc(stack: contextlib.ExitStack, mark: str) -> dict[str, object]:
    """Create System V and POSIX objects that every account may use."""
    key, flags = secrets.randbelow(1 << 30) + 1, _IPC_CREAT | _IPC_EXCL | _ALL
    segment = check(libc.shmget(key, 4096, flags))
    stack.callback(libc.shmctl, segment, _IPC_RMID, None)
    semaphore = check(libc.semget(key, 1, flags))
    stack.callback(libc.semctl, semaphore, 0, _IPC_RMID)
    messages = check(libc.msgget(key, flags))
    stack.callback(libc.msgctl, messages, _IPC_RMID, None)
    name = f"{mark}.public"
    queue = check(system_call("mq_open", name.encode(), os.O_RDWR | os.O_CREAT | os.O_EXCL, _ALL, None))
    stack.callback(unlink_queue, name)
    os.fchmod(queue, _ALL)
    os.close(queue)
    return {"key": key, "queue": name}


def _devices(stack: contextlib.ExitStack, mark: str) -> dict[str, object]:
    """Return the GPU devices of the machine, or a new device node that every account may open."""
    found = device_nodes()
    if not found:
        path = f"/dev/{mark}"
        os.mknod(path, stat.S_IFCHR | _ALL, os.makedev(*_NULL))
        stack.callback(_remove, path)
        os.chmod(path, _ALL)
        found = [path]
    return {"devices": found}


def _keyring(stack: contextlib.ExitStack, mark: str) -> dict[str, object]:
    content = ctypes.create_string_buffer(_CONTENT)
    key = check(system_call("add_key", b"user", mark.encode(), content, len(_CONTENT), _SESSION_KEYRING))
    stack.callback(system_call, "keyctl", _KEYCTL_UNLINK, key, _SESSION_KEYRING)
    return {"keyring_key": mark}


def _handle(path: str) -> str:
    """Return the handle of a file for open_by_handle_at(2), as hexadecimal digits, or ""."""
    buffer = ctypes.create_string_buffer(_HANDLE_BYTES)
    ctypes.cast(buffer, ctypes.POINTER(ctypes.c_uint32))[0] = _HANDLE_BYTES - 8
    mount = ctypes.c_int()
    made = libc.name_to_handle_at(_AT_FDCWD, os.fsencode(path), buffer, ctypes.byref(mount), 0)
    return bytes(buffer).hex() if made == 0 else ""


def _machine(home: Home) -> dict[str, object]:
    """Return facts about the machine: its disks, cgroups, timers and file systems."""
    disk = os.statvfs(home.root)
    cgroups = _cgroup_mounts()
    return {
        "disks": [f"/dev/{name}" for name in _disks() if os.path.exists(f"/dev/{name}")],
        "cgroups": cgroups,
        "release_agents": [path for path in (f"{place}/release_agent" for place in cgroups) if os.path.exists(path)],
        "timers": [place for place in _TIMERS if os.path.isdir(place)],
        "disk_device": os.stat(home.root).st_dev,
        "disk_free_bytes": disk.f_bavail * disk.f_frsize,
        "disk_free_inodes": disk.f_favail,
        "tmp_device": os.stat("/tmp").st_dev,
        "segment_device": os.stat("/dev/shm").st_dev,
    }


def _ray() -> dict[str, object]:
    """Return the process and the socket of Ray on this machine, if Ray runs with the uid of this process."""
    found: dict[str, object] = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            is_own = entry.name.isdigit() and entry.stat().st_uid == os.geteuid()
            if is_own and (entry / "comm").read_text(encoding="utf-8", errors="replace").strip() == _RAYLET:
                found |= {"ray_pid": int(entry.name), "ray_name": _RAYLET}
    sockets = sorted(Path("/tmp").glob(_RAY_SOCKETS))
    return found | ({"ray_socket": str(sockets[0])} if sockets else {})


def _disks() -> list[str]:
    with contextlib.suppress(OSError):
        lines = Path("/proc/partitions").read_text(encoding="ascii", errors="replace").splitlines()[2:]
        return [name for name in (line.split()[-1] for line in lines) if not name.startswith(_DISK_KINDS)]
    return []


def _cgroup_mounts() -> list[str]:
    found: list[str] = []
    with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as file:
        for line in file:
            fields, _, kind = line.partition(" - ")
            if kind.startswith("cgroup"):
                found.append(fields.split()[4])
    return found


def unlink_queue(name: str) -> bool:
    """Remove a POSIX message queue. Return False if the queue does not exist."""
    return bool(libc.mq_unlink(f"/{name}".encode()) == 0)


def _remove(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)
