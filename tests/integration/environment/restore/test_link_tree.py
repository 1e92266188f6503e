"""A tree is filled from units: links where they can be made, copies where not; nothing is followed or replaced."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from serverless_gpu.environment.restore.link_tree import ContentSource, fill
from serverless_gpu.errors import EnvironmentRejected
from tests.support.environment.linking import part, write
from tests.support.environment.restored_process import public_directory
from tests.support.golden import golden


def tree_of(tmp_path: Path) -> Path:
    tree = tmp_path / "tree"
    tree.mkdir()
    return tree


def test_files_are_linked_and_directories_of_units_are_merged(tmp_path: Path) -> None:
    one, two = write(tmp_path / "one", a__b__x="1", top="1"), write(tmp_path / "two", a__b__y="2", a__z="2")
    tree = tree_of(tmp_path)
    linked = fill(tree, [ContentSource(part(), [one, two])])
    assert (linked.linked, linked.copied) == (4, 0)
    assert sorted(str(path.relative_to(tree)) for path in tree.rglob("*") if path.is_file()) == [
        "a/b/x",
        "a/b/y",
        "a/z",
        "top",
    ]
    assert (tree / "a/b/x").samefile(one / "a/b/x")


def test_22C2_directories_get_their_mode_and_their_times_are_returned(tmp_path: Path) -> None:
    one, two = write(tmp_path / "one", a__b__x="1", c__y="1"), write(tmp_path / "two", a__z="2")
    tree = tree_of(tmp_path)
    linked = fill(tree, [ContentSource(part(files={"g/made": b""}), [one, two])], read_only=True)
    found = [tree, *(path for path in tree.rglob("*") if path.is_dir())]
    assert linked.directories == {
        "" if path == tree else str(path.relative_to(tree)): path.stat().st_mtime_ns for path in found
    }
    assert {stat.S_IMODE(path.stat().st_mode) for path in found} == {0o555}


def test_22C2_a_part_within_another_part_is_merged_with_what_lies_there(tmp_path: Path) -> None:
    outer = write(tmp_path / "outer", lib__same="outer", lib__d__one="outer")
    inner = write(tmp_path / "inner", same="inner", d__two="inner")
    tree = tree_of(tmp_path)
    linked = fill(tree, [ContentSource(part(), [outer]), ContentSource(part(at="lib"), [inner])])
    assert linked.linked == 3
    found = {path.name: path.read_text() for path in tree.rglob("*") if path.is_file()}
    assert found == {"same": "outer", "one": "outer", "two": "inner"}


def test_what_is_generated_wins_and_then_the_first_unit(tmp_path: Path) -> None:
    one, two = write(tmp_path / "one", same="one", ours="one"), write(tmp_path / "two", same="two")
    tree = tree_of(tmp_path)
    fill(tree, [ContentSource(part(files={"ours": b"generated"}, executable=frozenset({"ours"})), [one, two])])
    assert ((tree / "ours").read_text(), (tree / "same").read_text()) == ("generated", "one")
    assert stat.S_IMODE((tree / "ours").stat().st_mode) == 0o555


def test_nothing_is_written_through_a_link_of_another_unit(tmp_path: Path) -> None:
    one = write(tmp_path / "one", a__real="1")
    (tmp_path / "outside").mkdir()
    (one / "d").symlink_to(tmp_path / "outside")
    (one / "bin").symlink_to("a")
    two = write(tmp_path / "two", d__file="2", bin__tool="2")
    tree = tree_of(tmp_path)
    fill(tree, [ContentSource(part(files={"bin/python": b""}), [one, two])])
    assert os.listdir(tmp_path / "outside") == []
    assert sorted(os.listdir(tree / "bin")) == ["python", "tool"]
    assert not (tree / "d").is_symlink()


def test_a_file_where_another_unit_has_a_directory_is_refused(tmp_path: Path) -> None:
    one, two = write(tmp_path / "one", d__file="1"), write(tmp_path / "two")
    two.mkdir()
    with pytest.raises(EnvironmentRejected, match=re.escape(golden("environment.linking.file-one-unit"))):
        fill(tree_of(tmp_path), [ContentSource(part(files={"d": b"generated"}), [one, two])])


def test_copies_keep_time_and_may_be_written(tmp_path: Path) -> None:
    one = write(tmp_path / "one", code="1")
    tree = tree_of(tmp_path)
    linked = fill(tree, [ContentSource(part(), [one], copies=True)])
    assert (linked.linked, linked.copied) == (0, 1)
    status = (tree / "code").stat()
    assert (stat.S_IMODE(status.st_mode), status.st_mtime_ns, status.st_nlink) == (0o644, 10**18, 1)


names = some.sampled_from(["a", "b", "c", "d"])
paths = some.lists(names, min_size=1, max_size=3).map("/".join)


@settings(deadline=None, max_examples=30)
@given(some.lists(some.dictionaries(paths, some.binary(max_size=20), max_size=6), max_size=3))
def test_any_units_come_out_as_they_are(units: list[dict[str, bytes]]) -> None:
    with public_directory() as directory:
        expected: dict[str, bytes] = {}
        sources = []
        for number, files in enumerate(units):
            place = directory / str(number)
            place.mkdir()
            for path, content in sorted(files.items()):
                taken = {**expected, **files}
                if any(other != path and (other + "/").startswith(path + "/") for other in taken):
                    continue
                if any(path.startswith(other + "/") for other in taken):
                    continue
                (place / path).parent.mkdir(parents=True, exist_ok=True)
                (place / path).write_bytes(content)
                expected.setdefault(path, content)
            sources.append(place)
        tree = directory / "tree"
        tree.mkdir()
        fill(tree, [ContentSource(part(), sources)])
        found = {str(p.relative_to(tree)): p.read_bytes() for p in tree.rglob("*") if p.is_file()}
        assert found == expected
