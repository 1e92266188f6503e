"""Tiny wheels that tests build themselves, and environments to install them in."""

from __future__ import annotations

import base64
import hashlib
import os
import subprocess
import sys
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import uv

from serverless_gpu.environment.scan.description import Description, read_description
from serverless_gpu.environment.scan.interpreter import describe_other

BASE = Path(getattr(sys, "_base_executable", sys.executable)).resolve()
UV = Path(uv.__file__).parents[4] / "bin" / "uv"


class Wheel(msgspec.Struct, frozen=True, kw_only=True):
    """What a wheel holds: files by path, the text of its entry points, and how RECORD lies about some of them."""

    name: str
    version: str = "1.0"
    files: Mapping[str, str | bytes] = {}
    entry_points: str = ""
    data: Mapping[str, str | bytes] = {}
    """Files by path below ``<name>.data``, for example ``scripts/tool``."""
    lies: Mapping[str, str] = {}
    """Path to the content that RECORD's digest is of; it has to be as long as the real one."""
    executable: frozenset[str] = frozenset()


def build_wheel(directory: Path, wheel: Wheel) -> Path:
    """Write a wheel and return its path."""
    stem = f"{wheel.name.replace('-', '_')}-{wheel.version}"
    info = f"{stem}.dist-info"
    files: dict[str, str | bytes] = dict(wheel.files)
    files.update((f"{stem}.data/{path}", content) for path, content in wheel.data.items())
    files[f"{info}/METADATA"] = f"Metadata-Version: 2.1\nName: {wheel.name}\nVersion: {wheel.version}\n"
    files[f"{info}/WHEEL"] = "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    if wheel.entry_points:
        files[f"{info}/entry_points.txt"] = wheel.entry_points
    record = [
        f"{path},{_digest(wheel.lies.get(path, content))},{len(_bytes(content))}" for path, content in files.items()
    ]
    files[f"{info}/RECORD"] = "\n".join([*record, f"{info}/RECORD,,"]) + "\n"
    directory.mkdir(parents=True, exist_ok=True)
    target = directory / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(target, "w") as archive:
        for path, content in files.items():
            entry = zipfile.ZipInfo(path, (2024, 1, 2, 3, 4, 6))
            entry.external_attr = (0o100755 if path in wheel.executable else 0o100644) << 16
            archive.writestr(entry, _bytes(content))
    return target


class Venv:
    """A virtual environment without pip, to install local wheels in.

    Args:
        prefix: where it is made.
        options: of `python -m venv`.
        by_uv: whether uv makes it.
    """

    def __init__(self, prefix: Path, *options: str, by_uv: bool = False) -> None:
        self.prefix = prefix
        if by_uv:
            run([UV, "venv", "--quiet", "--offline", "--no-config", "--python", BASE, *options, prefix])
        else:
            run([BASE, "-m", "venv", "--without-pip", *options, prefix])
        self.python = prefix / "bin" / "python"
        (self.site,) = (prefix / "lib").glob("python3.*/site-packages")

    def pip(self, *arguments: str | Path) -> None:
        """Run pip of this test's interpreter on it."""
        run([sys.executable, "-m", "pip", "--python", self.python, *arguments])

    def install_with_pip(self, *wheels: Path) -> None:
        self.pip("install", *PIP_OPTIONS, "--no-deps", *wheels)

    def install_with_uv(self, *wheels: Path, cache: Path, link_mode: str = "copy", target: Path | None = None) -> None:
        options = ["--link-mode", link_mode, "--cache-dir", str(cache), "--python", str(self.python)]
        options += ["--target", str(target)] if target else []
        run([UV, "pip", "install", "--offline", "--no-index", "--no-deps", "--quiet", *options, *wheels])

    def describe(self, cwd: Path | None = None, **variables: str) -> Description:
        """Return what its interpreter says about itself; the current directory is not on `sys.path` unless given."""
        return describe_in(self.python, cwd, **variables)

    def run(self, program: str, cwd: Path | None = None) -> str:
        """Run a program in it and return what it printed."""
        return run([self.python, *([] if cwd else ["-P"]), "-c", program], cwd=cwd)


PIP_OPTIONS = ("--quiet", "--no-index", "--no-cache-dir", "--disable-pip-version-check", "--root-user-action=ignore")


def describe_in(python: Path, cwd: Path | None = None, **variables: str) -> Description:
    """Return what an interpreter says about itself in a directory, with variables set."""
    old_cwd, old_environ = os.getcwd(), dict(os.environ)
    try:
        os.environ.update({"PYTHONSAFEPATH": "" if cwd else "1", **variables})
        if cwd:
            os.chdir(cwd)
        return read_description(describe_other(str(python)))
    finally:
        os.chdir(old_cwd)
        os.environ.clear()
        os.environ.update(old_environ)


def run(command: Sequence[str | Path], cwd: Path | None = None) -> str:
    """Run a command and return what it printed; what it complains about is shown when it fails."""
    # Users' interpreters write bytecode, whatever the shell of this test says.
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    words = [str(part) for part in command]
    done = subprocess.run(words, capture_output=True, text=True, cwd=cwd, env=environ, check=False)
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


def _digest(content: str | bytes) -> str:
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(_bytes(content)).digest()).decode().rstrip("=")


def _bytes(content: str | bytes) -> bytes:
    return content.encode() if isinstance(content, str) else content
