"""Small virtual environments with distributions made by hand: as an installer leaves them, and in milliseconds."""

from __future__ import annotations

import base64
import hashlib
import os
import sys
import venv
from collections.abc import Mapping
from pathlib import Path

INSTALLED_S = 1_700_000_000
"""When everything here was installed: long before a test edits it."""


def make_venv(prefix: Path) -> Path:
    """Make a virtual environment without pip; return its interpreter."""
    venv.create(prefix, symlinks=True, with_pip=False)
    return prefix / "bin" / "python"


def site_packages(prefix: Path) -> Path:
    """Return where a virtual environment has its packages."""
    return prefix / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"


def install(prefix: Path, name: str, version: str, files: Mapping[str, bytes]) -> None:
    """Install a distribution, in place of another version of it.

    Args:
        prefix: of the environment.
        name: what it is called.
        version: which.
        files: their content, by path below site-packages.
    """
    site = site_packages(prefix)
    for old in site.glob(f"{name}-*.dist-info"):
        for row in (old / "RECORD").read_text().splitlines():
            (site / row.partition(",")[0]).unlink()
        old.rmdir()
    info = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode()
    wheel = b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    rows = []
    written = {**files, f"{info}/METADATA": metadata, f"{info}/WHEEL": wheel, f"{info}/INSTALLER": b"pip\n"}
    for path, content in written.items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_bytes(content)
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        rows.append(f"{path},sha256={digest},{len(content)}\n")
    (site / info / "RECORD").write_text("".join([*rows, f"{info}/RECORD,,\n"]))
    for path in (*written, f"{info}/RECORD"):
        os.utime(site / path, (INSTALLED_S, INSTALLED_S))
