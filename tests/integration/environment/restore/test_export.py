"""An exported environment stands alone: its interpreter, scripts and activation work, for other users as well."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

from serverless_gpu.environment.documents import Snapshot, SnapshotOrigin
from serverless_gpu.environment.restore.cache.unit_cache import UnitCache
from serverless_gpu.environment.restore.export import ExportRequest, export
from serverless_gpu.environment.restore.restore import restore
from serverless_gpu.environment.stores.blobs import StoreBlobs
from serverless_gpu.errors import EnvironmentCorrupt, InvalidValue, StorageError
from tests.support.environment.made_environments import Counting, Made, interpreter
from tests.support.environment.restored_process import NOBODY, public_directory
from tests.support.golden import golden

SYSTEM_PYTHON = Path("/usr/bin/python3")


@pytest.fixture
def store() -> Counting:
    return Counting()


@pytest.fixture
def made(store: Counting) -> Made:
    return Made(StoreBlobs(store))


@pytest.fixture
def cache(tmp_path: Path) -> UnitCache:
    return UnitCache(tmp_path / "environments")


def environment(made: Made, python: str = "") -> Snapshot:
    alpha = made.distribution(
        "alpha",
        {"site/alpha.py": "def main():\n    print('alpha runs')\n", "prefix/share/alpha.txt": "data"},
        points="[console_scripts]\nalpha = alpha:main\n",
    )
    early = made.piece({"site/early.py": "e = 1\n"})
    code = made.piece({"site/project/__init__.py": "p = 1\n"}, "code", "project")
    roots = [
        made.root([alpha]),
        made.root([early], "library", before=True),
        made.root([code], "code"),
    ]
    return made.snapshot(roots, facts=SnapshotOrigin(loaded=(("site/alpha.py",), (), ())), python=python)


def output(*command: str | Path) -> str:
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd="/", env=variables, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("name", ["plain", "with space", "long" * 40])
def test_a_tree_of_ones_own_works_wherever_it_is(made: Made, cache: UnitCache, tmp_path: Path, name: str) -> None:
    target = tmp_path / name / "env"
    snapshot = environment(made)
    exported = export(snapshot.address, made.blobs, cache, ExportRequest(target=target))
    assert (exported.tree, exported.python) == (str(target), str(target / "bin" / "python"))
    code = "import alpha, early, project, sys, json; print(json.dumps([sys.prefix, sys.path[1:]]))"
    prefix, path = json.loads(output(exported.python, "-c", code))
    site = f"{target}/lib/python{interpreter().minor}/site-packages"
    assert prefix == str(target)
    assert path[0] == f"{target}/roots/1/lib/python{interpreter().minor}/site-packages"
    assert path[-2:] == [site, f"{target}/code/2"]
    assert output(target / "bin" / "alpha") == "alpha runs"
    activate = f". '{target}/bin/activate' && alpha && echo $VIRTUAL_ENV && deactivate && echo ${{VIRTUAL_ENV-none}}"
    assert output("sh", "-c", activate).splitlines() == ["alpha runs", str(target), "none"]


def test_the_cache_can_be_deleted_and_code_can_be_edited(made: Made, cache: UnitCache, tmp_path: Path) -> None:
    snapshot = environment(made)
    exported = export(snapshot.address, made.blobs, cache, ExportRequest(target=tmp_path / "env"))
    code = tmp_path / "env/code/2/project/__init__.py"
    module = tmp_path / f"env/lib/python{interpreter().minor}/site-packages/alpha.py"
    assert (stat.S_IMODE(code.stat().st_mode), code.stat().st_nlink) == (0o644, 1)
    assert (stat.S_IMODE(module.stat().st_mode), module.stat().st_nlink) == (0o444, 2)
    assert exported.copied == 1
    shutil.rmtree(cache.root)
    assert output(tmp_path / "env/bin/python", "-c", "import alpha, project; alpha.main()") == "alpha runs"


def test_copies_share_nothing_with_the_cache(made: Made, cache: UnitCache, tmp_path: Path) -> None:
    exported = export(environment(made).address, made.blobs, cache, ExportRequest(target=tmp_path / "env", copies=True))
    assert exported.linked == 0
    assert all(path.stat().st_nlink == 1 for path in (tmp_path / "env").rglob("*") if path.is_file())


@pytest.mark.parametrize("there", ["file", "directory"])
def test_nothing_is_mixed_with_what_is_there(made: Made, cache: UnitCache, tmp_path: Path, there: str) -> None:
    target = tmp_path / "env"
    if there == "file":
        target.write_text("mine")
    else:
        target.mkdir()
        (target / "mine").touch()
    with pytest.raises(InvalidValue, match=f"{target} is"):
        export(environment(made).address, made.blobs, cache, ExportRequest(target=target))
    assert not cache.units.exists()


def test_an_empty_directory_is_used(made: Made, cache: UnitCache, tmp_path: Path) -> None:
    (tmp_path / "env").mkdir()
    export(environment(made).address, made.blobs, cache, ExportRequest(target=tmp_path / "env"))
    assert output(tmp_path / "env" / "bin" / "alpha") == "alpha runs"


def test_what_fails_leaves_nothing(store: Counting, made: Made, cache: UnitCache, tmp_path: Path) -> None:
    snapshot = environment(made)
    store.altered_times = 1000
    with pytest.raises(EnvironmentCorrupt):
        export(snapshot.address, made.blobs, cache, ExportRequest(target=tmp_path / "here" / "env"))
    store.altered_times = 0
    snapshot = environment(made)  # the unit was removed from the store
    with pytest.raises(StorageError, match=re.escape(golden("environment.exporting.proc-none-cannot"))):
        export(snapshot.address, made.blobs, cache, ExportRequest(target=Path("/proc/none/env")))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["environments"]


@pytest.mark.skipif(os.geteuid() != 0 or not SYSTEM_PYTHON.exists(), reason="needs root and a system Python")
def test_another_user_can_use_it(made: Made, tmp_path: Path) -> None:
    with public_directory() as directory:
        umask = os.umask(0o077)
        try:
            snapshot = environment(made, str(SYSTEM_PYTHON))
            export(
                snapshot.address, made.blobs, UnitCache(tmp_path / "private"), ExportRequest(target=directory / "env")
            )
        finally:
            os.umask(umask)
        user = ["setpriv", "--reuid", str(NOBODY), "--regid", str(NOBODY), "--clear-groups"]
        assert output(*user, directory / "env/bin/alpha") == "alpha runs"
        code = "import os, project, early; print(os.getuid())"
        assert output(*user, directory / "env/bin/python", "-c", code) == str(NOBODY)


def test_a_snapshot_restored_before_is_exported_without_the_store(made: Made, cache: UnitCache, tmp_path: Path) -> None:
    snapshot = environment(made)
    restore(snapshot.address, made.blobs, cache)
    exported = export(snapshot.address, StoreBlobs(Counting()), cache, ExportRequest(target=tmp_path / "env"))
    assert (exported.units_fetched, exported.fetched_bytes) == (0, 0)
