"""The files of the node that a principal's sandbox shows.

The launcher adds the interpreter's own directories (`inside/sandbox.py`), because a restored environment's interpreter
exists only after the mounts.
"""

from __future__ import annotations

import os
import re
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
_INFINIBAND = ("infiniband/uverbs[0-9]*", "infiniband/rdma_cm")
"""Nodes for transfers. The other nodes of an adapter (umad, issm) administer the network."""
_DEVICE_NAMES = ("nvidia[0-9]*", *_CONTROL_NODES, "nvidia-caps/nvidia-cap[0-9]*", *_INFINIBAND)
_MIG_NAME = re.compile(r"MIG-(?P<gpu>GPU-[0-9a-f-]+)/(?P<instance>\d+)/(?P<compute>\d+)", re.ASCII)


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


def gpu_nodes(uuids: Sequence[str], driver: Path = _DRIVER, devices: Path = _DEVICES) -> list[str]:
    """Return the device nodes for GPUs, and the driver's control nodes. Raises OSError for an unknown GPU.

    The driver lists each GPU with its UUID and its minor number in /proc/driver/nvidia/gpus/*/information. A MIG device
    has the name ``MIG-GPU-<UUID>/<GPU instance>/<compute instance>``. A process needs the nodes of its GPU and of both
    instances, which the driver names in /proc/driver/nvidia/capabilities.
    """
    if not uuids:
        return []
    minors: dict[str, str] = {}
    for path in sorted(driver.glob("gpus/*/information")):
        fields = _fields(path)
        minors[fields.get("GPU UUID", "")] = fields.get("Device Minor", "")
    names: list[str] = []
    for uuid in uuids:
        mig = _MIG_NAME.fullmatch(uuid)
        minor = minors.get(uuid if mig is None else mig["gpu"])
        if not minor:
            raise OSError(f"the driver names no device node for {uuid}")
        names.append(f"nvidia{minor}")
        if mig is not None:
            instance = driver / "capabilities" / f"gpu{minor}" / "mig" / f"gi{mig['instance']}"
            for path in (instance / "access", instance / f"ci{mig['compute']}" / "access"):
                number = _fields(path).get("DeviceFileMinor", "")
                if not number:
                    raise OSError(f"the driver names no device node for {uuid} in {path}")
                names.append(f"nvidia-caps/nvidia-cap{number}")
    control = [name for name in _CONTROL_NODES if (devices / name).exists()]
    return [str(devices / name) for name in dict.fromkeys((*names, *control))]


def network_nodes(devices: Path = _DEVICES) -> list[str]:
    """Return the nodes of this machine's InfiniBand adapters, which NCCL uses between nodes."""
    return sorted(str(path) for name in _INFINIBAND for path in devices.glob(name))


def device_nodes() -> list[str]:
    """Return the paths of the device nodes that an attempt may get on this node."""
    found = (path for name in _DEVICE_NAMES for path in _DEVICES.glob(name))
    return sorted(str(path) for path in found if path.is_char_device())


def _fields(path: Path) -> dict[str, str]:
    """Return the fields of a file of the driver: lines with a name, a colon and a value. Raises OSError."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
