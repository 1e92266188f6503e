"""The files of the node that a principal's sandbox shows.

The launcher adds the interpreter's own directories (`inside/sandbox.py`), because a restored environment's interpreter
exists only after the mounts.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from serverless_gpu.node.inside.sandbox import View
from serverless_gpu.node.isolation.principals import Principal
from serverless_gpu.node.processes.spawn import PACKAGE

MEMORY_BYTES_MAX = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
"""Limit of /tmp and of /dev/shm of an attempt: half of the memory, as for /dev/shm of a machine."""
_DEVICES = Path("/dev")
_DRIVER = Path("/proc/driver/nvidia")
_CONTROL_NODES = ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools")
_DEVICE_NAMES = ("nvidia[0-9]*", *_CONTROL_NODES)


def view_of(principal: Principal, python: str, trees: Sequence[str]) -> View:
    """Return the files for the sandbox of a principal's zygote. `trees` are environments. Raises OSError."""
    at = Path(principal.place) / "root"
    at.mkdir(mode=0o700, exist_ok=True)
    view = View(
        uid=principal.uid,
        at=str(at),
        home=principal.home,
        python=python,
        shown=[str(PACKAGE), *trees],
        devices=device_nodes(),
    )
    if (account := principal.account) is None:
        return view
    return view._replace(gid=account.gid, groups=account.groups, user=account.name, home_at=account.home)


def gpu_nodes(uuids: Sequence[str], driver: Path = _DRIVER) -> list[str]:
    """Return the device nodes for GPUs, and the driver's control nodes. Raises OSError for an unknown GPU.

    The driver lists each GPU with its UUID and its minor number in /proc/driver/nvidia/gpus/*/information.
    """
    if not uuids:
        return []
    minors: dict[str, str] = {}
    for path in sorted(driver.glob("gpus/*/information")):
        fields = dict(line.split(":", 1) for line in path.read_text(encoding="utf-8").splitlines() if ":" in line)
        minors[fields.get("GPU UUID", "").strip()] = fields.get("Device Minor", "").strip()
    unknown = [uuid for uuid in uuids if uuid not in minors]
    if unknown:
        raise OSError(f"the driver names no device node for {', '.join(unknown)}. Sandboxes do not support MIG devices")
    control = [str(_DEVICES / name) for name in _CONTROL_NODES if (_DEVICES / name).exists()]
    return [*(str(_DEVICES / f"nvidia{minors[uuid]}") for uuid in uuids), *control]


def device_nodes() -> list[str]:
    """Return the paths of this node's GPU devices."""
    found = (path for name in _DEVICE_NAMES for path in _DEVICES.glob(name))
    return sorted(str(path) for path in found if path.is_char_device())
