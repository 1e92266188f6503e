"""Which processes of a principal's sandbox belong to no run."""

from __future__ import annotations

import pytest

from serverless_gpu.node.isolation.inspection import SandboxProcess, strangers, strangers_text
from tests.support.golden import golden

KEEPER, MEMBER, HOLDER, ZYGOTE = (100,), (101, 1), (102, 2, 1), (103, 3, 2)
STEM = (110, 10, 9, 1)


@pytest.mark.parametrize(
    ("pids", "stems", "is_stranger"),
    [
        *((pids, (), False) for pids in (KEEPER, MEMBER, HOLDER, ZYGOTE)),
        (STEM, (110,), False),
        (STEM, (), True),
        (STEM, (10, 9), True),
        ((111, 11, 10, 2), (110,), True),
        ((120, 4, 3), (110,), True),
        ((121, 2, 4), (), True),
    ],
)
def test_a_process_belongs_to_the_sandbox_a_stem_or_no_run(
    pids: tuple[int, ...], stems: tuple[int, ...], is_stranger: bool
) -> None:
    assert bool(strangers([SandboxProcess(pids, "python3")], stems)) == is_stranger


def test_a_few_processes_are_named() -> None:
    assert strangers_text([SandboxProcess((1,), "a")]) == golden("node.inspection.one")
    assert strangers_text([SandboxProcess((n,), f"p{n}") for n in range(5)]) == golden("node.inspection.more")
