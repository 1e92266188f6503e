"""Which memory a zygote asks the kernel to put into huge pages."""

from __future__ import annotations

from pathlib import Path

from serverless_gpu.node.inside import zygote

MAPS = """\
00200000-00400000 rw-p 00000000 00:00 0                                  [heap]
00400000-00a00000 r-xp 00000000 08:01 1                                  /usr/lib/library.so
00a00000-01000000 rw-p 00000000 08:01 1                                  /usr/lib/library.so
7f0000100000-7f0000500000 rw-p 00000000 00:00 0
7f0000600000-7f0000700000 rw-p 00000000 00:00 0
7f0000700000-7f0000b00000 ---p 00000000 00:00 0
7f0001000000-7f0001400000 rw-s 00000000 00:01 2                          /dev/zero (deleted)
7ffc00000000-7ffc00400000 rw-p 00000000 00:00 0                          [stack]
"""


def test_22C7_whole_ranges_of_private_memory_without_a_file(tmp_path: Path) -> None:
    maps = tmp_path / "maps"
    maps.write_text(MAPS)
    assert zygote.huge_page_ranges(str(maps)) == [0x200000, 0x7F0000200000]


def test_22C7_where_the_kernel_does_not_say_there_are_none(tmp_path: Path) -> None:
    assert zygote.huge_page_ranges(str(tmp_path / "nothing")) == []
