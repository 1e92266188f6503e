"""GPU types and devices: the catalogue, and parsers for names, product strings and fakes.

A *type* is a GPU name that users write (``H100``). A *device* is one card, fake device or CPU slot of a machine. The
agent detects devices through NVML and locks devices.

Failure cases: an unknown name raises `UnknownGpuType` with the known names. An unknown product string becomes a
separate type, so that a machine with a rare card still works.
"""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from enum import StrEnum

import msgspec

from serverless_gpu.errors import InvalidValue, UnknownGpuType

GIB = 2**30
CPU = "CPU"

# Maximum number of fake devices per machine, so that a typing error does not create a million locks.
FAKE_DEVICES_MAX = 1024

# Minimum percentage of the nominal memory that a whole card reports. Real cards report 92 to 100 %, because the driver
# and error correction reserve memory. A card below the minimum is a virtual GPU, or a smaller laptop card of the same
# name.
_MEMORY_SHARE_PERCENT = 85

# Suffixes that turn a card name into another card: an "RTX 3090 Ti" is not an RTX 3090.
_VARIANT_WORDS = frozenset({"TI", "SUPER", "D", "LAPTOP"})

_SHAPE = re.compile(r"GPU\d+X(.+)")


class DeviceKind(StrEnum):
    """Kind of a device: real GPU, fake device or CPU slot."""

    GPU = "gpu"
    FAKE = "fake"
    CPU = "cpu"


class GpuType(msgspec.Struct, frozen=True, kw_only=True):
    """A card model, under the name that users write.

    Attributes:
        name: name in requests, receipts and prices.
        memory_bytes: nominal memory of the card, or the smallest size if one name covers several sizes.
        aliases: other names that requests may use.
        products: fragments of the driver's product string, in whole words.
    """

    name: str
    memory_bytes: int
    aliases: tuple[str, ...] = ()
    products: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not _key(self.name):
            raise InvalidValue(f"a GPU type cannot be named {self.name!r}", hint="use letters and digits in the name")
        if self.memory_bytes < 0:
            raise InvalidValue(f"GPU type {self.name} cannot have {self.memory_bytes} bytes of memory")


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """One card, fake device or CPU slot of a machine.

    Attributes:
        uuid: identifier in locks and receipts.
        index: position in PCI bus order. The indices of CPU slots start separately at 0.
        type: a catalogue name, or the product string of an unlisted card.
        memory_bytes: memory that the driver reports, or 0 for a device with no or unknown memory.
        kind: real GPU, fake device or CPU slot.
        product: product string that the driver reports.
        pci: address of the device in the kernel's log, such as ``"0000:17:00"``, or "" without an address.
    """

    uuid: str
    index: int
    type: str
    memory_bytes: int
    kind: DeviceKind
    product: str = ""
    pci: str = ""


def find_type(name: str, own: Sequence[GpuType] = ()) -> GpuType:
    """Return the GPU type for a name that a user entered.

    The lookup ignores case, spaces, ``-`` and ``_``. A shape name such as ``GPU_8xH100`` denotes the type in the name.

    Types in `own` take precedence over the catalogue. Raises UnknownGpuType if no type has the given name.
    """
    found = _lookup(name, own)
    if found is None:
        raise _unknown(name, own)
    return found


def canonical(name: str, own: Sequence[GpuType] = ()) -> str:
    """Return the catalogue's spelling of a type name, or the name itself for an unlisted type."""
    found = _lookup(name, own)
    return name if found is None else found.name


def is_listed(name: str, own: Sequence[GpuType] = ()) -> bool:
    """Return True if the catalogue or `own` contains a GPU type with a name, in any spelling."""
    return _lookup(name, own) is not None


def matches(wanted: str, device_type: str, own: Sequence[GpuType] = ()) -> bool:
    """Return True if a device's type equals the requested type or belongs to the requested family."""
    asked, present = canonical(wanted, own), canonical(device_type, own)
    return _key(asked) == _key(present) or present in FAMILIES.get(asked, ())


def families_of(gpu_type: str) -> tuple[str, ...]:
    """Return the families of a GPU type, spelled as in the catalogue."""
    return tuple(family for family, members in FAMILIES.items() if gpu_type in members)


def time_unit(gpu_types: Iterable[str] = ()) -> str:
    """Return the unit of device time, without the suffix ``-seconds`` or ``-hours``.

    The unit is ``"GPU"``, ``"CPU slot"``, or ``"device"`` for a mix of GPUs and CPU slots. Unknown device types count
    as a mix of GPUs and CPU slots.
    """
    types = set(gpu_types)
    if types == {CPU}:
        return "CPU slot"
    return "GPU" if types and not types & {CPU, ""} else "device"


def census(devices: Sequence[Device], unavailable: Sequence[str] = ()) -> tuple[dict[str, int], dict[str, int]]:
    """Return a node's total and unavailable devices, both counted by type.

    Fake devices of a type replace the real devices of that type.
    """
    faked = {device.type for device in devices if device.kind is DeviceKind.FAKE}
    counted = [device for device in devices if device.kind is DeviceKind.FAKE or device.type not in faked]
    taken = set(unavailable)
    total = Counter(device.type for device in counted)
    return dict(total), dict(Counter(device.type for device in counted if device.uuid in taken))


def recognise(product: str, memory_bytes: int, own: Sequence[GpuType] = ()) -> str:
    """Return the GPU type name of a card.

    The function prefers the most specific product fragment, and then the nearest memory size. A MIG slice or virtual
    GPU is not a whole card. The type of a slice is its product string, unless a type in `own` names the product string.

    If no type fits, the function returns the product string. `memory_bytes` is 0 when unknown.
    """
    words = _words(product)
    for types in (own, CATALOGUE):
        fits = [
            (len(_words(fragment)), -abs(memory_bytes - gpu_type.memory_bytes), gpu_type.name)
            for gpu_type in types
            if not memory_bytes or memory_bytes * 100 >= gpu_type.memory_bytes * _MEMORY_SHARE_PERCENT
            for fragment in gpu_type.products
            if _contains(words, _words(fragment))
        ]
        if fits:
            return max(fits)[2]
    return product.strip() or "UNKNOWN"


def parse_fake(text: str, own: Sequence[GpuType] = ()) -> tuple[Device, ...]:
    """Return the fake devices that ``SERVERLESS_GPU_FAKE`` describes.

    The text has the form ``"H100:4,A10:2"``. Raises InvalidValue for an invalid text, and UnknownGpuType for an unknown
    type.
    """
    counts: dict[str, tuple[GpuType, int]] = {}
    for entry in text.split(","):
        name, _, digits = entry.strip().rpartition(":")
        if not name:
            raise _bad_fake(text, f"{entry.strip()!r} does not name a type and a count")
        gpu_type = find_type(name, own)
        if gpu_type.name in counts:
            raise _bad_fake(text, f"{gpu_type.name} is named twice")
        # `isascii` excludes digits of other scripts, which int() would accept. The length check rejects huge numbers.
        if not (digits.isascii() and digits.isdigit() and len(digits) <= 9 and int(digits) >= 1):
            raise _bad_fake(text, f"{digits!r} is not a count of 1 or more")
        counts[gpu_type.name] = (gpu_type, int(digits))
    if sum(count for _, count in counts.values()) > FAKE_DEVICES_MAX:
        raise _bad_fake(text, f"more than {FAKE_DEVICES_MAX} devices")
    types = [(gpu_type, number) for gpu_type, count in counts.values() for number in range(count)]
    return tuple(
        Device(
            uuid=f"FAKE-{gpu_type.name}-{number}",
            index=index,
            type=gpu_type.name,
            memory_bytes=gpu_type.memory_bytes,
            kind=DeviceKind.FAKE,
            product=f"fake {gpu_type.name}",
            pci=f"fa{index >> 8:02x}:{index & 0xFF:02x}:00",
        )
        for index, (gpu_type, number) in enumerate(types)
    )


def cpu_slots(count: int) -> tuple[Device, ...]:
    """Return the CPU slots of a machine: devices that behave like GPUs and need no GPU."""
    return tuple(
        Device(uuid=f"CPU-{index}", index=index, type=CPU, memory_bytes=0, kind=DeviceKind.CPU)
        for index in range(count)
    )


def _bad_fake(text: str, why: str) -> InvalidValue:
    return InvalidValue(
        f"SERVERLESS_GPU_FAKE={text!r} cannot be read: {why}",
        hint='write types and counts, for example SERVERLESS_GPU_FAKE="H100:8" or "H100:4,A10:2"',
    )


def _lookup(name: str, own: Sequence[GpuType]) -> GpuType | None:
    key = _key(name)
    shape = _SHAPE.fullmatch(key)
    for candidate in (key, shape.group(1)) if shape else (key,):
        for gpu_type in own:
            if candidate in _keys(gpu_type):
                return gpu_type
        if candidate in _INDEX:
            return _INDEX[candidate]
    return None


def _unknown(name: str, own: Sequence[GpuType]) -> UnknownGpuType:
    names = list(dict.fromkeys(gpu_type.name for gpu_type in (*own, *CATALOGUE)))
    close = difflib.get_close_matches(_key(name), [_key(known) for known in names], n=1)
    near = next((known for known in names if [_key(known)] == close), None)
    return UnknownGpuType(
        f"unknown GPU type {name!r}; known types: {', '.join(names)}",
        hint=f"did you mean {near!r}?"
        if near
        else "use one of the known names, in any spelling of case, spaces, '-' and '_'",
    )


def _key(name: str) -> str:
    """Return a lookup key that is the same for all spellings of a name."""
    return name.upper().translate(_IGNORED)


def _keys(gpu_type: GpuType) -> tuple[str, ...]:
    return tuple(_key(name) for name in (gpu_type.name, *gpu_type.aliases))


def _words(product: str) -> tuple[str, ...]:
    return tuple(re.findall(r"[A-Z0-9]+", product.upper()))


def _contains(words: tuple[str, ...], fragment: tuple[str, ...]) -> bool:
    """Return True if a product string names exactly one card, so that A10 does not match A100."""
    if not fragment or ("MIG" in words) != ("MIG" in fragment):
        return False
    size = len(fragment)
    return any(
        words[start : start + size] == fragment and _VARIANT_WORDS.isdisjoint(words[start + size : start + size + 1])
        for start in range(len(words) - size + 1)
    )


_IGNORED = str.maketrans("", "", "-_ ")


def _type(name: str, gib: int, products: tuple[str, ...], aliases: tuple[str, ...] = ()) -> GpuType:
    return GpuType(name=name, memory_bytes=gib * GIB, aliases=aliases, products=products)


# Product strings come from `nvidia-smi -L`. The family A100 has no products, because no card has A100 as its type.
CATALOGUE: tuple[GpuType, ...] = (
    _type("A10", 24, ("A10",), ("A10-24GB",)),
    _type("A10G", 24, ("A10G",), ("A10G-24GB",)),
    _type("A16", 16, ("A16",)),
    _type("A2", 16, ("A2",)),
    _type("A30", 24, ("A30",)),
    _type("A40", 48, ("A40",)),
    _type("A100", 40, ()),
    _type(
        "A100-40", 40, ("A100", "A100-SXM4-40GB", "A100-PCIE-40GB"), ("A100-40GB", "A100-SXM4-40GB", "A100-PCIE-40GB")
    ),
    _type(
        "A100-80",
        80,
        ("A100", "A100-SXM4-80GB", "A100-SXM-80GB", "A100-PCIE-80GB", "A100 80GB PCIe"),
        ("A100-80GB", "A100-SXM4-80GB", "A100-PCIE-80GB", "A100 80GB PCIe"),
    ),
    _type("H20", 96, ("H20",)),
    _type("H100", 80, ("H100",), ("H100-80GB", "H100-SXM", "H100-PCIe", "H100-NVL")),
    _type("H200", 141, ("H200",), ("H200-141GB", "H200-SXM", "H200-NVL")),
    _type("GH200", 96, ("GH200",)),
    _type("B200", 180, ("B200",), ("B200-180GB", "B200-192GB")),
    _type("B300", 268, ("B300",), ("B300-288GB",)),
    _type("GB200", 185, ("GB200",)),
    _type("GB300", 277, ("GB300",)),
    _type("L4", 24, ("L4",)),
    _type("L40", 48, ("L40",)),
    _type("L40S", 48, ("L40S",)),
    _type("P100", 16, ("P100",)),
    _type("T4", 16, ("T4",)),
    _type("V100", 16, ("V100",)),
    _type("RTX-3090", 24, ("RTX 3090",)),
    _type("RTX-4090", 24, ("RTX 4090",)),
    _type("RTX-5090", 32, ("RTX 5090",)),
    _type("RTX-A4000", 16, ("RTX A4000",), ("A4000",)),
    _type("RTX-A5000", 24, ("RTX A5000",), ("A5000",)),
    _type("RTX-A6000", 48, ("RTX A6000",), ("A6000",)),
    _type("RTX-6000-Ada", 48, ("RTX 6000 Ada",), ("RTX-6000-Ada-Generation",)),
    _type("RTX-PRO-6000", 96, ("RTX PRO 6000",), ("RTX-PRO-6000-Blackwell",)),
    _type(CPU, 0, ()),
)

# Families of GPU types. A request for a family accepts any member.
FAMILIES: dict[str, tuple[str, ...]] = {"A100": ("A100-40", "A100-80")}

# Index of GPU types by key, because every call looks up the type of every device.
_INDEX: dict[str, GpuType] = {key: gpu_type for gpu_type in CATALOGUE for key in _keys(gpu_type)}
