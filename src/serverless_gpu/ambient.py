"""Provides all clocks and all new identifiers of the package.

Pure functions receive times and identifiers as arguments. All other code calls `ambient`.
Durations and deadlines use `boottime_ns`, which counts during suspend and never jumps. `wall_ns` serves only
calendar dates.
"""

from __future__ import annotations

import hashlib
import os
import time
from typing import Protocol

# Crockford's base 32 has no letters that look like digits. Lower-case identifiers sort in
# numeric order.
_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
# English month names, which do not depend on the locale.
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
_CLOCK_BOOTTIME = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)  # macOS has no boottime clock.

CLOCK_FAULT = "SGPU_FAULT_CLOCK"
"""Environment variable with the seconds by which a test moves the wall clock of a node's processes ahead."""


class Clock(Protocol):
    """The interface of the machine's clocks and of test clocks."""

    def boottime_ns(self) -> int:
        """Return nanoseconds since boot, including suspend."""
        ...

    def wall_ns(self) -> int:
        """Return nanoseconds since 1970 in UTC, according to the machine's clock."""
        ...

    def boot_id(self) -> str:
        """Return the machine's boot identifier. Boottimes of different boots are not comparable."""
        ...


class SystemClock:
    """The machine's clocks."""

    def boottime_ns(self) -> int:
        """Return nanoseconds since boot, including suspend."""
        return time.clock_gettime_ns(_CLOCK_BOOTTIME)

    def wall_ns(self) -> int:
        """Return nanoseconds since 1970 in UTC, according to the machine's clock."""
        ahead_s = os.environ.get(CLOCK_FAULT)
        return time.time_ns() + (round(float(ahead_s) * 1e9) if ahead_s else 0)

    def boot_id(self) -> str:
        """Return the kernel's boot identifier, or ``"unknown"`` if the kernel has none."""
        try:
            with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
                return file.read().strip()
        except OSError:
            return "unknown"


def new_run_id() -> str:
    """Return a ULID with 80 random bits. Run identifiers have 26 characters and sort by creation time."""
    value = (time.time_ns() // 1_000_000) << 80 | int.from_bytes(os.urandom(10), "big")
    return "".join(_ALPHABET[value >> shift & 31] for shift in range(125, -1, -5))


def first_run_id(wall_ns: int) -> str:
    """Return the lowest run identifier of a time in nanoseconds since 1970."""
    value = max(0, min(wall_ns // 1_000_000, (1 << 48) - 1)) << 80
    return "".join(_ALPHABET[value >> shift & 31] for shift in range(125, -1, -5))


def machine() -> str:
    """Return an identifier of this machine, root file system and user.

    Two processes with the same machine identifier find the same files at the same paths. A container has a separate
    root file system, so its machine identifier differs from the host's.
    """
    identity = "no identity"
    for path in ("/etc/machine-id", "/proc/sys/kernel/random/boot_id"):
        try:
            with open(path, encoding="ascii") as file:
                identity = file.read().strip()
        except (OSError, UnicodeDecodeError):
            continue
        if identity:
            break
    root = os.stat("/")
    text = f"{identity} {root.st_dev} {root.st_ino} {os.getuid()}"
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def host() -> str:
    """Return a hash of the operating system's machine identifier, or "" for a system without one."""
    try:
        with open("/etc/machine-id", encoding="ascii") as file:
            identity = file.read().strip()
    except (OSError, UnicodeDecodeError):
        return ""
    return hashlib.sha256(f"serverless-gpu host {identity}".encode()).hexdigest()[:32] if identity else ""


def created_wall_ns(run_id: str) -> int | None:
    """Return the creation time of a run identifier in nanoseconds since 1970, or None for other text.

    Only identifiers from `new_run_id` contain a creation time.
    """
    if len(run_id) != 26 or not set(run_id) <= set(_ALPHABET):
        return None
    value = 0
    for letter in run_id[:10]:  # Ten characters encode 50 bits. The time uses the lower 48 bits.
        value = value << 5 | _ALPHABET.index(letter)
    return value * 1_000_000


def format_moment(wall_ns: int) -> str:
    """Format a timestamp as a local date and time, for example ``"2027-01-15 14:03:22"``."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(wall_ns / 1e9))


def format_utc(wall_ns: int) -> str:
    """Format a timestamp in ISO 8601 as UTC, for example ``"2027-01-15T14:03:22Z"``."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(wall_ns / 1e9))


def format_clock(wall_ns: int) -> str:
    """Format a timestamp as the local time of day, for example ``"14:03:22"``."""
    return time.strftime("%H:%M:%S", time.localtime(wall_ns / 1e9))


def format_soon(wall_ns: int, now_ns: int | None = None) -> str:
    """Format a future time as local time, and add the date unless it is today's: ``"24 Nov 14:20"``."""
    now_s = (SystemClock().wall_ns() if now_ns is None else now_ns) / 1e9
    moment, today = time.localtime(wall_ns / 1e9), time.localtime(now_s)
    clock = time.strftime("%H:%M", moment)
    if moment[:3] == today[:3]:
        return clock
    date = f"{moment.tm_mday} {_MONTHS[moment.tm_mon - 1]}"
    return f"{date} {clock}" if moment.tm_year == today.tm_year else f"{date} {moment.tm_year} {clock}"


def format_soon_zoned(wall_ns: int, now_ns: int | None = None) -> str:
    """Format a future time with this machine's time zone, for users in other zones: ``"14:20 CET"``."""
    zone = time.strftime("%Z", time.localtime(wall_ns / 1e9))
    return f"{format_soon(wall_ns, now_ns)} {zone}".strip()
