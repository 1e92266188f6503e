"""A PostgreSQL of the tests' own: a fresh directory, a Unix socket in it, gone with the tests.

Nothing is waited for on its disk, so databases come and go in milliseconds; what survives a power cut is PostgreSQL's
business. `synchronous_commit` is off, as somebody may have it: our connections have to switch it on, or they lose what
they said was written when a test stops the cluster at once. PostgreSQL refuses to run as root, and is started as the
user that its package made, then.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import psycopg
import pytest

_OPTIONS = ("listen_addresses=", "max_connections=200")
_QUICK = ("fsync=off", "full_page_writes=off", "synchronous_commit=off")
_PLACES = "/usr/lib/postgresql"
_SHORT = threading.Event()
_MEMORY = Path("/dev/shm")
_ROOM_BYTES = 1 << 30


class Cluster:
    """A running PostgreSQL.

    Args:
        directory: where it lies; its path must be short, for the socket's sake.
        programs: directory of `initdb` and `postgres`.
        durable: whether it waits for its disk.
    """

    def __init__(self, directory: Path, programs: Path, *, durable: bool = False) -> None:
        self._options = _OPTIONS if durable else (*_OPTIONS, *_QUICK)
        self._directory = directory
        self._programs = programs
        self._process: subprocess.Popen[bytes] | None = None
        self._made = 0
        # In memory, copying the files of a template beats logging them; on a disk it is the other way round.
        self._strategy = "FILE_COPY" if directory.is_relative_to(_MEMORY) else "WAL_LOG"
        self._run("initdb", "-D", str(directory / "data"), "-A", "trust", "-U", "sgpu", "--no-sync", "-E", "UTF8")

    def url(self, name: str) -> str:
        """Return the url of one of its databases."""
        return f"postgresql://sgpu@/{name}?host={self._directory}"

    def start(self) -> None:
        """Start it and wait until it answers."""
        options = [word for option in self._options for word in ("-c", option)]
        place = ["-D", str(self._directory / "data"), "-c", f"unix_socket_directories={self._directory}"]
        with (self._directory / "log").open("ab") as log:
            self._process = subprocess.Popen(
                self._command("postgres", *place, *options), stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )
        for _ in range(1000):
            with contextlib.suppress(psycopg.OperationalError):
                psycopg.connect(self.url("postgres")).close()
                return
            assert self._process.poll() is None, (self._directory / "log").read_text()
            _SHORT.wait(0.02)
        raise AssertionError("PostgreSQL did not start")

    def stop(self) -> None:
        """Stop it at once, as `pg_ctl stop -m immediate` does: connections break, it recovers at the next start."""
        assert self._process is not None
        self._process.send_signal(signal.SIGQUIT)
        self._process.wait(30)

    def new_database(self, template: str = "template0") -> str:
        """Return the name of a new database, a copy of another one."""
        self._made += 1
        name = f"test{self._made}"
        with psycopg.connect(self.url("postgres"), autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name} TEMPLATE {template} STRATEGY {self._strategy}".encode())
        return name

    def drop_database(self, name: str) -> None:
        """Drop a database, whoever is still connected."""
        with psycopg.connect(self.url("postgres"), autocommit=True) as connection:
            connection.execute(f"DROP DATABASE {name} WITH (FORCE)".encode())

    def _run(self, program: str, *words: str) -> None:
        subprocess.run(self._command(program, *words), check=True, stdout=subprocess.DEVNULL)

    def _command(self, program: str, *words: str) -> Sequence[str]:
        # It must not outlive a test process that is killed.
        prefix = ["setpriv", "--pdeathsig", "QUIT"]
        if os.geteuid() == 0:
            prefix += ["--reuid=postgres", "--regid=postgres", "--clear-groups"]
        return [*prefix, str(self._programs / program), *words]


def _find_programs() -> Path | None:
    if found := shutil.which("initdb"):
        return Path(found).resolve().parent
    versions = sorted(Path(_PLACES).glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]))
    return versions[-1].parent if versions else None


def _fast_directory() -> Path:
    """Return a directory in memory where there is room, else /tmp: a database is many files."""
    with contextlib.suppress(OSError):
        if os.access(_MEMORY, os.W_OK) and shutil.disk_usage(_MEMORY).free > _ROOM_BYTES:
            return _MEMORY
    return Path("/tmp")


@contextlib.contextmanager
def cluster(*, durable: bool = False, within: Path | None = None) -> Iterator[Cluster]:
    """Run a PostgreSQL in a directory of its own; skip the test where none is installed."""
    programs = _find_programs()
    if programs is None:
        pytest.skip("PostgreSQL is not installed (apt-get install postgresql)")
    directory = Path(tempfile.mkdtemp(prefix="sg-pg-", dir=within or (Path("/tmp") if durable else _fast_directory())))
    try:
        if os.geteuid() == 0:
            shutil.chown(directory, "postgres", "postgres")
        running = Cluster(directory, programs, durable=durable)
        running.start()
        try:
            yield running
        finally:
            running.stop()
    finally:
        shutil.rmtree(directory, ignore_errors=True)
