"""Scripts in `bin`: what installers make of entry points, and first lines that name an interpreter. Pure.

    [console_scripts] in entry_points.txt → bin/<name>, the text that pip writes
    #!python in a script of a wheel       → #!<interpreter of this tree>

The kernel takes 127 bytes of a first line and splits at spaces. Where the interpreter's path does not fit, the script
starts as one of /bin/sh that Python reads as a string, as pip does it.

Failure cases: entry points that are no text, or whose names are no file names, are left out; nothing is written where
the interpreter lies.
"""

from __future__ import annotations

import configparser
import re
from collections.abc import Mapping

GROUPS = ("console_scripts", "gui_scripts")
_SHEBANG_BYTES_MAX = 127
_NAME = re.compile(r"[^\s=/\[\]\x00-\x1f\x7f][^=/\[\]\x00-\x1f\x7f]*")
_REFERENCE = re.compile(r"(?P<module>\w+(\.\w+)*)\s*:\s*(?P<function>\w+(\.\w+)*)\s*(\[.*\])?\s*")
_INTERPRETER = re.compile(r"(python|pythonw|pypy)[0-9.]*", re.IGNORECASE)
_GENERIC = re.compile(rb"#!python(w?)[ \t]*\r?(\n|$)")

_TEMPLATE = """\
# -*- coding: utf-8 -*-
import re
import sys
from {module} import {first}
if __name__ == '__main__':
    sys.argv[0] = re.sub(r'(-script\\.pyw|\\.exe)?$', '', sys.argv[0])
    sys.exit({function}())
"""


def entry_points(text: str) -> dict[str, str]:
    """Return the scripts that an `entry_points.txt` defines: name → reference (`package.module:function`)."""
    parser = configparser.ConfigParser(delimiters=("=",), strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]  # names keep their case: the documented way
    try:
        parser.read_string(text)
    except configparser.Error:
        return {}
    found = {}
    for group in GROUPS:
        for name, reference in parser.items(group) if parser.has_section(group) else ():
            if _is_script_name(name) and _REFERENCE.fullmatch(reference or ""):
                found[name] = reference
    return found


def script(reference: str, python: str) -> str:
    """Return the text of the script that an installer makes of an entry point."""
    match = _REFERENCE.fullmatch(reference)
    assert match is not None, reference  # entry_points lets nothing else through
    function = match["function"]
    body = _TEMPLATE.format(module=match["module"], first=function.partition(".")[0], function=function)
    return shebang(python) + body


def shebang(python: str) -> str:
    """Return the first line, or lines, of a script for an interpreter.

    Args:
        python: its path.
    """
    simple = f"#!{python}\n"
    if " " not in python and len(simple.encode()) <= _SHEBANG_BYTES_MAX:
        return simple
    quoted = python.replace("\\", "\\\\").replace('"', '\\"').replace("$", "\\$").replace("`", "\\`")
    return f"#!/bin/sh\n'''exec' \"{quoted}\" \"$0\" \"$@\"\n' '''\n"


def is_generic(content: bytes) -> bool:
    """Return whether a script's first line names any Python at all, as scripts in wheels do."""
    return _GENERIC.match(content) is not None


def specific(content: bytes, python: str) -> bytes:
    """Return a script with a generic first line, for one interpreter."""
    return shebang(python).encode() + _GENERIC.sub(b"", content, count=1)


def scripts(points: Mapping[str, str], python: str) -> dict[str, str]:
    """Return the scripts of a distribution: name → text."""
    return {name: script(reference, python) for name, reference in points.items()}


def _is_script_name(name: str) -> bool:
    plain = _NAME.fullmatch(name) is not None and name not in (".", "..") and len(name.encode()) <= 255
    return plain and not _INTERPRETER.fullmatch(name)
