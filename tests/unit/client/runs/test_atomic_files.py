"""Files that a person named: nothing but a file is replaced by one, and what is written is there whole."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from serverless_gpu.cli.access import audit
from serverless_gpu.cli.money import usage
from serverless_gpu.cli.planning.pictures import load_drawing
from serverless_gpu.cli.runs.results import Result, write_result
from serverless_gpu.errors import InvalidValue, StorageError
from serverless_gpu.model.billing.usage_table import UsageTable
from serverless_gpu.node.base.private_files import replacing_file
from tests.support.client.plot import handle
from tests.support.client.plotted import attempt, telemetry
from tests.support.golden import golden


def _report(path: Path) -> None:
    usage.put(UsageTable(names=("user",), kinds=("text",), lines=(("ada",),)), path)


def _audit(path: Path) -> None:
    with audit.open_copy(path):
        pass


def _result(path: Path) -> None:
    write_result(Result(3, iter([b"abc"])), path)


def _picture(path: Path) -> None:
    load_drawing(path, "serverless_gpu.replay.charts")


def _plot(path: Path) -> None:
    handle(attempt(path.parent / f"run-{path.stem}", 1, [telemetry(5)])).plot(path)


@pytest.mark.parametrize("write", [_report, _audit, _result, _picture, _plot])
def test_a_pipe_in_the_place_of_a_file_stays_a_pipe(write: Callable[[Path], None], tmp_path: Path) -> None:
    pipe, link = tmp_path / "pipe.png", tmp_path / "link.png"
    os.mkfifo(pipe)
    link.symlink_to(pipe)
    before = pipe.stat()
    for path in (pipe, link):
        with pytest.raises(InvalidValue, match=re.escape(golden("client.result_files.png-file-left"))):
            write(path)
    assert stat.S_ISFIFO(pipe.stat().st_mode) and pipe.stat().st_ino == before.st_ino and link.is_symlink()
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("write", [_report, _result])
def test_a_file_is_replaced_whole_and_a_link_stays_one(write: Callable[[Path], None], tmp_path: Path) -> None:
    path, link = tmp_path / "there", tmp_path / "link"
    path.write_text("before")
    link.symlink_to(path)
    write(link)
    assert link.is_symlink() and "before" not in path.read_text(errors="replace")
    assert sorted(tmp_path.iterdir()) == [link, path]


def test_what_was_there_stays_when_it_cannot_be_written_whole(tmp_path: Path) -> None:
    path = tmp_path / "there"
    path.write_text("before")
    with pytest.raises(StorageError, match=re.escape(golden("client.result_files.would-bytes"))):
        write_result(Result(4, iter([b"abc"])), path)
    with pytest.raises(KeyboardInterrupt), replacing_file(path):
        raise KeyboardInterrupt
    assert path.read_text() == "before" and [path] == list(tmp_path.iterdir())


def test_a_result_is_its_user_s_alone_and_a_report_as_the_umask_says(tmp_path: Path) -> None:
    _result(tmp_path / "0.pkl")
    before = os.umask(0o022)
    try:
        _report(tmp_path / "usage.parquet")
    finally:
        os.umask(before)
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("0.pkl", "usage.parquet")]
    assert modes == [0o600, 0o644]
