"""Xid errors of the NVIDIA driver: error numbers in the kernel log, and their consequences.

    NVRM: Xid (PCI:0000:17:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.
          └─ which GPU ─┘        └─ what happened

Error numbers and meanings come from NVIDIA's public catalogue ("Analyzing Xid Errors with the Xid Catalog",
docs.nvidia.com/deploy/xid-errors). The consequences follow the project's failure matrix (F23 to F25). An operator can
override each consequence in the table `xids` of a node's `config.toml`. Unknown Xid numbers have no consequence.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from enum import StrEnum

import msgspec

SUSPECT_NS = 24 * 3600 * 1_000_000_000
SUSPECT_PRINCIPALS = 3
"""Maximum number of principals whose code fails on a GPU within `SUSPECT_NS` before the GPU is suspect."""

_TEXT_MAX = 200
_LINE = re.compile(r"NVRM: Xid \(PCI:([0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2})[^)]*\): (\d{1,5})\b,?\s*(.*)")
_ADDRESS = re.compile(r"([0-9a-fA-F]{4,8}):([0-9a-fA-F]{2}):([0-9a-fA-F]{2})(?:\.[0-7])?")


class XidKind(StrEnum):
    """Consequence of an Xid error for the run and the GPU."""

    LOST = "lost"  # The node ends the run, quarantines the GPU and accepts no new runs.
    UNCORRECTABLE = "uncorrectable"  # The node ends the run and quarantines the GPU.
    CONTAINED = "contained"  # The node ends the run without a quarantine of the GPU.
    PENDING = "pending"  # The node lets the run continue and quarantines the GPU after the run.
    USER = "user"  # The user receives only a hint, because user code is the likely cause.
    OTHER = "other"  # The agent records the error without further action.


ENDS_A_RUN = frozenset({XidKind.LOST, XidKind.UNCORRECTABLE, XidKind.CONTAINED})
QUARANTINES = frozenset({XidKind.LOST, XidKind.UNCORRECTABLE, XidKind.PENDING})

HINT = "illegal memory access in your kernel"

TABLE: Mapping[int, tuple[XidKind, str]] = {
    11: (XidKind.USER, "invalid or corrupted push buffer stream"),
    13: (XidKind.USER, "graphics engine exception"),
    31: (XidKind.USER, "GPU memory page fault"),
    32: (XidKind.USER, "invalid or corrupted push buffer stream"),
    43: (XidKind.USER, "the GPU stopped processing"),
    45: (XidKind.OTHER, "clean-up after an earlier error or a killed process"),
    46: (XidKind.UNCORRECTABLE, "the GPU stopped processing"),
    48: (XidKind.UNCORRECTABLE, "double-bit memory error"),
    62: (XidKind.UNCORRECTABLE, "the GPU's micro-controller halted"),
    63: (XidKind.PENDING, "the GPU replaces broken memory at its next reset"),
    64: (XidKind.UNCORRECTABLE, "the GPU could not record broken memory for replacement"),
    74: (XidKind.UNCORRECTABLE, "NVLink error"),
    79: (XidKind.LOST, "the GPU has fallen off the bus"),
    92: (XidKind.OTHER, "high rate of corrected memory errors"),
    94: (XidKind.CONTAINED, "memory error, contained in one process"),
    95: (XidKind.UNCORRECTABLE, "memory error that was not contained"),
    119: (XidKind.UNCORRECTABLE, "the GPU's system processor does not answer"),
    120: (XidKind.UNCORRECTABLE, "error of the GPU's system processor"),
    136: (XidKind.UNCORRECTABLE, "NVLink could not be trained"),
    140: (XidKind.UNCORRECTABLE, "unrecoverable memory error"),
    143: (XidKind.UNCORRECTABLE, "the GPU could not be initialised"),
    158: (XidKind.UNCORRECTABLE, "fatal timeout in the GPU"),
}


class XidEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One Xid error in the kernel log."""

    pci: str  # Address of the GPU, as in `model.hardware.Device`.
    number: int
    text: str = ""  # The driver's description of the error.


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """An Xid error of one GPU, with its consequence."""

    uuid: str
    number: int
    kind: XidKind
    what: str  # Description of the Xid error, including its number.

    @property
    def sentence(self) -> str:
        """Return the description of the Xid error, prefixed with the GPU's identifier."""
        return f"{self.uuid}: {self.what}"


class UserFault(msgspec.Struct, frozen=True, kw_only=True):
    """A failure of a principal's own code on a GPU. `at_ns` is in nanoseconds since 1970."""

    principal: str
    number: int
    at_ns: int


def address(text: str) -> str:
    """Return a PCI address in the format of the driver's log and NVML, or "" if invalid."""
    found = _ADDRESS.fullmatch(text.strip())
    return "" if found is None else f"{int(found[1], 16):04x}:{found[2].lower()}:{found[3].lower()}"


def read(line: str) -> XidEvent | None:
    """Return the Xid error in a line of the kernel log, or None.

    The driver's message must fill the whole line. A line that quotes the message, for example in a file or process
    name, is not an Xid error.
    """
    found = _LINE.match(line)
    if found is None:
        return None
    text = "".join(letter for letter in found[3] if letter.isprintable())
    return XidEvent(pci=address(found[1]), number=int(found[2]), text=text[:_TEXT_MAX].rstrip(". "))


def fault(said: XidEvent, uuid: str, own: Mapping[int, XidKind]) -> Fault:
    """Return the consequence of an Xid error for one GPU."""
    kind, meaning = TABLE.get(said.number, (XidKind.OTHER, said.text or "not in the table of this version"))
    return Fault(
        uuid=uuid,
        number=said.number,
        kind=own.get(said.number, kind),
        what=f"Xid {said.number}, {meaning}",
    )


def principals(hits: Iterable[UserFault], now_ns: int) -> frozenset[str]:
    """Return the principals whose user code failed on a GPU within `SUSPECT_NS`."""
    return frozenset(hit.principal for hit in hits if 0 <= now_ns - hit.at_ns <= SUSPECT_NS)


def suspicion(hits: Iterable[UserFault], now_ns: int) -> str:
    """Return the reason why repeated user-code failures make a GPU suspect, or ""."""
    who = principals(hits, now_ns)
    if len(who) <= SUSPECT_PRINCIPALS:
        return ""
    return f"illegal memory accesses in runs of {len(who)} principals within 24 h: suspect hardware"
