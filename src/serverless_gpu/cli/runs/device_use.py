"""Device use of a run, one line each: from the receipt, or from samples so far."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from serverless_gpu.cli.output import columns
from serverless_gpu.model.receipt import DeviceUse
from serverless_gpu.model.telemetry.samples import DeviceTotals, Header, add, decode
from serverless_gpu.units import format_bytes, format_duration_ms, format_gpu_memory, format_joules

_SHOWN_MAX = 128


def use_lines(uses: Sequence[DeviceUse], nodes: Sequence[str] = ()) -> list[str]:
    """Return a table of devices by rank, empty for one device; `nodes` has one name per device."""
    if len(uses) < 2:
        return []
    head = ["#", "BUSY", "PEAK MEMORY", "ENERGY", "THROTTLED", "NODE", "DEVICE"]
    shown = uses[:_SHOWN_MAX]
    places = nodes[:_SHOWN_MAX] if len(nodes) == len(uses) else ["-"] * len(shown)
    rows = [
        [str(rank), *_cells(use), node, use.uuid] for rank, (use, node) in enumerate(zip(shown, places, strict=True))
    ]
    kept = [at for at in range(len(head)) if any(row[at] != "-" for row in rows)]
    lines = columns([[row[at] for at in kept] for row in [head, *rows]])
    more = len(uses) - _SHOWN_MAX
    return [*lines, *([f"and {more} more"] if more > 0 else [])]


def sampled_uses(directory: Path) -> tuple[DeviceUse, ...]:
    """Return the device use of a local attempt from its samples."""
    uses: dict[str, DeviceTotals] = {}
    for path in sorted((directory / "logs").glob("*.telemetry")):
        try:
            lines, _ = decode(path.read_bytes())
        except OSError:  # gone meanwhile
            continue
        header: Header | None = None
        for line in lines:
            if isinstance(line, Header):
                header = line
            elif header is not None:
                uses = add(uses, header, line)
    return tuple(use.result() for use in uses.values())


def _cells(use: DeviceUse) -> list[str]:
    form = format_bytes if use.uuid.startswith("CPU-") else format_gpu_memory  # a slot's is the host's
    return [
        "-" if use.busy_percent is None else f"{use.busy_percent:.0f} %",
        "-" if not use.peak_memory_bytes else form(use.peak_memory_bytes),
        "-" if use.energy_joules is None else format_joules(use.energy_joules),
        "-" if not use.throttled_s else format_duration_ms(round(use.throttled_s * 1000)),
    ]
