"""What the environment rows are measured on: made once per run of the benchmarks, offline, deleted when all is over.

    this interpreter's distributions ──▶ wheels (stored, not compressed) ──▶ uv ──▶ a venv of its own     1 GB and more
    nothing                          ──▶ many small distributions in a venv                            25,000, 100,000

The wheels are made from what is installed, so the same files go through pip's format, uv's cache, `tar` and us. A tree
is never deleted between rounds: ext4 does not hand out inodes that were freed in the last minutes without a search, and
whoever makes files next would pay for it.
"""

from __future__ import annotations

import atexit
import base64
import csv
import functools
import hashlib
import importlib
import importlib.metadata
import os
import random
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.contestants import ContestantFailed
from serverless_gpu.ambient import SystemClock

GIGABYTE = 10**9
now_ns = SystemClock().boottime_ns  # not that of `ranks`, which brings torch
_OURS = "serverless-gpu"
_FILES_PER_DISTRIBUTION = 250
_FILES_PER_DIRECTORY = 10
_UP = "../../../"


@functools.cache
def scratch() -> Path:
    """Return the directory of everything the environment rows make; it goes when the benchmarks end."""
    directory = Path(tempfile.mkdtemp(prefix="sgpu-bench-environments-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return directory


def settle() -> None:
    """Have what earlier rounds wrote on the disk: nobody's time has the writing of somebody else's files in it."""
    os.sync()


def need_room(size: int) -> None:
    """Refuse a row for which the disk is too small.

    Raises:
        ContestantFailed: there is less room than that.
    """
    free = shutil.disk_usage(scratch()).free
    if free < size:
        raise ContestantFailed(
            f"{scratch()} has {free / 1e9:.0f} GB of the {size / 1e9:.0f} GB the rounds write; none is deleted between"
        )


def uv() -> str:
    """Return the program uv of this environment.

    Raises:
        ContestantFailed: there is none.
    """
    try:
        package = importlib.import_module("uv")
    except ImportError:
        raise ContestantFailed("uv is not installed: `make bench` installs it") from None
    site = Path(str(package.__file__)).parents[1]
    found = [site.parents[2] / "bin" / "uv", Path(sys.prefix) / "bin" / "uv"]
    named = next((str(path) for path in found if path.exists()), shutil.which("uv"))
    if named is None:
        raise ContestantFailed("the package uv is there, its program is not")
    return named


def uv_environment() -> dict[str, str]:
    """Return the variables uv runs with: its own cache on our disk, no network."""
    dropped = ("UV_", "PIP_", "VIRTUAL_ENV")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    return {**kept, "UV_CACHE_DIR": str(scratch() / "uv-cache"), "UV_OFFLINE": "1", "UV_NO_PROGRESS": "1"}


def new_venv(at: Path) -> Path:
    """Make an empty virtual environment of this Python; return its interpreter."""
    # Not the link in bin: two environments of one interpreter must not look like one in another.
    base = getattr(sys, "_base_executable", sys.executable)
    subprocess.run([base, "-m", "venv", "--without-pip", str(at)], check=True)
    return at / "bin" / "python"


def site_packages(prefix: Path) -> Path:
    """Return where a virtual environment of this Python has its packages."""
    return prefix / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"


# --- a gigabyte -------------------------------------------------------------------------------------------------------


@functools.cache
def gigabyte() -> Path:
    """Return the prefix of a venv with every distribution of this interpreter, torch among them.

    Raises:
        ContestantFailed: together they are less than a gigabyte.
    """
    prefix = scratch() / "gigabyte"
    sync(prefix, new_venv(prefix))
    size = sum(path.stat().st_size for path in prefix.rglob("*") if path.is_file() and not path.is_symlink())
    if size < GIGABYTE:
        raise ContestantFailed(f"the environment has {size / 1e6:.0f} MB, and these rows are about a gigabyte")
    return prefix


def sync(prefix: Path, python: Path) -> None:
    """Have uv install all wheels into a venv."""
    directory, pins = wheels()
    command = [uv(), "pip", "sync", "--quiet", "--no-index", "--find-links", str(directory), "--python", str(python)]
    subprocess.run([*command, str(pins)], check=True, cwd=prefix, env=uv_environment())


@functools.cache
def wheels() -> tuple[Path, Path]:
    """Return a directory with a wheel for every distribution of this interpreter, and a file with their versions."""
    directory = scratch() / "wheels"
    directory.mkdir()
    pins: list[str] = []
    for distribution in importlib.metadata.distributions():
        name, version = distribution.metadata["Name"], distribution.version
        if name == _OURS or any(pin.startswith(f"{name}==") for pin in pins) or not _is_whole(distribution):
            continue
        _write_wheel(distribution, directory)
        pins.append(f"{name}=={version}")
    path = scratch() / "pins.txt"
    path.write_text("".join(f"{pin}\n" for pin in sorted(pins)), encoding="utf-8")
    return directory, path


def _is_whole(distribution: importlib.metadata.Distribution) -> bool:
    """Return whether it was installed from a wheel and all of its files are there."""
    installed = distribution.read_text("RECORD") is not None and distribution.read_text("WHEEL") is not None
    direct = distribution.read_text("direct_url.json") or ""
    return installed and '"editable"' not in direct


def _write_wheel(distribution: importlib.metadata.Distribution, directory: Path) -> None:
    stem = f"{distribution.metadata['Name'].replace('-', '_')}-{distribution.version}"
    tag = _tag(distribution.read_text("WHEEL") or "")
    rows: list[tuple[str, str, str]] = []
    info = ""
    with zipfile.ZipFile(directory / f"{stem}-{tag}.whl", "w", zipfile.ZIP_STORED) as wheel:
        for file in distribution.files or []:
            path = Path(str(distribution.locate_file(file)))
            name = _name_in_wheel(str(file), stem)
            if name is None or not path.is_file():
                continue
            if name.count("/") == 1 and name.endswith(".dist-info/METADATA"):
                info = name.rpartition("/")[0]
            data = path.read_bytes()
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            rows.append((name, f"sha256={digest}", str(len(data))))
            entry = zipfile.ZipInfo(name, (2020, 1, 1, 0, 0, 0))
            entry.external_attr = (path.stat().st_mode & 0o777 | 0o100000) << 16
            wheel.writestr(entry, data)
        record = f"{info}/RECORD"
        lines = [",".join(_quoted(cell) for cell in row) for row in [*rows, (record, "", "")]]
        wheel.writestr(record, "\n".join(lines) + "\n")


def _tag(text: str) -> str:
    """Return the tags of a WHEEL file as its file name says them: py2.py3-none-any."""
    tags = [line.partition(":")[2].strip().split("-") for line in text.splitlines() if line.startswith("Tag:")]
    return "-".join(".".join(dict.fromkeys(column)) for column in zip(*tags, strict=True))


def _name_in_wheel(name: str, stem: str) -> str | None:
    """Return what a file of an installation was called in its wheel; None for what an installer made."""
    file = name.rpartition("/")[2]
    if file.endswith(".pyc") or file in ("RECORD", "INSTALLER", "REQUESTED", "direct_url.json", "uv_cache.json"):
        return None
    if not name.startswith(_UP):
        return name
    below = name.removeprefix(_UP)
    return None if below.startswith("bin/") else f"{stem}.data/data/{below}"


def _quoted(cell: str) -> str:
    return f'"{cell}"' if "," in cell else cell


# --- an upgrade -------------------------------------------------------------------------------------------------------

TORCH_VERSIONS = ("2.12.1", "2.13.0")
TORCH_PLATFORM = "macosx_14_0_arm64"
"""Wheels of 88 and 111 MB; those for Linux with CUDA are over 500 (SGPU_BENCH_TORCH_PLATFORM=manylinux_2_28_x86_64)."""


@functools.cache
def torch_wheels() -> Path:
    """Return a directory with the wheels of two minor versions of torch, from PyPI.

    Raises:
        ContestantFailed: they cannot be had, for there is no network.
    """
    directory = scratch() / "torch"
    for version in TORCH_VERSIONS:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
        command += ["--platform", torch_platform(), "--python-version", "3.11", "--dest", str(directory)]
        done = subprocess.run([*command, f"torch=={version}"], capture_output=True, text=True, timeout=600, check=False)
        if done.returncode:
            raise ContestantFailed(f"skipped: PyPI has to be asked for torch {version}, and that failed (no network?)")
    return directory


def torch_platform() -> str:
    """Return for which platform the wheels are: we never import them."""
    return os.environ.get("SGPU_BENCH_TORCH_PLATFORM", TORCH_PLATFORM)


def unzip_wheel(wheel: Path, prefix: Path) -> None:
    """Install a wheel for another machine: its files, and what an installer notes; what was there is put aside."""
    site = site_packages(prefix)
    aside = Path(tempfile.mkdtemp(prefix="aside-", dir=prefix.parent))
    for old in (*site.glob("torch*"), *site.glob("functorch*")):
        old.rename(aside / old.name)
    with zipfile.ZipFile(wheel) as opened:
        opened.extractall(site)
    (info,) = site.glob("torch-*.dist-info")
    (info / "INSTALLER").write_text("uv", encoding="ascii")
    os.utime(info / "RECORD")


# --- many files -------------------------------------------------------------------------------------------------------


@functools.cache
def many_files(count: int) -> Path:
    """Return the prefix of a venv with so many files, in distributions of 250 of them."""
    prefix = scratch() / f"files-{count}"
    new_venv(prefix)
    for number in range(count // _FILES_PER_DISTRIBUTION):
        write_distribution(site_packages(prefix), f"package{number:04d}", 1, files=_FILES_PER_DISTRIBUTION)
    return prefix


def write_distribution(site: Path, name: str, version: int, *, files: int) -> None:
    """Install a distribution of small modules, in place of another version of it.

    Args:
        site: where.
        name: what it is called, and the package in it.
        version: decides what is in its modules, too.
        files: how many it has, its metadata among them.
    """
    for old in site.glob(f"{name}-*.dist-info"):
        shutil.rmtree(old)
    info = site / f"{name}-{version}.dist-info"
    info.mkdir()
    rows = []
    for relative, data in _files(name, version, files):
        path = site / relative
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        rows.append((relative, f"sha256={digest}", str(len(data))))
    with (info / "RECORD").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows([*rows, (f"{info.name}/RECORD", "", "")])


def _files(name: str, version: int, count: int) -> Iterator[tuple[str, bytes]]:
    info, numbers = f"{name}-{version}.dist-info", random.Random(f"{name} {version}")
    yield f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode()
    yield f"{info}/WHEEL", b"Wheel-Version: 1.0\nGenerator: bench\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    yield f"{info}/INSTALLER", b"uv"
    for number in range(count - 4):  # and RECORD
        below = f"part{number // _FILES_PER_DIRECTORY}/" if number >= _FILES_PER_DIRECTORY else ""
        yield f"{name}/{below}module{number}.py", f"value = {numbers.getrandbits(4096)}\n".encode()
