"""Code that git's patterns ignore and ranks import nevertheless, and what is said of the rest."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import msgspec
import pytest

from serverless_gpu.environment.documents import ignore_progress
from serverless_gpu.environment.scan import project_files, recognition
from serverless_gpu.environment.scan.description import Description
from serverless_gpu.environment.scan.project_files import CodeDirectory, CodeListing, list_code
from serverless_gpu.environment.scan.scan import Recogniser
from tests.support.environment.wheels import Venv
from tests.support.golden import golden


@pytest.fixture(autouse=True)
def plain_git(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", "/nonexistent")
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    for name in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{name}_NAME", "a")
        monkeypatch.setenv(f"GIT_{name}_EMAIL", "a@b")


def write(top: Path, **files: str) -> None:
    for path, text in files.items():
        (top / path).parent.mkdir(parents=True, exist_ok=True)
        (top / path).write_text(text)


def git(top: Path, *arguments: str) -> None:
    subprocess.run(["git", "-c", "protocol.file.allow=always", "-C", str(top), *arguments], check=True, stdout=-3)


def listed(top: Path, *wanted: str) -> tuple[set[str], str]:
    """Return the files that travel, and what is said of those that do not."""
    code = list_code(CodeDirectory(directory=str(top), wanted=wanted), ask=True)
    assert_same_at_the_gate(code)
    return set(code.listing.files), code.listing.odd.get("", "")


def assert_same_at_the_gate(code: CodeListing) -> None:
    again = list_code(code.place)
    assert again.listing.files == code.listing.files
    assert {path: one.mark for path, one in again.listing.directories.items()} == {
        path: one.mark for path, one in code.listing.directories.items()
    }


@pytest.fixture
def flat(tmp_path: Path) -> Path:
    top = tmp_path / "repository"
    ignored = {".gitignore": "forced/\n*.dat\n_version.py\n", "forced/__init__.py": "", "forced/private.py": ""}
    write(top, **ignored, **{"forced/deep/x.txt": "", "forced/deep/y.txt": "", "a.dat": "", "b.dat": "", "main.py": ""})
    git(top, "init", "-q")
    git(top, "add", "-f", ".gitignore", "main.py", "forced/__init__.py", "forced/deep/x.txt", "a.dat")
    return top


FLAT = {".gitignore", "main.py", "forced/__init__.py", "forced/deep/x.txt", "a.dat"}


def test_what_git_tracks_is_not_ignored(flat: Path) -> None:
    found, said = listed(flat)

    assert found == FLAT
    assert said == golden("environment.tracked.files-git-ignores")


def test_what_git_tracks_is_not_ignored_below_the_top_of_a_repository_and_in_a_worktree(flat: Path) -> None:
    assert listed(flat / "forced")[0] == {"__init__.py", "private.py", "deep/x.txt", "deep/y.txt"}
    git(flat, "commit", "-q", "-m", "a")
    git(flat, "worktree", "add", "-q", str(flat.parent / "tree"))
    write(flat.parent / "tree", **{"b.dat": "", "forced/more.py": ""})

    assert listed(flat.parent / "tree")[0] == FLAT


def test_a_submodule_has_tracked_files_of_its_own(flat: Path, tmp_path: Path) -> None:
    git(flat, "commit", "-q", "-m", "a")
    outer = tmp_path / "outer"
    write(outer, **{".gitignore": "/vendored/\n*.txt\n"})
    git(outer, "init", "-q")
    git(outer, "submodule", "--quiet", "add", "-f", str(flat), "vendored")
    write(outer, **{"vendored/b.dat": ""})

    found, _ = listed(outer)

    assert found == {".gitignore", ".gitmodules"} | {f"vendored/{path}" for path in FLAT}


def test_sgpuignore_goes_before_what_git_tracks_and_what_was_imported(flat: Path) -> None:
    write(flat, **{".sgpuignore": "a.dat\nforced/deep/\n!forced/private.py\nkeys.py\n", "keys.py": "", "sub/x.py": ""})
    write(flat, **{"sub/.sgpuignore": "x.py\n"})
    place = CodeDirectory(directory=str(flat), wanted=("keys.py", "sub/x.py", "forced/private.py"))

    code = list_code(place, ask=True)

    kept = {".sgpuignore", ".gitignore", "main.py", "sub/.sgpuignore", "forced/__init__.py", "forced/private.py"}
    assert set(code.listing.files) == kept
    assert code.place.unwanted == ("keys.py", "sub/x.py")


def test_python_files_beside_what_is_imported_travel_although_a_pattern_names_them(tmp_path: Path) -> None:
    write(tmp_path, **{".gitignore": "_version.py\n*.so\nbuild/\n.env\n", "pkg/__init__.py": "", "pkg/_version.py": ""})
    write(tmp_path, **{"pkg/fast.so": "", "pkg/.env": "", "notes/a.so": ""})
    write(tmp_path, **{"tools/run.py": "", "tools/_version.py": ""})
    write(tmp_path, **{"build/__init__.py": "", "build/x.so": "", "pkg/build/__init__.py": "", "_version.py": ""})
    write(tmp_path, **{"out/.gitignore": "*\n", "out/__init__.py": "", "out/x.py": ""})
    always = {".gitignore", "pkg/__init__.py", "pkg/_version.py", "pkg/fast.so", "tools/run.py"}

    assert listed(tmp_path)[0] == always
    assert listed(tmp_path, "tools/run.py")[0] == {*always, "tools/_version.py"}
    write(tmp_path, **{".sgpuignore": "*.so\n"})
    assert listed(tmp_path)[0] == (always | {".sgpuignore"}) - {"pkg/fast.so"}


def test_what_git_ignores_is_said_the_largest_first_and_bounded(tmp_path: Path) -> None:
    write(tmp_path, **{".gitignore": "*.bin\ndata/\n.cache/\n.env\n", "big.bin": "x" * 99, "small.bin": "x"})
    write(tmp_path, **{".env": "yy"})
    write(tmp_path, **{"data/a.py": "", ".cache/b": "", "sub/c.bin": "x" * 999, "sub/data/x": "", "a.py": ""})

    code = list_code(CodeDirectory(directory=str(tmp_path)), ask=True)

    said = "4 files and 3 directories that git ignores (data/, big.bin, .env, small.bin, .cache/, …)"
    assert code.listing.odd == {"": said}
    for number in range(3000):
        (tmp_path / f"{'n' * 240}{number}.bin").touch()
    said = listed(tmp_path)[1]
    assert said.startswith("3,004 files and 3 directories") and len(said) < 500


def test_nothing_is_said_where_git_ignores_nothing(tmp_path: Path) -> None:
    write(tmp_path, **{".sgpuignore": "b.py\n", "a.py": "", "b.py": "", "__pycache__/a.pyc": "", ".git/HEAD": ""})

    assert listed(tmp_path) == ({".sgpuignore", "a.py"}, "")


def test_without_an_index_that_can_be_read_patterns_decide_and_it_is_said(flat: Path) -> None:
    git(flat, "update-index", "--split-index")

    found, said = listed(flat)

    assert found == {".gitignore", "main.py"}
    assert said == golden("environment.tracked.files-directory-git", flat=flat)


def test_git_need_not_be_there_nor_know_the_repositorys_owner(flat: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")

    assert listed(flat)[0] == FLAT


def test_the_gate_finds_tracked_files_that_come_and_go_and_reads_no_index(
    flat: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    venv = Venv(tmp_path / "venv")
    (venv.site / "link.pth").write_text(f"{flat}\n")
    recogniser, description = Recogniser(tmp_path / "index"), venv.describe(cwd=flat)

    def captured() -> list[str]:
        scan = recogniser.scan(description, ignore_progress)
        recogniser.remember(scan)
        sources = [source for source in scan.sources.values() if any("main.py" in file for file in source.files)]
        return sorted(os.path.relpath(file, flat) for source in sources for file in source.files)

    def at_the_gate(described: Description = description) -> bool:
        with monkeypatch.context() as patch:
            patch.setattr(project_files, "tracked_files", None)
            return recogniser.gate(described) is not None

    assert captured() == sorted(FLAT)
    assert at_the_gate()
    (flat / "more.dat").touch()
    (flat / "forced" / "ignored.py").touch()
    assert at_the_gate()
    git(flat, "add", "-f", "forced/ignored.py")
    (flat / "forced" / "another.py").touch()
    assert not at_the_gate()
    assert "forced/ignored.py" in captured()
    (flat / "forced" / "ignored.py").unlink()
    assert not at_the_gate()


def test_the_gate_is_not_slowed_by_a_module_that_sgpuignore_keeps_out(
    flat: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(flat, **{".sgpuignore": "keys.py\n", "keys.py": ""})
    for directory, _, files in os.walk(flat, topdown=False):
        for name in [*files, "."]:  # so old that nothing needs a second look
            os.utime(os.path.join(directory, name), (1_600_000_000, 1_600_000_000))
    venv = Venv(tmp_path / "venv")
    (venv.site / "link.pth").write_text(f"{flat}\n")
    described = msgspec.structs.replace(venv.describe(cwd=flat), loaded=(str(flat / "keys.py"),))
    recogniser = Recogniser(tmp_path / "index")
    recogniser.remember(recogniser.scan(described, ignore_progress))
    monkeypatch.setattr(recognition, "list_code", None)

    assert recogniser.gate(described) is not None
