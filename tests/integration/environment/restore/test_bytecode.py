"""Bytecode is made here, from source, by an interpreter that runs nothing of it; and Python takes it for its own."""

from __future__ import annotations

import importlib.util
import os
import re
import struct
import time
from pathlib import Path

import pytest

from serverless_gpu.environment.documents import Snapshot, SnapshotOrigin
from serverless_gpu.environment.restore.bytecode import compile_all, compile_jobs
from serverless_gpu.environment.restore.cache.unit_cache import UnitCache
from serverless_gpu.environment.restore.cache.unpack import MTIME_S
from serverless_gpu.environment.restore.restore import RestoredTree, RestoreMethod, compile_rest, restore
from serverless_gpu.environment.stores.blobs import StoreBlobs
from serverless_gpu.errors import EnvironmentRejected
from tests.support.environment.made_environments import Counting, Made, Piece, base_python, interpreter
from tests.support.environment.restored_process import MODES, ask
from tests.support.golden import golden

TAG = f"cpython-{interpreter().minor.replace('.', '')}"

# Says which source files an import compiled, and where it found bytecode.
WATCH = """
import importlib._bootstrap_external as external, sys
compiled = []
real = external.SourceLoader.source_to_code
def watched(self, data, path, **options):
    compiled.append(path)
    return real(self, data, path, **options)
external.SourceLoader.source_to_code = watched
"""


@pytest.fixture(scope="module")
def made() -> Made:
    return Made(StoreBlobs(Counting()))


@pytest.fixture
def cache(tmp_path: Path) -> UnitCache:
    return UnitCache(tmp_path / "environments")


def environment(made: Made) -> tuple[Piece, Snapshot]:
    piece = made.distribution(
        "alpha",
        {
            "site/alpha/__init__.py": "a = 1\n",
            "site/alpha/used.py": "u = 2\ndef fail():\n    raise ValueError\n",
            "site/alpha/unused.py": "n = 3\n",
            "site/alpha/deep/more.py": "m = 4\n",
            "site/alpha/python2.py": "print 'old'\n",
            "site/alpha/latin.py": b"# -*- coding: latin-1 -*-\nx = '\xe9'\n",
            "site/alpha/no.txt": "",
            "site/single.py": "s = 5\n",
        },
    )
    loaded = ("site/alpha/__init__.py", "site/alpha/used.py", "site/single.py", "site/alpha/gone.py")
    return piece, made.snapshot([made.root([piece])], facts=SnapshotOrigin(loaded=(loaded,)))


@pytest.fixture(autouse=True)
def even_short_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile before the first use what is too short to be worth it."""
    monkeypatch.setattr("serverless_gpu.environment.restore.restore.FEW_BYTES", 0)


def test_a_few_short_files_are_left_to_whoever_imports_them(
    made: Made, cache: UnitCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    piece, snapshot = environment(made)
    monkeypatch.setattr("serverless_gpu.environment.restore.restore.FEW_BYTES", 10_000)
    restore(snapshot.address, made.blobs, cache)
    assert bytecode_in(cache.unit(piece.unit.address)) == []
    assert compile_rest(snapshot.address, cache) == 6


def bytecode_in(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*.pyc*"))


@pytest.mark.parametrize("mode", MODES)
def test_what_the_caller_had_loaded_is_compiled_first_and_the_rest_later(
    made: Made, cache: UnitCache, mode: str
) -> None:
    piece, snapshot = environment(made)
    way = RestoreMethod(mode="links" if mode == "links" else "overlay")
    restored = restore(snapshot.address, made.blobs, cache, way=way)
    place = cache.unit(piece.unit.address)
    first = [f"site/__pycache__/single.{TAG}.pyc"]
    first += [f"site/alpha/__pycache__/{name}.{TAG}.pyc" for name in ("__init__", "used")]
    assert bytecode_in(place) == first
    assert not_compiled(restored, "alpha", "alpha.used", "single") == []
    assert not_compiled(restored, "alpha.unused") == ["alpha/unused.py"]
    assert compile_rest(snapshot.address, cache) == 3
    rest = [f"site/alpha/__pycache__/{name}.{TAG}.pyc" for name in ("latin", "unused")]
    rest += [f"site/alpha/deep/__pycache__/more.{TAG}.pyc"]
    assert bytecode_in(place) == sorted(first + rest)  # and nothing of what does not compile
    assert not_compiled(restored, "alpha.unused", "alpha.deep.more", "alpha.latin") == []
    assert compile_rest(snapshot.address, cache) == 0
    assert cache.verify(piece.unit.address, made.blobs) == ""


def not_compiled(restored: RestoredTree, *modules: str) -> list[str]:
    """Import modules, and return the paths below site-packages that had no valid bytecode."""
    code = f"{WATCH}\nimport importlib, os, sysconfig\nmodules = [importlib.import_module(n) for n in {modules!r}]"
    code += """
site = sysconfig.get_path("purelib")
assert all(m.__cached__.startswith(site) for m in modules)
assert compiled or all(os.path.exists(m.__cached__) for m in modules)
answer = [os.path.relpath(path, site) for path in compiled if path.startswith(site)]
"""
    found: list[str] = ask(restored, code)
    return found


@pytest.mark.parametrize("mode", MODES)
def test_bytecode_names_the_time_and_size_of_its_source_and_tracebacks_the_tree(
    made: Made, cache: UnitCache, mode: str
) -> None:
    piece, snapshot = environment(made)
    restored = restore(
        snapshot.address, made.blobs, cache, way=RestoreMethod(mode="links" if mode == "links" else "overlay")
    )
    path = cache.unit(piece.unit.address) / f"site/alpha/__pycache__/used.{TAG}.pyc"
    magic, flags, mtime, size = struct.unpack("<4sIII", path.read_bytes()[:16])
    source = cache.unit(piece.unit.address) / "site/alpha/used.py"
    assert (magic, flags, mtime, size) == (importlib.util.MAGIC_NUMBER, 0, MTIME_S, source.stat().st_size)
    assert path.stat().st_mode & 0o777 == 0o444
    code = "import alpha.used; answer = alpha.used.fail.__code__.co_filename"
    assert ask(restored, code).startswith(restored.tree)


def test_S221_start_up_code_of_an_environment_is_never_run_by_restoring_or_compiling(
    made: Made, cache: UnitCache, tmp_path: Path
) -> None:
    marker = tmp_path / "marker"
    write = f"import pathlib; pathlib.Path({str(marker)!r}).touch()\n"
    names = ("sitecustomize", "usercustomize", "evil", "json", "marshal", "resource")
    evil = made.piece({"site/evil.pth": write, **{f"site/{name}.py": write for name in names}})
    loaded = tuple(f"site/{name}.py" for name in names)
    snapshot = made.snapshot([made.root([evil])], facts=SnapshotOrigin(loaded=(loaded,), python=base_python()))
    for mode in MODES:
        restored = restore(
            snapshot.address, made.blobs, cache, way=RestoreMethod(mode="links" if mode == "links" else "overlay")
        )
        compile_rest(snapshot.address, cache)
    assert len(bytecode_in(cache.unit(evil.unit.address))) == len(names)
    assert not marker.exists()
    ask(restored, "answer = 1")  # who uses it, as themselves, does run it
    assert marker.exists()


def test_S221_bytecode_is_never_taken_from_a_unit(made: Made) -> None:
    with pytest.raises(EnvironmentRejected, match=re.escape(golden("environment.bytecode.bytecode-made-node"))):
        made.piece({"site/a.py": "", f"site/__pycache__/a.{TAG}.pyc": "evil"})


def test_S221_the_compiler_starts_without_site_packages_variables_and_directory(tmp_path: Path) -> None:
    sources(tmp_path / "site", a="x = 1\n")
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\necho "$1 $2 $PWD" >> {tmp_path}/log\nenv >> {tmp_path}/log\nexec {base_python()} "$@"\n'
    )
    python.chmod(0o755)
    piece = Made(StoreBlobs(Counting())).piece({"site/a.py": "x = 1\n"})
    assert compile_all(compile_jobs(tmp_path, piece.unit.rows, TAG), str(python)) == 1
    first, *variables = (tmp_path / "log").read_text().splitlines()
    assert first == "-I -S /"
    assert {line.partition("=")[0] for line in variables if "=" in line} <= {"PWD", "OLDPWD", "_", "SHLVL"}


def test_files_under_the_names_of_bytecode_are_left_alone(made: Made, tmp_path: Path) -> None:
    piece = made.piece({"site/a.py": "x = 1\n", "site/__pycache__": "a file", "site/b/c.py": "", "prefix/bin/t.py": ""})
    assert [job.source for job in compile_jobs(tmp_path, piece.unit.rows, TAG)] == [f"{tmp_path}/site/b/c.py"]


def test_a_link_in_the_way_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "site/a.py").write_text("x = 1\n")
    (tmp_path / "site/__pycache__").symlink_to(tmp_path / "elsewhere")
    piece = Made(StoreBlobs(Counting())).piece({"site/a.py": "x = 1\n"})
    assert compile_all(compile_jobs(tmp_path, piece.unit.rows, TAG), base_python()) == 0
    assert os.listdir(tmp_path / "elsewhere") == []


def test_a_file_that_is_not_as_long_as_its_row_says_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site/a.py").write_text("x = 1 # and more\n")
    piece = Made(StoreBlobs(Counting())).piece({"site/a.py": "x = 1\n"})
    assert compile_all(compile_jobs(tmp_path, piece.unit.rows, TAG), base_python()) == 0


def sources(directory: Path, **texts: str) -> list[Path]:
    directory.mkdir()
    for name, text in texts.items():
        (directory / f"{name}.py").write_text(text)
    return sorted(directory.iterdir())


# An interpreter that dies of some files, as a compiler with a bug would.
FRAGILE = """#!{python}
import os, runpy, signal, sys
from builtins import compile as real
def fragile(source, name, *arguments, **options):
    if name.endswith("killer.py"):
        os.kill(os.getpid(), signal.SIGSEGV)
    return real(source, name, *arguments, **options)
import builtins
program = sys.argv[-2]
sys.argv = sys.argv[-2:]
code = real(open(program).read(), program, "exec")
builtins.compile = fragile
exec(code, {{"__name__": "__main__"}})
"""


def test_a_file_that_ends_its_compiler_is_passed_over(tmp_path: Path) -> None:
    good = {f"good{number:03}": f"x = {number}\n" for number in range(150)}
    killers = {f"good{number:03}killer": "x = 1\n" for number in (3, 90)}
    work = []
    made = Made(StoreBlobs(Counting()))
    for path in sources(tmp_path / "site", **good, **killers):
        work += compile_jobs(tmp_path, made.piece({f"site/{path.name}": path.read_text()}).unit.rows, TAG)
    fragile = tmp_path / "fragile"
    fragile.write_text(FRAGILE.format(python=base_python()))
    fragile.chmod(0o755)
    assert compile_all(work, str(fragile)) == 150
    assert len(bytecode_in(tmp_path)) == 150


def test_a_file_that_takes_too_long_is_passed_over(tmp_path: Path) -> None:
    slow = "x = (" + "+".join(f"{{{', '.join(map(str, range(200)))}}}" for _ in range(30000)) + ")\n"
    made = Made(StoreBlobs(Counting()))
    work = []
    for path in sources(tmp_path / "site", a="x = 1\n", b=slow, c="x = 2\n"):
        work += compile_jobs(tmp_path, made.piece({f"site/{path.name}": path.read_text()}).unit.rows, TAG)
    began = time.monotonic()
    assert compile_all(work, base_python(), patience_s=1) == 2
    assert time.monotonic() - began < 20


def test_an_interpreter_that_does_not_start_leaves_everything_as_it_is(tmp_path: Path) -> None:
    sources(tmp_path / "site", a="x = 1\n")
    piece = Made(StoreBlobs(Counting())).piece({"site/a.py": "x = 1\n"})
    for python in ("/bin/false", "/does/not/exist"):
        assert compile_all(compile_jobs(tmp_path, piece.unit.rows, TAG), python) == 0
