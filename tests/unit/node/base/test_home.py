"""Where things lie: homes that are private, writable and whole, or a sentence that says why not."""

from __future__ import annotations

import errno
import os
import re
import stat
from pathlib import Path

import pytest

from serverless_gpu.errors import StorageError
from serverless_gpu.node.base.home import Home, find_home, storage_error
from tests.support.golden import golden

UID = os.getuid()


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def tree(path: Path) -> list[str]:
    return sorted(str(entry.relative_to(path)) for entry in path.rglob("*"))


# --- finding it ------------------------------------------------------------------------------------------------------


def test_the_home_asked_for_is_made_private(tmp_path: Path) -> None:
    found = find_home({"SERVERLESS_GPU_HOME": str(tmp_path / "a" / "home")})
    assert (found.root, found.note) == (tmp_path / "a" / "home", "")
    assert (mode(found.root), tree(found.root)) == (0o700, ["checkpoints", "locks", "runs"])


def test_the_default_lies_in_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert find_home({}).root == tmp_path / ".serverless_gpu"


def test_a_relative_home_is_taken_from_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_home({"SERVERLESS_GPU_HOME": "here"}).root == tmp_path / "here"


def test_a_home_that_others_can_enter_is_closed_to_them(tmp_path: Path) -> None:
    wanted = tmp_path / "home"
    wanted.mkdir(mode=0o755)
    assert find_home({"SERVERLESS_GPU_HOME": str(wanted)}).note == ""
    assert mode(wanted) == 0o700


def test_a_home_is_found_again_with_what_is_in_it(tmp_path: Path) -> None:
    environ = {"SERVERLESS_GPU_HOME": str(tmp_path / "home")}
    find_home(environ).make_attempt("r", 1)
    assert find_home(environ).attempt("r", 1).is_dir()


def test_a_home_that_cannot_be_made_is_replaced_and_the_user_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    wanted, fallback = tmp_path / "file" / "home", tmp_path / f"serverless_gpu-home-{UID}"
    found = find_home({"SERVERLESS_GPU_HOME": str(wanted), "TMPDIR": str(tmp_path)})
    assert (found.root, found.note) == (
        fallback,
        golden("node.home.cannot-written-directory", wanted=wanted, fallback=fallback),
    )
    assert mode(fallback) == 0o700


def test_no_home_anywhere(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    wanted, fallback = tmp_path / "file", tmp_path / "file" / f"serverless_gpu-home-{UID}"
    with pytest.raises(StorageError) as caught:
        find_home({"SERVERLESS_GPU_HOME": str(wanted), "TMPDIR": str(wanted)})
    assert str(caught.value) == golden("node.home.neither-file-exists", wanted=wanted, fallback=fallback)


def test_a_home_that_is_a_link_is_not_said_to_belong_to_somebody_else(tmp_path: Path) -> None:
    """A link to a larger disk is a common thing: taken, or refused for what it is."""
    (tmp_path / "disk").mkdir()
    wanted = tmp_path / "home"
    wanted.symlink_to(tmp_path / "disk")
    note = find_home({"SERVERLESS_GPU_HOME": str(wanted), "TMPDIR": str(tmp_path)}).note
    assert "somebody else" not in note
    assert note == "" or "link" in note


@pytest.mark.skipif(UID == 0, reason="root may write everywhere")
def test_a_read_only_home(tmp_path: Path) -> None:
    wanted = tmp_path / "home"
    find_home({"SERVERLESS_GPU_HOME": str(wanted)})
    wanted.chmod(0o500)
    found = find_home({"SERVERLESS_GPU_HOME": str(wanted), "TMPDIR": str(tmp_path)})
    assert found.note.startswith(f"{wanted} cannot be written to (the directory is read-only)")


# --- attempts --------------------------------------------------------------------------------------------------------


def test_an_attempt_has_its_directories(tmp_path: Path) -> None:
    home = Home(tmp_path)
    made = home.make_attempt("run", 3)
    assert made == home.attempt("run", 3) == tmp_path / "runs" / "run" / "3"
    assert tree(made) == ["failures", "logs", "results"]
    assert {mode(path) for path in (made, *made.iterdir())} == {0o700}
    assert (home.runs, home.locks, home.agent_log) == (tmp_path / "runs", tmp_path / "locks", tmp_path / "agent.log")


def test_of_an_attempt_that_cannot_be_made_nothing_is_left(tmp_path: Path) -> None:
    home = Home(tmp_path)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "run").touch()
    with pytest.raises(StorageError) as caught:
        home.make_attempt("run", 1)
    assert str(caught.value) == golden("node.home.cannot-write-file", attempt=home.attempt("run", 1))


@pytest.mark.parametrize("second", [1, 2])
def test_a_second_attempt_never_costs_the_first(tmp_path: Path, second: int) -> None:
    home = Home(tmp_path)
    result = home.make_attempt("run", 1) / "results" / "0.pkl"
    result.write_bytes(b"precious")
    home.attempt("run", 2).touch()  # in the way of the second attempt
    with pytest.raises(StorageError):
        home.make_attempt("run", second)
    assert result.exists()


def test_removing_a_run_removes_every_attempt_and_is_not_worried_by_none(tmp_path: Path) -> None:
    home = Home(tmp_path)
    home.make_attempt("run", 1)
    home.make_attempt("run", 2)
    home.make_attempt("other", 1)
    home.remove_run("run")
    home.remove_run("run")
    assert [entry.name for entry in home.runs.iterdir()] == ["other"]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_F28_a_full_disk(code: int) -> None:
    assert str(storage_error(OSError(code, os.strerror(code)), Path("/x/y"))) == golden("node.home.space-left-hint")


# --- sockets ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def wanted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return where sockets are to lie; it is not there yet."""
    monkeypatch.setenv("SERVERLESS_GPU_SOCKETS", str(tmp_path / "sockets"))
    return tmp_path / "sockets"


def test_sockets_lie_where_only_the_user_can_enter(tmp_path: Path, wanted: Path) -> None:
    sockets = Home(tmp_path / "home").sockets()
    assert sockets.parent == wanted
    assert (mode(sockets), mode(sockets.parent)) == (0o700, 0o700)
    assert Home(tmp_path / "home").sockets() == sockets


def test_two_homes_do_not_share_sockets_and_two_names_of_one_home_do(tmp_path: Path, wanted: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "one")
    one, two, link = (Home(tmp_path / name).sockets() for name in ("one", "two", "link"))
    assert one == link != two


def test_sockets_lie_in_tmp_for_every_session_of_a_user(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal and a notebook server have different runtime directories; both must find the same agent."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(home))
    sockets = Home(home).sockets()
    assert sockets.parent == Path(f"/tmp/serverless_gpu-{UID}")
    sockets.rmdir()


def test_a_path_of_a_socket_always_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVERLESS_GPU_SOCKETS", "")
    sockets = Home(tmp_path / ("deep" * 50)).sockets()
    assert len(os.fsencode(sockets / f"{'r' * 26}.sock")) <= 107
    sockets.rmdir()


def test_a_file_in_the_way_of_the_sockets(tmp_path: Path, wanted: Path) -> None:
    wanted.touch()
    with pytest.raises(StorageError) as caught:
        Home(tmp_path).sockets()
    assert str(caught.value) == golden("node.home.cannot-make-sockets", wanted=wanted)


def test_a_link_is_not_followed_to_where_sockets_would_lie(tmp_path: Path, wanted: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    wanted.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StorageError) as caught:
        Home(tmp_path).sockets()
    assert str(caught.value) == golden("node.home.belongs-somebody-else", wanted=wanted)


@pytest.mark.skipif(UID != 0, reason="only root can give a directory away")
def test_somebody_elses_directory_is_refused(tmp_path: Path, wanted: Path) -> None:
    wanted.mkdir()
    os.chown(wanted, 12345, 12345)
    with pytest.raises(StorageError, match=re.escape(golden("node.home.belongs-somebody-else-2"))):
        Home(tmp_path).sockets()


def test_a_directory_that_others_can_enter_holds_no_sockets(tmp_path: Path, wanted: Path) -> None:
    """Anyone who can enter could connect; it is closed, or refused."""
    wanted.mkdir()
    wanted.chmod(0o777)
    try:
        sockets = Home(tmp_path).sockets()
    except StorageError:
        return
    assert (mode(sockets.parent), mode(sockets)) == (0o700, 0o700)
