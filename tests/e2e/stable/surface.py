"""The whole surface as text, and what a later one does to users of an earlier one.

[section]            who: a function, a class, a command, a route, a message, a file
item = line          one parameter, option, field or value of it
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.e2e.stable import commands, names, wire

FILE = Path(__file__).with_name("surface.txt")
_HEAD = """\
# What users of serverless-gpu depend on, one line per item: python -m tests.e2e.stable.record writes it.
# A line that goes or changes breaks somebody; a new line is a promise from now on.
"""

_VALUES = re.compile(r"one of ([^,]*)")

Sections = dict[str, dict[str, str]]


class Difference(NamedTuple):
    """One line of the surface that is another one now.

    Attributes:
        breaks: whether users of the earlier surface can notice.
        text: for people.
    """

    breaks: bool
    text: str


def current() -> Sections:
    """Return the surface of the package that is imported here."""
    return {**names.sections(), **commands.sections(), **wire.sections()}


def written(sections: Sections) -> str:
    """Return the sections as text."""
    parts = [_HEAD]
    for name, lines in sections.items():
        parts.append("\n".join([f"[{name}]", *(f"{item} = {line}" for item, line in lines.items())]) + "\n")
    return "\n".join(parts)


def read(text: str) -> Sections:
    """Return the sections in a text that `written` made."""
    found: Sections = {}
    for line in text.splitlines():
        if line.startswith("#") or not line:
            continue
        if line.startswith("[") and line.endswith("]") and " = " not in line:
            lines = found.setdefault(line[1:-1], {})
        else:
            item, _, value = line.partition(" = ")
            lines[item] = value
    return found


def differences(before: Sections, now: Sections) -> list[Difference]:
    """Return what is another line now; what breaks users comes first.

    A new parameter or field that must be given breaks whoever does not know it, unless the whole section is new.
    """
    found = [Difference(True, f"removed: [{name}]") for name in before.keys() - now.keys()]
    found += [Difference(False, f"added: [{name}]") for name in now.keys() - before.keys()]
    for name in before.keys() & now.keys():
        found += _of_section(name, before[name], now[name])
    return sorted(found, key=lambda one: (not one.breaks, one.text))


def _of_section(name: str, before: dict[str, str], now: dict[str, str]) -> Iterator[Difference]:
    for item in before.keys() - now.keys():
        yield Difference(True, f"removed: [{name}] {item}")
    for item in now.keys() - before.keys():
        yield Difference(_is_demanded(item, now, before), f"added: [{name}] {item} = {now[item]}")
    for item in before.keys() & now.keys():
        if before[item] != now[item]:
            line = f"changed: [{name}] {item} = {before[item]}\n      to {now[item]}"
            yield Difference(not _is_wider(before[item], now[item]), line)


def _is_demanded(item: str, lines: dict[str, str], before: dict[str, str]) -> bool:
    """Return whether something must be given from now on to what was there before; an answer is given to users."""
    if "required" not in lines[item] or item.startswith("answer"):
        return False
    parent = max((other for other in lines if item != other and item.startswith(other)), key=len, default="")
    return not parent or parent in before


def _is_wider(old: str, new: str) -> bool:
    """Return whether a line allows all that it allowed, and more: further values, a default where there was none."""
    if old.endswith("required"):
        new = new.partition("default")[0] + "required" if "default" in new else new
        if old == new:
            return True
    values, wider = _VALUES.search(old), _VALUES.search(new)
    if values is None or wider is None or _VALUES.sub("", old) != _VALUES.sub("", new):
        return False
    return set(values[1].split()) < set(wider[1].split())
