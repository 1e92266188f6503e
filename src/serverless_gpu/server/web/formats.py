"""Formats values for templates: times in the reader's zone, durations, sizes, money and states."""

from __future__ import annotations

import datetime
import hashlib
import zoneinfo
from collections.abc import Callable, Mapping
from typing import Any

from markupsafe import Markup

from serverless_gpu.ambient import format_utc
from serverless_gpu.model.lifecycle.attempt import State
from serverless_gpu.units import format_bytes, format_duration_ms, format_gpu_ms, format_micros

_STATES: Mapping[State, tuple[str, str]] = {
    State.QUEUED: ("queued", "○"),
    State.STARTING: ("starting", "◔"),
    State.RUNNING: ("running", "▶"),
    State.STOPPING: ("starting", "◑"),
    State.UNREACHABLE: ("unknown", "?"),
    State.SUCCEEDED: ("succeeded", "✓"),
    State.FAILED: ("failed", "✕"),
    State.CANCELLED: ("stopped", "■"),
    State.TIMED_OUT: ("failed", "⏱"),
    State.BUDGET_STOPPED: ("stopped", "■"),
    State.LOST: ("unknown", "?"),
}
"""Class and sign of each state. The sign is the second cue beside the colour."""


def duration(ms: float | None) -> str:
    """Return a duration with its unit, or a dash for None."""
    return "–" if ms is None else format_duration_ms(round(ms))


def between(start_ns: int | None, end_ns: int | None) -> str:
    """Return the time between two timestamps with its unit, or a dash if one is None."""
    return "–" if start_ns is None or end_ns is None else duration(max(0, end_ns - start_ns) / 1e6)


def size(count: int | None) -> str:
    """Return a number of bytes with its unit, or a dash for None."""
    return "–" if count is None else format_bytes(count)


def money(micros: int | None, currency: str) -> str:
    """Return an amount of money with its currency, or a dash for None."""
    return "–" if micros is None else format_micros(micros, currency)


def gpu_time(gpu_ms: int) -> str:
    """Return device time with its unit."""
    return format_gpu_ms(gpu_ms)


def zone_of(name: str) -> datetime.tzinfo:
    """Return the reader's time zone, or UTC for an unknown name."""
    try:
        return zoneinfo.ZoneInfo(name) if name else datetime.UTC
    except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError):
        return datetime.UTC


def moments(zone: datetime.tzinfo) -> Callable[[int | None], Markup]:
    """Return a function that formats timestamps in a time zone as `<time>` elements.

    A script makes the text relative and keeps the exact time as a tooltip. Without scripts, the exact time stays.
    """

    def moment(wall_ns: int | None) -> Markup:
        if wall_ns is None:
            return Markup("–")
        local = datetime.datetime.fromtimestamp(wall_ns // 1_000_000_000, zone)
        text = f"{local:%Y-%m-%d %H:%M:%S} {local.tzname()}"
        return Markup('<time datetime="{}">{}</time>').format(format_utc(wall_ns), text)

    return moment


def state(value: State | str) -> Markup:
    """Return a run's state with its sign."""
    style, sign = _STATES[State(value)]
    word = str(value).lower().replace("_", " ")
    return Markup('<span class="state {}"><span aria-hidden="true">{}</span> {}</span>').format(style, sign, word)


def gpus(count: int | None, gpu_type: str | None) -> str:
    """Return a number of devices with their type."""
    if not count:
        return "all GPUs of a node" if count is None else "–"
    return f"{count} × {gpu_type}" if gpu_type else f"{count} GPU{'s' if count > 1 else ''}"


def part_name(kind: str, name: str) -> str:
    """Return an element's identifier for an object with an arbitrary name."""
    return f"{kind}-{hashlib.sha256(name.encode('utf-8', 'surrogatepass')).hexdigest()[:12]}"


def attributes(values: Mapping[str, Any]) -> Markup:
    """Return HTML attributes. The function omits None and False, and writes True as a bare name."""
    parts = [
        Markup(" {}").format(name) if value is True else Markup(' {}="{}"').format(name, value)
        for name, value in values.items()
        if value is not None and value is not False
    ]
    return Markup("").join(parts)


def coded(text: str) -> Markup:
    """Return a sentence whose parts between backticks, such as commands, are code."""
    parts = text.split("`")
    if len(parts) % 2 == 0:
        return Markup("{}").format(text)
    forms = (Markup("<code>{}</code>" if at % 2 else "{}").format(part) for at, part in enumerate(parts))
    return Markup("").join(forms)


def percent(value: float | None) -> str:
    """Return a percentage without decimals, or a dash for None."""
    return "–" if value is None else f"{value:.0f} %"


def number(value: float | None, unit: str = "") -> str:
    """Return a rounded number with its unit, or a dash for None."""
    return "–" if value is None else f"{value:,.0f} {unit}".rstrip()


_BROWSERS = (("Firefox/", "Firefox"), ("Edg/", "Edge"), ("OPR/", "Opera"), ("Chrome/", "Chrome"), ("Safari/", "Safari"))
_SYSTEMS = (
    ("Android", "Android"),
    ("iPhone", "iPhone"),
    ("Mac OS X", "macOS"),
    ("Windows", "Windows"),
    ("Linux", "Linux"),
)


def browser(agent: str) -> str:
    """Return the browser and the system of a `User-Agent` header, or the start of an unknown header."""
    name = next((name for part, name in _BROWSERS if part in agent), "")
    system = next((name for part, name in _SYSTEMS if part in agent), "")
    return f"{name} on {system}" if name and system else name or agent[:40] or "–"


FILTERS: Mapping[str, Callable[..., Any]] = {
    "browser": browser,
    "between": between,
    "coded": coded,
    "duration": duration,
    "gpu_time": gpu_time,
    "money": money,
    "number": number,
    "percent": percent,
    "size": size,
    "state": state,
}
