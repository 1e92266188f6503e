"""Reads the kernel log, where the NVIDIA driver reports faults of its GPUs (see `model/xid.py`).

    /dev/kmsg             one record for each read: "6,3020,34169732672,-;NVRM: Xid (PCI:0000:17:00): 79, …"
    <home>/fake_kmsg      the same lines for declared GPUs; a test writes them (`testing.FakeGpus.xid`)

A process that may open `/dev/kmsg` may also write records to it. The kernel labels records from a process with the
process's syslog facility, or with `user`. Only the kernel's own records have facility 0. This module ignores records of
all other facilities.

If this module cannot read the log, the GPUs' state is unknown and `problem` contains the reason. If the kernel
overwrites unread records, this module continues with the oldest existing record. If the log has more lines than one
call of `lines` returns, the next call returns the remaining lines.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from serverless_gpu.ambient import Clock
from serverless_gpu.errors import IsolationUnavailable
from serverless_gpu.model.hardware import DeviceKind

KERNEL = Path("/dev/kmsg")
FAKE_FILE = "fake_kmsg"
AGAIN_S = 0.25
"""Seconds between reads of a log file that cannot be polled."""

_LINES_MAX = 2000
_RECORD_BYTES = 8192  # The kernel's size limit for a log record.
_LEVELS = 8  # A record's prefix is facility * 8 + level.


class KernelLogLine(NamedTuple):
    """A line of the kernel log, with its approximate time in nanoseconds since 1970."""

    at_ns: int
    text: str


class KernelLog:
    """Reader of the kernel log's new lines or, with `past`, of all lines."""

    def __init__(
        self, path: Path, clock: Clock, *, past: bool = False, opener: Callable[[], int] | None = None
    ) -> None:
        self.problem = ""  # Reason why the log cannot be read, or "".
        self._path = path
        self._clock = clock
        self._past = past
        self._opener = opener  # Opens the kernel log for a process without rights.
        self._rest = b""
        self._fd: int | None = None
        self._open()

    @property
    def fd(self) -> int | None:
        """Return a pollable descriptor for new lines, or None if the caller must read periodically."""
        return self._fd if self._path == KERNEL else None

    def lines(self) -> list[KernelLogLine]:
        """Return the log's new lines, oldest first."""
        if self._fd is None:
            self._open()
        if self._fd is None:
            return []
        records = self._records(self._fd) if self._path == KERNEL else self._of_file(self._fd)
        return [line for record in records if (line := self._line(record)) is not None]

    def close(self) -> None:
        """Close the log file. A second `close` does nothing."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _open(self) -> None:
        try:
            if self._path == KERNEL and self._opener is not None:
                self._fd = self._opener()
            else:
                self._fd = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError as error:
            self._past = self._past or self._path != KERNEL  # All lines of a later created log file are new.
            self.problem = "" if self._path != KERNEL else f"{self._path}: {error.strerror}"
            return
        except OSError as error:
            self.problem = f"{self._path} cannot be read: {error.strerror}"
            return
        except IsolationUnavailable as error:
            self.problem = f"{self._path} cannot be read: {error.message}"
            return
        self.problem = ""
        with contextlib.suppress(OSError):
            os.lseek(self._fd, 0, os.SEEK_SET if self._past else os.SEEK_END)

    def _records(self, fd: int) -> list[bytes]:
        found: list[bytes] = []
        for _ in range(_LINES_MAX):
            try:
                record = os.read(fd, _RECORD_BYTES)
            except BlockingIOError:
                break
            # The kernel has overwritten the next record. The next read returns the oldest existing record.
            except BrokenPipeError:
                continue
            except OSError as error:
                self.problem = f"{self._path} cannot be read: {error.strerror}"
                break
            if not record:
                break
            found.append(record)
        return found

    def _of_file(self, fd: int) -> list[bytes]:
        try:
            data = self._rest + os.read(fd, _LINES_MAX * 100)
        except OSError as error:
            self.problem = f"{self._path} cannot be read: {error.strerror}"
            return []
        *whole, self._rest = data.split(b"\n")
        return whole

    def _line(self, record: bytes) -> KernelLogLine | None:
        head, _, text = record.partition(b";")
        fields = head.split(b",")
        if len(fields) < 3 or not fields[2].isdigit():
            return None
        if not fields[0].isdigit() or int(fields[0]) >= _LEVELS:  # Only the kernel's own records have facility 0.
            return None
        # After a suspend, the computed time may be too early, because the kernel log's clock stops during a suspend.
        ago_ns = self._clock.boottime_ns() - int(fields[2]) * 1000
        at_ns = self._clock.wall_ns() - max(0, ago_ns)
        return KernelLogLine(at_ns, text.partition(b"\n")[0].decode("utf-8", "replace"))


def log_of(kind: DeviceKind, home: Path) -> Path:
    """Return the kernel log for real GPUs, or the test's log file for fake GPUs."""
    return KERNEL if kind is DeviceKind.GPU else home / FAKE_FILE
