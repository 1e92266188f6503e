"""Which directories a uid may not enter on the way to its interpreter."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from serverless_gpu.node.inside.own_uid import closed_directories


@pytest.fixture
def tree() -> Iterator[Path]:
    """Yield a directory tree open/closed/inner/python, in which others may not enter `closed`."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as place:
        os.chmod(place, 0o755)
        inner = Path(place, "open", "closed", "inner")
        inner.mkdir(parents=True)
        (Path(place) / "open" / "closed").chmod(0o700)
        (inner / "python").touch(mode=0o755)
        yield Path(place)


def below(tree: Path, found: list[str]) -> list[str]:
    return [path for path in found if path.startswith(f"{tree}/")]


def test_the_outermost_closed_directory_is_covered_once(tree: Path) -> None:
    inner = tree / "open" / "closed" / "inner"
    inner.chmod(0o700)
    paths = [str(inner / "python"), str(inner / "lib"), str(tree / "open" / "file")]
    assert below(tree, closed_directories(paths, os.getuid() + 1)) == [str(tree / "open" / "closed")]


def test_the_owner_of_a_closed_directory_enters_it(tree: Path) -> None:
    assert below(tree, closed_directories([str(tree / "open" / "closed" / "inner" / "python")], os.getuid())) == []


def test_open_directories_need_no_cover(tree: Path) -> None:
    (tree / "open" / "closed").chmod(0o711)
    assert below(tree, closed_directories([str(tree / "open" / "closed" / "inner" / "python")], os.getuid() + 1)) == []
