"""A restored environment as the agent holds it: what of a caller's context changes in it, and what a receipt says."""

from __future__ import annotations

import os
import re
from pathlib import Path

import msgspec
import pytest

from serverless_gpu.environment.documents import ProgressPoint, Root, SnapshotOrigin, make_snapshot
from serverless_gpu.environment.restore.interpreters import LoadedModules
from serverless_gpu.errors import EnvironmentUnsupported
from serverless_gpu.node.agent.restore_process import sentence, way_for
from serverless_gpu.node.inside import namespaces
from tests.support.golden import golden
from tests.support.node.restored import PYTHON, TOY, caller, environment


def test_a_callers_paths_are_those_of_the_restored_environment(tmp_path: Path) -> None:
    moved = environment(tmp_path).context(caller(tmp_path))
    assert moved.python == "/view/bin/python" and moved.flags == ("-O",) and moved.argv == ("train.py",)
    assert moved.sys_path == ("/view/code/1", "/usr/lib/python3.11", "/view/lib/python3.11/site-packages")
    assert moved.environ == {
        "PATH": "/view/bin:/usr/bin",
        "VIRTUAL_ENV": "/view",
        "PYTHONPATH": "/view/code/1/lib:/view/code/1:/opt/x",
        "A": "/venv",
    }
    assert moved.packages == {
        "toy": "/view/lib/python3.11/site-packages/toy.py",
        "torch": "",
        "json": "/usr/lib/json.py",
    }
    assert moved.copies == {"/view/code/1": str(tmp_path / "project")}
    assert moved.cwd == str(tmp_path / "project"), "files are written where the caller expects them"


def test_a_working_directory_that_is_gone_is_its_restored_copy(tmp_path: Path) -> None:
    held = environment(tmp_path)
    (tmp_path / "project").rmdir()
    assert held.context(caller(tmp_path)).cwd == "/view/code/1"


def test_what_a_receipt_says(tmp_path: Path) -> None:
    mounted, linked = environment(tmp_path), environment(tmp_path, "links")
    short = mounted.address[:12]
    assert mounted.text(fetched=True) == golden("node.restored.snapshot-unit-overlay", short=short)
    assert mounted.text(fetched=False) == golden("node.restored.snapshot-unit-overlay-2", short=short)
    assert linked.text(fetched=False) == golden("node.restored.snapshot-unit-links", short=short)


def test_a_unit_that_was_loaded_is_found_by_its_files(tmp_path: Path) -> None:
    old, new = environment(tmp_path), environment(tmp_path)
    new.snapshot = make_snapshot(PYTHON, (Root(kind="own", members=()), old.snapshot.roots[1]), SnapshotOrigin())
    file = tmp_path / "units" / "ab" / TOY.address / "site" / "toy" / "fast.so"
    file.parent.mkdir(parents=True)
    file.touch()
    library = LoadedModules(files=frozenset({"/view/lib/python3.11/site-packages/toy/fast.so"}))
    assert new.misfit(library, old) == golden("node.restored.toy-loaded-any")
    other = LoadedModules(files=frozenset({"/view/lib/python3.11/site-packages/toy/other.so"}))
    assert new.misfit(other, old) == ""
    (file.parents[1] / "toy.pth").touch()
    assert new.misfit(other, old) == golden("node.restored.toy-runs-code")


@pytest.mark.parametrize("gone", ["view", f"units/ab/{TOY.address}", "units"])
def test_what_was_deleted_is_not_there_even_if_it_was_made_again(tmp_path: Path, gone: str) -> None:
    held, same = environment(tmp_path), environment(tmp_path)
    assert held.is_there() and held.is_one_with(same)
    (tmp_path / gone).rename(tmp_path / "deleted")
    assert not held.is_there()
    assert not environment(tmp_path / "elsewhere").is_one_with(held)
    again = environment(tmp_path)  # which makes them
    assert not held.is_there() and not held.is_one_with(again) and again.is_there()
    assert again.misfit(LoadedModules(), held) == golden("node.restored.started-deleted")


def test_what_a_unit_brings_is_looked_up_in_it(tmp_path: Path) -> None:
    old, new = environment(tmp_path), environment(tmp_path)
    silent = msgspec.structs.replace(TOY, modules=())  # a snapshot may say so: its address does not cover it
    old.snapshot = make_snapshot(PYTHON, (Root(kind="own", members=()), new.snapshot.roots[1]), SnapshotOrigin())
    new.snapshot = make_snapshot(PYTHON, (Root(kind="own", members=(silent,)), new.snapshot.roots[1]), SnapshotOrigin())
    site = tmp_path / "units" / "ab" / TOY.address / "site"
    (site / "toy-1.0.dist-info").mkdir(parents=True)
    for name in ("calendar.cpython-311-x86_64-linux-gnu.so", "numpy.txt"):
        (site / name).touch()
    assert new.misfit(LoadedModules(names=frozenset({"numpy", "toy-1"})), old) == ""
    why = "toy 1.0 provides calendar, which the warm interpreter has loaded from elsewhere"
    assert new.misfit(LoadedModules(names=frozenset({"calendar"})), old) == why
    (site / "toy-1.0.dist-info" / "entry_points.txt").write_text("[torch.backends]\ntoy = toy:load\n")
    assert new.misfit(LoadedModules(), old) == golden("node.restored.toy-runs-code-torch")


def test_links_have_an_interpreter_each(tmp_path: Path) -> None:
    linked = environment(tmp_path, "links")
    assert linked.misfit(LoadedModules(), environment(tmp_path)) == golden("node.restored.each-environment-made")


def test_the_lock_is_let_go_with_the_last_who_uses_it(tmp_path: Path) -> None:
    held = environment(tmp_path)
    (fd,) = held.fds
    assert os.fstat(fd)
    del held
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_how_to_restore(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    can, cannot = tmp_path / "can", tmp_path / "cannot"
    for environments in (can, cannot):
        environments.mkdir()
    monkeypatch.setattr(namespaces, "probe_mounts", lambda directory: "")
    assert (way_for("", can).mode, way_for("overlay", can).mode) == ("overlay", "overlay")
    forced = way_for("links", can)
    assert (forced.mode, forced.why) == ("links", "SERVERLESS_GPU_RESTORE=links")
    monkeypatch.setattr(namespaces, "probe_mounts", lambda directory: pytest.fail("asked twice"))
    assert way_for("", can).mode == "overlay"
    monkeypatch.setattr(namespaces, "probe_mounts", lambda directory: "a user namespace cannot be made")
    fallen_back = way_for("", cannot)
    assert (fallen_back.mode, fallen_back.why) == ("links", golden("node.restored.mounts-user-namespace"))
    with pytest.raises(EnvironmentUnsupported, match=re.escape(golden("node.restored.machine-cannot-mount"))):
        way_for("overlay", cannot)


def test_how_far_a_restore_is_in_words() -> None:
    assert sentence(ProgressPoint(phase="fetch", bytes_done=1_000_000, bytes_total=4_000_000)) == golden(
        "node.restored.fetching-mb-mb"
    )
    assert sentence(ProgressPoint(phase="compile", files_done=3, files_total=9)) == "compiling 3 of 9 files"
    assert sentence(ProgressPoint(phase="restore")) == "laying out"
    waits = ProgressPoint(phase="fetch", bytes_total=9, waits_for="unit 3f9a (1.0 MB) and 2 more")
    assert sentence(waits) == golden("node.restored.waiting-another-process")
