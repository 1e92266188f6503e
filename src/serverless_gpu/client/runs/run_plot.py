"""Collects the data of `Run.plot()`, which `run_figure.py` draws with Matplotlib."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from serverless_gpu.client.metrics import read_metrics
from serverless_gpu.client.runs.run_source import RunSource
from serverless_gpu.client.runs.timeline import lanes, marks, span
from serverless_gpu.errors import InvalidValue, ServerlessGpuError, StorageError
from serverless_gpu.lazy_import import load
from serverless_gpu.model.hardware import DeviceKind
from serverless_gpu.model.lifecycle.attempt import State
from serverless_gpu.model.telemetry import Header, Sample, decode
from serverless_gpu.node.base.private_files import refuse_irregular
from serverless_gpu.units import format_duration_ms

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot(source: RunSource, name: str, state: str, path: str | os.PathLike[str] | None) -> Figure:
    """Return a run's figure and write it to `path` if given. Raises only subclasses of ServerlessGpuError."""
    try:
        figures = load("serverless_gpu.client.runs.run_figure")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        message = "Run.plot() needs Matplotlib, which is not installed for this Python"
        raise ServerlessGpuError(message, hint="pip install 'serverless-gpu[plot]'") from None
    files = source.read_telemetry()
    attempts = source.attempts()
    shown = lanes(read_metrics(files), _totals(files))
    ends = span(shown)
    about = (
        _devices_text(files),
        "" if ends is None else format_duration_ms(round(1000 * (ends[1] - ends[0]))),
        state,
        attempts[-1].reason.value if attempts and attempts[-1].reason is not None and state != State.SUCCEEDED else "",
    )
    titles = figures.Titles(" · ".join(filter(None, (name, f"run {source.run_id}"))), " · ".join(filter(None, about)))
    target = None if path is None else Path(path)
    if target is not None:
        refuse_irregular(target)
    try:
        figure: Figure = figures.draw(shown, marks(attempts), titles, target)
    except OSError as error:
        message = f"the figure cannot be written to {target}: {error.strerror or error}"
        raise StorageError(message, hint="give the path of a file in a directory you can write to") from None
    except ValueError as error:
        raise InvalidValue(f"{path} cannot be written: {error}") from None
    return figure


def _devices_text(files: list[bytes]) -> str:
    """Return a description of the last attempt's devices and nodes, such as ``16 H100 on 2 nodes``."""
    headers = [header for header in map(_last_header, files) if header is not None]
    newest = max((header.fence for header in headers), default=0)
    nodes = {header.node_rank: header.devices for header in headers if header.fence == newest}
    devices = [device for devices in nodes.values() for device in devices]
    names = [
        "CPU slots"
        if device.kind is DeviceKind.CPU
        else f"{device.type} (fake)"
        if device.kind is DeviceKind.FAKE
        else device.type
        for device in devices
    ]
    counted = ", ".join(f"{names.count(name)} {name}" for name in dict.fromkeys(names))
    return f"{counted} on {len(nodes)} nodes" if len(nodes) > 1 else counted


def _totals(files: list[bytes]) -> dict[tuple[int, int], int]:
    """Return each GPU's total memory by node and GPU number, from the last sample in each file."""
    totals: dict[tuple[int, int], int] = {}
    for data in files:
        header = _last_header(data)
        start = data.rfind(b"\n[", 0, data.rfind(b"\n")) + 1
        for line in decode(data[start : data.find(b"\n", start) + 1])[0] if start else ():
            if header is not None and isinstance(line, Sample):
                known = ((place, gpu.memory_total_bytes) for place, gpu in enumerate(line.gpus))
                totals |= {(header.node_rank, place): total for place, total in known if total}
    return totals


def _last_header(data: bytes) -> Header | None:
    """Return a sample file's last header, which lists the node's devices."""
    start = data.rfind(b"\n{") + 1
    found = decode(data[start : data.find(b"\n", start) + 1])[0]
    return found[0] if found and isinstance(found[0], Header) else None
