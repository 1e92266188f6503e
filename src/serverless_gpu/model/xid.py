"""Xid errors of the NVIDIA driver: the numbers of the kernel's log, and the consequences of each.

    NVRM: Xid (PCI:0000:17:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.
          └─ which GPU ─┘        └─ what happened

Numbers and what they mean are those of NVIDIA's public catalogue ("Analyzing Xid Errors with the Xid Catalog",
docs.nvidia.com/deploy/xid-errors); what is done is ours, by the failure matrix (F23 to F25). A node may decide
otherwise, number by number, in the table `xids` of its `config.toml`. An unknown number changes nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from enum import StrEnum

import msgspec

SUSPECT_NS = 24 * 3600 * 1_000_000_000
SUSPECT_PRINCIPALS = 3
"""More principals than that whose own code failed on the same GPU within `SUSPECT_NS`: then it is not their code."""

_TEXT_MAX = 200
_LINE = re.compile(r"NVRM: Xid \(PCI:([0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2})[^)]*\): (\d{1,5})\b,?\s*(.*)")
_ADDRESS = re.compile(r"([0-9a-fA-F]{4,8}):([0-9a-fA-F]{2}):([0-9a-fA-F]{2})(?:\.[0-7])?")


class XidKind(StrEnum):
    """The consequence of an Xid."""

    LOST = "lost"  # the run ends, the GPU is not lent any more, the node takes nothing new
    UNCORRECTABLE = "uncorrectable"  # the run ends, the GPU is not lent any more
    CONTAINED = "contained"  # the run ends, the GPU is as good as before
    PENDING = "pending"  # the run goes on, the GPU is not lent after it
    USER = "user"  # nothing but a hint: it is the run's own code, most likely
    OTHER = "other"  # nothing: it is written down


ENDS_A_RUN = frozenset({XidKind.LOST, XidKind.UNCORRECTABLE, XidKind.CONTAINED})
QUARANTINES = frozenset({XidKind.LOST, XidKind.UNCORRECTABLE, XidKind.PENDING})

HINT = "illegal memory access in your kernel"

TABLE: Mapping[int, tuple[XidKind, str]] = {
    11: (XidKind.USER, "invalid or corrupted push buffer stream"),
    13: (XidKind.USER, "graphics engine exception"),
    31: (XidKind.USER, "GPU memory page fault"),
    32: (XidKind.USER, "invalid or corrupted push buffer stream"),
    43: (XidKind.USER, "the GPU stopped processing"),
    45: (XidKind.OTHER, "clean-up after an earlier error, or after a process that was killed"),
    46: (XidKind.UNCORRECTABLE, "the GPU stopped processing"),
    48: (XidKind.UNCORRECTABLE, "double-bit memory error"),
    62: (XidKind.UNCORRECTABLE, "the GPU's micro-controller halted"),
    63: (XidKind.PENDING, "broken memory is replaced at the next reset"),
    64: (XidKind.UNCORRECTABLE, "broken memory could not be noted for replacement"),
    74: (XidKind.UNCORRECTABLE, "NVLink error"),
    79: (XidKind.LOST, "the GPU has fallen off the bus"),
    92: (XidKind.OTHER, "high rate of corrected memory errors"),
    94: (XidKind.CONTAINED, "memory error, contained in one process"),
    95: (XidKind.UNCORRECTABLE, "memory error that was not contained"),
    119: (XidKind.UNCORRECTABLE, "the GPU's system processor does not answer"),
    120: (XidKind.UNCORRECTABLE, "error of the GPU's system processor"),
    136: (XidKind.UNCORRECTABLE, "NVLink could not be trained"),
    140: (XidKind.UNCORRECTABLE, "memory error that could not be recovered from"),
    143: (XidKind.UNCORRECTABLE, "the GPU could not be initialised"),
    158: (XidKind.UNCORRECTABLE, "fatal time-out in the GPU"),
}


class XidEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One Xid of the kernel's log."""

    pci: str  # address of the GPU, as in `model.hardware.Device`
    number: int
    text: str = ""  # what the driver says of it


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """The meaning of an Xid for one GPU."""

    uuid: str
    number: int
    kind: XidKind
    what: str  # what happened to it, naming the Xid

    @property
    def sentence(self) -> str:
        """Return what happened, and to which GPU."""
        return f"{self.uuid}: {self.what}"


class UserFault(msgspec.Struct, frozen=True, kw_only=True):
    """A principal's own code failed on a GPU, nanoseconds since 1970."""

    principal: str
    number: int
    at_ns: int


def address(text: str) -> str:
    """Return a PCI address as both the driver's log and NVML mean it: ``"0000:17:00"``; "" for what is none."""
    found = _ADDRESS.fullmatch(text.strip())
    return "" if found is None else f"{int(found[1], 16):04x}:{found[2].lower()}:{found[3].lower()}"


def read(line: str) -> XidEvent | None:
    """Return the Xid that a line of the kernel's log reports, or None.

    The driver's message is the whole line. A line that only contains one quotes it: a file's or a process's name.
    """
    found = _LINE.match(line)
    if found is None:
        return None
    text = "".join(letter for letter in found[3] if letter.isprintable())
    return XidEvent(pci=address(found[1]), number=int(found[2]), text=text[:_TEXT_MAX].rstrip(". "))


def fault(said: XidEvent, uuid: str, own: Mapping[int, XidKind]) -> Fault:
    """Return what an Xid means."""
    kind, meaning = TABLE.get(said.number, (XidKind.OTHER, said.text or "not in the table of this version"))
    return Fault(
        uuid=uuid,
        number=said.number,
        kind=own.get(said.number, kind),
        what=f"Xid {said.number}, {meaning}",
    )


def principals(hits: Iterable[UserFault], now_ns: int) -> frozenset[str]:
    """Return whose own code failed on a GPU lately."""
    return frozenset(hit.principal for hit in hits if 0 <= now_ns - hit.at_ns <= SUSPECT_NS)


def suspicion(hits: Iterable[UserFault], now_ns: int) -> str:
    """Return why a GPU is suspected of being broken though nothing but user code failed on it, or ""."""
    who = principals(hits, now_ns)
    if len(who) <= SUSPECT_PRINCIPALS:
        return ""
    return f"illegal memory accesses in runs of {len(who)} principals within 24 h: suspect hardware"
