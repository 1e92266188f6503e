"""A Ray that is none: two processes of the right names and a socket, up in a moment, for tests of what is around it.

ray start --block ─┬─ gcs_server      both do nothing until they are ended
                   └─ raylet
"""

from __future__ import annotations

from pathlib import Path

VERSION = "2.60.0"

_START = """
import json, os, sys, time

temporary = next(word.partition("=")[2] for word in sys.argv if word.startswith("--temp-dir="))
os.chmod(temporary, 0o777)  # as Ray does
session = os.path.join(temporary, "session_1")
os.makedirs(os.path.join(session, "sockets"))
os.makedirs(os.path.join(session, "logs"))
os.symlink(session, os.path.join(temporary, "session_latest"))
with open(os.path.join(session, "logs", "gcs_server.out"), "w") as file:
    file.write("the last words of the GCS\\n")
with open(os.path.join(session, "logs", "prefix.out"), "w") as file:
    file.write(sys.prefix)
with open(os.path.join(session, "logs", "environ.out"), "w") as file:
    json.dump(dict(os.environ), file)
pids = []
for name in ("gcs_server", "raylet"):
    pid = os.fork()
    if pid == 0:
        if os.fork() == 0:  # who detaches itself, as workers of user code may
            os.setsid()
            time.sleep(600)
        with open("/proc/self/comm", "w") as file:
            file.write(name)
        time.sleep(600)
    pids.append(pid)
while any(open(f"/proc/{pid}/comm").read().startswith("python") for pid in pids):
    time.sleep(0.005)
open(os.path.join(session, "sockets", "raylet"), "w").close()
print("Ray runtime started.", flush=True)
os.wait()
print("Some Ray subprocesses exited unexpectedly", flush=True)
"""


FILES = {
    "ray/__init__.py": f"__version__ = {VERSION!r}\n",
    "ray/_raylet.py": "",  # Ray's compiled half, by which it is known
    "ray/scripts/__init__.py": "",
    "ray/scripts/scripts.py": _START,
}


def install(where: Path) -> Path:
    """Write the package, and return the directory that has to be on the path."""
    metadata = {f"ray-{VERSION}.dist-info/METADATA": f"Metadata-Version: 2.1\nName: ray\nVersion: {VERSION}\n"}
    for name, text in {**FILES, **metadata}.items():
        path = where / "site" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return where / "site"


def pids(directory: str) -> dict[str, list[int]]:
    """Return the processes of a cluster by their names, as they are seen from outside.

    Args:
        directory: the cluster's.
    """
    found: dict[str, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if directory.encode() in (entry / "cmdline").read_bytes():
                    found.setdefault((entry / "comm").read_text().strip(), []).append(int(entry.name))
            except OSError:
                continue
    return found
