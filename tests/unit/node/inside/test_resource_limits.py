"""The resource limits of ranks that run as a principal."""

from __future__ import annotations

import resource

import pytest

from serverless_gpu.node.inside.resource_limits import DESCRIPTORS_MAX, wanted_limits

ALL = resource.RLIM_INFINITY
CORE, FILES, LOCKED, TASKS = (
    resource.RLIMIT_CORE,
    resource.RLIMIT_NOFILE,
    resource.RLIMIT_MEMLOCK,
    resource.RLIMIT_NPROC,
)


@pytest.mark.parametrize(
    ("files", "locked", "tasks", "tasks_max", "expected"),
    [
        ((1024, 4096), (8192, ALL), (100, 200), 0, ((1024, 4096), (ALL, ALL), (200, 200))),
        ((1024, ALL), (8192, 8192), (ALL, ALL), 0, ((1024, DESCRIPTORS_MAX), (8192, 8192), (ALL, ALL))),
        ((ALL, ALL), (0, 0), (ALL, ALL), 50, ((DESCRIPTORS_MAX, DESCRIPTORS_MAX), (0, 0), (50, 50))),
        ((20, 20), (5, 7), (10, 40), 50, ((20, 20), (7, 7), (40, 40))),
    ],
)
def test_27_no_limit_is_above_the_nodes_hard_limit(
    files: tuple[int, int],
    locked: tuple[int, int],
    tasks: tuple[int, int],
    tasks_max: int,
    expected: tuple[tuple[int, int], ...],
) -> None:
    current = {CORE: (ALL, ALL), FILES: files, LOCKED: locked, TASKS: tasks}
    found = wanted_limits(current, tasks_max)
    assert (found[FILES], found[LOCKED], found[TASKS]) == expected
    assert found[CORE] == (0, 0)
