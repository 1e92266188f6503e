"""From an installed wheel to a store and out again: scan, capture and unpacking as one."""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path

import pytest

from serverless_gpu.environment.capture.snapshot_capture import CaptureResult, scan_and_capture
from serverless_gpu.environment.documents import ProgressPoint, Snapshot, ignore_progress
from serverless_gpu.environment.restore.cache.unpack import unpack
from serverless_gpu.environment.scan.scan import Recogniser
from serverless_gpu.environment.stores.blobs import StoreBlobs
from serverless_gpu.environment.stores.directory_store import DirectoryStore
from tests.support.environment.scans import claim
from tests.support.environment.wheels import Venv, Wheel, build_wheel

NOISE = b"".join(hashlib.sha256(b"%d" % number).digest() for number in range(300_000))  # 9.6 MB, the same each time
TOOL = Wheel(
    name="tool",
    files={
        "tool/__init__.py": "from tool.core import answer\n",
        "tool/core.py": "answer = 42\n",
        "tool/größe.txt": "groß\n",
        "tool/empty.py": "",
        "tool/big.bin": NOISE,
        "tool.libs/libtool.so.1": b"\x7fELF",
    },
    data={"scripts/tool-script": "#!python\nprint(1)\n", "data/share/tool/data.txt": "data\n"},
    entry_points="[console_scripts]\ntool = tool:answer\n",
)


@pytest.fixture
def venv(tmp_path: Path) -> Venv:
    venv = Venv(tmp_path / "venv")
    venv.install_with_pip(build_wheel(tmp_path / "wheels", TOOL))
    return venv


class Place:
    """A store and an index below a test's directory."""

    def __init__(self, tmp_path: Path) -> None:
        self._tmp_path = tmp_path
        self._unpacked = 0
        self.store = DirectoryStore(tmp_path / "store")
        self.recogniser = Recogniser(tmp_path / "index")

    def take(self, venv: Venv, cwd: Path | None = None) -> CaptureResult:
        return scan_and_capture(
            venv.describe(cwd), self.recogniser, StoreBlobs(self.store), level=1, report=ignore_progress
        )

    def unpack(self, snapshot: Snapshot, number: int = 0) -> dict[str, tuple[str, bytes | str]]:
        """Unpack every unit of a root, and return what is there by path: kind, content or target."""
        blobs, found = StoreBlobs(self.store), dict[str, tuple[str, bytes | str]]()
        for member in snapshot.roots[number].members:
            self._unpacked += 1
            directory = self._tmp_path / f"unit{self._unpacked}"
            unpack(blobs.read_unit(member.address), blobs, directory)
            found |= _seen(directory)
        return found


def _seen(directory: Path) -> dict[str, tuple[str, bytes | str]]:
    found: dict[str, tuple[str, bytes | str]] = {}
    for path in directory.rglob("*"):
        name = str(path.relative_to(directory))
        if path.is_symlink():
            found[name] = ("l", os.readlink(path))
        elif path.is_file():
            found[name] = ("x" if path.stat().st_mode & stat.S_IXUSR else "f", path.read_bytes())
    return found


def _installed(venv: Venv) -> dict[str, tuple[str, bytes | str]]:
    """Return what a capture takes of a site-packages directory: no bytecode, nothing that installers note."""
    left_out = ("RECORD", "INSTALLER", "REQUESTED", "direct_url.json")
    return {
        f"site/{name}": content
        for name, content in _seen(venv.site).items()
        if not name.endswith(".pyc") and not (".dist-info/" in name and name.endswith(left_out))
    }


def test_a_venv_with_a_wheel_comes_out_as_it_was_installed(tmp_path: Path, venv: Venv) -> None:
    os.chmod(venv.site / "tool" / "core.py", 0o755)
    (venv.site / "loose.py").write_text("loose = True\n")
    (venv.site / "latest.py").symlink_to("loose.py")
    place = Place(tmp_path)
    captured = place.take(venv)
    assert [member.name for member in captured.snapshot.roots[0].members] == ["tool", ""]
    found = place.unpack(captured.snapshot)
    outside = {path: found.pop(path) for path in list(found) if path.startswith("prefix/")}
    assert found == _installed(venv)
    assert outside == {
        "prefix/bin/tool-script": ("x", b"#!python\nprint(1)\n"),
        "prefix/share/tool/data.txt": ("f", b"data\n"),
    }
    assert StoreBlobs(place.store).read_snapshot(captured.snapshot.address) == captured.snapshot


def test_captured_again_nothing_is_sent(tmp_path: Path, venv: Venv) -> None:
    place = Place(tmp_path)
    first = place.take(venv)
    again = place.take(venv)
    assert again.snapshot.address == first.snapshot.address
    assert (again.units_new, again.units_known, again.sent_bytes) == ((), 1, 0)
    assert place.recogniser.gate(venv.describe()) == again.snapshot


def test_an_edit_in_site_packages_sends_the_edit(tmp_path: Path, venv: Venv) -> None:
    place = Place(tmp_path)
    first = place.take(venv)
    assert first.sent_bytes > 9_000_000
    (venv.site / "tool" / "core.py").write_text("answer = 43  # edited by hand\n")
    second = place.take(venv)
    assert second.snapshot.address != first.snapshot.address
    assert second.sent_bytes < 10_000
    found = place.unpack(second.snapshot)
    assert {path: found[path] for path in _installed(venv)} == _installed(venv)
    # The version before is still there, whole.
    assert place.unpack(first.snapshot)["site/tool/core.py"] == ("f", b"answer = 42\n")


def test_a_wheel_whose_record_lies_ends_at_its_true_address(tmp_path: Path) -> None:
    wheel = build_wheel(tmp_path / "wheels", Wheel(name="liar", files={"liar.py": "x = 1\n"}))
    addresses = []
    for lies in (False, True):
        venv = Venv(tmp_path / str(lies) / "venv")
        venv.install_with_pip(wheel)
        if lies:
            _claim(venv, claim("liar.py", b"x = 2\n"))
        place = Place(tmp_path / str(lies))
        captured = place.take(venv)
        assert len(captured.moved) == lies
        addresses.append(captured.snapshot.addresses())
        assert place.unpack(captured.snapshot)["site/liar.py"] == ("f", b"x = 1\n")
        again = place.take(venv)
        assert (again.snapshot.address, again.moved) == (captured.snapshot.address, {})
    assert addresses[0] == addresses[1]


def test_code_is_captured_beside_the_packages(tmp_path: Path, venv: Venv) -> None:
    code = tmp_path / "code"
    (code / "pkg").mkdir(parents=True)
    (code / "train.py").write_text("import pkg\n")
    (code / "pkg" / "__init__.py").write_text("")
    place = Place(tmp_path)
    captured = place.take(venv, cwd=code)
    (number,) = (number for number, root in enumerate(captured.snapshot.roots) if root.kind == "code")
    assert place.unpack(captured.snapshot, number) == {
        "site/train.py": ("f", b"import pkg\n"),
        "site/pkg/__init__.py": ("f", b""),
    }


def test_scan_and_capture_report(tmp_path: Path, venv: Venv) -> None:
    seen: list[ProgressPoint] = []
    place = Place(tmp_path)
    scan_and_capture(venv.describe(), place.recogniser, StoreBlobs(place.store), level=1, report=seen.append)
    assert [phase for phase in dict.fromkeys(progress.phase for progress in seen)] == ["scan", "capture"]
    assert seen[-1].bytes_done == seen[-1].bytes_total > 9_000_000


def _claim(venv: Venv, line: str) -> None:
    """Write another line into RECORD, which looks as old as before."""
    record = next(venv.site.glob("*.dist-info/RECORD"))
    looked = record.stat()
    path = line.partition(",")[0]
    kept = [other for other in record.read_text().splitlines() if other.partition(",")[0] != path]
    record.write_text("\n".join([line, *kept]) + "\n")
    os.utime(record, ns=(looked.st_atime_ns, looked.st_mtime_ns))
