"""Project code: what git would list, `.sgpuignore`, and directories that are nobody's project."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from serverless_gpu.environment.scan import project_files
from serverless_gpu.environment.scan.gitignore import excludes_file, outer_ignoring, tracked_files
from serverless_gpu.environment.scan.project_files import CodeDirectory, list_code, wanted_files
from serverless_gpu.errors import EnvironmentTooLarge
from tests.support.golden import golden

_names = st.sampled_from(["a", "b", "ab", "a.py", "b.txt", "build", "#c", "x y"])
_paths = st.lists(_names, min_size=1, max_size=4).map("/".join)
_parts = st.sampled_from(
    [
        "a",
        "b",
        "ab",
        "*",
        "**",
        "a*",
        "?",
        "*.py",
        "[ab]",
        "[!a]",
        "build",
        "b.txt",
        r"\#c",
        "#c",
        "x y",
        "x y ",
        r"a\*",
    ]
)
_lines = st.builds(
    lambda negated, anchored, parts, directory: negated + anchored + "/".join(parts) + directory,
    st.sampled_from(["", "", "!"]),
    st.sampled_from(["", "", "/"]),
    st.lists(_parts, min_size=1, max_size=3),
    st.sampled_from(["", "", "/"]),
)
_patterns = st.lists(_lines, min_size=1, max_size=5).map("\n".join)
_directories = st.one_of(st.just(""), st.lists(_names, min_size=1, max_size=2).map("/".join))
_trees = st.tuples(
    st.lists(_paths, min_size=1, max_size=12), st.dictionaries(_directories, _patterns, min_size=1, max_size=3)
)


@pytest.fixture(autouse=True, scope="module")
def no_patterns_of_the_user() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", "/nonexistent")
        patch.setenv("HOME", "/nonexistent")
        yield


def write(top: Path, files: Mapping[str, str]) -> None:
    for path, text in files.items():
        file = top / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


def listed(place: Path, **options: object) -> set[str]:
    return set(list_code(CodeDirectory(directory=str(place), **options)).listing.files)  # type: ignore[arg-type]  # for short


def git_lists(top: Path) -> set[str]:
    environ = {**os.environ, "GIT_CONFIG_NOSYSTEM": "1", "HOME": str(top), "XDG_CONFIG_HOME": str(top / "no")}
    if not (top / ".git").exists():
        subprocess.run(["git", "init", "-q", str(top)], check=True, env=environ)
    command = ["git", "-C", str(top), "ls-files", "-z", "-co", "--exclude-standard"]
    out = subprocess.run(command, check=True, env=environ, capture_output=True).stdout.decode()
    return {path for path in out.split("\0") if path}


@pytest.mark.slow
@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(tree=_trees)
@example(tree=(["x y/a"], {"": "x y\n!x y/"}))
@example(tree=(["a/b/a.py", "a/ab/a.py"], {"": "a/**\n!a/ab/"}))
@example(tree=(["a/b", "b/a"], {"": "/*\n!/a/", "a": "!b"}))
@example(tree=(["a/b/ab", "a/ab"], {"": "**/\n", "a": "ab/"}))
@example(tree=(["a/a", "a/b/a"], {"": "a/**/"}))
def test_a_directory_is_listed_as_git_lists_it(tree: tuple[list[str], dict[str, str]]) -> None:
    paths, patterns = tree
    with tempfile.TemporaryDirectory() as directory:
        top = Path(directory)
        for path in [*paths, *(f"{above}/.gitignore".lstrip("/") for above in patterns)]:
            file = top / path
            above = path.rpartition("/")[0]
            if file.exists() or any((top / parent).is_file() for parent in Path(path).parents):
                continue
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(patterns[above] + "\n" if file.name == ".gitignore" and above in patterns else "")
        assert listed(top) == git_lists(top)


@pytest.mark.parametrize(
    "settings",
    [
        "[core]\n\texcludesFile = ~/mine\n",
        "[Core] excludesfile=~/mine ; a comment\n",
        '[core]\n editor = vi\n excludesfile = "~/mi\\\\ne" # a comment\n',
        '[core]\nexcludesfile = ~/"m#;i"ne\n',
        "[core]\nexcludesfile = ~/mi\\\nne\n[user]\nname = core\n",
        '[core "sub"]\nexcludesfile = ~/no\n[user]\nexcludesfile = ~/no\n[core]\nexcludesfile = ~/mine\n',
        "[core]\nexcludesfile = ~/no\nexcludesfile = /etc/mine\n",
        "[core]\n# excludesfile = ~/no\neditor = vi\n",
    ],
)
def test_core_excludesfile_is_read_as_git_reads_it(tmp_path: Path, settings: str) -> None:
    file = tmp_path / "config"
    file.write_text(settings)
    command = ["git", "config", "--file", str(file), "--get", "--type=path", "core.excludesfile"]
    git = subprocess.run(command, capture_output=True, text=True)
    assert (excludes_file(settings) or "") == git.stdout.removesuffix("\n")


def test_a_users_own_patterns_hold_and_are_watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "project" / ".git").mkdir(parents=True)
    (tmp_path / "project" / "a.dat").touch()
    (tmp_path / "project" / "a.py").touch()
    (tmp_path / "mine").write_text("*.dat\n")
    assert listed(tmp_path / "project") == {"a.dat", "a.py"}
    (tmp_path / ".gitconfig").write_text("[core]\nexcludesFile = ~/mine\n")
    assert listed(tmp_path / "project") == {"a.py"}
    assert {str(tmp_path / ".gitconfig"), str(tmp_path / "mine")} <= {*outer_ignoring(str(tmp_path / "project"))[1]}


def test_a_directory_inside_a_repository_is_listed_as_git_lists_it(tmp_path: Path) -> None:
    above = {
        ".gitignore": "*.log\n/src/out/\nkept/*\n",
        "src/.gitignore": "!kept/b.txt\n",
        "src/a.py": "",
        "src/a.log": "",
    }
    write(tmp_path, {**above, "src/out/x.py": "", "src/kept/a.txt": "", "src/kept/b.txt": "", "src/deep/out/y.py": ""})
    write(tmp_path, {"src/secret.txt": ""})
    everything = git_lists(tmp_path)
    (tmp_path / ".git" / "info" / "exclude").write_text("secret.txt\n")

    found = listed(tmp_path / "src")

    assert found == {path.removeprefix("src/") for path in everything if path.startswith("src/")} - {"secret.txt"}
    assert found == {".gitignore", "a.py", "kept/a.txt", "kept/b.txt", "deep/out/y.py"}


def test_a_directory_that_its_repository_ignores_is_listed_nevertheless(tmp_path: Path) -> None:
    write(tmp_path, {".gitignore": "scratch/\n*.log\n", "scratch/try.py": "", "scratch/sub/more.py": ""})
    git_lists(tmp_path)

    assert listed(tmp_path / "scratch") == {"try.py", "sub/more.py"}
    assert listed(tmp_path / "scratch" / "sub") == {"more.py"}


def test_a_worktree_and_a_nested_repository_have_patterns_of_their_own(tmp_path: Path) -> None:
    repository, worktree = tmp_path / "main", tmp_path / "work"
    write(repository, {".gitignore": "*.log\n", "a.py": ""})
    git_lists(repository)
    (repository / ".git" / "info" / "exclude").write_text("private.py\n")
    (repository / ".git" / "worktrees" / "work").mkdir(parents=True)
    (repository / ".git" / "worktrees" / "work" / "commondir").write_text("../..\n")
    write(worktree, {".git": f"gitdir: {repository}/.git/worktrees/work\n", "a.py": "", "private.py": ""})
    write(repository, {"nested/.git/HEAD": "", "nested/b.log": "", "nested/.gitignore": "c.py\n", "nested/c.py": ""})

    assert listed(worktree) == {"a.py"}
    assert listed(repository) == {".gitignore", "a.py", "nested/.gitignore", "nested/b.log"}


def test_sgpuignore_goes_before_git(tmp_path: Path) -> None:
    write(tmp_path, {".gitignore": "*.so\ndata/\n", ".sgpuignore": "!fast.so\ntests/\n", "fast.so": "", "slow.so": ""})
    write(tmp_path, {"tests/test_a.py": "", "data/x": "", "a.py": "", "sub/.gitignore": "fast.so", "sub/fast.so": ""})

    assert listed(tmp_path) == {".gitignore", ".sgpuignore", "fast.so", "a.py", "sub/.gitignore", "sub/fast.so"}


def test_what_is_never_code_is_left_out(tmp_path: Path) -> None:
    write(
        tmp_path, {f"{name}/x.py": "" for name in (".git", ".hg", ".svn", "__pycache__", ".ipynb_checkpoints", "home")}
    )
    write(
        tmp_path, {"a.py": "", "a.pyc": "", "env/pyvenv.cfg": "", "env/lib/x.py": "", "deps/b.py": "", "pkg/c.py": ""}
    )
    out = (str(tmp_path / "home"), str(tmp_path / "deps"))

    assert listed(tmp_path, out=out) == {"a.py", "pkg/c.py"}


def test_a_project_that_is_a_virtual_environment_leaves_the_environment_out(tmp_path: Path) -> None:
    write(
        tmp_path,
        {"pyvenv.cfg": "", "bin/python": "", "lib/x.py": "", "share/y": "", "train.py": "", "sub/bin/z.py": ""},
    )

    assert listed(tmp_path) == {"train.py", "sub/bin/z.py"}


def test_metadata_of_an_old_editable_install_is_kept_although_git_ignores_it(tmp_path: Path) -> None:
    write(tmp_path, {".gitignore": "*.egg-info/\n", "tool.egg-info/PKG-INFO": "", "tool.egg-info/top_level.txt": ""})
    write(tmp_path, {"tool.py": "", "deep/other.egg-info/PKG-INFO": ""})

    found = {".gitignore", "tool.py", "tool.egg-info/PKG-INFO", "tool.egg-info/top_level.txt"}
    assert listed(tmp_path) == found


def test_an_ignored_file_that_was_imported_is_kept(tmp_path: Path) -> None:
    write(tmp_path, {".gitignore": "_version.py\n*.so\n", "pkg/_version.py": "", "pkg/fast.so": "", "pkg/other.so": ""})
    write(tmp_path, {"env/pyvenv.cfg": "", "env/lib/x.py": "", "deps/y.py": "", "deps/z.so": ""})
    loaded = [
        str(tmp_path / path) for path in ("pkg/_version.py", "pkg/fast.so", "env/lib/x.py", "deps/z.so", "gone.py")
    ]
    wanted = wanted_files(str(tmp_path), [*loaded, "/usr/lib/os.py"], [str(tmp_path / "deps"), "/elsewhere"])

    found = listed(tmp_path, wanted=wanted, out=(str(tmp_path / "deps"),))

    assert found == {".gitignore", "pkg/_version.py", "pkg/fast.so", "pkg/other.so"}


def test_a_shallow_directory_is_not_walked(tmp_path: Path) -> None:
    write(tmp_path, {"train.py": "", "notes.txt": "", "package/__init__.py": "", "package/sub/data.json": ""})
    write(tmp_path, {"Downloads/huge.py": "", ".cache/x.py": ""})
    (tmp_path / "Downloads" / "closed").mkdir(mode=0)

    assert listed(tmp_path, shallow=True) == {"train.py", "package/__init__.py", "package/sub/data.json"}


def test_a_project_with_too_many_bytes_names_the_largest(tmp_path: Path) -> None:
    write(tmp_path, {"a.py": "x"})
    for number in range(12):
        (tmp_path / f"data{number}").mkdir()
        with open(tmp_path / f"data{number}" / "weights.bin", "wb") as file:
            file.truncate((number + 90) * 1024**2)

    with pytest.raises(EnvironmentTooLarge) as caught:
        listed(tmp_path)

    assert str(caught.value) == golden("environment.project.project-directory-13", tmp_path=tmp_path)
    write(tmp_path, {".sgpuignore": "*.bin\n"})
    assert listed(tmp_path) == {"a.py", ".sgpuignore"}


def test_a_project_with_too_many_files_names_the_largest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(project_files, "CODE_FILES_MAX", 5)
    write(tmp_path, {f"images/{number}.png": "" for number in range(6)} | {"a.py": ""})

    with pytest.raises(EnvironmentTooLarge, match=golden("environment.project.files-00-mib")):
        listed(tmp_path)


def test_of_names_that_differ_in_case_one_travels_and_the_others_are_said(tmp_path: Path) -> None:
    for name in ("A.txt", "a.txt", "Data/x", "data/y", "data/z", "deep/ﬁle", "deep/file", "Net.py", "net.py", "solo"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")

    code = list_code(CodeDirectory(directory=str(tmp_path), wanted=("net.py",)))

    assert sorted(code.listing.files) == ["A.txt", "Data/x", "deep/file", "net.py", "solo"]
    same = "on a system that ignores case or Unicode forms, the name equals"
    assert code.listing.odd == {
        "a.txt": f"{same} A.txt",
        "data": f"{same} Data",
        "deep/ﬁle": f"{same} file",
        "Net.py": f"{same} net.py",
    }


def test_what_is_named_too_oddly_to_travel_is_left_out(tmp_path: Path) -> None:
    deep = tmp_path.joinpath(*["d"] * 64)
    deep.mkdir(parents=True)
    (deep / "file").touch()
    (tmp_path / "new\nline").touch()
    (tmp_path / "fine").touch()

    code = list_code(CodeDirectory(directory=str(tmp_path)))

    assert list(code.listing.files) == ["fine"]
    reasons = {os.path.basename(path): reason for path, reason in code.listing.odd.items()}
    assert reasons["file"].startswith("the path is too long") and reasons["new\nline"].startswith(
        "the name has control"
    )


@pytest.mark.parametrize("version", ["2", "4"])
@pytest.mark.parametrize("below", ["", "sub"])
def test_what_git_tracks_travels_although_its_patterns_ignore_it(tmp_path: Path, version: str, below: str) -> None:
    repository = tmp_path / "repository"
    top = repository / below
    texts = {
        ".gitignore": "build/\nforced/\n*.dat\n",
        ".sgpuignore": "forced/large.bin\nsecret.dat\n",
        "build/out": "",
        "forced/__init__.py": "",
        "forced/deep/more.py": "",
        "forced/large.bin": "",
        "forced/untracked.py": "",
        "kept.py": "",
        "loose.dat": "",
        "secret.dat": "",
        "tracked.dat": "",
    }
    for name, text in texts.items():
        (top / name).parent.mkdir(parents=True, exist_ok=True)
        (top / name).write_text(text)
    forced = ("forced/__init__.py", "forced/deep/more.py", "forced/large.bin", "secret.dat", "tracked.dat", "kept.py")
    for arguments in (("init", "-q"), ("add", "-f", *(str(top / name) for name in forced))):
        subprocess.run(("git", "-C", repository, "-c", f"index.version={version}", *arguments), check=True)
    (top / "tracked.dat").write_text("and edited since")

    code = list_code(CodeDirectory(directory=str(top)), ask=True)

    assert sorted(code.listing.files) == [
        ".gitignore",
        ".sgpuignore",
        "forced/__init__.py",
        "forced/deep/more.py",
        "kept.py",
        "tracked.dat",
    ]
    (said,) = code.listing.odd.values()
    assert said == golden("environment.project.files-directory-git")
    assert code.place.index == str(repository / ".git" / "index") and not code.place.is_stale()


@pytest.mark.parametrize(
    "content", [b"", b"DIRC", b"DIRC\0\0\0\2\0\0\0\x09" + b"\0" * 80, b"DIRC\0\0\0\7\0\0\0\1", b"x" * 99]
)
def test_an_index_of_git_that_cannot_be_read_is_told_from_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "index").write_bytes(content)

    assert tracked_files(str(tmp_path / "index"), "") is None
    assert tracked_files(str(tmp_path / "none"), "") == []
