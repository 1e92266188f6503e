"""Why there is no warm interpreter for a caller, in words that name what is different."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import pytest

from serverless_gpu.node.agent.zygotes import Key, first_run
from serverless_gpu.node.inside.zygote import mapped_libraries
from serverless_gpu.node.processes.spawn import one_name
from tests.support.golden import golden

MINE = Key("/usr/bin/python3", (), (("OMP_NUM_THREADS", "1"),))


def test_the_first_run_of_an_interpreter() -> None:
    assert first_run(MINE, []) == golden("node.zygotes.first-run-interpreter")
    others = [Key("/opt/python3", (), MINE.variables), Key(MINE.python, ("-O",), MINE.variables)]
    assert first_run(MINE, others) == golden("node.zygotes.first-run-interpreter")


def test_start_up_variables_that_differ_are_named() -> None:
    near = Key(MINE.python, (), (("MALLOC_ARENA_MAX", "2"), ("OMP_NUM_THREADS", "2")))
    far = Key(MINE.python, (), (("LD_PRELOAD", "a"), ("PYTHONHASHSEED", "0"), ("OMP_NUM_THREADS", "2")))
    assert first_run(MINE, [far, near]) == golden("node.zygotes.first-run-value")


@pytest.mark.parametrize(
    ("count", "listed"),
    [(1, "V0"), (2, "V0 and V1"), (4, "V0, V1, V2 and V3"), (9, "V0, V1, V2 and 6 more variables")],
)
def test_23B10_a_cold_start_is_explained_in_one_sentence(count: int, listed: str) -> None:
    other = Key(MINE.python, (), (*MINE.variables, *((f"V{number}", "1") for number in range(count))))
    assert first_run(MINE, [other]) == golden("node.zygotes.first-run-value-python", listed=listed)


def test_an_interpreter_has_one_name_in_its_directory(tmp_path: Path) -> None:
    for place in ("one", "other"):
        (tmp_path / place).mkdir()
        (tmp_path / place / "python3.11").symlink_to(sys.executable)
        (tmp_path / place / "python3").symlink_to(sys.executable)
        (tmp_path / place / "python").symlink_to("python3.11")
        (tmp_path / place / "python2").write_text("another one")
    names = [one_name(str(tmp_path / "one" / name)) for name in ("python", "python3", "python3.11", "python2")]
    assert names == [*[str(tmp_path / "one" / "python3")] * 3, str(tmp_path / "one" / "python2")]
    assert one_name(str(tmp_path / "other" / "python")) == str(tmp_path / "other" / "python3"), "another environment"


def test_an_interpreter_that_is_alone_or_gone_keeps_its_name(tmp_path: Path) -> None:
    (tmp_path / "pypy").symlink_to(sys.executable)
    for python in (str(tmp_path / "pypy"), str(tmp_path / "gone"), "python", ""):
        assert one_name(python) == python


def test_libraries_that_cannot_be_listed_are_not_known_to_be_none(tmp_path: Path) -> None:
    maps = tmp_path / "maps"
    assert mapped_libraries(str(maps)) is None
    maps.write_text("7f00-7f10 r-xp 0 08:01 7     /view/lib/libcudart.so.12\n7f20-7f30 rw-p 0 00:00 0 \n")
    assert mapped_libraries(str(maps)) == ["/view/lib/libcudart.so.12"]


def test_22A2_owners_have_different_keys_in_restored_environments_too() -> None:
    key = Key("/usr/bin/python3", (), (), "a" * 64, owner="alice of sgpu+http://one")
    for owner in ("bob of sgpu+http://one", "alice of sgpu+http://two", ""):
        other = msgspec.structs.replace(key, owner=owner)
        assert key != other and key.elsewhere() != other.elsewhere()
    assert first_run(key, [msgspec.structs.replace(key, owner="")]).startswith("first run of this owner")
