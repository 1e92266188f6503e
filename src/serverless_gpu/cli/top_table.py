"""Converts a monitor frame to a table, and formats the table for a terminal of any size.

    node-7 · cpu 37 % · memory 61.2/251.0 GB · disk 412.0 GB free · network ↓ 12.0 MB/s ↑ 3.1 MB/s
    8 H100: 6 lent, 2 free · 4.2 kW

    #  BUSY                      MEMORY                               POWER      TEMP   CLOCK     WHO
    0  ████████████████░░  87 %  ██████████████░░░░    57.1/79.6 GiB  512/700 W  64 °C  1980 MHz  train rank 0 …o8p0a1s

    run 01kaqw3e5r7t9y2u4i6o8p0a1s · train · RUNNING · 12 min 03 s
      rank 0: cpu 101 %, 3.1 GB, GPU 57.1 GiB   rank 1: cpu 99 %, 3.1 GB, GPU 57.1 GiB

GPU memory is displayed in GiB, as in nvidia-smi. The table omits free CPU slots. On a narrow terminal, `draw` first
removes the least important columns. If the lines are still too long, `draw` shortens the bars and truncates the lines.
All functions in this module are pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from serverless_gpu.client.display.terminal_screen import fit, safe
from serverless_gpu.model.hardware import Device, DeviceKind
from serverless_gpu.model.telemetry import GpuSample, HostSample, RankSample, throttle_words
from serverless_gpu.node.monitor.messages import NodeFrame, WatchedAttempt
from serverless_gpu.units import format_bytes, format_duration_ms, format_gpu_memory

_BAR_MIN, _BAR_MAX = 4, 18
_NAME_MAX = 24
_LAST_MAX = 23
_BARS_KEEP = 6  # `draw` shortens bars before it removes columns with at least this `keep`.
_ID_SHOWN = 8
_BOLD, _DIM, _GOOD, _WARN, _BAD = "1", "2", "36", "33", "31"


class DeviceOwner(msgspec.Struct, frozen=True, kw_only=True):
    """The run and user that hold a device."""

    run_id: str  # Identifier of the run or session; "" if unknown.
    name: str  # Name of the run; "" if unknown.
    rank: int | None  # Global rank that uses the device; None if unknown.
    user: str


class DeviceRow(msgspec.Struct, frozen=True, kw_only=True):
    """The current state of one device.

    `owner` is None for a free device. `quarantined` is the quarantine reason, or "" without a quarantine.
    """

    device: Device
    now: GpuSample
    owner: DeviceOwner | None = None
    quarantined: str = ""


class RunRow(msgspec.Struct, frozen=True, kw_only=True):
    """The current state of one attempt.

    `began_ns` is the start time of the ranks in nanoseconds since 1970, or 0 before the start.
    """

    run_id: str
    fence: int
    name: str
    state: str
    began_ns: int
    devices: int
    tracked: str
    ranks: tuple[RankSample, ...]


class NetworkRates(msgspec.Struct, frozen=True, kw_only=True):
    """Network traffic in bytes per second. None means unknown."""

    receive: float | None = None
    transmit: float | None = None


class TopTable(msgspec.Struct, frozen=True, kw_only=True):
    """State of the node at the time `at_ns` in nanoseconds since 1970."""

    at_ns: int
    node: str
    host: HostSample
    rates: NetworkRates
    devices: tuple[DeviceRow, ...]
    runs: tuple[RunRow, ...]


class Around(msgspec.Struct, frozen=True, kw_only=True):
    """Information about the node that is not part of a frame."""

    node: str  # Host name of the machine.
    user: str  # User who owns the home directory.
    # Owners by device UUID, from the device locks, including runs of other users.
    holders: Mapping[str, DeviceOwner] = {}
    quarantined: Mapping[str, str] = {}  # Quarantine reasons by device UUID.


def tabulate(frame: NodeFrame, before: NodeFrame | None, around: Around) -> TopTable:
    """Return a frame as a table. Compute the network rates from the previous frame."""
    owners = {**around.holders, **_owners(frame.attempts, around.user)}
    gpus = frame.sample.gpus
    rows = tuple(
        DeviceRow(
            device=device,
            now=gpus[place] if place < len(gpus) else GpuSample(),
            owner=owners.get(device.uuid),
            quarantined=around.quarantined.get(device.uuid, ""),
        )
        for place, device in enumerate(frame.devices)
    )
    runs = tuple(
        RunRow(
            run_id=attempt.run_id,
            fence=attempt.fence,
            name=attempt.name,
            state=attempt.state.value,
            began_ns=attempt.began_ns,
            devices=len(attempt.devices),
            tracked=attempt.tracked,
            ranks=ranks,
        )
        for attempt, ranks in zip(frame.attempts, _ranks(frame.attempts, frame.sample.ranks), strict=True)
    )
    return TopTable(
        at_ns=frame.sample.at_ns,
        node=around.node,
        host=frame.sample.host,
        rates=_rates(frame, before),
        devices=rows,
        runs=runs,
    )


def table_json(table: TopTable) -> dict[str, object]:
    """Return a table as JSON, with null for unknown values."""
    return {
        "at_ns": table.at_ns,
        "node": table.node,
        "host": _as_dict(table.host)
        | {"receive_bytes_s": table.rates.receive, "transmit_bytes_s": table.rates.transmit},
        "devices": [
            {"uuid": row.device.uuid, "index": row.device.index, "type": row.device.type, "kind": row.device.kind.value}
            | _as_dict(row.now)
            | {"owner": None if row.owner is None else msgspec.to_builtins(row.owner), "quarantined": row.quarantined}
            for row in table.devices
        ],
        "runs": [msgspec.to_builtins(row) | {"ranks": [_as_dict(rank) for rank in row.ranks]} for row in table.runs],
    }


def _as_dict(value: msgspec.Struct) -> dict[str, object]:
    return {name: getattr(value, name) for name in value.__struct_fields__}


def _owners(attempts: Sequence[WatchedAttempt], user: str) -> dict[str, DeviceOwner]:
    """Return the owner of each device.

    Each attempt lists its devices in rank order.
    """
    owners: dict[str, DeviceOwner] = {}
    for attempt in attempts:
        ranks = sorted(attempt.pids)
        for place, uuid in enumerate(attempt.devices):
            # With one process per node, rank 0 of the node uses all devices of the attempt.
            rank = ranks[place] if len(ranks) == len(attempt.devices) else ranks[0] if len(ranks) == 1 else None
            owners[uuid] = DeviceOwner(run_id=attempt.run_id, name=attempt.name, rank=rank, user=user)
    return owners


def _ranks(attempts: Sequence[WatchedAttempt], samples: Sequence[RankSample]) -> list[tuple[RankSample, ...]]:
    """Return the samples of each attempt's ranks. The samples are in rank order and omit ended ranks."""
    left = list(samples)
    found: list[tuple[RankSample, ...]] = []
    for attempt in attempts:
        own: list[RankSample] = []
        while left and left[0].rank in attempt.pids and (not own or left[0].rank > own[-1].rank):
            own.append(left.pop(0))
        found.append(tuple(own))
    return found


def _rates(frame: NodeFrame, before: NodeFrame | None) -> NetworkRates:
    if before is None or frame.sample.at_ns <= before.sample.at_ns:
        return NetworkRates()
    seconds = (frame.sample.at_ns - before.sample.at_ns) / 1e9
    now, then = frame.sample.host, before.sample.host
    return NetworkRates(
        receive=_rate(now.network_receive_bytes, then.network_receive_bytes, seconds),
        transmit=_rate(now.network_transmit_bytes, then.network_transmit_bytes, seconds),
    )


def _rate(now: int | None, then: int | None, seconds: float) -> float | None:
    return None if now is None or then is None or now < then else (now - then) / seconds


class Style(NamedTuple):
    """Colour and Unicode support of a terminal."""

    colour: bool
    unicode: bool

    def paint(self, text: str, code: str) -> str:
        """Return coloured or bold text if the terminal supports colours."""
        return f"\x1b[{code}m{text}\x1b[0m" if self.colour and text.strip() else text


class _Cell(NamedTuple):
    """Text of a table cell, and its colour or weight."""

    text: str
    code: str = ""


class _Column(NamedTuple):
    """Table column. On a narrow terminal, columns with a smaller `keep` disappear first."""

    head: str
    keep: int
    cells: Callable[[DeviceRow], _Cell]


def draw(table: TopTable, *, columns: int, style: Style, user: str = "") -> list[str]:
    """Return the table as lines for a terminal width. Omit the owner of `user`'s devices."""
    lines = [*_head(table, columns, style), ""]
    lines += _devices(table, columns, style, user)
    lines += [*([""] if lines[-1] else []), *_runs(table, columns, style)]
    return [fit(line, columns) for line in lines]


# --- the first lines ----------------------------------------------------------------------------------------------


def _head(table: TopTable, columns: int, style: Style) -> list[str]:
    host = table.host
    parts = [_clean(table.node)]
    if host.cpu_percent is not None:
        parts.append(f"cpu {host.cpu_percent:.0f} %")
    if host.memory_bytes is not None and host.memory_total_bytes:
        parts.append(f"memory {_ratio_text(host.memory_bytes, host.memory_total_bytes, format_bytes)}")
    if host.disk_bytes is not None and host.disk_total_bytes is not None:
        parts.append(f"disk {format_bytes(max(0, host.disk_total_bytes - host.disk_bytes))} free")
    down, up = ("↓", "↑") if style.unicode else ("in", "out")
    if table.rates.receive is not None and table.rates.transmit is not None:
        network = (
            f"{down} {format_bytes(round(table.rates.receive))}/s {up} {format_bytes(round(table.rates.transmit))}/s"
        )
        parts.append(f"network {network}")
    return [*_wrap(parts, columns, style), *_wrap(_summary(table), columns, style)]


def _summary(table: TopTable) -> list[str]:
    """Return the number of lent and free devices, and the total power."""
    parts: list[str] = []
    for name in dict.fromkeys(_type_name(row) for row in table.devices):
        rows = [row for row in table.devices if _type_name(row) == name]
        lent = sum(row.owner is not None for row in rows)
        barred = sum(bool(row.quarantined) for row in rows)
        words = [f"{lent} lent", f"{len(rows) - lent - barred} free", f"{barred} in quarantine" if barred else ""]
        parts.append(f"{len(rows)} {name}: {', '.join(filter(None, words))}")
    watts = [row.now.power_watts for row in table.devices if row.now.power_watts is not None]
    if watts:
        parts.append(f"{sum(watts) / 1000:.1f} kW")
    return parts or ["no devices"]


def _type_name(row: DeviceRow) -> str:
    if row.device.kind is DeviceKind.CPU:
        return "CPU slots"
    return _clean(row.device.type) + (" (fake)" if row.device.kind is DeviceKind.FAKE else "")


def _wrap(parts: Sequence[str], columns: int, style: Style) -> list[str]:
    dot = " · " if style.unicode else " | "
    lines: list[str] = []
    for part in parts:
        if lines and len(lines[-1]) + len(dot) + len(part) <= columns:
            lines[-1] += dot + part
        else:
            lines.append(part)
    return [style.paint(lines[0], _BOLD), *lines[1:]] if lines else []


# --- devices ------------------------------------------------------------------------------------------------------


def _devices(table: TopTable, columns: int, style: Style, user: str) -> list[str]:
    rows = [row for row in table.devices if row.device.kind is not DeviceKind.CPU or row.owner or row.quarantined]
    if not rows:
        return []
    kinds = {row.device.kind for row in rows}
    wanted = [
        _Column("#", 9, lambda row: _Cell(str(row.device.index))),
        _Column("TYPE", 0, lambda row: _Cell(_clean(row.device.type))),
        _Column("BUSY", 8, lambda row: _busy(row, 0, style)),
        _Column("MEMORY", 6, lambda row: _memory(row, 0, style)),
        _Column("POWER", 4, _power),
        _Column("TEMP", 5, lambda row: _temperature(row, style)),
        _Column("CLOCK", 3, _clock),
        _Column("WHO", 7, lambda row: _owner_cell(row, user)),
    ]
    shown = [
        column
        for column in wanted
        if column.head in ("#", "BUSY", "WHO") or any(column.cells(row).text for row in rows)
    ]
    if len({row.device.type for row in rows}) < 2 and DeviceKind.CPU not in kinds:
        shown = [column for column in shown if column.head != "TYPE"]
    bar = _BAR_MIN
    while (bar or len(shown) > 2) and sum(_widths(rows, shown, bar)) + 2 * (len(shown) - 1) > columns:
        least = min(shown, key=lambda column: column.keep)
        if bar and least.keep >= _BARS_KEEP:
            bar = 0
        else:
            shown.remove(least)
    barred = sum(column.head in ("BUSY", "MEMORY") for column in shown)
    spare = columns - sum(_widths(rows, shown, bar)) - 2 * (len(shown) - 1)
    bar = min(_BAR_MAX, bar + max(0, spare) // barred) if spare >= 0 else 0
    bar = bar if bar >= _BAR_MIN else 0
    return _align(rows, shown, bar, style)


def _cells(row: DeviceRow, shown: Sequence[_Column], bar: int, style: Style) -> list[_Cell]:
    made = {"BUSY": _busy, "MEMORY": _memory}
    return [made[column.head](row, bar, style) if column.head in made else column.cells(row) for column in shown]


def _widths(rows: Sequence[DeviceRow], shown: Sequence[_Column], bar: int) -> list[int]:
    plain = Style(colour=False, unicode=True)
    table = [_cells(row, shown, bar, plain) for row in rows]
    widths = [max([len(column.head), *(len(cells[at].text) for cells in table)]) for at, column in enumerate(shown)]
    return [*widths[:-1], min(widths[-1], _LAST_MAX)]  # On a narrow terminal, `draw` truncates the last column.


def _align(rows: Sequence[DeviceRow], shown: Sequence[_Column], bar: int, style: Style) -> list[str]:
    widths = _widths(rows, shown, bar)
    head = "  ".join(column.head.ljust(width) for column, width in zip(shown, widths, strict=True)).rstrip()
    lines = [style.paint(head, _DIM)]
    for row in rows:
        cells = _cells(row, shown, bar, style)
        parts = []
        for cell, width in zip(cells, widths, strict=True):
            text = style.paint(cell.text, cell.code) if cell.code else cell.text
            parts.append(text + " " * (width - len(cell.text)))
        lines.append("  ".join(parts).rstrip())
    return lines


def _busy(row: DeviceRow, bar: int, style: Style) -> _Cell:
    percent = row.now.busy_percent
    if percent is None:
        return _Cell("-")
    text = f"{_bar(percent / 100, bar, style)}{percent:3.0f} %"
    return _Cell(text, _GOOD if percent >= 1 else _DIM)


def _memory(row: DeviceRow, bar: int, style: Style) -> _Cell:
    used, total = row.now.memory_bytes, row.now.memory_total_bytes or row.device.memory_bytes
    if used is None:
        return _Cell("")
    form = format_bytes if row.device.kind is DeviceKind.CPU else format_gpu_memory
    if not total:
        return _Cell(form(used))
    return _Cell(
        f"{_bar(used / total, bar, style)}{_ratio_text(used, total, form):>13}", _GOOD if used / total >= 0.01 else _DIM
    )


def _power(row: DeviceRow) -> _Cell:
    watts, limit = row.now.power_watts, row.now.power_limit_watts
    if watts is None:
        return _Cell("")
    return _Cell(f"{watts:.0f} W" if limit is None else f"{watts:.0f}/{limit:.0f} W")


def _temperature(row: DeviceRow, style: Style) -> _Cell:
    celsius = row.now.temperature_celsius
    if celsius is None:
        return _Cell("")
    return _Cell(f"{celsius:.0f} {'°C' if style.unicode else 'C'}", _WARN if celsius >= 85 else "")


def _clock(row: DeviceRow) -> _Cell:
    why = ", ".join(throttle_words(row.now.throttle))
    megahertz = "" if row.now.sm_megahertz is None else f"{row.now.sm_megahertz:.0f} MHz"
    errors = f"{row.now.ecc_errors} ECC errors" if row.now.ecc_errors else ""
    return _Cell(" ".join(filter(None, (megahertz, why, errors))), _BAD if errors else _WARN if why else "")


def _owner_cell(row: DeviceRow, user: str) -> _Cell:
    if row.quarantined:
        return _Cell(f"quarantined: {_clean(row.quarantined)}", _BAD)
    if row.owner is None:
        return _Cell("free", _DIM)
    rank = "" if row.owner.rank is None else f"rank {row.owner.rank}"
    run = f"…{row.owner.run_id[-_ID_SHOWN:]}" if row.owner.run_id else ""
    name = _clean(row.owner.name)
    whose = _clean(row.owner.user) if row.owner.user != user else ""
    return _Cell(" ".join(filter(None, (name[:_NAME_MAX], rank, run, whose))) or "lent")


def _bar(share: float, width: int, style: Style) -> str:
    if width <= 0:
        return ""
    full = round(max(0.0, min(1.0, share)) * width)
    full = max(full, 1) if share >= 0.005 else full
    return (("█" if style.unicode else "#") * full) + (("░" if style.unicode else ".") * (width - full)) + " "


def _ratio_text(used: int, total: int, form: Callable[[int], str]) -> str:
    """Return a ratio such as ``61.3/79.6 GiB``, in the unit of the total."""
    whole, unit = form(total).split(" ")
    scale = total / float(whole) if float(whole) else 1.0
    return f"{used / scale:.1f}/{whole} {unit}"


# --- runs ---------------------------------------------------------------------------------------------------------


def _runs(table: TopTable, columns: int, style: Style) -> list[str]:
    if not table.runs:
        return [style.paint("no runs", _DIM)]
    lines: list[str] = []
    for run in table.runs:
        lines += _run(run, table.at_ns, columns, style)
    return lines


def _run(run: RunRow, now_ns: int, columns: int, style: Style) -> list[str]:
    took = "" if run.began_ns <= 0 else format_duration_ms(max(0, now_ns - run.began_ns) // 1_000_000)
    attempt = f"attempt {run.fence}" if run.fence > 1 else ""
    name = _clean(run.name)[:_NAME_MAX]
    lines = _wrap([part for part in (f"run {run.run_id}", name, run.state, took, attempt) if part], columns, style)
    link = f"  MLflow: {_clean(run.tracked)}"
    if run.tracked and len(link) <= columns:  # A truncated link would be useless.
        lines.append(link)
    return lines + [f"  {line}" for line in _rank_lines(run.ranks, columns - 2)]


def _rank_lines(ranks: Sequence[RankSample], columns: int) -> list[str]:
    """Return lines with the load of each rank. Put as many ranks on a line as fit."""
    texts = [_rank_text(rank) for rank in ranks]
    if not texts:
        return []
    width = max(map(len, texts)) + 3
    beside = max(1, (columns + 3) // width)
    rows = [texts[place : place + beside] for place in range(0, len(texts), beside)]
    return ["".join(text.ljust(width) for text in row).rstrip() for row in rows]


def _rank_text(rank: RankSample) -> str:
    parts = [
        "" if rank.cpu_percent is None else f"cpu {rank.cpu_percent:.0f} %",
        "" if rank.memory_bytes is None else format_bytes(rank.memory_bytes),
        "" if rank.gpu_memory_bytes is None else f"GPU {format_gpu_memory(rank.gpu_memory_bytes)}",
    ]
    return f"rank {rank.rank}: {', '.join(filter(None, parts)) or '-'}"


def _clean(text: str) -> str:
    """Return untrusted text without terminal control characters."""
    return "".join(letter if letter.isprintable() else "?" for letter in safe(text, tty=True))
